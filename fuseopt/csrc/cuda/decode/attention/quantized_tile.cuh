// Keys and values in 8 bits: a scale for each head and token, and the tiles and running softmax that read them.
//
// The tensor cores multiply halves, whatever the model's dtype. Elements are converted to halves exactly, in registers. A
// query is divided by a power of two; the scores are multiplied by it, the softmax scale and the key's scale in float32. A
// value's weight is its probability times its scale, relative to a power of two that follows the largest scale.
#pragma once

#include <cuda_fp8.h>

#include "cuda/decode/attention/many_rows.cuh"

namespace fuseopt {

// kLargest: the largest magnitude of an element. `unit`: the factor that a widened half has to be multiplied by.
struct Int8 {
  static constexpr float kLargest = 127;
  static constexpr CacheDType kCacheDType = kInt8;

  __device__ static unsigned rounded(float x) {
    return __float2int_rn(fminf(fmaxf(x, -kLargest), kLargest)) & 0xff;
  }

  // Bytes 0 and 2, then 1 and 3, as halves: 0x6400 + n is the half 1024 + n.
  __device__ static uint2 widened(unsigned bytes) {
    constexpr unsigned kSigns = 0x80808080, kOrigin = 0x64646464, kOfZero = 0x64806480;
    const unsigned shifted = bytes ^ kSigns;
    const unsigned words[] = {__byte_perm(shifted, kOrigin, 0x4240), __byte_perm(shifted, kOrigin, 0x4341)};
    const __half2 zero = reinterpret_cast<const __half2&>(kOfZero);
    const __half2 halves[] = {__hsub2(reinterpret_cast<const __half2&>(words[0]), zero),
                              __hsub2(reinterpret_cast<const __half2&>(words[1]), zero)};
    return reinterpret_cast<const uint2&>(halves);
  }
  __device__ static float unit() { return 1; }
};

struct Fp8 {
  static constexpr float kLargest = 448;
  static constexpr CacheDType kCacheDType = kFp8;

  __device__ static unsigned rounded(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && !defined(FUSEOPT_FP8_BY_SHIFTS)
  __device__ static uint2 widened(unsigned bytes) {
    const unsigned pairs = __byte_perm(bytes, 0, 0x3120);
    uint2 halves;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(pairs));
    return halves;
  }
  __device__ static float unit() { return 1; }
#else
  // Exponent and mantissa move to their places in a half, whose exponent's bias is greater by 8.
  __device__ static uint2 widened(unsigned bytes) {
    constexpr unsigned kSigns = 0x80008000, kOthers = 0x3f803f80;
    return {(bytes << 8 & kSigns) | (bytes << 7 & kOthers), (bytes & kSigns) | (bytes >> 1 & kOthers)};
  }
  __device__ static float unit() { return 256; }
#endif
};

// The largest magnitude among the elements of kLanes neighbouring lanes; NaN if one is NaN.
template <int kLanes>
__device__ inline float largest_magnitude(const float (&x)[8]) {
  unsigned largest = 0;  // NaN has the greatest bits, infinity the next
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(fabsf(x[i])));
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    largest = max(largest, __shfl_xor_sync(kFullWarp, largest, distance));
  }
  return __uint_as_float(largest);
}

// The largest power of two that is not above a number >= 0; 0 for subnormal numbers, and infinity for infinity and NaN. Its
// `inverse` is 2^127 for 0, and -infinity for infinity.
__device__ inline float power_of_two(float x) { return __uint_as_float(__float_as_uint(x) & 0x7f800000); }
__device__ inline float inverse(float power) { return __uint_as_float(0x7f000000 - __float_as_uint(power)); }

// x / divisor, faster than the compiler's division. Correctly rounded, except for subnormal numbers.
__device__ inline float quotient(float x, float divisor, float reciprocal) {
  const float nearly = x * reciprocal;
  return __fmaf_rn(__fmaf_rn(-nearly, divisor, x), reciprocal, nearly);
}

// Quantises 8 elements of a vector whose largest magnitude is `largest`; the scale is `largest` / kLargest. If that is not
// finite, the elements are zeros, which the scale makes NaN.
template <typename Stored>
__device__ inline uint2 quantized(const float (&x)[8], float largest, float& scale) {
  scale = quotient(largest, Stored::kLargest, 1 / Stored::kLargest);
  const bool has_elements = scale > 0 && scale < INFINITY;
  const float raise = scale < 0x1p-60f ? 0x1p64f : 1;  // so that the reciprocal is finite
  const float divisor = has_elements ? scale * raise : 1, reciprocal = __frcp_rn(divisor);
  uint2 words = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned element = has_elements ? Stored::rounded(quotient(x[i] * raise, divisor, reciprocal)) : 0;
    (i < 4 ? words.x : words.y) |= element << i % 4 * 8;
  }
  return words;
}

// A tile in shared memory.
template <typename Stored, int kDims>
struct QuantizedTile : TileStorage<unsigned char, kDims> {
  using Storage = TileStorage<unsigned char, kDims>;
  using Storage::index, Storage::keys, Storage::kPieces, Storage::values;

