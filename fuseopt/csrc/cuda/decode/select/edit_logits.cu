// Logits as float32 scores after a chain of processors.
#include "cuda/common/dependent_launch.cuh"
#include "cuda/decode/select/logits_chunk.cuh"

namespace fuseopt::edit_logits {
namespace {

constexpr int kThreads = 256;
// TUNED: measurement not recorded (9e8505e); `fuseopt bench kernels --model gpt2` measures it again.
constexpr int kPerThread = 16;
constexpr int kChunk = kThreads * kPerThread;

struct EditChunks {
  EditLogits of;
  ScoreArithmetic<float> arithmetic;
};

// Blocks: x is the row, y the chunk.
template <typename T>
__global__ void __launch_bounds__(kThreads) edit_kernel(const __grid_constant__ EditChunks chunks) {
  using Chunk = LogitsChunk<T, kThreads, kPerThread>;
  __shared__ unsigned penalised[Chunk::kMarkWords], banned[Chunk::kMarkWords];
  __shared__ Vector<float, Chunk::kWidth> edited[kChunk / Chunk::kWidth];
  const EditLogits& of = chunks.of;
  Chunk chunk(of.logits, blockIdx.x, blockIdx.y, of.vocabulary);

  let_successor_start();
  const ChunkMarks marks = chunk.mark(of.edits, blockIdx.x, penalised, banned);
  wait_for_predecessor();
  chunk.load();
#pragma unroll
  for (int k = 0; k < Chunk::kVectors; ++k) {
    Vector<float, Chunk::kWidth> scores;
#pragma unroll
    for (int j = 0; j < Chunk::kWidth; ++j) scores.values[j] = chunk.vectors[k][j];
    marks.edit(chunk.place_of(k), chunks.arithmetic, scores.values);
    edited[chunk.place_of(k) / Chunk::kWidth] = scores;
  }
  // The output's rows may be aligned differently, so neighbouring lanes write neighbouring elements.
  __syncwarp();
  const int stretch = threadIdx.x / kWarpSize * Chunk::kStretch, lane = threadIdx.x % kWarpSize;
  float* const output = of.output + static_cast<int64_t>(blockIdx.x) * of.vocabulary;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = stretch + k * kWarpSize + lane, token = chunk.token_at(i);
    if (chunk.is_token(token)) output[token] = edited[i / Chunk::kWidth].values[i % Chunk::kWidth];
  }
}

template <typename T>
cudaError_t launch_as(const EditLogits& edit, cudaStream_t stream) {
  const EditChunks chunks = {edit, ScoreArithmetic<float>(edit.edits)};
  const auto blocks = static_cast<unsigned>(chunks_of(edit.vocabulary, kChunk));
  const LaunchShape shape{static_cast<unsigned>(edit.rows), kThreads, 0, 1, blocks};
  return launch_dependent(edit_kernel<T>, chunks, shape, edit.pdl, stream);
}

}  // namespace

extern "C" cudaError_t fuseopt_edit_logits(EditLogits edit, cudaStream_t stream) {
  if (edit.rows == 0 || edit.vocabulary == 0) return cudaSuccess;
  switch (static_cast<DType>(edit.logits.dtype)) {
    case kFloat16: return launch_as<__half>(edit, stream);
    case kBFloat16: return launch_as<__nv_bfloat16>(edit, stream);
    case kFloat64: return launch_as<double>(edit, stream);
    case kFloat32: return launch_as<float>(edit, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fuseopt::edit_logits
