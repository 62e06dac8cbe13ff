// A row that a cluster of blocks samples from, and the draw from the few scores that a small top-k leaves.
#pragma once

#include "cuda/decode/select/exponential_draw.cuh"
#include "cuda/decode/select/logits_edits.cuh"
#include "cuda/decode/select/score_candidate.cuh"
#include "cuda/decode/select/score_cut.cuh"
#include "cuda/decode/select/typicality.cuh"

namespace fuseopt::decode_sample {
namespace {

constexpr int kChunk = 4096;
constexpr float kLog2OfE = 1.442695041f;

using Weight = unsigned long long;

struct SampleRows {
  DecodeSample of;
  ScoreArithmetic<float> arithmetic;
  int chunks_of_block;
  TorchDraw draw;
};

// The cluster's view of its row.
struct SampledRow {
  const SampleRows& rows;
  int64_t row;
  ExponentialDraw draw;
  int places;     // of each block
  int row_begin;  // the token of the first block's first place
  float* scores = nullptr;  // this block's
  int begin = 0;            // the token of its first place
  float highest = 0, lowest = 0;

  __device__ float weight_of(float score) const { return expf(score - highest); }
  __device__ float log2_weight_of(float score) const { return (score - highest) * kLog2OfE; }

  // A score's probability divided by its number, but for a factor.
  __device__ float ratio(float score, int token) const {
    const float* const divisors = rows.of.select.divisors;
    const int64_t element = row * rows.of.select.vocabulary + token;
    return __fdiv_rn(weight_of(score), divisors != nullptr ? divisors[element] : draw(static_cast<unsigned>(element)));
  }

  __device__ void keep(int token, float score) const {
    rows.of.kept[row * rows.of.select.vocabulary + token] = score;
  }
  // Of this block's tokens.
  __device__ void keep_none() const {
#pragma unroll 1
    for (int token = begin + threadIdx.x; token < min(begin + places, static_cast<int>(rows.of.select.vocabulary));
         token += blockDim.x) {
      if (token >= 0) keep(token, -INFINITY);
    }
  }
};

// Upstream removes what has a cumulative probability of at most 1 - top_p, from the lowest score on.
__device__ double share_of(double top_p) { return 1 - static_cast<double>(static_cast<float>(1 - top_p)); }

// Draws from the `count` gathered entries, which have all scores that top-k leaves, on one block.
template <typename RowCutter>
__device__ Candidate<float> draw_of_few(RowCutter& cutter, const SampledRow& row, int count, float2* shared_values) {
  const DecodeSample& of = row.rows.of;
  const typename RowCutter::Entry entry = cutter.sort(count);
  const float score = RowCutter::value_of(entry);
  if (threadIdx.x == min(of.top_k, int64_t{count}) - 1) shared_values[RowCutter::kThreads] = {score, 0};
  __syncthreads();
  bool is_kept = threadIdx.x < count && score >= shared_values[RowCutter::kThreads].x;
  const auto weight = [&] { return is_kept ? RowCutter::fixed_weight(row.weight_of(score)) : Weight{0}; };
  if (of.top_p < 1) {
    const auto scanned = cutter.scan(weight());
    const double wanted = ceil(static_cast<double>(scanned.total) * share_of(of.top_p));
    is_kept = is_kept && (scanned.before < wanted || threadIdx.x < of.min_tokens);
  }
  if (of.min_p > 0) {
    is_kept = is_kept && (row.weight_of(score) >= static_cast<float>(of.min_p) || threadIdx.x < of.min_tokens);
  }
  if (of.typical_p < 1) {
    double sums[2] = {};
    if (is_kept) sums[0] = row.weight_of(score), sums[1] = sums[0] * (score - row.highest);
    cutter.add_up_in_block(sums);
    const float typicality = Typicality(row.highest, sums)(score);
    const Weight all = cutter.scan(weight()).total;
    const float own = is_kept ? row.weight_of(score) : -1;
    shared_values[threadIdx.x] = {typicality, own};
    __syncthreads();
    Weight before = 0;
    int nearer = 0;  // of equal ones the lowest tokens, which are the last of equal entries
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const float2 other = shared_values[i];
      if (other.y < 0 || other.x < typicality) continue;
      nearer += other.x > typicality || RowCutter::low_of(cutter.sorted(i)) < RowCutter::low_of(entry);
      if (other.x > typicality) before += RowCutter::fixed_weight(other.y);
    }
    is_kept = is_kept && (nearer < of.min_tokens || before < max(1., ceil(static_cast<double>(all) * static_cast<float>(of.typical_p))));
  }
  Candidate<float> best;
  if (is_kept) {
    const int token = row.row_begin + static_cast<int>(RowCutter::low_of(entry));
    if (of.kept != nullptr) row.keep(token, score);
    if (of.highest == nullptr) best.consider(row.ratio(score, token), token);
  }
  return best;
}

}  // namespace
}  // namespace fuseopt::decode_sample
