// The end of a greedy decoding step in two launches: the best score of each chunk of a row, all over the device, then in
// one block the best of each row and all that follows from it.
#include "dependent_launch.cuh"
#include "dtype.cuh"

namespace fuseopt {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kPerThread = DecodeSelect::kChunk / kThreads;

template <typename T>
using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// A score and where it stands. NaN is above everything, and of equals the first wins, as in torch.argmax.
template <typename Acc>
struct Candidate {
  Acc score = -INFINITY;
  int token = INT32_MAX;

  __device__ void consider(Acc other, int other_token) {
    const bool above = isnan(other) ? !isnan(score) : other > score;
    const bool equal = isnan(other) ? isnan(score) : other == score;
    if (above || (equal && other_token < token)) score = other, token = other_token;
  }

  __device__ void reduce_over_warp() {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      const Acc other = __shfl_xor_sync(kFullWarp, score, distance);
      consider(other, __shfl_xor_sync(kFullWarp, token, distance));
    }
  }
};
static_assert(sizeof(Candidate<double>) <= DecodeSelect::kCandidateBytes);

// Blocks: x is the chunk, y the row.
template <typename T>
__global__ void __launch_bounds__(kThreads) chunk_kernel(const __grid_constant__ DecodeSelect select) {
  using Acc = AccOf<T>;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int first = blockIdx.x * DecodeSelect::kChunk + threadIdx.x, vocabulary = static_cast<int>(select.vocabulary);
  const T* const scores = static_cast<const T*>(select.scores) + blockIdx.y * select.row_stride;
  __shared__ Candidate<Acc> of_warps[kWarps];

  let_successor_start();
  wait_for_predecessor();
  T values[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (first + i * kThreads < vocabulary) values[i] = scores[first + i * kThreads];
  }
  Candidate<Acc> best;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (first + i * kThreads < vocabulary) best.consider(static_cast<Acc>(values[i]), first + i * kThreads);
  }
  best.reduce_over_warp();
  if (lane == 0) of_warps[warp] = best;
  __syncthreads();
  if (warp > 0) return;
  best = lane < kWarps ? of_warps[lane] : Candidate<Acc>();
  best.reduce_over_warp();
  if (lane == 0) static_cast<Candidate<Acc>*>(select.candidates)[blockIdx.y * gridDim.x + blockIdx.x] = best;
}

template <typename Acc>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ DecodeSelect select) {
  const int chunks = static_cast<int>(select.chunks);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  let_successor_start();
  wait_for_predecessor();
  const int64_t column = *select.length;
  bool going = false;
  for (int64_t row = warp; row < select.rows; row += kWarps) {
    const auto* const candidates = static_cast<const Candidate<Acc>*>(select.candidates) + row * chunks;
    Candidate<Acc> best;
    for (int c = lane; c < chunks; c += kWarpSize) best.consider(candidates[c].score, candidates[c].token);
    best.reduce_over_warp();
    if (lane > 0) continue;
    bool unfinished = select.unfinished[row];
    const int64_t token = unfinished ? best.token : *select.pad;
    for (int64_t i = 0; i < select.eos_count; ++i) unfinished = unfinished && token != select.eos[i];
    select.tokens[row] = token;
    select.unfinished[row] = unfinished;
    if (column >= 0 && column < select.ids_columns) {
      select.ids[row * select.ids_row_stride + column * select.ids_column_stride] = token;
    }
    going = going || unfinished;
  }
  going = __syncthreads_or(going);
  if (threadIdx.x == 0) {
    *select.going = going;
    *select.length = column + 1;
  }
  for (int c = 0; c < select.counter_count; ++c) {
    for (int64_t i = threadIdx.x; i < select.counter_sizes[c]; i += kThreads) ++select.counters[c][i];
  }
}

template <typename T>
cudaError_t launch_as(const DecodeSelect& select, cudaStream_t stream) {
  const LaunchShape shape{static_cast<unsigned>(select.chunks), kThreads, 0, 1, static_cast<unsigned>(select.rows)};
  const cudaError_t error = launch_dependent(chunk_kernel<T>, select, shape, select.overlap, stream);
  if (error != cudaSuccess) return error;
  return launch_dependent(finish_kernel<AccOf<T>>, select, {1, kThreads, 0, 1}, true, stream);
}

}  // namespace

extern "C" cudaError_t fuseopt_decode_select(DecodeSelect select, cudaStream_t stream) {
  if (select.rows == 0) return cudaSuccess;
  switch (select.dtype) {
    case kFloat16: return launch_as<__half>(select, stream);
    case kBFloat16: return launch_as<__nv_bfloat16>(select, stream);
    case kFloat64: return launch_as<double>(select, stream);
    default: return launch_as<float>(select, stream);
  }
}

}  // namespace fuseopt
