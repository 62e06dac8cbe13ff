// Computes the loss of each row of logits, and writes its gradient over them. A block has a row. Its first vectors are
// in registers and the others in shared memory, so that the row is read once. A row too wide for that is read twice,
// the second time from the L2 cache. The maximum and the sum of exponentials are updated in the same pass (Milakov and
// Gimelshein, 2018, arXiv 1805.02867).
#include "cuda/common/wide_row.cuh"

namespace fuseopt::cross_entropy_grad {
namespace {

// TUNED: GPT-2's vocabulary: 94% of a copy's bandwidth, Triton's kernel 70% (fc2207b).
constexpr int kMostThreads = 1024;  // per multiprocessor, over all its blocks
constexpr int kHeld = 2;   // vectors of a row in each thread's registers
constexpr int kLoads = 2;  // of the other vectors, loads in flight per thread

template <int kWidth>
__device__ void fill_from(int first, float value, float (&values)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] = j < first ? values[j] : value;
}

// `slots`: vectors of a row in the block's shared memory, or 0.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) cross_entropy_grad_kernel(const __grid_constant__ CrossEntropyGrad loss,
                                                                      int slots) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr bool kPrecise = sizeof(T) == 4;
  extern __shared__ __align__(kAccessBytes) char shared[];
  Vector<T>* const staged = reinterpret_cast<Vector<T>*>(shared);
  RowTeam<Team::kBlock> team;
  const int64_t row = team.index;
  T* const logits = static_cast<T*>(loss.logits.data);
  const int classes = static_cast<int>(loss.classes);
  const LineSpan<kWidth> span(row, static_cast<int>(loss.width), team.lane);
  const int first_staged = kHeld * team.size;

  follow_predecessor();
  Vector<T> held[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int v = team.lane + k * team.size;
    if (span.has(v)) held[k] = load_vector(logits, span.first + v);
  }
  if (slots > 0) fetch_row(staged, logits, span, first_staged);
  const int64_t target = loss.target[row];
  const bool is_ignored = target == loss.ignore_index, is_class = target >= 0 && target < classes;
  const float target_logit = is_class ? to_float(logits[span.begin + target]) : 0.f;
  const bool is_smoothed = loss.label_smoothing != 0.f;
  const float pivot = isfinite(target_logit) ? target_logit : 0.f;

  const auto visit_held = [&](auto visit) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (span.has(team.lane + k * team.size)) visit(team.lane + k * team.size, held[k]);
    }
  };
  const auto load = [&](int v) { return slots > 0 ? staged[v - first_staged] : load_vector(logits, span.first + v); };

  OnlineSum<kPrecise> online(-INFINITY);
  float excess = 0.f;  // sum of logit - pivot
  const auto add = [&](int v, const Vector<T>& x) {
    const int left = classes - static_cast<int>(span.column(v));
    float values[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = x[j];
    if (left < kWidth) fill_from(left, -INFINITY, values);
    online.add(values);
    if (!is_smoothed) return;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) excess += j < left ? values[j] - pivot : 0.f;
  };
  visit_held(add);
  if (slots > 0) await_row();
  visit_row<kLoads>(span, team, kHeld, load, add);
  const float row_max = team.template reduce<Max>(online.max);
  const float origin = row_max == -INFINITY ? 0.f : row_max;
  float sums[2] = {online.sum * exp_as<true>(online.max - origin), excess};
  team.template reduce<Sum>(sums);
  const float row_sum = sums[0], log_sum = logf(row_sum), logsumexp = row_max + log_sum;

  if (threadIdx.x == 0) {
    float value = log_sum - (target_logit - row_max);
    if (is_smoothed) {
      const float of_all = log_sum + (row_max - pivot) - sums[1] / classes;
      value = (1.f - loss.label_smoothing) * value + loss.label_smoothing * of_all;
    }
    value += loss.z_loss * logsumexp * logsumexp;
    loss.losses[row] = is_ignored ? 0.f : value;
    loss.in_range[row] = is_ignored || is_class;
  }
  if (!loss.writes_gradient) return;

  const float grad_output = loss.grad_output == nullptr ? 1.f : loss.grad_output[row];
  const float scale = grad_output * (1.f + 2.f * loss.z_loss * logsumexp) / row_sum;
  const float of_target = grad_output * (1.f - loss.label_smoothing);
  const float of_all = grad_output * loss.label_smoothing / classes;
  const auto store = [&](int v, const Vector<T>& x) {
    const int column = static_cast<int>(span.column(v)), left = is_ignored ? 0 : classes - column;
    float values[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = exp_as<kPrecise>(x[j] - row_max) * scale - of_all;
    const auto place = static_cast<uint64_t>(target - column);
    if (is_class && place < kWidth) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] -= j == static_cast<int>(place) ? of_target : 0.f;
    }
    if (left < kWidth) fill_from(left, 0.f, values);
    store_floats_as<T>(logits, span.first + v, values);
  };
  visit_row<kLoads>(span, team, kHeld, load, store);
  visit_held(store);
}

template <typename T>
void launch_as(const CrossEntropyGrad& loss, cudaStream_t stream) {
  const auto most_shared = static_cast<int64_t>(shared_bytes_of_block());
  const int64_t vectors = loss.width / kVectorWidth<T> + LineSpan<1>::kLineVectors;
  int threads = kMostThreads / 2, slots = 0;
  for (const int blocks : {8, 4, 2, 1}) {
    const int64_t needed = std::max<int64_t>(vectors - kHeld * kMostThreads / blocks, 1);
    if (needed * kAccessBytes > most_shared / blocks - kWideStaticShared) continue;
    threads = kMostThreads / blocks, slots = static_cast<int>(needed);
    break;
  }
  const int shared_bytes = slots * kAccessBytes;
  const auto launch = [&](auto kernel) {
    kernel.launch(block_per_row(loss.rows), threads, shared_bytes, stream, loss, slots);
  };
  if (threads > kMostThreads / 2) launch(FollowingKernel<cross_entropy_grad_kernel<T, kMostThreads>>{});
  else launch(FollowingKernel<cross_entropy_grad_kernel<T, kMostThreads / 2>>{});
}

}  // namespace

extern "C" cudaError_t fuseopt_cross_entropy_grad(CrossEntropyGrad loss, cudaStream_t stream) {
  if (loss.rows == 0) return cudaSuccess;
  dispatch_fast_dtype(loss.logits.dtype, [&](auto tag) {
    launch_as<typename decltype(tag)::type>(loss, stream);
  });
  return cudaGetLastError();
}

}  // namespace fuseopt::cross_entropy_grad
