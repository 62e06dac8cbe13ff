// A warp's strip of 16 queries against keys and values in shared memory: m16n8k16 with the queries as M, as in flash
// attention (Dao et al. 2022, arXiv 2205.14135). Lines in shared memory are ordered by piece_index.
#pragma once

#include "cuda/common/partial_softmax.cuh"
#include "cuda/common/tensor_core.cuh"

namespace fuseopt {

constexpr int kStripQueries = 16;

// The place of a lane's first piece for load_lines and load_transposed of a tile of 16 lines: by columns of its 8 x 8
// tiles, as for queries and values, or by rows, as for keys.
template <int kPieces>
__device__ inline int strip_lines_index() {
  const int lane = threadIdx.x % kWarpSize;
  return piece_index<kPieces>(lane % 16, lane / 16);
}
template <int kPieces>
__device__ inline int strip_keys_index() {
  const int lane = threadIdx.x % kWarpSize;
  return piece_index<kPieces>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Adds products of queries `lane / 4` and `lane / 4` + 8 with keys 2 (`lane` % 4) and the next of each 8.
// `query_of(i)` returns the queries' pieces i and i + 1, from load_lines.
template <typename T, int kDims, int kKeys, typename QueryOf>
__device__ inline void multiply_strip_keys(float (&score)[kKeys / 8][4], const uint4* keys, QueryOf query_of) {
  constexpr int kPieces = kDims / 8;
  const int keys_index = strip_keys_index<kPieces>();
#pragma unroll
  for (int i = 0; i < kPieces; i += 2) {
    const uint4 q = query_of(i);
#pragma unroll
    for (int key = 0; key < kKeys; key += 16) {
      const uint4 part = load_lines(&keys[key * kPieces + (keys_index ^ i)]);
      multiply<T>(score[key / 8], {q.x, q.z}, {q.y, q.w}, part.x, part.y);
      multiply<T>(score[key / 8 + 1], {q.x, q.z}, {q.y, q.w}, part.z, part.w);
    }
  }
}

// The running softmax of a strip's scores, and the values weighted by it, for queries lane / 4 and lane / 4 + 8. Scores
// are in powers of two. The sum is over the lane's own keys; weighted[i] has dimensions 8 i + lane % 4 * 2 and the
// next.
template <int kDims>
struct alignas(16) StripAttended {
  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {}, weighted[kDims / 8][4] = {};

  // Takes a score into account. Returns the origin that is subtracted from all scores: a number, even before any key is
  // seen.
  __device__ float raise(int half, float score) {
    const float raised = fmaxf(largest[half], score), factor = factor_of_part(largest[half], raised);
    largest[half] = raised;
    sum[half] *= factor;
#pragma unroll
    for (int i = 0; i < kDims / 8; ++i) weighted[i][half * 2] *= factor, weighted[i][half * 2 + 1] *= factor;
    return origin_of(raised);
  }

  // Adds the result of the same queries for other keys.
  __device__ void add(const StripAttended& other) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      raise(half, other.largest[half]);
      const float factor = factor_of_part(other.largest[half], largest[half]);
      sum[half] += other.sum[half] * factor;
#pragma unroll
      for (int i = 0; i < kDims / 8; ++i) {
#pragma unroll
        for (int j = half * 2; j < half * 2 + 2; ++j) weighted[i][j] += other.weighted[i][j] * factor;
      }
    }
  }

  // Turns the products of a query with keys into weights, and adds these to the sum. `is_seen(key)`: whether the query
  // attends to a key, counted from the lane's first one.
  template <int kHalves, typename IsSeen>
  __device__ void weigh(float (&score)[kHalves][4], int half, float scale, IsSeen is_seen) {
    float largest_score = -INFINITY;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& own = score[i][half * 2 + j];
        own = is_seen(i * 8 + j) ? rounded_product(own, scale) : -INFINITY;
        largest_score = fmaxf(largest_score, own);
      }
    }
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2) {
      largest_score = fmaxf(largest_score, __shfl_xor_sync(kFullWarp, largest_score, apart));
    }
    const float origin = raise(half, largest_score);
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& own = score[i][half * 2 + j];
        sum[half] += own = exp2_approx(own - origin);
      }
    }
  }

  // Adds the values of keys, by their weights. `add(sums, low, high, low_keys, high_keys)` multiplies as `multiply`
  // does.
  template <typename T, int kHalves, typename Add>
  __device__ void add_values(const float (&weight)[kHalves][4], const uint4* values, Add add) {
    constexpr int kPieces = kDims / 8;
    const int lines_index = strip_lines_index<kPieces>();
#pragma unroll
    for (int key = 0; key < kHalves * 8; key += 16) {
      const auto weights = [&](int of_half) {
        const auto& low = weight[key / 8];
        const auto& high = weight[key / 8 + 1];
        return uint2{packed<T>(low[of_half], low[of_half + 1]), packed<T>(high[of_half], high[of_half + 1])};
      };
      const uint2 low = weights(0), high = weights(2);
#pragma unroll
      for (int i = 0; i < kPieces; i += 2) {
        const uint4 part = load_transposed(&values[key * kPieces + (lines_index ^ i)]);
        add(weighted[i], low, high, part.x, part.y);
        add(weighted[i + 1], low, high, part.z, part.w);
      }
    }
  }

  // The sum over all lanes that share the queries.
  __device__ float total(int half) const {
    float total = sum[half];
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2) total += __shfl_xor_sync(kFullWarp, total, apart);
    return total;
  }
};

}  // namespace fuseopt
