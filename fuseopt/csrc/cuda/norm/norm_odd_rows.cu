// Norms over rows of 16-bit elements that begin at any address, with 16-byte accesses. A warp has a row: whole vectors
// of the matrix, and a few elements before and after them. Warps walk the rows in steps of a multiple of eight, so all
// rows of a warp have the same offset from a vector, and it reads its part of the weight once.
#include "cuda/norm/norm_odd_rows.cuh"

#include <initializer_list>

#include "cuda/common/dependent_launch.cuh"
#include "cuda/common/row_span.cuh"
#include "cuda/common/row_team.cuh"
#include "cuda/common/vector.cuh"

namespace fuseopt::norm_odd_rows {
namespace {

// TUNED: measurement not recorded (c620c07); `fuseopt bench ops --op rms_norm` measures it again.
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kVectors = 4;  // of a row, per lane
constexpr int kWidth = 8;    // elements of a vector
constexpr int kLeastColumns = 256, kMostColumns = kVectors * kWarpSize * kWidth + kWidth - 1;
// TUNED: measurement not recorded (6627589); `fuseopt bench ops --op rms_norm` measures it again.
template <bool kLayerNorm>
constexpr int kFwdBlocksPerProcessor = kLayerNorm ? 5 : 6;
constexpr int kBwdBlocksPerProcessor = 3;

// A lane's part of each row of its warp.
template <typename T>
class OddRows {
 public:
  // Whole vectors, and the lane's element outside them, or zero.
  struct Part {
    Vector<T> vectors[kVectors];
    T edge;

    // Forces the compiler to convert the elements again after this, because registers cannot hold all of them as
    // floats.
    __device__ void stay_narrow() {
#pragma unroll
      for (Vector<T>& vector : vectors) {
        auto& words = reinterpret_cast<uint4&>(vector);
        asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
      }
    }
  };

  __device__ OddRows(int columns)
      : columns_(columns),
        first_row_(static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize),
        span_(first_row_, columns, lane()),
        head_(static_cast<int>(span_.column(0))),
        edge_(span_.edge == span_.kNone ? -1 : static_cast<int>(span_.edge - span_.begin)) {}

  __device__ int64_t first_row() const { return first_row_; }
  __device__ int64_t row_distance() const { return static_cast<int64_t>(gridDim.x) * kWarps; }

  __device__ void load(Part& part, const T* matrix, int64_t row) const {
    const T* const at = matrix + row * columns_;
    for_vectors([&](int k, int column) { part.vectors[k] = *reinterpret_cast<const Vector<T>*>(at + column); },
                [&](int k) { part.vectors[k] = {}; });
    part.edge = has_edge() ? at[edge_] : from_acc<T>(0.f);
  }

  __device__ void store(const Part& part, T* matrix, int64_t row) const {
    T* const at = matrix + row * columns_;
    for_vectors([&](int k, int column) { *reinterpret_cast<Vector<T>*>(at + column) = part.vectors[k]; }, [](int) {});
    if (has_edge()) at[edge_] = part.edge;
  }

  // Loads a parameter, aligned or not; without one every element is `absent`.
  __device__ void load_parameter(Part& part, const T* parameter, float absent) const {
    const auto load = [&](int column) { return parameter != nullptr ? parameter[column] : from_acc<T>(absent); };
    for_vectors(
        [&](int k, int column) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) part.vectors[k].values[j] = load(column + j);
        },
        [&](int k) { part.vectors[k] = {}; });
    part.edge = has_edge() ? load(edge_) : from_acc<T>(0.f);
  }

  // Calls there(k, column) for each vector, with its first column, and absent(k) for those after the row's end.
  template <typename There, typename Absent>
  __device__ void for_vectors(There there, Absent absent) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = lane() + k * kWarpSize;
      if (v < span_.vectors) there(k, head_ + v * kWidth);
      else absent(k);
    }
  }

  __device__ bool has_edge() const { return edge_ >= 0; }
  __device__ int edge() const { return edge_; }

 private:
  static __device__ int lane() { return threadIdx.x % kWarpSize; }

  const int columns_;
  const int64_t first_row_;
  const RowSpan<kWidth> span_;
  const int head_, edge_;
};

template <typename T>
struct FwdArguments {
  const T *input, *weight, *bias;
  T* output;
  float *mean, *rstd;
  int64_t rows;
  int columns;
  float inverse_columns, eps, offset;
  int norm_dtype;
};

