// The best continuations of each item. Warps take the highest of their stretch of a row, blocks those of their warps,
// and a warp an item those of its blocks.
#include "dependent_launch.cuh"
#include "launchers.h"
#include "topk_order.cuh"

namespace fuseopt {
namespace {

constexpr int kWarps = 8;
constexpr int kStretch = 1024;  // scores a warp
constexpr int kChunk = kWarps * kStretch;

struct ChunkedCandidates {
  BeamCandidates of;
  int chunks;  // a row
};

__global__ void __launch_bounds__(kWarps * kWarpSize) chunk_kernel(const __grid_constant__ ChunkedCandidates chunked) {
  const BeamCandidates& of = chunked.of;
  __shared__ unsigned keys[kWarps][kStretch];
  __shared__ unsigned taken_keys[kWarps * kMaxTaken];
  __shared__ int taken_tokens[kWarps * kMaxTaken];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, count = of.count;
  const int64_t row = blockIdx.x / chunked.chunks;
  const int first = static_cast<int>(blockIdx.x % chunked.chunks) * kChunk + warp * kStretch;

  let_successor_start();
  wait_for_predecessor();
  const float* const scores = of.scores + row * of.row_stride;
  const float running = of.running_scores[row];
#pragma unroll 8
  for (int i = lane; i < kStretch; i += kWarpSize) {
    const int token = first + i;
    keys[warp][i] = token < of.vocabulary ? key_of(scores[token * of.column_stride] + running) : kNoKey;
  }
  __syncwarp();
  Taken taken = take_highest(keys[warp], kStretch, count);
  if (lane < count) {
    taken_keys[warp * count + lane] = taken.key;
    taken_tokens[warp * count + lane] = first + taken.place;
  }
  __syncthreads();
  if (warp > 0) return;
  taken = take_highest(taken_keys, kWarps * count, count);
  if (lane < count) {
    of.chunk_keys[blockIdx.x * count + lane] = taken.key;
    of.chunk_tokens[blockIdx.x * count + lane] = taken.key == kNoKey ? 0 : taken_tokens[taken.place];
  }
}

__global__ void __launch_bounds__(kWarpSize) item_kernel(const __grid_constant__ ChunkedCandidates chunked) {
  const BeamCandidates& of = chunked.of;
  extern __shared__ unsigned item_keys[];
  __shared__ Taken scratch[kMaxTaken];
  const int lane = threadIdx.x, count = of.count;
  const int of_row = chunked.chunks * count, size = static_cast<int>(of.beams) * of_row;
  const int64_t item = blockIdx.x;

  let_successor_start();
  wait_for_predecessor();
  for (int i = lane; i < size; i += kWarpSize) item_keys[i] = of.chunk_keys[item * size + i];
  __syncwarp();
  Taken taken = take_highest(item_keys, size, count);
  if (lane < count) {
    const int beam = taken.place / of_row;
    taken.place = beam * static_cast<int>(of.vocabulary) + of.chunk_tokens[item * size + taken.place];
  }
  taken = in_topk_order(taken, count, scratch);
  if (lane < count) {
    of.values[item * count + lane] = score_of(taken.key);
    of.places[item * count + lane] = taken.place;
  }
}

}  // namespace

extern "C" int64_t fuseopt_beam_candidates_chunks(int64_t vocabulary) { return ceil_div(vocabulary, kChunk); }

extern "C" cudaError_t fuseopt_beam_candidates(BeamCandidates candidates, cudaStream_t stream) {
  const int64_t rows = candidates.items * candidates.beams;
  if (rows == 0) return cudaSuccess;
  const int chunks = static_cast<int>(fuseopt_beam_candidates_chunks(candidates.vocabulary));
  const ChunkedCandidates chunked = {candidates, chunks};
  const LaunchShape shape = {static_cast<unsigned>(rows * chunks), kWarps * kWarpSize, 0, 1};
  const cudaError_t error = launch_dependent(chunk_kernel, chunked, shape, candidates.overlap, stream);
  if (error != cudaSuccess) return error;
  const size_t shared_bytes = candidates.beams * chunks * candidates.count * sizeof(unsigned);
  const LaunchShape item_shape = {static_cast<unsigned>(candidates.items), kWarpSize, shared_bytes, 1};
  return launch_dependent(item_kernel, chunked, item_shape, candidates.overlap, stream);
}

}  // namespace fuseopt
