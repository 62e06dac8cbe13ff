// The end of a decode step that samples, in two launches after the numbers are drawn: in the first a cluster of blocks
// edits and filters each row and finds the token that is drawn from it; the second is that of a greedy step.
//
// transformers' filters keep the scores above a cut, so none of them is sorted or written to memory: scores stay in
// shared memory and the cuts are found by histograms. Equal scores at the cut of top-p are kept from the last one on, as
// a stable sort in ascending order has it.
#include <cassert>

#include "cuda/common/dependent_launch.cuh"
#include "cuda/decode/select/logits_chunk.cuh"
#include "cuda/decode/select/score_candidate.cuh"
#include "cuda/decode/select/score_cut.cuh"

namespace fuseopt::decode_sample {
namespace {

// TUNED: not measured; loads in flight as of other kernels in this folder.
constexpr int kThreads = RowCutter::kThreads;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kPerThread = 16;
constexpr int kChunk = kThreads * kPerThread;
constexpr int kAtOnce = 8;  // loads in flight per thread

struct SampleRows {
  DecodeSample of;
  ScoreArithmetic<float> arithmetic;
  int chunks_of_block;
};

// What is left of a row: scores above a key, and those equal to it from a place of this block on, of which those that
// are at least `min_p` times as likely as the highest.
struct Kept {
  unsigned key;
  int first_equal;
  float highest;
  float min_p;

  __device__ float weight_of(float score) const { return expf(score - highest); }
  __device__ bool contains(float score, int place) const {
    const unsigned its_key = key_of(score);
    return (its_key > key || (its_key == key && place >= first_equal)) && (min_p <= 0 || weight_of(score) >= min_p);
  }
};

// How far the information of a score is from the mean; upstream: TypicalLogitsWarper.
struct Typicality {
  float highest;
  float log_sum = 0;
  float entropy = 0;

