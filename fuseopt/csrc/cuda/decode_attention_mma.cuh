// decode_attention for 16-bit caches, on the tensor cores: m16n8k16 with 16 keys as M and up to 8 queries as N, which
// are the rows (beams) that share an item of the cache. One query takes as long as eight.
//
// A head of an item has a block, or a cluster of blocks; a warp takes tiles of 16 keys. A tile's keys and values come
// straight into registers, as fragments, those of a warp's first tile before the kernel waits for its predecessor:
// earlier steps have written them. What is left to do then is to load the query and the new key and value, 4 products
// for the scores, a softmax within the warp, 5 products for the values, and the merge of the warps. The order of
// dimensions within a product is such that a lane reads 8 neighbouring ones.
#pragma once

#include "attention_parts.cuh"
#include "dependent_launch.cuh"
#include "tensor_core.cuh"

namespace fuseopt {

constexpr int kTileKeys = 16;
constexpr int kTileQueries = 8;

constexpr unsigned kMaxClusterBlocks = 4;

template <int kDims>
constexpr int kMmaThreads = kDims == 64 ? 512 : 256;  // for 128 registers, or more

// What an item has on the device, past the L1 cache. Of an int64 the lower half: a place in a cache needs no more.
struct Lengths {
  int filled, start;

  __device__ Lengths(const DecodeAttention& attention, unsigned item)
      : filled(load(attention.lengths, item)), start(load(attention.starts, item)) {}

 private:
  __device__ static int load(const DecodeAttention::Integers& integers, unsigned item) {
    if (integers.data == nullptr) return 0;
    return __ldcg(static_cast<const int*>(integers.data) + item * integers.stride * (integers.bytes / 4));
  }
};

// Places [first, end) of an item's cache are read, of which those from `start` on count; the new key is in the last.
struct FilledPlaces {
  int first, end, start;
  int token;  // the new key's, or -1

  __device__ FilledPlaces(const DecodeAttention& attention, const Lengths& lengths) {
    const bool has_token = attention.key.data != nullptr;
    const int capacity = static_cast<int>(attention.capacity), length = lengths.filled + has_token;
    start = max(lengths.start, 0);
    end = min(max(length, 0), capacity);
    token = has_token && length == end ? end - 1 : -1;
    // The new key is written even where nothing is attended to.
    first = min(start, max(end - has_token, 0));
  }

  __device__ bool has(int place) const { return place >= start && place < end; }
};

// Whether the mask lets a place of an item be attended to.
__device__ inline bool is_kept(const DecodeAttention& attention, unsigned item, int place) {
  if (attention.mask == nullptr) return true;
  const bool* const kept = attention.mask + item * attention.capacity + place;
  return __ldcg(reinterpret_cast<const unsigned char*>(kept)) != 0;
}

// The row of the cache in which a row finds a place; any of them where there is no telling.
__device__ inline unsigned ancestor_of(const DecodeAttention& attention, unsigned row, int place) {
  const int ancestor = __ldcg(attention.ancestry + row * attention.capacity + place);
  return min(static_cast<unsigned>(ancestor), static_cast<unsigned>(attention.rows - 1));
}

// What is added to the score of a place, in powers of two.
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

// Rows and columns of an 8x8 matrix of 16-bit elements change places; four lanes have a row.
__device__ inline unsigned transposed(unsigned pair) {
  unsigned result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

template <typename T>
__device__ inline unsigned packed(float low, float high) {
  const T pair[2] = {from_acc<T>(low), from_acc<T>(high)};
  return reinterpret_cast<const unsigned&>(pair);
}

// Makes the compiler work out an address here, and not where it is used.
template <typename T>
__device__ inline T* settled(T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// A lane's part of a tile: of keys lane / 4 (+ 8) dimensions lane % 4 * 8 (+ 32 ...), of the values of keys
// lane % 4 * 2 (+ 1, 8, 9) dimensions lane / 4 * 8 (+ 64).
template <typename T, int kDims>
struct Tile {
  static constexpr int kKeyParts = kDims / 32, kValueParts = kDims / 64;
  uint4 keys[2][kKeyParts], values[4][kValueParts];

  __device__ static int key_of(int h) { return threadIdx.x % kWarpSize / 4 + h * 8; }
  __device__ static int value_of(int h) { return threadIdx.x % 4 * 2 + h % 2 + h / 2 * 8; }
  __device__ static int key_dim() { return threadIdx.x % 4 * 8; }
  __device__ static int value_dim() { return threadIdx.x % kWarpSize / 4 * 8; }

  // From two caches, at offset_of(key).
  template <typename OffsetOf>
  __device__ void load(const T* key_cache, const T* value_cache, OffsetOf offset_of) {
#pragma unroll
    for (int h = 0; h < 2; ++h) load_parts(key_cache + offset_of(key_of(h)) + key_dim(), keys[h]);
#pragma unroll
    for (int h = 0; h < 4; ++h) load_parts(value_cache + offset_of(value_of(h)) + value_dim(), values[h]);
  }

  // Puts a new key and value, which `new_key` + key_dim() and `new_value` + value_dim() point to, into the tile, and
  // into the caches at `offset`.
  __device__ void replace(int key, const T* new_key, const T* new_value, T* key_cache, T* value_cache, int offset) {
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
      for (int h = 0; h < 4; ++h) values[h][i] = value_of(h) == key ? value_parts[i] : values[h][i];
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

  // sums[i][j]: dimension value_dim() + 64 i + 2 j (+ 1 in its second half) for queries lane % 4 * 2 (+ 1).
  __device__ void add_values(float (&sums)[kValueParts][4][4], unsigned low_keys, unsigned high_keys) const {
#pragma unroll
    for (int i = 0; i < kValueParts; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned a = word(0, i, j), b = word(1, i, j), c = word(2, i, j), d = word(3, i, j);
        multiply<T>(sums[i][j], {__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410)},
                    {__byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x7632)}, low_keys, high_keys);
      }
    }
  }

  // A weight of 0 would not hide what is no number.
  __device__ void drop_values(unsigned kept) {
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      if (kept >> value_of(h) & 1) continue;
#pragma unroll
      for (int i = 0; i < kValueParts; ++i) values[h][i] = uint4{};
    }
  }