template <typename T, bool kLayerNorm>
__global__ void __launch_bounds__(kThreads, kFwdBlocksPerProcessor<kLayerNorm>)
    norm_odd_rows_fwd_kernel(const __grid_constant__ FwdArguments<T> call) {
  follow_predecessor();
  const OddRows<T> walk(call.columns);
  typename OddRows<T>::Part scale, shift, x;
  walk.load_parameter(scale, call.weight, 1.f);
  if constexpr (kLayerNorm) walk.load_parameter(shift, call.bias, 0.f);

#pragma unroll 1
  for (int64_t row = walk.first_row(); row < call.rows; row += walk.row_distance()) {
    walk.load(x, call.input, row);
    scale.stay_narrow();
    if constexpr (kLayerNorm) shift.stay_narrow();
    const float edge = to_float(x.edge);
    // The mean over the row of `of(x - mean)`.
    const auto sum_over_row = [&](float mean, auto of) {
      float sum = walk.has_edge() ? of(edge - mean) : 0.f;
      walk.for_vectors(
          [&](int k, int) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) sum += of(x.vectors[k][j] - mean);
          },
          [](int) {});
      return warp_reduce<Sum>(sum) * call.inverse_columns;
    };
    float mean = 0;
    if constexpr (kLayerNorm) {
      // Computed as a distance from an element, so that it is exact for a constant row.
      const float origin = to_float(call.input[row * call.columns]);
      mean = origin + sum_over_row(origin, [](float x) { return x; });
    }
    const float row_rstd = rsqrtf(sum_over_row(mean, [](float x) { return x * x; }) + call.eps);
    if (threadIdx.x % kWarpSize == 0 && call.rstd != nullptr) {
      call.rstd[row] = row_rstd;
      if constexpr (kLayerNorm) call.mean[row] = mean;
    }

#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      float result[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) result[j] = (x.vectors[k][j] - mean) * row_rstd;
      if constexpr (!kLayerNorm) round_floats(call.norm_dtype, result);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if constexpr (kLayerNorm) result[j] = result[j] * scale.vectors[k][j] + shift.vectors[k][j];
        else result[j] *= scale.vectors[k][j] + call.offset;
        x.vectors[k].values[j] = from_acc<T>(result[j]);
      }
    }
    float result = (edge - mean) * row_rstd;
    if constexpr (kLayerNorm) result = result * to_float(scale.edge) + to_float(shift.edge);
    else result = round_to(call.norm_dtype, result) * (to_float(scale.edge) + call.offset);
    x.edge = from_acc<T>(result);
    walk.store(x, call.output, row);
  }
}

// The same formula as in rms_norm_bwd.cu. A block writes one row of partial sums.
template <typename T, bool kHasGradSum>
__global__ void __launch_bounds__(kThreads, kBwdBlocksPerProcessor)
    rms_norm_odd_rows_bwd_kernel(const T* grad_output, const T* grad_sum,
                                 const T* input, const T* weight,
                                 const float* rstd, T* __restrict__ grad_input, Partials<float> partials,
                                 int64_t rows, int columns, float inverse_columns, float offset) {
  follow_predecessor();
  const OddRows<T> walk(columns);
  typename OddRows<T>::Part scale, x, grad, added;
  walk.load_parameter(scale, weight, 1.f);
  float weight_sums[kVectors][kWidth] = {}, edge_sum = 0;

#pragma unroll 1
  for (int64_t row = walk.first_row(); row < rows; row += walk.row_distance()) {
    const float row_rstd = rstd[row];
    walk.load(x, input, row);
    walk.load(grad, grad_output, row);

    const float edge_xhat = to_float(x.edge) * row_rstd, edge_product = to_float(grad.edge) * edge_xhat;
    const float edge_scale = to_float(scale.edge) + offset;
    edge_sum += edge_product;
    float dot = edge_product * edge_scale;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float grad_times_xhat = grad.vectors[k][j] * (x.vectors[k][j] * row_rstd);
        weight_sums[k][j] += grad_times_xhat;
        dot += grad_times_xhat * (scale.vectors[k][j] + offset);
      }
    }
    const float mean_dot = warp_reduce<Sum>(dot) * inverse_columns;
    x.stay_narrow();
    grad.stay_narrow();
    if constexpr (kHasGradSum) walk.load(added, grad_sum, row);