  // The nearest score is the highest.
  __device__ float operator()(float score) const { return -fabsf(-(score - highest - log_sum) - entropy); }
};

__device__ void cut_top_p(RowCutter& cutter, const float* scores, int places, float lowest, double top_p, Kept& kept) {
  // Upstream removes what has a cumulative probability of at most this, from the lowest score on.
  const double removed = static_cast<float>(1 - top_p);
  const ScoreCut cut = cutter.find<CutBy::kProbability>(
      places, kept.highest, lowest, 1 - removed,
      [&](int i) { return kept.contains(scores[i], i) ? scores[i] : -INFINITY; },
      [&](int i) { return kept.weight_of(scores[i]); });
  const double weight = ldexp(static_cast<double>(kept.weight_of(score_of(cut.key))), RowCutter::kFraction);
  const double wanted = ceil(static_cast<double>(cut.wanted - cut.before) / weight);
  const int count = static_cast<int>(fmin(fmax(wanted, 1.0), cut.equal));
  const int count_here = min(max(count - cut.equal_later, 0), cut.equal_here);
  kept.key = cut.key;
  if (count_here == 0) {
    kept.first_equal = INT_MAX;
  } else if (count_here < cut.equal_here) {
    kept.first_equal = cutter.first_of_last(places, count_here, [&](int i) { return key_of(scores[i]) == cut.key; });
  }
}

// Returns the key of the least typical score to be kept.
__device__ unsigned cut_typical_p(RowCutter& cutter, const float* scores, int places, double mass, const Kept& kept,
                                  Typicality& typicality) {
  double sums[2] = {};  // of the weights, and of the weights times the scores
  for (int i = threadIdx.x; i < places; i += kThreads) {
    if (!kept.contains(scores[i], i)) continue;
    const float weight = kept.weight_of(scores[i]);
    sums[0] += weight;
    sums[1] += static_cast<double>(weight) * (scores[i] - kept.highest);
  }
  cutter.reduce<Sum>(sums);
  typicality.log_sum = static_cast<float>(log(sums[0]));
  typicality.entropy = static_cast<float>(log(sums[0]) - sums[1] / sums[0]);
  const auto value_of = [&](int i) { return kept.contains(scores[i], i) ? typicality(scores[i]) : -INFINITY; };
  float highest = -INFINITY, negated_lowest = -INFINITY;
  for (int i = threadIdx.x; i < places; i += kThreads) {
    const float value = value_of(i);
    highest = fmaxf(highest, value);
    if (value > -INFINITY) negated_lowest = fmaxf(negated_lowest, -value);
  }
  double bounds[2] = {highest, negated_lowest};
  cutter.reduce<Max>(bounds);
  const ScoreCut cut = cutter.find<CutBy::kUnorderedProbability>(
      places, static_cast<float>(bounds[0]), static_cast<float>(-bounds[1]), static_cast<float>(mass), value_of,
      [&](int i) { return kept.weight_of(scores[i]); });
  return cut.key;
}

// Edits this block's scores and stores them; others than tokens are -inf. Returns the highest and, negated, the lowest
// finite score.
template <typename T>
__device__ void load_scores(const SampleRows& rows, int64_t row, int first_chunk, float* scores, double (&bounds)[2]) {
  float highest = -INFINITY, negated_lowest = -INFINITY;
  using Chunk = LogitsChunk<T, kThreads, kPerThread>;
  __shared__ unsigned penalised[Chunk::kMarkWords], banned[Chunk::kMarkWords];
  const DecodeSelect& select = rows.of.select;
  bool is_valid = true;
  for (int c = 0; c < rows.chunks_of_block; ++c) {
    Chunk chunk(select.scores, row, first_chunk + c, select.vocabulary);
    ChunkMarks marks;
    if (select.has_edits) {
      if (c > 0) __syncthreads();
      marks = chunk.mark(select.edits, row, penalised, banned);
    }
    if (c == 0) wait_for_predecessor();
    chunk.load();
#pragma unroll
    for (int k = 0; k < Chunk::kVectors; ++k) {
      const int place = chunk.place_of(k);
      Vector<float, Chunk::kWidth> vector;
#pragma unroll
      for (int j = 0; j < Chunk::kWidth; ++j) vector.values[j] = chunk.vectors[k][j];
      if (select.has_edits) marks.edit(place, rows.arithmetic, vector.values);
#pragma unroll
      for (int j = 0; j < Chunk::kWidth; ++j) {
        float& score = vector.values[j];
        score = chunk.is_token(chunk.token_at(place + j)) ? score + 0.f : -INFINITY;  // 0 and -0 are equal
        is_valid = is_valid && score < INFINITY;
        highest = fmaxf(highest, score);
        if (score > -INFINITY) negated_lowest = fmaxf(negated_lowest, -score);
      }
      *reinterpret_cast<Vector<float, Chunk::kWidth>*>(scores + c * Chunk::kSize + place) = vector;
    }
  }
  assert(is_valid && "probability is inf, nan or negative");
  bounds[0] = highest, bounds[1] = negated_lowest;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ SampleRows rows) {
  __shared__ RowCutter::Storage storage;
  __shared__ Candidate<float> of_warps[kWarps];
  extern __shared__ float4 shared_scores[];
  const DecodeSelect& select = rows.of.select;
  RowCutter cutter(storage);
  const int64_t row = blockIdx.x / cutter.size;
  const int first_chunk = cutter.rank * rows.chunks_of_block, places = rows.chunks_of_block * kChunk;
  float* const scores = rows.of.scratch == nullptr ? reinterpret_cast<float*>(shared_scores)
                                                   : rows.of.scratch + static_cast<int64_t>(blockIdx.x) * places;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;

  let_successor_start();
  double bounds[2];
  load_scores<T>(rows, row, first_chunk, scores, bounds);
  cutter.wait_for_blocks();
  cutter.reduce<Max>(bounds);
  const float highest = static_cast<float>(bounds[0]);
  assert(highest > -INFINITY && "probability is inf, nan or negative");
  // Scores that are still lower have a probability of less than 2^-125, and are never drawn.
  float lowest = fmaxf(static_cast<float>(-bounds[1]), highest - RowCutter::kMostRange);
  Kept kept = {key_of(lowest + 0.f), 0, highest, static_cast<float>(rows.of.min_p)};
  const bool is_typical = rows.of.typical_p < 1, is_top_k_alone = rows.of.top_p >= 1 && rows.of.min_p <= 0 && !is_typical;
  bool is_cut = false;
  if (rows.of.top_k < select.vocabulary) {
    const ScoreCut cut = cutter.find<CutBy::kCount>(places, highest, static_cast<float>(-bounds[1]),
                                                    static_cast<double>(rows.of.top_k), [&](int i) { return scores[i]; },
                                                    [](int) { return 1.f; });
    is_cut = cut.is_cut;
    // Other filters remove what is never drawn.
    if (is_cut && (is_top_k_alone || cut.key > kept.key)) kept.key = cut.key, lowest = fmaxf(lowest, score_of(cut.key));
  }
  // The order of upstream: min-p comes after top-p.
  const float min_p = kept.min_p;
  kept.min_p = 0;
  if (rows.of.top_p < 1) cut_top_p(cutter, scores, places, lowest, rows.of.top_p, kept);
  kept.min_p = min_p;
  Typicality typicality = {highest};
  const unsigned typical = is_typical ? cut_typical_p(cutter, scores, places, rows.of.typical_p, kept, typicality) : 0;

  const auto is_kept = [&](int i) {
    return kept.contains(scores[i], i) && (!is_typical || key_of(typicality(scores[i])) >= typical);
  };

  const int first_token = LogitsChunk<T, kThreads, kPerThread>(select.scores, row, first_chunk, select.vocabulary).token_at(0);
  const float* const divisors = select.divisors + row * select.vocabulary + first_token;
  if (rows.of.kept != nullptr) {
    float* const output = rows.of.kept + row * select.vocabulary + first_token;
    // Without any filter, scores that are too low to be drawn are left too.
    is_cut = is_cut || rows.of.top_p < 1 || min_p > 0 || is_typical;
    for (int i = threadIdx.x; i < places; i += kThreads) {
      const bool is_token = first_token + i >= 0 && first_token + i < select.vocabulary;
      if (is_token) output[i] = !is_cut || is_kept(i) ? scores[i] : -INFINITY;
    }
  }
  Candidate<float> best;
  for (int first = threadIdx.x; first < places; first += kAtOnce * kThreads) {
    float weights[kAtOnce], divided_by[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = first + k * kThreads;
      weights[k] = is_kept(i) ? kept.weight_of(scores[i]) : -1;
      if (weights[k] >= 0) divided_by[k] = divisors[i];
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (weights[k] >= 0) best.consider(__fdiv_rn(weights[k], divided_by[k]), first_token + first + k * kThreads);
    }
  }
  best.reduce();
  if (lane == 0) of_warps[warp] = best;
  __syncthreads();
  if (warp > 0) return;
  best = lane < kWarps ? of_warps[lane] : Candidate<float>();
  best.reduce();
  if (lane == 0) static_cast<Candidate<float>*>(select.candidates)[blockIdx.x] = best;
}

int chunks_of_block(int64_t vocabulary, int blocks) {
  return static_cast<int>(ceil_div(chunks_of(vocabulary, kChunk), blocks));
}

size_t bytes_of_block(int64_t vocabulary, int blocks) {
  return static_cast<size_t>(chunks_of_block(vocabulary, blocks)) * kChunk * sizeof(float);
}

bool needs_scratch(int64_t vocabulary, int blocks) {
  return !fits_block(sample_kernel<float>, bytes_of_block(vocabulary, blocks));
}

template <typename T>
cudaError_t launch_as(const DecodeSample& sample, cudaStream_t stream) {
  const DecodeSelect& select = sample.select;
  const SampleRows rows = {sample, ScoreArithmetic<float>(select.edits), chunks_of_block(select.vocabulary, sample.blocks)};
  const size_t shared_bytes = sample.scratch == nullptr ? bytes_of_block(select.vocabulary, sample.blocks) : 0;
  const LaunchShape shape{static_cast<unsigned>(select.rows * sample.blocks), kThreads, shared_bytes,
                          static_cast<unsigned>(sample.blocks)};
  return launch_dependent(sample_kernel<T>, rows, shape, select.pdl, stream);
}

}  // namespace

extern "C" int64_t fuseopt_decode_sample_blocks(int64_t rows, int64_t vocabulary) {
  const int64_t chunks = chunks_of(vocabulary, kChunk), most_chunks = RowCutter::kMostPlaces / kChunk;
  const int most = is_sm90_or_newer() ? RowCutter::kMostBlocks : 1;
  int blocks = 1;
  while (blocks < most && blocks < chunks &&
         (chunks > blocks * most_chunks || 2 * rows * blocks <= multiprocessor_count())) {
    blocks *= 2;
  }
  return chunks > blocks * most_chunks ? 0 : blocks;
}

extern "C" int64_t fuseopt_decode_sample_scratch(int64_t rows, int64_t vocabulary) {
  const int blocks = static_cast<int>(fuseopt_decode_sample_blocks(rows, vocabulary));
  if (blocks == 0 || !needs_scratch(vocabulary, blocks)) return 0;
  return static_cast<int64_t>(blocks) * chunks_of_block(vocabulary, blocks) * kChunk;
}

extern "C" cudaError_t fuseopt_decode_sample(DecodeSample sample, cudaStream_t stream) {
  if (sample.select.rows == 0) return cudaSuccess;
  cudaError_t error = cudaErrorInvalidValue;
  switch (static_cast<DType>(sample.select.scores.dtype)) {
    case kFloat16: error = launch_as<__half>(sample, stream); break;
    case kBFloat16: error = launch_as<__nv_bfloat16>(sample, stream); break;
    case kFloat32: error = launch_as<float>(sample, stream); break;
    case kFloat64: break;  // refused by the binding
  }
  if (error != cudaSuccess) return error;
  DecodeSelect finish = sample.select;
  finish.chunks = sample.blocks;
  finish.has_candidates = finish.pdl = true;
  return fuseopt_decode_select(finish, stream);
}

}  // namespace fuseopt::decode_sample
