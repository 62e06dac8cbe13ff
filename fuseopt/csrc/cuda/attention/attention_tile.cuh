// What the kernels of decode_attention for 16-bit caches share: m16n8k16 with 16 keys as M and up to 8 queries as N.
// The queries are the rows (beams) that share an item of the cache. One query takes as long as eight.
#pragma once

#include "cuda/common/launchers.h"
#include "cuda/common/partial_softmax.cuh"
#include "cuda/common/tensor_core.cuh"

namespace fuseopt {

constexpr int kTileKeys = 16;
constexpr int kTileQueries = 8;
constexpr unsigned kAllTileKeys = (1u << kTileKeys) - 1;

// An item's lengths, loaded past the L1 cache. Of an int64 only the lower half is read, since a slot number fits into
// it.
struct Lengths {
  int filled, start;

  __device__ Lengths(const DecodeAttention& attention, unsigned item)
      : filled(load(attention.lengths, item)), start(load(attention.starts, item)) {}

 private:
  __device__ static int load(const Integers& integers, unsigned item) {
    if (integers.data == nullptr) return 0;
    const unsigned words = static_cast<unsigned>(integers.stride) * (static_cast<unsigned>(integers.bytes) / 4);
    return __ldcg(static_cast<const int*>(integers.data) + item * words);
  }
};

// Places [first, end) of an item's cache are read; those from `start` on are attended to. The new key is in the last
// one.
struct FilledPlaces {
  int first, end, start;
  int token;  // place of the new key, or -1

  __device__ FilledPlaces(const DecodeAttention& attention, const Lengths& lengths) {
    const bool has_token = attention.key.data != nullptr;
    const int capacity = static_cast<int>(attention.capacity), length = lengths.filled + has_token;
    start = max(lengths.start, 0);
    end = min(max(length, 0), capacity);
    token = has_token && length == end ? end - 1 : -1;
    // The new key is written even if nothing is attended to.
    first = min(start, max(end - has_token, 0));
  }

  __device__ bool has(int place) const { return place >= start && place < end; }
};

// Nonzero if the mask allows attention to a place of an item.
__device__ inline unsigned mask_of(const DecodeAttention& attention, unsigned item, int place) {
  if (attention.mask == nullptr) return 1;
  return __ldcg(reinterpret_cast<const unsigned char*>(attention.mask) + item * attention.capacity + place);
}

// The row of the cache that holds a row's key of this place. An invalid number is clamped to a valid row.
__device__ inline unsigned ancestor_of(const DecodeAttention& attention, unsigned row, int place) {
  const int ancestor = __ldcg(attention.ancestry + row * attention.capacity + place);
  return min(static_cast<unsigned>(ancestor), static_cast<unsigned>(attention.rows - 1));
}

// The bias that is added to the score of a place, in powers of two.
template <typename T>
__device__ inline float bias_of(const DecodeAttention& attention, const FilledPlaces& places, unsigned head,
                                int place) {
  if (attention.bias.data == nullptr) return 0;
  const int columns = static_cast<int>(attention.bias_columns);
  const int64_t index = int64_t(head) * columns + min(max(places.end - 1 - place, 0), columns - 1);
  const float bias = attention.bias.dtype == kDType<T> ? load_as<float>({attention.bias.data, kDType<T>}, index)
                                                     : load_as<float>(attention.bias, index);
  return bias * kLog2E;
}

// A tile in registers. Dimensions are ordered within a product so that a lane has 8 neighbouring ones. A lane has, of
// keys lane / 4 (+ 8), dimensions lane % 4 * 8 (+ 32 ...); of the values of keys lane % 4 * 2 (+ 1, 8, 9), dimensions
// lane / 4 * 8 (+ 64).
template <typename T, int kDims>
struct Tile {
  static constexpr int kKeyParts = kDims / 32, kValueParts = kDims / 64;
  uint4 keys[2][kKeyParts], values[4][kValueParts];

  __device__ static int key_of(int h) { return threadIdx.x % kWarpSize / 4 + h * 8; }
  __device__ static int value_of(int h) { return threadIdx.x % 4 * 2 + h % 2 + h / 2 * 8; }
  __device__ static int key_dim() { return threadIdx.x % 4 * 8; }
  __device__ static int value_dim() { return threadIdx.x % kWarpSize / 4 * 8; }

  // Loads from two caches, at offset_of(key).
  template <typename OffsetOf>
  __device__ void load(const T* key_cache, const T* value_cache, OffsetOf offset_of) {
#pragma unroll
    for (int h = 0; h < 2; ++h) load_parts(key_cache + offset_of(key_of(h)) + key_dim(), keys[h]);
#pragma unroll
    for (int h = 0; h < 4; ++h) load_parts(value_cache + offset_of(value_of(h)) + value_dim(), values[h]);
  }

  // Writes a new key and value, given at `new_key` + key_dim() and `new_value` + value_dim(), into the tile and into
  // the caches at `offset`. The tile gets the value only where `is_kept`.
  __device__ void replace(int key, const T* new_key, const T* new_value, T* key_cache, T* value_cache, int offset,
                          bool is_kept = true) {
    uint4 key_parts[kKeyParts], value_parts[kValueParts];
    load_parts(new_key, key_parts);
    load_parts(new_value, value_parts);
#pragma unroll
    for (int i = 0; i < kKeyParts; ++i) {
      if (key_of(0) == 0) store_part(key_cache + offset + key_dim(), i, key_parts);
#pragma unroll
      for (int h = 0; h < 2; ++h) keys[h][i] = key_of(h) == key ? key_parts[i] : keys[h][i];
    }
#pragma unroll
    for (int i = 0; i < kValueParts; ++i) {
      if (value_of(0) == 0) store_part(value_cache + offset + value_dim(), i, value_parts);
#pragma unroll
      for (int h = 0; h < 4; ++h) values[h][i] = value_of(h) == key && is_kept ? value_parts[i] : values[h][i];
    }
  }