#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float xhat = x.vectors[k][j] * row_rstd;
        float result = row_rstd * (grad.vectors[k][j] * (scale.vectors[k][j] + offset) - xhat * mean_dot);
        if constexpr (kHasGradSum) result += added.vectors[k][j];
        x.vectors[k].values[j] = from_acc<T>(result);
      }
    }
    float result = row_rstd * (to_float(grad.edge) * edge_scale - edge_xhat * mean_dot);
    if constexpr (kHasGradSum) result += to_float(added.edge);
    x.edge = from_acc<T>(result);
    walk.store(x, grad_input, row);
  }
  if (partials.data == nullptr) return;

  // Each warp's sums by column, added up in the order of the warps.
  extern __shared__ float warp_sums[];  // [kWarps][columns]
  float* const own = warp_sums + threadIdx.x / kWarpSize * columns;
  walk.for_vectors(
      [&](int k, int column) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) own[column + j] = weight_sums[k][j];
      },
      [](int) {});
  if (walk.has_edge()) own[walk.edge()] = edge_sum;
  __syncthreads();
  float* const partial = partials.of(0) + static_cast<int64_t>(blockIdx.x) * columns;
  for (int c = threadIdx.x; c < columns; c += kThreads) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += warp_sums[warp * columns + c];
    partial[c] = sum;
  }
}

bool suits(int64_t rows, int64_t columns, int dtype, std::initializer_list<TypedPointer> matrices,
           std::initializer_list<TypedPointer> parameters) {
  if (dtype == kFloat32 || rows == 0 || columns < kLeastColumns || columns > kMostColumns) return false;
  for (const TypedPointer& matrix : matrices) {
    if (matrix.data != nullptr && (matrix.dtype != dtype || !is_aligned(matrix.data))) return false;
  }
  for (const TypedPointer& parameter : parameters) {
    if (parameter.data != nullptr && parameter.dtype != dtype) return false;
  }
  return true;
}

// A number of blocks by which all rows of a warp have the same offset from a vector, if it has several rows.
int64_t blocks_for(int64_t rows, int blocks_per_processor) {
  constexpr int64_t kStep = kWidth / kWarps;
  const int64_t most = static_cast<int64_t>(blocks_per_processor) * multiprocessor_count() / kStep * kStep;
  return std::min({ceil_div(rows, kWidth) * kStep, most, rows});
}

}  // namespace
}  // namespace fuseopt::norm_odd_rows

namespace fuseopt {

bool launch_odd_rows_fwd(const NormFwd& call, bool is_layer_norm, cudaStream_t stream) {
  using namespace norm_odd_rows;
  const int dtype = call.input.dtype;
  if (!suits(call.rows, call.columns, dtype, {call.input, call.output}, {call.weight, call.bias})) return false;
  return dispatch_fast_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      const auto launch = [&](auto kernel, int blocks_per_processor) {
        kernel.launch(static_cast<unsigned>(blocks_for(call.rows, blocks_per_processor)), kThreads, 0, stream,
                      {static_cast<const T*>(call.input.data), static_cast<const T*>(call.weight.data),
                       static_cast<const T*>(call.bias.data), static_cast<T*>(call.output.data),
                       static_cast<float*>(call.mean.data), static_cast<float*>(call.rstd.data), call.rows,
                       static_cast<int>(call.columns), 1.0f / call.columns, static_cast<float>(call.eps),
                       static_cast<float>(call.offset), call.norm_dtype});
      };
      if (is_layer_norm) launch(FollowingKernel<norm_odd_rows_fwd_kernel<T, true>>{}, kFwdBlocksPerProcessor<true>);
      else launch(FollowingKernel<norm_odd_rows_fwd_kernel<T, false>>{}, kFwdBlocksPerProcessor<false>);
    }
  });
}

bool launch_odd_rows_bwd(const NormBwd& call, Partials<float>& partials, cudaStream_t stream) {
  using namespace norm_odd_rows;
  const auto matrices = {call.grad_output, call.grad_sum, call.input, call.grad_input};
  if (!suits(call.rows, call.columns, call.input.dtype, matrices, {call.weight})) return false;
  return dispatch_fast_dtype(call.input.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      partials.count = blocks_for(call.rows, kBwdBlocksPerProcessor);
      const size_t shared_bytes = partials.data != nullptr ? kWarps * call.columns * sizeof(float) : 0;
      const auto launch = [&](auto kernel) {
        kernel.launch(static_cast<unsigned>(partials.count), kThreads, shared_bytes, stream,
                      static_cast<const T*>(call.grad_output.data), static_cast<const T*>(call.grad_sum.data),
                      static_cast<const T*>(call.input.data), static_cast<const T*>(call.weight.data),
                      static_cast<const float*>(call.rstd.data), static_cast<T*>(call.grad_input.data), partials,
                      call.rows, static_cast<int>(call.columns), 1.0f / call.columns,
                      static_cast<float>(call.offset));
      };
      if (call.grad_sum.data != nullptr) launch(FollowingKernel<rms_norm_odd_rows_bwd_kernel<T, true>>{});
      else launch(FollowingKernel<rms_norm_odd_rows_bwd_kernel<T, false>>{});
    }
  });
}

}  // namespace fuseopt