  // Every 32nd or 64th 8 dimensions from `vector` on, past the L1 cache.
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

template <typename T, int kDims, bool kAncestry>
__global__ void __launch_bounds__(kMmaThreads<kDims>)
    decode_attention_mma_kernel(const __grid_constant__ DecodeAttention attention) {
  using Tile = Tile<T, kDims>;
  let_successor_start();
  const unsigned item = cluster_index(), head = blockIdx.y, heads = gridDim.y;
  const int beams = static_cast<int>(attention.rows_per_item), lane = threadIdx.x % kWarpSize;
  const unsigned row = item * beams + blockIdx.z * kTileQueries;
  const int queries = min(beams - static_cast<int>(blockIdx.z) * kTileQueries, kTileQueries);
  const Lengths lengths(attention, item);
  extern __shared__ __align__(16) char shared[];
  Parts parts(shared, queries, kDims);

  const int capacity = static_cast<int>(attention.capacity);
  const unsigned head_size = capacity * kDims;
  const uint64_t head_offset = uint64_t(item * heads + head) * head_size;
  T* const keys = static_cast<T*>(attention.key_cache) + head_offset;
  T* const values = static_cast<T*>(attention.value_cache) + head_offset;
  const auto vector_of = [&](const DecodeAttention::Heads& heads, int query, int dim) {
    return static_cast<const T*>(heads.data) + int64_t(row + query) * heads.row_stride + head * heads.head_stride + dim;
  };
  const T* const query_at = settled(vector_of(attention.query, lane / 4, Tile::key_dim()));
  const T* const token_key = settled(vector_of(attention.key, 0, Tile::key_dim()));
  const T* const token_value = settled(vector_of(attention.value, 0, Tile::value_dim()));
  const FilledPlaces places(attention, lengths);
  // Where a place lies, from `keys` and `values`.
  const auto offset_of = [&](int place) {
    place = min(place, capacity - 1);
    if constexpr (!kAncestry) {
      return static_cast<unsigned>(place) * kDims;
    } else {
      return (int64_t(ancestor_of(attention, row, place)) - row) * heads * head_size + place * kDims;
    }
  };

  Tile tile;
  uint4 query[Tile::kKeyParts] = {};
  // Scores are in powers of two. The sum of weights takes a product as well, with ones for values.
  float largest[2] = {-INFINITY, -INFINITY}, sum[4] = {}, weighted[Tile::kValueParts][4][4] = {};
  int base = places.first + parts.own() * kTileKeys;
  bool kept_by_lane = false;
  for (bool is_first = true; is_first || base < places.end; base += parts.count() * kTileKeys, is_first = false) {
    if (base < places.end) {
      tile.load(keys, values, [&](int key) { return offset_of(base + key); });
      kept_by_lane = is_kept(attention, item, min(base + lane % kTileKeys, capacity - 1));
    }
    if (is_first) {
      wait_for_predecessor();
      if (lane / 4 < queries) Tile::load_parts(query_at, query);
      if (base >= places.end) break;
    }
    const int token = places.token - base;
    if (token >= 0 && token < kTileKeys) {
      tile.replace(token, token_key, token_value, keys, values, places.token * kDims);
    }

    const unsigned kept = __ballot_sync(kFullWarp, kept_by_lane && lane < kTileKeys && places.has(base + lane));
    float scores[4] = {};
    tile.multiply_keys(query, scores);
    const float scale = static_cast<float>(attention.scale) * kLog2E;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float bias = bias_of<T>(attention, places, head, base + Tile::key_of(h));
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        scores[h * 2 + q] = kept >> Tile::key_of(h) & 1 ? scores[h * 2 + q] * scale + bias : -INFINITY;
      }
    }
    if (kept != (1u << kTileKeys) - 1) tile.drop_values(kept);
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      float raised = fmaxf(largest[q], fmaxf(scores[q], scores[2 + q]));
#pragma unroll
      for (int distance = 4; distance < kWarpSize; distance *= 2) {
        raised = fmaxf(raised, __shfl_xor_sync(kFullWarp, raised, distance));
      }
      const float origin = raised == -INFINITY ? 0.0f : raised, factor = exp2_approx(largest[q] - origin);
      largest[q] = raised;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scores[h * 2 + q] = exp2_approx(scores[h * 2 + q] - origin);
        sum[h * 2 + q] *= factor;
#pragma unroll
        for (int i = 0; i < Tile::kValueParts; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) weighted[i][j][h * 2 + q] *= factor;
        }
      }
    }
    const unsigned low_keys = transposed(packed<T>(scores[0], scores[1]));
    const unsigned high_keys = transposed(packed<T>(scores[2], scores[3]));
    const unsigned ones = packed<T>(1.0f, 1.0f);
    multiply<T>(sum, {ones, ones}, {ones, ones}, low_keys, high_keys);
    tile.add_values(weighted, low_keys, high_keys);
  }

  parts.await_first_block();
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const int part_query = lane % 4 * 2 + q;
    if (part_query >= queries) continue;