  // Scores of keys key_of(0), key_of(1) with queries lane % 4 * 2 (+ 1).
  __device__ void multiply_keys(const uint4 (&query)[kKeyParts], float (&scores)[4]) const {
#pragma unroll
    for (int i = 0; i < kKeyParts; ++i) {
      const uint4 low = keys[0][i], high = keys[1][i];
      multiply<T>(scores, {low.x, low.y}, {high.x, high.y}, query[i].x, query[i].y);
      multiply<T>(scores, {low.z, low.w}, {high.z, high.w}, query[i].z, query[i].w);
    }
  }

  // sums[4 i + j]: dimension value_dim() + 64 i + 2 j (+ 1 in its second half) for queries lane % 4 * 2 (+ 1).
  __device__ void add_values(float (&sums)[kDims / 16][4], unsigned low_keys, unsigned high_keys) const {
#pragma unroll
    for (int i = 0; i < kValueParts; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned a = word(0, i, j), b = word(1, i, j), c = word(2, i, j), d = word(3, i, j);
        multiply<T>(sums[i * 4 + j], {__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410)},
                    {__byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x7632)}, low_keys, high_keys);
      }
    }
  }

  // Needed because a weight of 0 times NaN or infinity is NaN.
  __device__ void drop_values(unsigned dropped) {
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if ((dropped >> value_of(h) & 1) == 0) continue;
#pragma unroll
      for (int i = 0; i < kValueParts; ++i) values[h][i] = uint4{};
    }
  }

  // Loads every 32nd or 64th group of 8 dimensions from `vector` on, past the L1 cache.
  template <int kParts>
  __device__ static void load_parts(const T* vector, uint4 (&parts)[kParts]) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) parts[i] = __ldcg(reinterpret_cast<const uint4*>(vector + i * (kDims / kParts)));
  }

 private:
  template <int kParts>
  __device__ static void store_part(T* vector, int i, const uint4 (&parts)[kParts]) {
    *reinterpret_cast<uint4*>(vector + i * (kDims / kParts)) = parts[i];
  }

  __device__ unsigned word(int h, int i, int j) const { return reinterpret_cast<const unsigned*>(&values[h][i])[j]; }
};

// The running softmax of up to 8 queries' scores, and the values weighted by it. Scores are in powers of two.
template <typename T, int kDims>
struct Attended {
  // For queries lane % 4 * 2 (+ 1). The sum of weights is computed by a product too, with ones as values. The tile
  // determines which 16 dimensions weighted[i] has.
  float largest[2] = {-INFINITY, -INFINITY}, sum[4] = {}, weighted[kDims / 16][4] = {};

  // Adds the keys of tiles for the first `queries`. `addends` are added to the scores of keys lane / 4 (+ 8); -INFINITY
  // excludes a key. `dropped` has a bit for each of these keys whose value may be NaN or infinite. kFirst: nothing has
  // been added before.
  template <bool kFirst = false, typename Tile, typename Query, int kTiles>
  __device__ void add(Tile (&tiles)[kTiles], const Query& query, int queries, const float (&addends)[kTiles][2],
                      unsigned dropped, float scale) {
    add_scored<kFirst>(tiles, query, queries, dropped, [&](float (&scores)[kTiles][4], int q) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& score = scores[t][h * 2 + q];
          score = addends[t][h] == -INFINITY ? -INFINITY : score * scale + addends[t][h];
        }
      }
    });
  }

  // The same with `to_scores(products, q)`: makes scores, in powers of two, of products [tile][h * 2 + q] of keys
  // lane / 4 + 8 h with query lane % 4 * 2 + q; -INFINITY excludes a key.
  template <bool kFirst = false, typename Tile, typename Query, int kTiles, typename ToScores>
  __device__ void add_scored(Tile (&tiles)[kTiles], const Query& query, int queries, unsigned dropped,
                             ToScores to_scores) {
    float scores[kTiles][4] = {};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      tiles[t].multiply_keys(query, scores[t]);
      const unsigned dropped_of_tile = dropped >> t * kTileKeys & kAllTileKeys;
      if (dropped_of_tile != 0) tiles[t].drop_values(dropped_of_tile);
    }
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      if (q >= queries) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) scores[t][q] = scores[t][2 + q] = 0;
        continue;
      }
      to_scores(scores, q);
      float raised = largest[q];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          raised = fmaxf(raised, scores[t][h * 2 + q]);
        }
      }
#pragma unroll
      for (int distance = 4; distance < kWarpSize; distance *= 2) {
        raised = fmaxf(raised, __shfl_xor_sync(kFullWarp, raised, distance));
      }
      const float origin = origin_of(raised), factor = kFirst ? 0.0f : factor_of_part(largest[q], raised);
      largest[q] = raised;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) scores[t][h * 2 + q] = exp2_approx(scores[t][h * 2 + q] - origin);
        if constexpr (kFirst) continue;
        sum[h * 2 + q] *= factor;
#pragma unroll
        for (int i = 0; i < kDims / 16; ++i) weighted[i][h * 2 + q] *= factor;
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const unsigned low_keys = transposed(packed<T>(scores[t][0], scores[t][1]));
      const unsigned high_keys = transposed(packed<T>(scores[t][2], scores[t][3]));
      const unsigned ones = packed<T>(1.0f, 1.0f);
      multiply<T>(sum, {ones, ones}, {ones, ones}, low_keys, high_keys);
      tiles[t].add_values(weighted, low_keys, high_keys);
    }
  }
};

}  // namespace fuseopt
