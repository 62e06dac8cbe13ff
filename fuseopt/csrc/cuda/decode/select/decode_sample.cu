// The end of a decode step that samples: a cluster of blocks edits and filters each row and finds the token that is drawn
// from it. For one row it also ends the step; for more, the second launch of a greedy step does.
//
// transformers' filters keep the scores above a cut, so no row is sorted or written to memory: scores stay in shared
// memory. What a small top-k leaves is gathered, and one block does the rest. Otherwise cuts are found by histograms.
// Equal scores at the cut of top-p are kept from the last one on, as a stable sort in ascending order has it.
#include <cassert>

#include "cuda/common/dependent_launch.cuh"
#include "cuda/decode/select/end_of_step.cuh"
#include "cuda/decode/select/logits_chunk.cuh"
#include "cuda/decode/select/decode_sample_race.h"
#include "cuda/decode/select/sampled_row.cuh"

namespace fuseopt::decode_sample {
namespace {

using By = CutBy;

// TUNED: few threads fit beside a head's: top-k 50 at 1 row 17 -> 9 us over greedy (55188af). Others: not measured.
constexpr int kMostThreads = 512, kFewThreads = 128, kSmallTopK = 64;
constexpr int kMostBlocks = RowCutter<kMostThreads>::kMostBlocks, kMostPlaces = RowCutter<kMostThreads>::kMostPlaces;

template <typename T, int kThreads>
using ChunkOf = LogitsChunk<T, kThreads, kChunk / kThreads>;

// Edits this block's scores and stores them; others than tokens are -inf. Returns the highest and, negated, the lowest
// finite score of the thread.
template <typename T, int kThreads>
__device__ float2 load_scores(const SampleRows& rows, int64_t row, int first_chunk, float* scores) {
  using Chunk = ChunkOf<T, kThreads>;
  __shared__ unsigned penalised[Chunk::kMarkWords], banned[Chunk::kMarkWords];
  const DecodeSelect& select = rows.of.select;
  float highest = -INFINITY, negated_lowest = -INFINITY;
  bool is_valid = true;
#pragma unroll 1
  for (int c = 0; c < rows.chunks_of_block; ++c) {
    Chunk chunk(select.scores, row, first_chunk + c, select.vocabulary);
    ChunkMarks marks;
    if (select.has_edits) {
      if (c > 0) __syncthreads();
      marks = chunk.mark(select.edits, row, penalised, banned);
    }
    if (c == 0) wait_for_predecessor();
    chunk.load();
    chunk.for_each_vector([&](int place, const auto& loaded) {
      Vector<float, Chunk::kWidth> vector;
#pragma unroll
      for (int j = 0; j < Chunk::kWidth; ++j) vector.values[j] = loaded[j];
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
    });
  }
  assert(is_valid && "probability is inf, nan or negative");
  return {highest, negated_lowest};
}

// Draws from this block's share of the row.
template <typename RowCutter>
__device__ Candidate<float> draw_of_row(RowCutter& cutter, const SampledRow& row) {
  constexpr int kThreads = RowCutter::kThreads;
  const DecodeSample& of = row.rows.of;
  const float* const scores = row.scores;
  const int first_place = cutter.rank * row.places;
  const auto no_low = [](int) { return 0u; };
  const auto place_of = [&](int i) { return static_cast<unsigned>(first_place + i); };
  ValueCut cut;
  if (of.top_k < of.select.vocabulary) {
    cut = cutter.template find<By::kCount, true>(
        row.places, row.highest, row.lowest, static_cast<double>(of.top_k), [&](int i) { return scores[i]; }, no_low,
        [](float, unsigned) { return 0.f; });
  }
  if (of.top_p < 1) {
    const ValueCut before = cut;
    cut = cutter.template find<By::kProbability, false>(
        row.places, row.highest, fmaxf(row.lowest, before.value), share_of(of.top_p),
        [&](int i) { return before.keeps(scores[i], 0) ? scores[i] : -INFINITY; },
        place_of,
        [&](float score, unsigned) { return row.log2_weight_of(score); });
  }
  const float min_p = static_cast<float>(of.min_p);
  ValueCut least = {INFINITY, 0};
  if (of.min_tokens > 1) {
    least = cutter.template find<By::kCount, false>(
        row.places, row.highest, row.lowest, static_cast<double>(of.min_tokens), [&](int i) { return scores[i]; },
        place_of, [](float, unsigned) { return 0.f; });
  }
  const auto passes = [&](int i) {
    const bool is_likely = min_p <= 0 || row.weight_of(scores[i]) >= min_p;
    return (is_likely && cut.keeps(scores[i], first_place + i)) || least.keeps(scores[i], first_place + i);
  };
  const bool is_typical = of.typical_p < 1;
  double sums[2] = {1, 0};
  ValueCut typical_cut, nearest = {INFINITY, 0};
  const auto from_first = [&](int i) { return static_cast<unsigned>(INT_MAX - first_place - i); };
  if (is_typical) {
    sums[0] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < row.places; i += kThreads) {
      if (!passes(i)) continue;
      const float weight = row.weight_of(scores[i]);
      sums[0] += weight;
      sums[1] += static_cast<double>(weight) * (scores[i] - row.highest);
    }
    cutter.add_up(sums);
  }
  const Typicality typicality(row.highest, sums);
  if (is_typical) {
    // The most typical value is at most 0, and others are at least this.
    const float lowest = fminf(typicality(row.lowest), typicality(row.highest));
    typical_cut = cutter.template find<By::kUnorderedProbability, true>(
        row.places, 0.f, lowest, static_cast<double>(static_cast<float>(of.typical_p)),
        [&](int i) { return passes(i) ? typicality(scores[i]) : -INFINITY; },
        [&](int i) { return __float_as_uint(row.log2_weight_of(scores[i])); },
        [](float, unsigned low) { return __uint_as_float(low); });
    if (of.min_tokens > 1) {
      nearest = cutter.template find<By::kCount, false>(
          row.places, 0.f, lowest, static_cast<double>(of.min_tokens),
          [&](int i) { return passes(i) ? typicality(scores[i]) : -INFINITY; }, from_first,
          [](float, unsigned) { return 0.f; });
    }
  }
  const auto is_kept = [&](int i) {
    if (!is_typical || !passes(i)) return passes(i);
    const float its_typicality = typicality(scores[i]);
    return typical_cut.keeps(its_typicality, 0) || nearest.keeps(its_typicality, static_cast<int>(from_first(i)));
  };
  const int vocabulary = static_cast<int>(of.select.vocabulary);
  if (of.kept != nullptr) {
#pragma unroll 1
    for (int i = threadIdx.x; i < row.places; i += kThreads) {
      const int token = row.begin + i;
      if (token >= 0 && token < vocabulary) row.keep(token, is_kept(i) ? scores[i] : -INFINITY);
    }
  }
  Candidate<float> best;
  if (of.highest != nullptr) return best;
  if (of.select.divisors == nullptr) {
    // Not unrolled, as each block has to fetch the instructions.
#pragma unroll 1
    for (int i = threadIdx.x; i < row.places; i += kThreads) {
      if (is_kept(i)) best.consider(row.ratio(scores[i], row.begin + i), row.begin + i);
    }
    return best;
  }
  const float* const divisors = of.select.divisors + row.row * of.select.vocabulary + row.begin;
  constexpr int kPerThread = kThreads / 64;  // blocks of few threads gather, so seldom come here: more would spill
#pragma unroll 1
  for (int first = threadIdx.x; first < row.places; first += kPerThread * kThreads) {
    float weights[kPerThread], divided_by[kPerThread];  // loads in flight
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int i = first + k * kThreads;
      weights[k] = is_kept(i) ? row.weight_of(scores[i]) : -1;
      if (weights[k] >= 0) divided_by[k] = divisors[i];
    }
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      if (weights[k] >= 0) best.consider(__fdiv_rn(weights[k], divided_by[k]), row.begin + first + k * kThreads);
    }
  }
  return best;
}

