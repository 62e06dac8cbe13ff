// Draws a token from each row without finding where a filter cuts. The token drawn is the one with the highest ratio of
// weight to number among those that the filter keeps: the winner of a race. So all tokens run, and the first of them are
// checked: a token is kept if the weights of all that come before it in the filter's order add up to less than the cut.
// A token that is not kept excludes all after it in that order, and the rest run again, seldom more than once.
//
// A cluster of blocks has a row. Numbers are drawn before the wait for the logits. Blocks are small enough to start
// beside a head's, while these still read weights.
#include "cuda/decode/select/end_of_step.cuh"
#include "cuda/decode/select/race_runner.cuh"
#include "cuda/decode/select/decode_sample_race.h"

namespace fuseopt::decode_sample_race {
namespace {

template <typename T, Cut kCut>
__global__ void __launch_bounds__(kThreads, 8) race_kernel(const __grid_constant__ Race race) {
#if __CUDA_ARCH__ >= 900  // `takes` refuses older devices
  __shared__ Storage storage;
  extern __shared__ float4 shared_slots[];
  const DecodeSelect& select = race.of.select;
  const int rank = cluster_rank(), size = cluster_size();
  const int64_t row = blockIdx.x / size;
  const int first_chunk = rank * race.chunks_of_block;
  arrive_relaxed_at_cluster_barrier();
  let_successor_start();
  if (blockIdx.x == 0 && threadIdx.x == 0) prefetch_for_end_of_step(select);
  const LogitsChunk<T, kThreads, kPerThread<T, kCut>> first(select.scores, row, first_chunk, select.vocabulary);
  float* const slots = reinterpret_cast<float*>(shared_slots);
  Runner<T, kCut> runner = {race, storage, row, slots, first.token_at(0), rank, size * kWarps};
  if (select.divisors == nullptr) {
#pragma unroll 1
    for (int c = 0; c < race.chunks_of_block; ++c) runner.draw_numbers(c);
  }
  wait_at_cluster_barrier();  // all blocks have started
  runner.load_and_run(first_chunk);
  Entrant winner;
#pragma unroll 1
  for (bool is_first = true;; is_first = false) {
    runner.compare(is_first);
    if (runner.decide(winner)) break;
    runner.run_again();
    cluster_barrier();  // all have read what `compare` sends anew
  }
  if (rank > 0) return;
  const Candidate<float> best = {key_of(winner.ratio), winner.token};
  if (select.rows > 1) {
    if (threadIdx.x == 0) static_cast<Candidate<float>*>(select.candidates)[row] = best;
    return;
  }
  if (threadIdx.x == 0) storage.best = best;
  __syncthreads();
  end_step(select, &storage.best, 1);
#endif
}

template <typename T, Cut kCut>
int blocks_of_row(int64_t vocabulary) {
  const int64_t chunks = chunks_of(vocabulary, kChunk<T, kCut>);
  int blocks = 1;
  while (blocks < kMostBlocks && blocks < chunks) blocks *= 2;
  return blocks;
}

template <typename T, Cut kCut>
int chunks_of_block(int64_t vocabulary) {
  return static_cast<int>(ceil_div(chunks_of(vocabulary, kChunk<T, kCut>), blocks_of_row<T, kCut>(vocabulary)));
}

template <typename T, Cut kCut>
size_t bytes_of_block(int64_t vocabulary) {
  return static_cast<size_t>(chunks_of_block<T, kCut>(vocabulary)) * kChunk<T, kCut> * sizeof(float);
}

template <typename T, Cut kCut>
cudaError_t launch_as(const DecodeSample& sample, cudaStream_t stream) {
  const DecodeSelect& select = sample.select;
  const Race race = {sample, ScoreArithmetic<float>(select.edits), chunks_of_block<T, kCut>(select.vocabulary),
                     TorchDraw(select.rows * select.vocabulary)};
  const auto kernel = race_kernel<T, kCut>;
  const auto blocks = static_cast<unsigned>(blocks_of_row<T, kCut>(select.vocabulary));
  const size_t shared_bytes = bytes_of_block<T, kCut>(select.vocabulary);
  const LaunchShape shape{static_cast<unsigned>(select.rows) * blocks, kThreads, shared_bytes, blocks};
  constexpr unsigned kPortableBlocks = 8;
  if (blocks > kPortableBlocks) {
    cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  return launch_dependent(kernel, race, shape, select.pdl, stream);
}

template <typename T>
cudaError_t launch_as(const DecodeSample& sample, cudaStream_t stream) {
  if (sample.top_k < sample.select.vocabulary) return launch_as<T, Cut::kCount>(sample, stream);
  if (sample.top_p < 1) return launch_as<T, Cut::kProbability>(sample, stream);
  if (sample.typical_p < 1) return launch_as<T, Cut::kTypicality>(sample, stream);
  return launch_as<T, Cut::kNone>(sample, stream);
}

}  // namespace

bool takes(const DecodeSample& sample) {
  constexpr int kLeastTopK = 129;        // fewer are gathered
  constexpr double kLeastTypical = 1e-3;  // tokens that are kept must not all be too unlikely to have a weight
  const bool has_top_k = sample.top_k < sample.select.vocabulary, is_typical = sample.typical_p < 1;
  return is_sm90_or_newer() && sample.kept == nullptr && sample.highest == nullptr && sample.min_tokens == 1 &&
         has_top_k + (sample.top_p < 1) + is_typical <= 1 && !(has_top_k && sample.top_k < kLeastTopK) &&
         !(is_typical && (sample.min_p > 0 || sample.typical_p < kLeastTypical)) &&
         fits_block(race_kernel<float, Cut::kNone>, bytes_of_block<__half, Cut::kNone>(sample.select.vocabulary));
}

cudaError_t launch(const DecodeSample& sample, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  dispatch_fast_dtype(sample.select.scores.dtype,
                      [&](auto tag) { error = launch_as<typename decltype(tag)::type>(sample, stream); });
  return error;
}

}  // namespace fuseopt::decode_sample_race
