#include <array>
#include <map>
#include <mutex>

#include "cuda/common/binding.h"
#include "cuda/gemm/cublas_lt.h"

namespace fuseopt::tuned_matmul_binding {
namespace {

constexpr const char* kOp = "tuned_matmul";
constexpr int kCandidates = 8, kRounds = 3, kMostRuns = 20;
constexpr size_t kMostWorkspace = 32 << 20, kMostPlans = 4096;
constexpr float kMillisecondsARound = 0.3f;
// A candidate must take less than this share of the time of the library's own choice. Times of one algorithm vary by up
// to 2%.
constexpr float kWorthIt = 0.98f;

using cublas_lt::Candidate;
using cublas_lt::Handle;
using cublas_lt::Library;

void succeed(int status, const char* what) {
  FUSEOPT_CHECK(status == 0, "fuseopt::", kOp, ": cuBLASLt failed at ", what, " with status ", status);
}

// An object of the library, destroyed together with this.
class Object {
 public:
  explicit Object(int (*destroy)(Handle)) : destroy_(destroy) {}
  Object(const Object&) = delete;
  ~Object() { destroy_(handle_); }

  Handle* address() { return &handle_; }
  Handle handle() const { return handle_; }

 private:
  int (*destroy_)(Handle);
  Handle handle_ = nullptr;
};

// A matrix whose rows, or columns if transposed, are contiguous and `stride` elements apart.
struct Operand {
  Tensor tensor;
  bool transposed;
  int64_t stride;
};

Operand operand_of(const Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1), down = matrix.stride(0), across = matrix.stride(1);
  if ((columns == 1 || across == 1) && (rows == 1 || down >= columns)) {
    return {matrix, false, rows == 1 ? columns : down};
  }
  if ((rows == 1 || down == 1) && (columns == 1 || across >= rows)) {
    return {matrix, true, columns == 1 ? rows : across};
  }
  return {torch::stable::contiguous(matrix), false, columns};
}

cublas_lt::DataType data_type(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return cublas_lt::kR32F;
    case ScalarType::Half: return cublas_lt::kR16F;
    case ScalarType::BFloat16: return cublas_lt::kR16BF;
    default: FUSEOPT_CHECK(false, "fuseopt::", kOp, ": dtype ", type, " is not supported");
  }
}

// Milliseconds between two points of a stream.
class Stopwatch {
 public:
  explicit Stopwatch(const Launch& launch) : launch_(launch) {
    launch_.check(cudaEventCreate(&begin_));
    launch_.check(cudaEventCreate(&end_));
  }
  Stopwatch(const Stopwatch&) = delete;
  ~Stopwatch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  void start() const { launch_.check(cudaEventRecord(begin_, launch_.stream())); }