// The best of the block, in its first warp.
template <int kWarps>
__device__ Candidate<float> best_of_block(Candidate<float> best) {
  __shared__ Candidate<float> of_warps[kWarps];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  best.reduce();
  if (lane == 0) of_warps[warp] = best;
  __syncthreads();
  if (warp > 0) return best;
  best = lane < kWarps ? of_warps[lane] : Candidate<float>();
  best.reduce();
  return best;
}

// kShared: whether scores are in shared memory.
template <typename T, int kThreads, bool kShared>
__global__ void __launch_bounds__(kThreads, kShared ? 1024 / kThreads : 1)
    sample_kernel(const __grid_constant__ SampleRows rows) {
  using RowCutter = fuseopt::RowCutter<kThreads>;
  __shared__ typename RowCutter::Storage storage;
  __shared__ unsigned long long candidates[RowCutter::kMostBlocks];
  __shared__ Candidate<float> best_of_row;
  extern __shared__ float4 shared_scores[];
  const DecodeSample& of = rows.of;
  const DecodeSelect& select = of.select;
  RowCutter cutter(storage);
  const int first_chunk = cutter.rank * rows.chunks_of_block;
  const int64_t index = blockIdx.x / cutter.size;
  SampledRow row = {rows, index, ExponentialDraw(of.random, rows.draw), rows.chunks_of_block * kChunk,
                    ChunkOf<T, kThreads>(select.scores, index, 0, select.vocabulary).token_at(0)};
  row.scores = kShared ? reinterpret_cast<float*>(shared_scores)
                       : of.scratch + static_cast<int64_t>(blockIdx.x) * row.places;
  row.begin = row.row_begin + cutter.rank * row.places;

  let_successor_start();
  if (blockIdx.x == 0 && threadIdx.x == 0 && of.highest == nullptr) prefetch_for_end_of_step(select);
  const float2 of_thread = load_scores<T, kThreads>(rows, row.row, first_chunk, row.scores);
  const float2 bounds = cutter.bounds(of_thread.x, of_thread.y);
  row.highest = bounds.x, row.lowest = -bounds.y;
  if (of.highest != nullptr) {
    if (cutter.rank == 0 && threadIdx.x == 0) of.highest[row.row] = row.highest;
    if (row.highest == -INFINITY) return row.keep_none();
  }
  assert(row.highest > -INFINITY && "probability is inf, nan or negative");

  Candidate<float> best;
  int few = 0;
  if (of.top_k <= RowCutter::kGroups / 2 && of.top_k < select.vocabulary) {
    const float reached = cutter.value_reached_by(static_cast<int>(of.top_k));
    if (of.kept != nullptr) row.keep_none();
    few = cutter.gather(row.places, 1, kThreads, [&](int i) { return row.scores[i] >= reached; },
                        [&](int i) { return RowCutter::entry_of(row.scores[i], cutter.rank * row.places + i); });
  }
  if (few == 0) {
    best = draw_of_row(cutter, row);
    if (of.highest != nullptr) return cluster_barrier();  // all have read the first block's count of entries
    best = best_of_block<RowCutter::kWarps>(best);
    if (threadIdx.x == 0) {
      store_to_block(&candidates[cutter.rank], 0, static_cast<unsigned long long>(best.key) << 32 | (INT32_MAX - best.token));
    }
    cluster_barrier();
    if (cutter.rank > 0) return;
    unsigned long long highest = threadIdx.x < cutter.size ? candidates[threadIdx.x] : 0;
    if (threadIdx.x < kWarpSize) {
      for (int distance = RowCutter::kMostBlocks / 2; distance > 0; distance /= 2) {
        highest = max(highest, __shfl_xor_sync(kFullWarp, highest, distance));
      }
      best = {static_cast<unsigned>(highest >> 32), INT32_MAX - static_cast<int>(static_cast<unsigned>(highest))};
    }
  } else {
    if (cutter.rank > 0) return;
    float2* const values = reinterpret_cast<float2*>(row.scores);
    best = draw_of_few(cutter, row, few, values);
    cluster_barrier();  // the others have read the count of entries, and ended
    if (of.highest != nullptr) return;
    best = best_of_block<RowCutter::kWarps>(best);
  }
  if (select.rows > 1) {
    if (threadIdx.x == 0) static_cast<Candidate<float>*>(select.candidates)[row.row] = best;
    return;
  }
  if (threadIdx.x == 0) best_of_row = best;
  __syncthreads();
  end_step(select, &best_of_row, 1);
}

