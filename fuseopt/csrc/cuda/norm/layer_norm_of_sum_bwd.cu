// Backward of a LayerNorm whose input x = base + addends is recomputed. It also writes what a step's matrix products
// read: the recomputed output = xhat * weight + bias, the gradient of x rounded to T, and the sums of that over rows.
//
// Blocks walk the rows. Where the device can, the next rows are copied to shared memory meanwhile. A thread has the
// same four columns in every row.
#include "cuda/norm/norm_bwd.cuh"

namespace fuseopt::layer_norm_of_sum_bwd {
namespace {

constexpr int kWidth = 4;
constexpr int kMostAddends = LayerNormOfSumBwd::kMostAddends;

// Offsets of the tensors' rows in a stage.
template <typename T>
struct Stage {
  int columns;

  __host__ __device__ int narrow() const { return columns * static_cast<int>(sizeof(T)); }
  __host__ __device__ int wide() const { return columns * static_cast<int>(sizeof(float)); }
  __host__ __device__ int base() const { return narrow(); }
  __host__ __device__ int grad_sum() const { return narrow() + wide(); }
  __host__ __device__ int addend(int index) const { return narrow() * (1 + index) + 2 * wide(); }
};

template <typename T>
__device__ void fetch(const StageRing& ring, int stage, const LayerNormOfSumBwd& call, int64_t row) {
  if (threadIdx.x != 0 || row >= call.rows) return;
  const Stage<T> parts{static_cast<int>(call.columns)};
  const int64_t begin = row * call.columns;
  ring.begin(stage);
  ring.bring(stage, parts.base(), call.base + begin, parts.wide());
  for (int a = 0; a < call.addend_count; ++a) {
    ring.bring(stage, parts.addend(a), static_cast<const T*>(call.addends[a]) + begin, parts.narrow());
  }
  ring.bring(stage, 0, static_cast<const T*>(call.grad_output.data) + begin, parts.narrow());
  ring.bring(stage, parts.grad_sum(), call.grad_sum + begin, parts.wide());
}

template <typename T>
__global__ void __launch_bounds__(LayerNormOfSumBwd::kMostColumns / kWidth)
    layer_norm_of_sum_bwd_kernel(const __grid_constant__ LayerNormOfSumBwd call, Partials<float> partials, int stages) {
  follow_predecessor();
  extern __shared__ __align__(kAccessBytes) char slots[];
  const int columns = static_cast<int>(call.columns), vector = threadIdx.x;
  const bool has_columns = vector * kWidth < columns;
  const Stage<T> parts{columns};
  RowTeam<Team::kBlock> team;
  StageRing ring(slots, parts.addend(call.addend_count), stages);
  if constexpr (kHasRowRings) {
    if (threadIdx.x == 0) ring.open();
    __syncthreads();
    for (int s = 0; s < stages; ++s) fetch<T>(ring, s, call, team.index + s * team.count);
  }

  Vector<float, kWidth> scale = {}, shift = {};
  if (has_columns) scale = load_vector(call.weight, vector), shift = load_vector(call.bias, vector);
  float weight_sums[1][kWidth] = {}, bias_sums[1][kWidth] = {}, grad_sums[1][kWidth] = {};
  float next_mean = team.index < call.rows ? call.mean[team.index] : 0.0f;
  float next_rstd = team.index < call.rows ? call.rstd[team.index] : 0.0f;

  for (int64_t row = team.index; row < call.rows; row += team.count) {
    const float mean = next_mean, rstd = next_rstd;
    if (row + team.count < call.rows) {
      next_mean = call.mean[row + team.count];
      next_rstd = call.rstd[row + team.count];
    }
    // A tensor's row: in the call's memory, or in the ring.
    const auto row_of = [&](const auto* tensor, int offset) {
      if constexpr (kHasRowRings) return reinterpret_cast<decltype(tensor)>(ring.data() + offset);
      else return tensor + row * columns;
    };
    if constexpr (kHasRowRings) ring.wait();

    Vector<T, kWidth> grad = {};
    Vector<float, kWidth> added = {};
    float xhat[kWidth] = {}, sums[2] = {};  // of g = grad * weight, and of g * xhat
    if (has_columns) {
      Vector<float, kWidth> x = load_vector(row_of(call.base, parts.base()), vector);
      Vector<T, kWidth> addends[kMostAddends];
#pragma unroll
      for (int a = 0; a < kMostAddends; ++a) {
        if (a >= call.addend_count) break;
        addends[a] = load_vector<T, kWidth>(row_of(static_cast<const T*>(call.addends[a]), parts.addend(a)), vector);
      }
      grad = load_vector<T, kWidth>(row_of(static_cast<const T*>(call.grad_output.data), 0), vector);
      added = load_vector(row_of(call.grad_sum, parts.grad_sum()), vector);
#pragma unroll
      for (int a = 0; a < kMostAddends; ++a) {
        if (a >= call.addend_count) break;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) x.values[j] += addends[a][j];
      }
      float output[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        xhat[j] = (x[j] - mean) * rstd;
        output[j] = xhat[j] * scale[j] + shift[j];
        const float g = grad[j] * scale[j];
        sums[0] += g;
        sums[1] += g * xhat[j];
        weight_sums[0][j] += grad[j] * xhat[j];
        bias_sums[0][j] += grad[j];
      }
      store_floats_as<T>(static_cast<T*>(call.output) + row * columns, vector, output);
    }
    team.template reduce<Sum>(sums);
    if constexpr (kHasRowRings) {
      fetch<T>(ring, ring.stage(), call, row + stages * team.count);
      ring.advance();
    }
    if (!has_columns) continue;
    const float mean_g = sums[0] / columns, mean_dot = sums[1] / columns;
    float result[kWidth];
    Vector<T, kWidth> rounded;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      result[j] = rstd * (grad[j] * scale[j] - mean_g - xhat[j] * mean_dot) + added[j];
      rounded.values[j] = from_acc<T>(result[j]);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) grad_sums[0][j] += rounded[j];
    store_floats_as<float>(call.grad + row * columns, vector, result);
    reinterpret_cast<Vector<T, kWidth>*>(static_cast<T*>(call.rounded) + row * columns)[vector] = rounded;
  }
  store_block_partials(weight_sums, partials.of(0), columns, team);
  store_block_partials(bias_sums, partials.of(1), columns, team);
  store_block_partials(grad_sums, partials.of(2), columns, team);
}

}  // namespace

