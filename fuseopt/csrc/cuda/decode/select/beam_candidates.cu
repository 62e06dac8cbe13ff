// The best continuations of each item. Each warp takes the highest scores of its stretch of a row, each block those of
// its warps, and then one warp per item those of the blocks.
#include "cuda/common/dependent_launch.cuh"
#include "cuda/decode/select/exponential_draw.cuh"
#include "cuda/decode/select/logits_chunk.cuh"
#include "cuda/decode/select/topk_order.cuh"

namespace fuseopt::beam_candidates {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
// TUNED: measurement not recorded (9e8505e); `fuseopt bench kernels --model gpt2 --beams 4` measures it again.
constexpr int kPerThread = 32;
constexpr int kChunk = kThreads * kPerThread;

template <typename T>
using Chunk = LogitsChunk<T, kThreads, kPerThread>;

struct ChunkedCandidates {
  BeamCandidates of;
  int chunks;  // per row
  ScoreArithmetic<float> arithmetic;
  TorchDraw draw;
};

// For a row of logits or a part of it: the highest logit, and the sum of exp(logit - highest).
struct PartialSum {
  float highest;
  float sum;
};

// Blocks: x is the row, y the chunk.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ ChunkedCandidates chunked) {
  const BeamCandidates& of = chunked.of;
  Chunk<T> chunk(of.scores, blockIdx.x, blockIdx.y, of.vocabulary);
  RowTeam<Team::kBlock> team;

  let_successor_start();
  wait_for_predecessor();
  chunk.load();
  float highest = -INFINITY, sum = 0;
  const auto for_each = [&](auto visit) {
#pragma unroll
    for (int k = 0; k < Chunk<T>::kVectors; ++k) {
#pragma unroll
      for (int j = 0; j < Chunk<T>::kWidth; ++j) {
        if (chunk.is_token(chunk.token_of(k) + j)) visit(chunk.vectors[k][j]);
      }
    }
  };
  for_each([&](float logit) { highest = fmaxf(highest, logit); });
  highest = team.reduce<Max>(highest);
  // If all logits are -inf the sum is 0; a NaN makes it NaN.
  const float subtracted = highest == -INFINITY ? 0 : highest;
  for_each([&](float logit) { sum += expf(logit - subtracted); });
  sum = team.reduce<Sum>(sum);
  if (threadIdx.x == 0) {
    reinterpret_cast<PartialSum*>(of.partial_sums)[static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y] = {highest, sum};
  }
}

// The same for a whole row, from its parts.
__device__ PartialSum sum_of_row(const ChunkedCandidates& chunked, int64_t row) {
  const auto* const parts = reinterpret_cast<const PartialSum*>(chunked.of.partial_sums) + row * chunked.chunks;
  PartialSum total = {-INFINITY, 0};
  for (int c = 0; c < chunked.chunks; ++c) total.highest = fmaxf(total.highest, parts[c].highest);
  for (int c = 0; c < chunked.chunks; ++c) total.sum += parts[c].sum * expf(parts[c].highest - total.highest);
  return total;
}

enum class Keys { kPlain, kEdited, kDrawn };

// The highest accumulated score of all beams of the row's item.
__device__ float highest_of_item(const BeamCandidates& of, int64_t row) {
  const int64_t first = row / of.beams * of.beams;
  float highest = -INFINITY;
  for (int64_t i = first; i < first + of.beams; ++i) highest = fmaxf(highest, of.highest[i] + of.running_scores[i]);
  return highest;
}