int chunks_of_block(int64_t vocabulary, int blocks) {
  return static_cast<int>(ceil_div(chunks_of(vocabulary, kChunk), blocks));
}

size_t bytes_of_block(int64_t vocabulary, int blocks) {
  return static_cast<size_t>(chunks_of_block(vocabulary, blocks)) * kChunk * sizeof(float);
}

bool needs_scratch(int64_t vocabulary, int blocks) {
  return !fits_block(sample_kernel<float, kMostThreads, true>, bytes_of_block(vocabulary, blocks));
}

template <typename T, int kThreads, bool kShared>
cudaError_t launch_as(const DecodeSample& sample, cudaStream_t stream) {
  const DecodeSelect& select = sample.select;
  const SampleRows rows = {sample, ScoreArithmetic<float>(select.edits), chunks_of_block(select.vocabulary, sample.blocks),
                           TorchDraw(select.rows * select.vocabulary)};
  const auto kernel = sample_kernel<T, kThreads, kShared>;
  const size_t shared_bytes = kShared ? bytes_of_block(select.vocabulary, sample.blocks) : 0;
  const LaunchShape shape{static_cast<unsigned>(select.rows * sample.blocks), kThreads, shared_bytes,
                          static_cast<unsigned>(sample.blocks)};
  constexpr int kPortableBlocks = 8;
  if (sample.blocks > kPortableBlocks) {
    cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  return launch_dependent(kernel, rows, shape, select.pdl, stream);
}

template <typename T>
cudaError_t launch_as(const DecodeSample& sample, cudaStream_t stream) {
  if (sample.scratch != nullptr) return launch_as<T, kMostThreads, false>(sample, stream);
  // Blocks of few threads start beside a head's. They gather a small top-k only.
  const bool are_small = sample.blocks == kMostBlocks && sample.top_k <= kSmallTopK;
  return are_small ? launch_as<T, kFewThreads, true>(sample, stream) : launch_as<T, kMostThreads, true>(sample, stream);
}

}  // namespace

extern "C" int64_t fuseopt_decode_sample_blocks(int64_t rows, int64_t vocabulary) {
  const int64_t chunks = chunks_of(vocabulary, kChunk), most_chunks = kMostPlaces / kChunk;
  const int most = is_sm90_or_newer() ? kMostBlocks : 1;
  int blocks = 1;
  while (blocks < most && blocks < chunks && (chunks > blocks * most_chunks || rows * blocks <= multiprocessor_count())) {
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
  if (decode_sample_race::takes(sample)) {
    error = decode_sample_race::launch(sample, stream);
  } else {
    dispatch_fast_dtype(sample.select.scores.dtype,
                        [&](auto tag) { error = launch_as<typename decltype(tag)::type>(sample, stream); });
  }
  if (error != cudaSuccess || sample.select.rows == 1 || sample.highest != nullptr) return error;
  DecodeSelect finish = sample.select;
  finish.chunks = 1;
  finish.has_candidates = finish.pdl = true;
  return fuseopt_decode_select(finish, stream);
}

}  // namespace fuseopt::decode_sample