extern "C" cudaError_t fuseopt_layer_norm_of_sum_bwd(const LayerNormOfSumBwd& call, cudaStream_t stream) {
  Partials<float> partials{static_cast<float*>(call.workspace), 0, call.columns};
  const ColumnSums sums{{{call.grad_weight, kFloat32}, {call.grad_bias, kFloat32}, {call.grad_columns, kFloat32}}};
  if (call.rows > 0) {
    dispatch_fast_dtype(call.grad_output.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      using Kernel = FollowingKernel<layer_norm_of_sum_bwd_kernel<T>>;
      const int threads = static_cast<int>(ceil_div(call.columns, kWidth * kWarpSize)) * kWarpSize;
      const int64_t most_blocks = tuning().layer_norm_of_sum_bwd_ring_threads / threads;
      int blocks = static_cast<int>(std::clamp<int64_t>(most_blocks, 1, kPartialsPerProcessor)), stages = 0;
      size_t shared_bytes = 0;
      if (is_sm90_or_newer()) {
        const int stage_bytes = Stage<T>{static_cast<int>(call.columns)}.addend(call.addend_count);
        const auto shared = static_cast<int>(shared_bytes_of_multiprocessor());
        const auto stages_of = [&](int blocks) {
          return std::clamp((shared / blocks - kBwdStaticShared) / stage_bytes, 1, kMaxRingStages);
        };
        while (blocks > 1 && stages_of(blocks) < kMaxRingStages) --blocks;
        stages = stages_of(blocks);
        shared_bytes = static_cast<size_t>(stages) * stage_bytes;
      }
      partials.count = std::min<int64_t>(call.rows, blocks * multiprocessor_count());
      Kernel::launch(static_cast<unsigned>(partials.count), threads, shared_bytes, stream, call, partials, stages);
    });
  }
  return reduce_partials(partials, sums, stream);
}

}  // namespace fuseopt::layer_norm_of_sum_bwd
