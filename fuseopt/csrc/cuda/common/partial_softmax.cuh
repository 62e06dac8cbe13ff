// Merge of attention over parts of a query's keys. A part has the largest of its scores (in powers of two), the sum of
// exponentials relative to that score, and the values weighted by these exponentials (Milakov and Gimelshein, 2018,
// arXiv 1805.02867).
//
// A part that has seen no key has a largest score of -INFINITY and zeros. A NaN score is never the largest, but makes
// the sum NaN. So no part is skipped because of its largest score, and the result is NaN as in softmax.
#pragma once

#include "cuda/common/math.cuh"
#include "cuda/common/row_team.cuh"

namespace fuseopt {

__device__ inline float exp2_as(float x) { return exp2_approx(x); }
__device__ inline double exp2_as(double x) { return exp2(x); }

// The value that is subtracted from scores before exp2.
template <typename Acc>
__device__ inline Acc origin_of(Acc largest) {
  return largest == Acc(-INFINITY) ? Acc(0) : largest;
}

// The factor for a part's sum and weighted values when its origin becomes that of `largest`.
template <typename Acc>
__device__ inline Acc factor_of_part(Acc largest_of_part, Acc largest) {
  return exp2_as(largest_of_part - origin_of(largest));
}

// The final factor for weighted values; without keys the result is 0.
__device__ inline float reciprocal_of_sum(float sum) { return sum == 0.0f ? 0.0f : __fdividef(1.0f, sum); }
__device__ inline double reciprocal_of_sum(double sum) { return sum == 0.0 ? 0.0 : 1.0 / sum; }

struct PartStats {
  float largest = -INFINITY, sum = 0.0f;
};

// A query's attention in kDims dimensions, merged from all parts; their number is a multiple of kTogether.
// `stats_of(part)` returns PartStats, `values_of(part)` an array of kDims weighted values.
template <int kDims, int kTogether, typename StatsOf, typename ValuesOf>
__device__ inline void merge_parts(int parts, StatsOf stats_of, ValuesOf values_of, float (&merged)[kDims]) {
  float largest = -INFINITY, sum = 0.0f, total[kDims] = {};
#pragma unroll 1
  for (int first = 0; first < parts; first += kTogether) {
#pragma unroll
    for (int p = 0; p < kTogether; ++p) largest = fmaxf(largest, stats_of(first + p).largest);
  }
#pragma unroll 1
  for (int first = 0; first < parts; first += kTogether) {
#pragma unroll
    for (int p = 0; p < kTogether; ++p) {
      const PartStats stats = stats_of(first + p);
      const float factor = factor_of_part(stats.largest, largest);
      const float* const values = values_of(first + p);
      sum += factor * stats.sum;
#pragma unroll
      for (int d = 0; d < kDims; ++d) total[d] += factor * values[d];
    }
  }
  const float reciprocal = reciprocal_of_sum(sum);
#pragma unroll
  for (int d = 0; d < kDims; ++d) merged[d] = total[d] * reciprocal;
}

// The same for a number of parts that kMost bounds, without the division by the sum: `merged` is a Vector of some of the
// dimensions, as `values_of(part)` returns it. All loads are in flight together.
template <int kMost, typename StatsOf, typename ValuesOf, typename Values>
__device__ inline PartStats merge_some_parts(int parts, StatsOf stats_of, ValuesOf values_of, Values& merged) {
  constexpr int kDims = sizeof(Values) / sizeof(float);
  PartStats all, stats[kMost];
#pragma unroll
  for (int part = 0; part < kMost; ++part) {
    if (part < parts) stats[part] = stats_of(part);
    all.largest = fmaxf(all.largest, stats[part].largest);
  }
  merged = {};
#pragma unroll
  for (int part = 0; part < kMost; ++part) {
    if (part >= parts) continue;
    const float factor = factor_of_part(stats[part].largest, all.largest);
    const Values values = values_of(part);
    all.sum += factor * stats[part].sum;
#pragma unroll
    for (int i = 0; i < kDims; ++i) merged.values[i] += factor * values.values[i];
  }
  return all;
}

// The same if each of kLanes neighbouring lanes has the stats of one part: returns the factor for that part's values.
template <int kLanes, typename Acc>
__device__ inline Acc share_of_part(Acc largest_of_part, Acc sum_of_part) {
  const Acc factor = factor_of_part(largest_of_part, warp_reduce<Max, kLanes>(largest_of_part));
  return factor * reciprocal_of_sum(warp_reduce<Sum, kLanes>(factor * sum_of_part));
}

}  // namespace fuseopt
