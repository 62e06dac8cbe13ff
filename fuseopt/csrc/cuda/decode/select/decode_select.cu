// The end of a decoding step in two launches: the best score of each chunk of a row, all over the device, unless the
// head has found it, then in one block the best of each row and all that follows from it.
#include <cassert>

#include "cuda/common/dependent_launch.cuh"
#include "cuda/decode/select/logits_chunk.cuh"
#include "cuda/decode/select/score_candidate.cuh"

namespace fuseopt::decode_select {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
// TUNED: measurement not recorded (9e8505e); `fuseopt bench kernels --model gpt2` measures it again.
constexpr int kPerThread = 16;
constexpr int kChunk = kThreads * kPerThread;
constexpr int kMaxFinishThreads = 1024;
constexpr int kCandidatesAtOnce = 10;  // loads in flight per thread; as many as candidates of a head's blocks

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

// Lanes per row: as many as it has chunks, rounded up to a power of two, at most a warp.
__host__ __device__ inline int lanes_for(int64_t chunks) {
  int lanes = 1;
  while (lanes < chunks && lanes < kWarpSize) lanes *= 2;
  return lanes;
}

template <typename Acc>
__global__ void __launch_bounds__(kMaxFinishThreads) finish_kernel(const __grid_constant__ DecodeSelect select) {
  const int chunks = static_cast<int>(select.chunks), lanes = lanes_for(chunks);
  const int lane = threadIdx.x % lanes, rows_at_once = blockDim.x / lanes;
  let_successor_start();
  wait_for_predecessor();
  // All loads are issued before the first result is used.
  const int64_t column = *select.length, pad = *select.pad, first_eos = select.eos_count > 0 ? select.eos[0] : -1;
  int64_t counts[DecodeSelect::kMaxCounters];
#pragma unroll
  for (int c = 0; c < DecodeSelect::kMaxCounters; ++c) {
    if (c < select.counter_count && threadIdx.x < select.counter_sizes[c]) counts[c] = select.counters[c][threadIdx.x];
  }
  bool going = false;
  for (int64_t first = 0; first < select.rows; first += rows_at_once) {
    const int64_t row = first + threadIdx.x / lanes;
    const bool is_row = row < select.rows;
    bool unfinished = is_row && select.unfinished[row];
    const auto* const candidates = static_cast<const Candidate<Acc>*>(select.candidates) + row * chunks;
    Candidate<Acc> best;
    for (int c = lane; is_row && c < chunks; c += kCandidatesAtOnce * lanes) {
      Candidate<Acc> loaded[kCandidatesAtOnce];
#pragma unroll
      for (int i = 0; i < kCandidatesAtOnce; ++i) {
        if (c + i * lanes < chunks) loaded[i] = candidates[c + i * lanes];
      }
#pragma unroll
      for (const auto& candidate : loaded) best.consider(candidate);
    }
    if (lanes == kWarpSize) best.reduce();
    else best.reduce(lanes);
    if (lane > 0 || !is_row) continue;
    const int64_t token = unfinished ? best.token : pad;
    unfinished = unfinished && (select.eos_count == 0 || token != first_eos);
    for (int64_t i = 1; i < select.eos_count; ++i) unfinished = unfinished && token != select.eos[i];
    select.tokens[row] = token;
    select.unfinished[row] = unfinished;
    if (column >= 0 && column < select.ids_columns) {
      select.ids[row * select.ids_row_stride + column * select.ids_column_stride] = token;
    }
    going = going || unfinished;
  }
  going = __syncthreads_or(going);
  if (threadIdx.x == 0) {
    select.going[std::clamp<int64_t>(column, 0, select.going_count - 1)] = going;
    *select.length = column + 1;
  }
#pragma unroll
  for (int c = 0; c < DecodeSelect::kMaxCounters; ++c) {
    if (c >= select.counter_count) continue;
    if (threadIdx.x < select.counter_sizes[c]) select.counters[c][threadIdx.x] = counts[c] + 1;
    for (int64_t i = threadIdx.x + blockDim.x; i < select.counter_sizes[c]; i += blockDim.x) ++select.counters[c][i];
  }
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
