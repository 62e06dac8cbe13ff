// The end of a decoding step in two launches: the best score of each chunk of a row, all over the device, unless the
// head has found it, then in one block the best of each row and all that follows from it.
#include <cassert>

#include "cuda/common/dependent_launch.cuh"
#include "cuda/decode/select/end_of_step.cuh"
#include "cuda/decode/select/logits_chunk.cuh"

namespace fuseopt::decode_select {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
// TUNED: measurement not recorded (9e8505e); `fuseopt bench kernels --model gpt2` measures it again.
constexpr int kPerThread = 16;
constexpr int kChunk = kThreads * kPerThread;
constexpr int kMaxFinishThreads = 1024;

template <typename T>
using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

static_assert(sizeof(Candidate<double>) <= DecodeSelect::kCandidateBytes);

struct SelectChunks {
  DecodeSelect of;
  ScoreArithmetic<float> arithmetic;
};

// How scores are changed before they are compared.
enum class Kind { kPlain, kEdited, kDrawn };

// Blocks: x is the row, y the chunk.
template <typename T, Kind kKind>
__global__ void __launch_bounds__(kThreads) chunk_kernel(const __grid_constant__ SelectChunks chunks) {
  using Acc = AccOf<T>;
  using Chunk = LogitsChunk<T, kThreads, kPerThread>;
  __shared__ unsigned penalised[Chunk::kMarkWords], banned[Chunk::kMarkWords];
  __shared__ Candidate<Acc> of_warps[kWarps];
  const DecodeSelect& select = chunks.of;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t row = blockIdx.x;
  Chunk chunk(select.scores, row, blockIdx.y, select.vocabulary);

  let_successor_start();
  ChunkMarks marks;
  if constexpr (kKind == Kind::kEdited) marks = chunk.mark(select.edits, row, penalised, banned);
  wait_for_predecessor();
  chunk.load();
  Vector<float, Chunk::kWidth> divisors[Chunk::kVectors];
  if constexpr (kKind == Kind::kDrawn) chunk.load_alike(select.divisors + row * select.vocabulary, 1, divisors);
  Candidate<Acc> best;
  bool is_valid = true;
#pragma unroll
  for (int k = 0; k < Chunk::kVectors; ++k) {
    const int first = chunk.token_of(k);
    Acc scores[Chunk::kWidth];
#pragma unroll
    for (int j = 0; j < Chunk::kWidth; ++j) scores[j] = static_cast<Acc>(chunk.vectors[k].values[j]);
    if constexpr (kKind == Kind::kEdited) {
      float edited[Chunk::kWidth];
#pragma unroll
      for (int j = 0; j < Chunk::kWidth; ++j) edited[j] = chunk.vectors[k][j];
      marks.edit(chunk.place_of(k), chunks.arithmetic, edited);
#pragma unroll
      for (int j = 0; j < Chunk::kWidth; ++j) scores[j] = edited[j];
    }
#pragma unroll
    for (int j = 0; j < Chunk::kWidth; ++j) {
      if (!chunk.is_token(first + j)) continue;
      if constexpr (kKind == Kind::kDrawn) {
        is_valid = is_valid && scores[j] >= 0 && scores[j] < INFINITY;
        scores[j] = __fdiv_rn(scores[j], divisors[k].values[j]);
      }
      best.consider(scores[j], first + j);
    }
  }
  if constexpr (kKind == Kind::kDrawn) assert(is_valid && "probability is inf, nan or negative");
  best.reduce();
  if (lane == 0) of_warps[warp] = best;
  __syncthreads();
  if (warp > 0) return;
  best = lane < kWarps ? of_warps[lane] : Candidate<Acc>();
  best.reduce();
  if (lane == 0) static_cast<Candidate<Acc>*>(select.candidates)[row * gridDim.y + blockIdx.y] = best;
}

template <typename Acc>
__global__ void __launch_bounds__(kMaxFinishThreads) finish_kernel(const __grid_constant__ DecodeSelect select) {
  let_successor_start();
  wait_for_predecessor();
  end_step(select, static_cast<const Candidate<Acc>*>(select.candidates), static_cast<int>(select.chunks));
}

template <typename Acc>
cudaError_t launch_finish(const DecodeSelect& select, bool pdl, cudaStream_t stream) {
  const bool fits = select.rows * lanes_for(select.chunks) <= kThreads;
  const LaunchShape shape{1, static_cast<unsigned>(fits ? kThreads : kMaxFinishThreads), 0, 1};
  return launch_dependent(finish_kernel<Acc>, select, shape, pdl, stream);
}

template <typename T>
cudaError_t launch_as(const DecodeSelect& select, cudaStream_t stream) {
  const LaunchShape shape{static_cast<unsigned>(select.rows), kThreads, 0, 1, static_cast<unsigned>(select.chunks)};
  const SelectChunks chunks = {select, ScoreArithmetic<float>(select.edits)};
  auto kernel = select.has_edits ? chunk_kernel<T, Kind::kEdited> : chunk_kernel<T, Kind::kPlain>;
  if constexpr (std::is_same_v<T, float>) {
    if (select.divisors != nullptr) kernel = chunk_kernel<T, Kind::kDrawn>;
  }
  const cudaError_t error = launch_dependent(kernel, chunks, shape, select.pdl, stream);
  if (error != cudaSuccess) return error;
  return launch_finish<AccOf<T>>(select, true, stream);
}

}  // namespace

extern "C" int64_t fuseopt_decode_select_chunks(int64_t vocabulary) { return chunks_of(vocabulary, kChunk); }

extern "C" cudaError_t fuseopt_decode_select(DecodeSelect select, cudaStream_t stream) {
  if (select.rows == 0) return cudaSuccess;
  if (select.has_candidates) return launch_finish<float>(select, select.pdl, stream);
  switch (static_cast<DType>(select.scores.dtype)) {
    case kFloat16: return launch_as<__half>(select, stream);
    case kBFloat16: return launch_as<__nv_bfloat16>(select, stream);
    case kFloat64: return launch_as<double>(select, stream);
    case kFloat32: return launch_as<float>(select, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fuseopt::decode_select