#pragma unroll
    for (int i = 0; i < Tile::kValueParts; ++i) {
      float values[8];
#pragma unroll
      for (int d = 0; d < 8; ++d) values[d] = weighted[i][d / 2][d % 2 * 2 + q];
      parts.leave_values(part_query, Tile::value_dim() + i * 64, values);
    }
    if (lane / 4 == 0) parts.leave_stats(part_query, largest[q], sum[q]);
  }
  if (!parts.gather()) return;
  const int filled = min((places.end - places.first + kTileKeys - 1) / kTileKeys, parts.count());
  for (unsigned index = threadIdx.x; index < queries * kDims; index += blockDim.x) {
    const unsigned query = index / kDims, dim = index % kDims;
    static_cast<T*>(attention.output)[(uint64_t(row + query) * heads + head) * kDims + dim] =
        from_acc<T>(parts.merged(query, dim, filled));
  }
}

// How many warps share out the places of a block's queries, a power of two, and in how many blocks: enough warps to
// have all places in registers at once, as far as the device has room for them.
struct Split {
  unsigned parts, blocks;

  Split(const DecodeAttention& attention, int64_t units, size_t bytes_of_part, unsigned most_warps) {
    constexpr unsigned kWarpsPerMultiprocessor = 16;  // by their registers
    constexpr size_t kSharedBytes = 96 * 1024;        // which every device with clusters has
    parts = is_sm90_or_newer() ? most_warps * kMaxClusterBlocks : most_warps;
    while (parts > 4 && (parts / 2 * kTileKeys >= attention.capacity || parts * bytes_of_part > kSharedBytes ||
                         units * parts > kWarpsPerMultiprocessor * multiprocessor_count())) {
      parts /= 2;
    }
    blocks = (parts + most_warps - 1) / most_warps;
  }

  unsigned threads() const { return parts / blocks * kWarpSize; }
};

template <typename T, int kDims>
cudaError_t launch_mma_kernel(const DecodeAttention& attention, cudaStream_t stream) {
  const int64_t items = attention.rows / attention.rows_per_item;
  const auto groups = static_cast<unsigned>(ceil_div(attention.rows_per_item, kTileQueries));
  const int64_t queries = std::min<int64_t>(attention.rows_per_item, kTileQueries);
  const Split split(attention, items * attention.heads * groups, Parts::bytes_of_part(queries, kDims),
                    kMmaThreads<kDims> / kWarpSize);
  const LaunchShape shape{static_cast<unsigned>(items) * split.blocks,
                          split.threads(),
                          Parts::bytes(split.parts, queries, kDims),
                          split.blocks,
                          static_cast<unsigned>(attention.heads),
                          groups};
  const auto kernel = attention.ancestry != nullptr ? decode_attention_mma_kernel<T, kDims, true>
                                                    : decode_attention_mma_kernel<T, kDims, false>;
  return launch_dependent(kernel, attention, shape, attention.overlap, stream);
}

template <typename T>
bool launch_decode_attention_mma(const DecodeAttention& attention, cudaStream_t stream, cudaError_t& error) {
  if (compute_capability_major() < 8) return false;
  switch (attention.head_dim) {
    case 64: error = launch_mma_kernel<T, 64>(attention, stream); return true;
    case 128: error = launch_mma_kernel<T, 128>(attention, stream); return true;
    default: return false;
  }
}

}  // namespace fuseopt