  // See Tile::multiply_keys. `query`: of dimensions lane % 4 * 4 + 16 i the first and third, then the second and fourth.
  __device__ void multiply_keys(const unsigned (&query)[kPieces * 2], float (&scores)[4]) const {
    const int lane = threadIdx.x % kWarpSize, key = lane % 16, piece = lane / 16;
#pragma unroll
    for (int i = 0; i < kPieces; i += 2) {
      const uint4 part = load_lines(&keys[index(key, piece) ^ i]);
      multiply<__half>(scores, Stored::widened(part.x), Stored::widened(part.y), query[i * 2], query[i * 2 + 1]);
      multiply<__half>(scores, Stored::widened(part.z), Stored::widened(part.w), query[i * 2 + 2], query[i * 2 + 3]);
    }
  }

  // The dimension of half i % 2 of sums[i / 2].
  __device__ static int dim_of(int i) { return threadIdx.x % kWarpSize / 4 * 2 + i / 2 * 16 + i % 2; }

  // sums[i]: dimensions dim_of(2 i) and, in its second half, dim_of(2 i + 1), for queries lane % 4 * 2 (+ 1).
  __device__ void add_values(float (&sums)[kDims / 16][4], unsigned low_keys, unsigned high_keys) const {
    const int lane = threadIdx.x % kWarpSize, key = lane % 8 + lane / 16 * 8, piece = lane / 8 % 2;
    const auto add = [&](float (&of_piece)[4], unsigned low, unsigned high) {
      const uint2 of_low = Stored::widened(low), of_high = Stored::widened(high);
      multiply<__half>(of_piece, {of_low.x, of_high.x}, {of_low.y, of_high.y}, low_keys, high_keys);
    };
#pragma unroll
    for (int i = 0; i < kPieces; i += 2) {
      const uint4 part = load_transposed(&values[index(key, piece) ^ i]);
      add(sums[i], part.x, part.z);
      add(sums[i + 1], part.y, part.w);
    }
  }
};

// Like Attended, for quantized keys and values.
template <typename Stored, int kDims>
struct QuantizedAttended {
  // Halves reach 65504, and weights twice this; small weights are normal numbers down to 2^-28 of the largest.
  static constexpr float kLargestWeight = 16384, kLeastUnit = 0x1p-100f;

  // Until `finish`, `sum` covers the lane's keys only. `weighted` is relative to `unit`, the power of two of the largest scale.
  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {}, unit = kLeastUnit, weighted[kDims / 16][4] = {};

  // See Attended::add_scored. `value_scale`: of key `lane` of the tiles, 0 if it is excluded.
  template <typename Tile, typename Query, int kTiles, typename ToScores>
  __device__ void add_scored(Tile (&tiles)[kTiles], const Query& query, int queries, unsigned dropped, float value_scale,
                             ToScores to_scores) {
    const int lane = threadIdx.x % kWarpSize;
    float scores[kTiles][4] = {}, scales[kTiles * 2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      tiles[t].multiply_keys(query, scores[t]);
      const unsigned dropped_of_tile = dropped >> t * kTileKeys & kAllTileKeys;
      if (dropped_of_tile != 0) tiles[t].drop_values(dropped_of_tile);
    }
    const float largest_scale = __uint_as_float(largest_in_warp(__float_as_uint(value_scale)));
    const float raised_unit = fmaxf(unit, power_of_two(largest_scale)), per_unit = inverse(raised_unit);
    const float of_unit = unit * per_unit, weight = value_scale * (kLargestWeight * per_unit);
    unit = raised_unit;
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) scales[i] = __shfl_sync(kFullWarp, weight, i * 8 + lane / 4);
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      if (q >= queries) continue;
      to_scores(scores, q);
      float raised = largest[q];
#pragma unroll
      for (int i = 0; i < kTiles * 2; ++i) raised = fmaxf(raised, scores[i / 2][i % 2 * 2 + q]);
#pragma unroll
      for (int distance = 4; distance < kWarpSize; distance *= 2) {
        raised = fmaxf(raised, __shfl_xor_sync(kFullWarp, raised, distance));
      }
      const float origin = origin_of(raised), factor = factor_of_part(largest[q], raised);
      largest[q] = raised;
      sum[q] *= factor;
#pragma unroll
      for (int i = 0; i < kTiles * 2; ++i) {
        float& score = scores[i / 2][i % 2 * 2 + q];
        const float probability = exp2_approx(score - origin);
        sum[q] += probability;
        score = probability * scales[i];
      }
#pragma unroll
      for (int i = 0; i < kDims / 16; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) weighted[i][h * 2 + q] *= factor * of_unit;
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const unsigned low_keys = transposed(packed<__half>(scores[t][0], scores[t][1]));
      const unsigned high_keys = transposed(packed<__half>(scores[t][2], scores[t][3]));
      tiles[t].add_values(weighted, low_keys, high_keys);
    }
  }

  // Makes `sum` the sum over all keys, and `weighted` absolute.
  __device__ void finish() {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll
      for (int distance = 4; distance < kWarpSize; distance *= 2) {
        sum[q] += __shfl_xor_sync(kFullWarp, sum[q], distance);
      }
    }
    const float factor = unit * (Stored::unit() / kLargestWeight);
#pragma unroll
    for (int i = 0; i < kDims / 16; ++i) {
#pragma unroll
      for (int h = 0; h < 4; ++h) weighted[i][h] *= factor;
    }
  }
};

}  // namespace fuseopt