  float stop() const {
    float milliseconds = 0;
    launch_.check(cudaEventRecord(end_, launch_.stream()));
    launch_.check(cudaEventSynchronize(end_));
    launch_.check(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return milliseconds;
  }

 private:
  const Launch& launch_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

uint32_t alignment_of(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  uint32_t bytes = 256;
  while (address % bytes != 0) bytes /= 2;
  return bytes;
}

// The epilogue of a product.
struct Behind {
  uint32_t epilogue = cublas_lt::kPlain;
  std::optional<Tensor> bias;
  std::optional<Tensor> kept;  // the activation's input
  bool accumulate = false;
};

// How the library computes products of one kind, at any addresses.
struct Plan {
  explicit Plan(const Library& library)
      : description(library.destroy_description),
        a(library.destroy_layout),
        b(library.destroy_layout),
        d(library.destroy_layout) {}

  Object description;
  Object a;
  Object b;
  Object d;
  std::optional<Candidate> candidate;
  bool is_measured = false;
};

// output [rows, columns] = left [rows, inner] x right [inner, columns]. The library's matrices are column-major, so it
// computes right^T x left^T, [columns, rows].
class Product {
 public:
  Product(const Launch& launch, const Tensor& left, const Tensor& right, const Tensor& output, const Behind& behind)
      : launch_(launch),
        library_(Library::get(kOp)),
        left_(operand_of(left)),
        right_(operand_of(right)),
        output_(output),
        behind_(behind),
        key_{launch.device(),
             data_type(dtype_of(left)),
             data_type(dtype_of(output)),
             behind.epilogue,
             behind.accumulate,
             left.size(0),
             right.size(1),
             left.size(1),
             left_.stride,
             right_.stride,
             left_.transposed,
             right_.transposed,
             alignment_of(left_.tensor.data_ptr()),
             alignment_of(right_.tensor.data_ptr()),
             alignment_of(output.data_ptr()),
             alignment_of(data_of(behind.bias))} {}

  // Runs the algorithm that was measured to be fastest, or else the one that the library proposes.
  void run(bool measure) {
    // Locked, because two measurements must not run at once, and because a plan holds the addresses of this product.
    const std::lock_guard<std::mutex> lock(mutex_);
    Handle& handle = handles_[launch_.device()];
    if (handle == nullptr) succeed(library_.create(&handle), "its creation");
    handle_ = handle;
    Plan& plan = found_plan();
    if (behind_.bias.has_value()) describe(plan, cublas_lt::kBiasPointer, data_of(behind_.bias));
    if (behind_.kept.has_value()) describe(plan, cublas_lt::kAuxPointer, behind_.kept->data_ptr());
    const bool can_measure = measure && !plan.is_measured && !is_capturing();
    if (can_measure || !plan.candidate.has_value()) choose(plan, can_measure);
    const std::optional<Tensor> workspace = room_for(plan.candidate->workspace);
    succeed(run(plan, *plan.candidate, workspace, output_), "a product");
  }

 private:
  using Key = std::array<int64_t, 16>;
  using Plans = std::map<Key, Plan>;

  // Never destroyed: at the end of the process the library may already be unloaded.
  static Plans& plans() {
    static Plans* const all = new Plans;
    return *all;
  }

  Plan& found_plan() const {
    const auto known = plans().find(key_);
    if (known != plans().end()) return known->second;
    if (plans().size() >= kMostPlans) plans().clear();
    Plan& plan = plans().try_emplace(key_, library_).first->second;
    try {
      describe(plan);
    } catch (...) {
      plans().erase(key_);
      throw;
    }
    return plan;
  }

  void describe(Plan& plan) const {
    const int64_t rows = output_.size(0), columns = output_.size(1);
    const int64_t inner = left_.tensor.size(1);
    const auto type = data_type(dtype_of(left_.tensor));
    succeed(library_.create_description(plan.description.address(), cublas_lt::kCompute32F, cublas_lt::kR32F),
            "a description");
    describe(plan, cublas_lt::kTransposeA, int32_t{right_.transposed});
    describe(plan, cublas_lt::kTransposeB, int32_t{left_.transposed});
    describe(plan, cublas_lt::kEpilogue, behind_.epilogue);
    if (behind_.kept.has_value()) describe(plan, cublas_lt::kAuxStride, columns);
    lay_out(plan.a, type, right_, columns, inner);
    lay_out(plan.b, type, left_, inner, rows);
    succeed(library_.create_layout(plan.d.address(), data_type(dtype_of(output_)), columns, rows, columns),
            "a layout");
  }

  template <typename T>
  void describe(Plan& plan, cublas_lt::Description attribute, T value) const {
    succeed(library_.set_description(plan.description.handle(), attribute, &value, sizeof value), "an attribute");
  }

  void lay_out(Object& layout, int type, const Operand& operand, int64_t rows, int64_t columns) const {
    if (operand.transposed) std::swap(rows, columns);
    succeed(library_.create_layout(layout.address(), type, rows, columns, operand.stride), "a layout");
  }

  bool is_capturing() const {
    cudaStreamCaptureStatus status;
    launch_.check(cudaStreamIsCapturing(launch_.stream(), &status));
    return status != cudaStreamCaptureStatusNone;
  }

  std::vector<Candidate> candidates(const Plan& plan) const {
    Object preference(library_.destroy_preference);
    succeed(library_.create_preference(preference.address()), "a preference");
    const auto prefer = [&](cublas_lt::Preference attribute, auto value) {
      succeed(library_.set_preference(preference.handle(), attribute, &value, sizeof value), "a preference");
    };
    prefer(cublas_lt::kMaxWorkspace, uint64_t{kMostWorkspace});
    // With K split, cuBLASLt rounds the sum before it adds the bias: 1.3 times the error of one rounding (2048 x 4089 x 1024).
    const bool is_plain = behind_.epilogue == cublas_lt::kPlain;
    prefer(cublas_lt::kReductionSchemes, is_plain ? cublas_lt::kFloat32Reductions : cublas_lt::kNoReductions);
    prefer(cublas_lt::kAlignmentA, alignment_of(right_.tensor.data_ptr()));
    prefer(cublas_lt::kAlignmentB, alignment_of(left_.tensor.data_ptr()));
    prefer(cublas_lt::kAlignmentC, alignment_of(output_.data_ptr()));
    prefer(cublas_lt::kAlignmentD, alignment_of(output_.data_ptr()));
    std::vector<Candidate> found(kCandidates);
    int count = 0;
    succeed(library_.candidates(handle_, plan.description.handle(), plan.a.handle(), plan.b.handle(), plan.d.handle(),
                                plan.d.handle(), preference.handle(), kCandidates, found.data(), &count),
            "the choice of an algorithm");
    FUSEOPT_CHECK(count > 0, "fuseopt::", kOp, ": cuBLASLt has no algorithm for this product");
    found.resize(count);
    return found;
  }

  std::optional<Tensor> room_for(size_t bytes) const {
    if (bytes == 0) return std::nullopt;
    return allocate(output_, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  }

  int run(const Plan& plan, const Candidate& candidate, const std::optional<Tensor>& workspace,
          const Tensor& output) const {
    const float one = 1, beta = behind_.accumulate ? 1 : 0;
    return library_.matmul(handle_, plan.description.handle(), &one, right_.tensor.data_ptr(), plan.a.handle(),
                           left_.tensor.data_ptr(), plan.b.handle(), &beta, output.data_ptr(), plan.d.handle(),
                           output.data_ptr(), plan.d.handle(), &candidate.algorithm, data_of(workspace),
                           candidate.workspace, launch_.stream());
  }

  void choose(Plan& plan, bool measure) const {
    const std::vector<Candidate> found = candidates(plan);
    if (!measure) {
      plan.candidate = found[0];
      return;
    }
    const Stopwatch watch(launch_);
    const std::optional<Tensor> workspace = room_for(kMostWorkspace);
    const Tensor output = behind_.accumulate ? allocate_like(output_, dtype_of(output_)) : output_;
    constexpr float kFails = -1;
    std::vector<float> times(found.size(), 0);
    // The first round loads the kernels; the second determines how many runs the other rounds have.
    for (int round = 0; round < 2 + kRounds; ++round) {
      for (size_t index = 0; index < found.size(); ++index) {
        float& time = times[index];
        if (time == kFails) continue;
        const int runs = round < 2 ? 1 : std::clamp(static_cast<int>(kMillisecondsARound / time), 1, kMostRuns);
        int status = 0;
        watch.start();
        for (int i = 0; i < runs && status == 0; ++i) status = run(plan, found[index], workspace, output);
        const float now = std::max(watch.stop() / runs, 1e-6f);
        time = status != 0 ? kFails : round < 2 ? now : std::min(time, now);
      }
    }
    size_t fastest = 0;
    for (size_t index = 1; index < found.size(); ++index) {
      const float least = fastest == 0 ? times[0] * kWorthIt : times[fastest];
      if (times[index] != kFails && (times[fastest] == kFails || times[index] < least)) fastest = index;
    }
    plan.candidate = found[fastest];
    plan.is_measured = true;
  }

  static inline std::mutex mutex_;
  static inline std::map<int32_t, Handle> handles_;

  const Launch& launch_;
  const Library& library_;
  Handle handle_ = nullptr;
  Operand left_;
  Operand right_;
  Tensor output_;
  const Behind& behind_;
  Key key_;
};

uint32_t epilogue_of(const std::string& activation, bool has_bias) {
  const uint32_t bias = has_bias ? cublas_lt::kBias : 0;
  if (activation == "gelu_tanh") return cublas_lt::kGelu | bias;
  if (activation == "relu") return cublas_lt::kRelu | bias;
  FUSEOPT_CHECK(activation.empty(), "fuseopt::", kOp, ": unknown activation '", activation, "'");
  return has_bias ? bias : uint32_t{cublas_lt::kPlain};
}

void check_factors(const Tensor& left, const Tensor& right) {
  FUSEOPT_CHECK(left.dim() == 2 && right.dim() == 2 && left.size(1) == right.size(0) && left.size(1) > 0, "fuseopt::",
                kOp, ": left must be [rows, inner], right [inner, columns], with something to sum up");
}

Tensor checked_bias(const Tensor& bias, const Tensor& right) {
  FUSEOPT_CHECK(bias.dim() == 1 && bias.size(0) == right.size(1), "fuseopt::", kOp, ": bias must be [columns]");
  return as_contiguous(bias);
}

void multiply(const Launch& launch, const Tensor& left, const Tensor& right, const Tensor& output,
              const Behind& behind, bool measure) {
  if (output.numel() > 0) Product(launch, left, right, output, behind).run(measure);
}

Tensor tuned_matmul(Tensor left, Tensor right, std::optional<Tensor> bias, std::string activation, bool float_result,
                    bool measure) {
  check_factors(left, right);
  FUSEOPT_CHECK(!(bias.has_value() && float_result), "fuseopt::", kOp, ": a float32 result has no bias");
  const Launch launch(kOp, left);
  Behind behind;
  behind.epilogue = epilogue_of(activation, bias.has_value());
  if (bias.has_value()) behind.bias = checked_bias(*bias, right);
  Tensor output =
      allocate(left, {left.size(0), right.size(1)}, float_result ? ScalarType::Float : dtype_of(left));
  multiply(launch, left, right, output, behind, measure);
  return output;
}

std::tuple<Tensor, Tensor> tuned_matmul_gelu(Tensor left, Tensor right, Tensor bias, bool measure) {
  check_factors(left, right);
  FUSEOPT_CHECK(right.size(1) % cublas_lt::kAuxMultiple == 0, "fuseopt::tuned_matmul_gelu: cuBLASLt keeps the sum only in",
                " rows of a multiple of ", cublas_lt::kAuxMultiple, " columns, not of ", right.size(1));
  const Launch launch(kOp, left);
  Behind behind;
  behind.epilogue = cublas_lt::kGelu | cublas_lt::kAux | cublas_lt::kBias;
  behind.bias = checked_bias(bias, right);
  behind.kept = allocate(left, {left.size(0), right.size(1)}, dtype_of(left));
  Tensor activated = allocate_like(*behind.kept, dtype_of(left));
  multiply(launch, left, right, activated, behind, measure);
  return {*behind.kept, activated};
}

void tuned_matmul_(Tensor output, Tensor left, Tensor right, bool accumulate, bool measure) {
  check_factors(left, right);
  FUSEOPT_CHECK(output.dim() == 2 && output.size(0) == left.size(0) && output.size(1) == right.size(1) &&
                    output.is_contiguous(),
                "fuseopt::", kOp, ": output must be [rows, columns], contiguous");
  const Launch launch(kOp, left);
  Behind behind;
  behind.accumulate = accumulate;
  multiply(launch, left, right, output, behind, measure);
}

constexpr auto kTunedMatmul = arguments("tuned_matmul", {
    {"left", kUpToFloat}, {"right", kUpToFloat, "left"}, {"bias", kUpToFloat, "left"}});
constexpr auto kTunedMatmulGelu = arguments("tuned_matmul_gelu", {
    {"left", kUpToFloat}, {"right", kUpToFloat, "left"}, {"bias", kUpToFloat, "left"}});
constexpr auto kTunedMatmulInPlace = arguments("tuned_matmul_", {
    {"output", kUpToFloat}, {"left", kUpToFloat}, {"right", kUpToFloat, "left"}});

}  // namespace
}  // namespace fuseopt::tuned_matmul_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::tuned_matmul_binding;
  library.impl("tuned_matmul", TORCH_BOX((fuseopt::checked<tuned_matmul, kTunedMatmul>)));
  library.impl("tuned_matmul_gelu", TORCH_BOX((fuseopt::checked<tuned_matmul_gelu, kTunedMatmulGelu>)));
  library.impl("tuned_matmul_", TORCH_BOX((fuseopt::checked<tuned_matmul_, kTunedMatmulInPlace>)));
}