// Blocks: x is the row, y the chunk.
template <typename T, Keys kKeys>
__global__ void __launch_bounds__(kThreads) chunk_kernel(const __grid_constant__ ChunkedCandidates chunked) {
  constexpr int kWidth = Chunk<T>::kWidth, kStretch = Chunk<T>::kStretch;
  const BeamCandidates& of = chunked.of;
  __shared__ unsigned penalised[Chunk<T>::kMarkWords], banned[Chunk<T>::kMarkWords];
  __shared__ Vector<unsigned, kWidth> vectors_of_keys[kWarps][kStretch / kWidth];
  __shared__ unsigned taken_keys[kWarps * kMaxTaken];
  __shared__ int taken_tokens[kWarps * kMaxTaken];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, count = of.count;
  const int64_t row = blockIdx.x;
  Chunk<T> chunk(of.scores, row, blockIdx.y, of.vocabulary);

  let_successor_start();
  ChunkMarks marks;
  if constexpr (kKeys == Keys::kEdited) marks = chunk.mark(of.edits, row, penalised, banned);
  wait_for_predecessor();
  const float running = of.running_scores[row];
  const bool has_sum = of.partial_sums != nullptr;
  chunk.load();
  PartialSum total = {0, 1};
  if (has_sum) total = sum_of_row(chunked, row);
  const float logarithm = logf(total.sum);
#pragma unroll
  for (int k = 0; k < Chunk<T>::kVectors; ++k) {
    const int place = chunk.place_of(k);
    float scores[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      scores[j] = chunk.vectors[k][j];
      if (has_sum) scores[j] = scores[j] - total.highest - logarithm;
    }
    if constexpr (kKeys == Keys::kEdited) marks.edit(place, chunked.arithmetic, scores);
    Vector<unsigned, kWidth> keys;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      keys.values[j] = chunk.is_token(chunk.token_at(place + j)) ? key_of(scores[j] + running) : kNoKey;
    }
    vectors_of_keys[warp][place % kStretch / kWidth] = keys;
  }
  __syncwarp();
  if constexpr (kKeys == Keys::kDrawn) {
    const ExponentialDraw draw(of.random, chunked.draw);
    const float highest = highest_of_item(of, row);
    const int first = chunk.token_at(warp * kStretch);
    unsigned* const keys = vectors_of_keys[warp]->values;
    for (int i = lane; i < kStretch; i += kWarpSize) {
      if (keys[i] == kNoKey) continue;
      const float weight = expf(score_of(keys[i]) - highest);
      const auto element = static_cast<unsigned>(row * of.vocabulary + first + i);
      keys[i] = key_of(weight > 0 ? __fdiv_rn(weight, draw(element)) : weight);
    }
    __syncwarp();
  }
  Taken taken = take_highest(vectors_of_keys[warp]->values, kStretch, count);
  if (lane < count) {
    taken_keys[warp * count + lane] = taken.key;
    taken_tokens[warp * count + lane] = chunk.token_at(warp * kStretch + taken.place);
  }
  __syncthreads();
  if (warp > 0) return;
  taken = take_highest(taken_keys, kWarps * count, count);
  if (lane < count) {
    const int64_t place = (row * chunked.chunks + blockIdx.y) * count + lane;
    of.chunk_keys[place] = taken.key;
    of.chunk_tokens[place] = taken.key == kNoKey ? 0 : taken_tokens[taken.place];
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
    float value = score_of(taken.key);
    if (of.highest != nullptr) {
      const int64_t row = item * of.beams + taken.place / of.vocabulary, token = taken.place % of.vocabulary;
      const auto* const scores = static_cast<const float*>(of.scores.data) + row * of.scores.row_stride;
      value = scores[token * of.scores.column_stride] + of.running_scores[row];
    }
    of.values[item * count + lane] = value;
    of.places[item * count + lane] = taken.place;
  }
}

template <typename T>
cudaError_t launch_chunks(const ChunkedCandidates& chunked, cudaStream_t stream) {
  const BeamCandidates& of = chunked.of;
  const auto rows = static_cast<unsigned>(of.items * of.beams);
  const LaunchShape shape = {rows, kThreads, 0, 1, static_cast<unsigned>(chunked.chunks)};
  bool pdl = of.pdl;
  if (of.partial_sums != nullptr) {
    const cudaError_t error = launch_dependent(sum_kernel<T>, chunked, shape, pdl, stream);
    if (error != cudaSuccess) return error;
    pdl = true;
  }
  auto kernel = of.has_edits ? chunk_kernel<T, Keys::kEdited> : chunk_kernel<T, Keys::kPlain>;
  if constexpr (std::is_same_v<T, float>) {
    if (of.highest != nullptr) kernel = chunk_kernel<T, Keys::kDrawn>;
  }
  return launch_dependent(kernel, chunked, shape, pdl, stream);
}

}  // namespace

extern "C" int64_t fuseopt_beam_candidates_chunks(int64_t vocabulary) { return chunks_of(vocabulary, kChunk); }

extern "C" cudaError_t fuseopt_beam_candidates(BeamCandidates candidates, cudaStream_t stream) {
  if (candidates.items * candidates.beams == 0) return cudaSuccess;
  const int chunks = static_cast<int>(fuseopt_beam_candidates_chunks(candidates.vocabulary));
  const ChunkedCandidates chunked = {candidates, chunks, ScoreArithmetic<float>(candidates.edits),
                                     TorchDraw(candidates.items * candidates.beams * candidates.vocabulary)};
  cudaError_t error = cudaErrorInvalidValue;
  switch (static_cast<DType>(candidates.scores.dtype)) {
    case kFloat16: error = launch_chunks<__half>(chunked, stream); break;
    case kBFloat16: error = launch_chunks<__nv_bfloat16>(chunked, stream); break;
    case kFloat32: error = launch_chunks<float>(chunked, stream); break;
    case kFloat64: break;  // refused by the binding
  }
  if (error != cudaSuccess) return error;
  const size_t shared_bytes = candidates.beams * chunks * candidates.count * sizeof(unsigned);
  const LaunchShape item_shape = {static_cast<unsigned>(candidates.items), kWarpSize, shared_bytes, 1};
  return launch_dependent(item_kernel, chunked, item_shape, candidates.pdl, stream);
}

}  // namespace fuseopt::beam_candidates
