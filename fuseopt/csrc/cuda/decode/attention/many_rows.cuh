// decode_attention for 16-bit caches if (row, head)s fill the device. Each has four, two or one of a block's warps: as
// many as let all of them be resident at once.
//
// A warp takes 32 keys at a time, or 16 if keys have 128 dimensions. Meanwhile further keys are copied to shared
// memory, for this warp or for others, so that memory throughput limits a multiprocessor and not latency. The first
// copies start before the kernel waits for its predecessor. For places that are not filled a warp gets zeros and reads
// nothing.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/attention/attention_tile.cuh"
#include "cuda/common/block_barrier.cuh"
#include "cuda/common/dependent_launch.cuh"

namespace fuseopt {

// TUNED: with the kernel; two warps per row and head are faster than four, one with more rows (3d47804, 239f1cf).
constexpr unsigned kManyRowsAttentionWarps = 4;
constexpr int kTileStageBytes = 8 * 1024;

// Blocks per multiprocessor: with one stage of shared memory per warp registers limit them, with two stages that
// memory.
template <int kDims>
constexpr unsigned kManyRowsBlocks = kDims == 64 ? 6 : 3;
constexpr unsigned kTwoStagesBlocks = 3;
static_assert(2 * kManyRowsAttentionWarps * kTileStageBytes <= kLeastSharedBytesOfSm80);

struct ManyRows {
  DecodeAttention attention;
  int stages;  // 1 or 2 for each warp
};

// Keys and values of a tile in shared memory, in pieces of 16 bytes.
template <typename Element, int kDims>
struct TileStorage {
  static constexpr int kPieceDims = sizeof(uint4) / sizeof(Element), kPieces = kDims / kPieceDims;  // pieces of a key
  static constexpr int kCopyKeys = kWarpSize / kPieces, kCopies = kTileKeys / kCopyKeys;
  uint4 keys[kTileKeys * kPieces], values[kTileKeys * kPieces];

  // A warp copies several keys at once; a lane copies this key of them, and this piece of the key.
  __device__ static int own_key() { return threadIdx.x % kWarpSize / kPieces; }
  __device__ static int own_piece() { return threadIdx.x % kPieces; }
  __device__ static int index(int key, int piece) { return piece_index<kPieces>(key, piece); }
  __device__ static int own_index(int copy) {
    const int first = copy * kCopyKeys;
    return first * kPieces + (index(own_key(), own_piece()) ^ first % 8);
  }

  // Starts copies from a cache to neighbouring tiles, with zeros after the cache's end. `keys` and `values` point to
  // the lane's first piece, `offset_of` gives the offset of a later key from there, and `there` is the number of keys
  // from it on.
  template <typename Tile, int kTiles, typename OffsetOf, typename... Policy>
  __device__ static void fetch(Tile (&tiles)[kTiles], const Element* keys, const Element* values, int there,
                               OffsetOf offset_of, Policy... policy) {
#pragma unroll
    for (int copy = 0; copy < kTiles * kCopies; ++copy) {
      const int key = copy * kCopyKeys;
      const auto offset = offset_of(key);
      Tile& tile = tiles[copy / kCopies];
      copy_async(&tile.keys[own_index(copy % kCopies)], keys + offset, key < there, policy...);
      copy_async(&tile.values[own_index(copy % kCopies)], values + offset, key < there, policy...);
    }
  }

  // Writes the lane's piece of a key, or of a value, into neighbouring tiles.
  template <typename Tile, int kTiles>
  __device__ static void put(Tile (&tiles)[kTiles], int key, bool is_value, uint4 piece) {
    Tile& tile = tiles[key / kTileKeys];
    (is_value ? tile.values : tile.keys)[index(key % kTileKeys, own_piece())] = piece;
  }

  // Needed because a weight of 0 times NaN or infinity is NaN.
  __device__ void drop_values(unsigned dropped) {
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      if (dropped >> (copy * kCopyKeys + own_key()) & 1) values[own_index(copy)] = uint4{};
    }
    __syncwarp();
  }
};

// A tile in shared memory, of elements that the tensor cores take.
template <typename T, int kDims>
struct SharedTile : TileStorage<T, kDims> {
  using Storage = TileStorage<T, kDims>;
  using Storage::index, Storage::keys, Storage::kPieces, Storage::values;

  // See Tile::multiply_keys. `query` has pairs of dimensions, lane % 4 * 2 + 8 i.
  __device__ void multiply_keys(const unsigned (&query)[kPieces], float (&scores)[4]) const {
    const int lane = threadIdx.x % kWarpSize, key = lane % 16, piece = lane / 16;
#pragma unroll
    for (int i = 0; i < kPieces; i += 2) {
      const uint4 part = load_lines(&keys[index(key, piece) ^ i]);
      multiply<T>(scores, {part.x, part.z}, {part.y, part.w}, query[i], query[i + 1]);
    }
  }

  // The dimension of half i % 2 of sums[i / 2].
  __device__ static int dim_of(int i) { return threadIdx.x % kWarpSize / 4 + i * 8; }

  // sums[i]: dimensions dim_of(2 i) and, in its second half, dim_of(2 i + 1), for queries lane % 4 * 2 (+ 1).
  __device__ void add_values(float (&sums)[kDims / 16][4], unsigned low_keys, unsigned high_keys) const {
    const int lane = threadIdx.x % kWarpSize, key = lane % 8 + lane / 16 * 8, piece = lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < kPieces; i += 2) {
      const uint4 part = load_transposed(&values[index(key, piece) ^ i]);
      multiply<T>(sums[i / 2], {part.x, part.z}, {part.y, part.w}, low_keys, high_keys);
    }
  }
};

// A warp's result: the largest score (in powers of two), the sum of exponentials, and the values weighted by these. It
// overwrites the warp's tiles.
template <int kDims>
struct SharedResult {
  float values[kTileQueries][kDims], largest[kTileQueries], sum[kTileQueries];

  template <typename Tile, typename Attended>
  __device__ void leave(const Attended& attended, int queries) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int query = lane % 4 * 2 + q;
      if (query >= queries) continue;
#pragma unroll
      for (int i = 0; i < kDims / 8; ++i) values[query][Tile::dim_of(i)] = attended.weighted[i / 2][i % 2 * 2 + q];
      largest[query] = attended.largest[q];
      sum[query] = attended.sum[q];
    }
  }
};

template <typename T, int kDims, bool kAncestry>
__global__ void __launch_bounds__(kManyRowsAttentionWarps* kWarpSize, kManyRowsBlocks<kDims>)
    decode_attention_many_rows_kernel(const __grid_constant__ ManyRows many) {
  using Tile = SharedTile<T, kDims>;
  constexpr int kTiles = kTileStageBytes / sizeof(Tile), kKeys = kTiles * kTileKeys;
  using Tiles = Tile[kTiles];
  using Result = SharedResult<kDims>;
  static_assert(sizeof(Result) <= sizeof(Tiles));
  let_successor_start();
  const DecodeAttention& attention = many.attention;
  const int beams = static_cast<int>(attention.queries_per_kv), lane = threadIdx.x % kWarpSize;
  const unsigned item = blockIdx.x * blockDim.y + threadIdx.y, head = blockIdx.y, heads = gridDim.y;
  const unsigned row = item * beams + blockIdx.z * kTileQueries;
  if (row >= attention.rows) return;
  const int queries = min(beams - static_cast<int>(blockIdx.z) * kTileQueries, kTileQueries);
  const int own = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize, step = warps * kKeys;
  const Lengths lengths(attention, item);
  extern __shared__ __align__(16) char shared[];
  Tiles* const stages = reinterpret_cast<Tiles*>(shared) + (threadIdx.y * warps + own) * many.stages;

  const int capacity = static_cast<int>(attention.capacity);
  const int64_t head_size = static_cast<int64_t>(capacity) * kDims, row_size = heads * head_size;
  const int64_t head_offset = item * row_size + head * head_size + Tile::own_piece() * 8;
  T* const keys = static_cast<T*>(attention.key_cache) + head_offset;
  T* const values = static_cast<T*>(attention.value_cache) + head_offset;
  const auto vector_of = [&](const DecodeAttention::Heads& heads, int query) {
    return static_cast<const T*>(heads.data) + int64_t(row + query) * heads.row_stride + head * heads.head_stride;
  };
  const FilledPlaces places(attention, lengths);
  const int written = places.token >= 0 ? places.token : places.end;  // places before it are already in the cache
  const auto place_of_lane = [&](int base) { return min(base + lane % kKeys, capacity - 1); };
  const auto mask_of_lane = [&](int base) { return mask_of(attention, item, place_of_lane(base)); };
  const auto ancestor_of_lane = [&](int base) {
    return kAncestry ? ancestor_of(attention, row, place_of_lane(base)) : row;
  };
  // Evicted first, because a step reads the cache once, and prefetched weights have to stay in L2 until they are read.
  const uint64_t policy = evict_first();
  const auto fetch = [&](Tiles& tiles, int base, unsigned ancestor) {
    const int place = base + Tile::own_key();
    const T* const key_from = settled(keys + static_cast<int64_t>(place) * kDims);
    const T* const value_from = settled(values + static_cast<int64_t>(place) * kDims);
    const auto offset_of = [&](int key) {
      int64_t offset = key * kDims;
      if constexpr (kAncestry) {
        const unsigned source = __shfl_sync(kFullWarp, ancestor, key + Tile::own_key());
        offset += static_cast<int>(source - row) * row_size;
      }
      return offset;
    };
    Tile::fetch(tiles, key_from, value_from, written - place, offset_of, policy);
  };

  int base = places.first + own * kKeys;
  unsigned next_ancestor = ancestor_of_lane(base);
#pragma unroll 1
  for (int s = 0; s < many.stages; ++s) {
    const unsigned ancestor = next_ancestor;
    next_ancestor = ancestor_of_lane(base + (s + 1) * step);
    if (base + s * step < places.end) fetch(stages[s], base + s * step, ancestor);
    end_copy_group();
  }
  unsigned next_mask = mask_of_lane(base);
  wait_for_predecessor();

  unsigned query[Tile::kPieces] = {};
  if (lane / 4 < queries) {
    const T* const vector = settled(vector_of(attention.query, lane / 4) + lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < Tile::kPieces; ++i) query[i] = __ldcg(reinterpret_cast<const unsigned*>(vector + i * 8));
  }
  // The first lanes have one piece each of the new key, the lanes after them one of the new value.
  const bool has_token = places.token >= 0 && lane < 2 * Tile::kPieces, is_value = lane >= Tile::kPieces;
  uint4 token = {};
  if (has_token) {
    const T* const vector = vector_of(is_value ? attention.value : attention.key, 0);
    token = __ldcg(reinterpret_cast<const uint4*>(vector + Tile::own_piece() * 8));
  }

  Attended<T, kDims> attended;
#pragma unroll 1
  for (int stage = 0; base < places.end; base += step, stage = stage + 1 < many.stages ? stage + 1 : 0) {
    Tiles& tiles = stages[stage];
    const int place = base + lane % kKeys;
    const bool is_kept = next_mask != 0 && places.has(place);
    const float addend = is_kept ? bias_of<T>(attention, places, head, place) : -INFINITY;
    const unsigned dropped = __ballot_sync(kFullWarp, !is_kept && place < places.end);
    next_mask = mask_of_lane(base + step);
    float addends[kTiles][2];
#pragma unroll
    for (int key = 0; key < kKeys; key += 8) {
      addends[key / kTileKeys][key / 8 % 2] = __shfl_sync(kFullWarp, addend, key + lane / 4);
    }
    if (many.stages == 1) await_copy_groups<0>();
    else await_copy_groups<1>();
    __syncwarp();
    const int token_key = places.token - base;
    if (token_key >= 0 && token_key < kKeys) {
      if (has_token) {
        *reinterpret_cast<uint4*>((is_value ? values : keys) + places.token * kDims) = token;
        Tile::put(tiles, token_key, is_value, token);
      }
      __syncwarp();
    }
    const float scale = attention.score_scale;
    attended.add(tiles, query, queries, addends, dropped, scale);
    __syncwarp();
    const unsigned ancestor = next_ancestor;
    next_ancestor = ancestor_of_lane(base + (many.stages + 1) * step);
    if (base + many.stages * step < places.end) fetch(tiles, base + many.stages * step, ancestor);
    end_copy_group();
  }

  const auto output_of = [&](int query) {
    return static_cast<T*>(attention.output) + (uint64_t(row + query) * heads + head) * kDims;
  };
  if (warps == 1) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      if (lane % 4 * 2 + q >= queries) continue;
      T* const output = output_of(lane % 4 * 2 + q) + lane / 4;
      const float reciprocal = reciprocal_of_sum(attended.sum[q]);
#pragma unroll
      for (int i = 0; i < kDims / 8; ++i) {
        output[i * 8] = from_acc<T>(attended.weighted[i / 2][i % 2 * 2 + q] * reciprocal);
      }
    }
    return;
  }
  const auto result_of = [&](int warp) { return reinterpret_cast<Result*>(stages + (warp - own) * many.stages); };
  result_of(own)->template leave<Tile>(attended, queries);
  wait_at_barrier(threadIdx.y + 1, blockDim.x);  // for the warps that share a (row, head)
  constexpr int kLaneDims = kDims / kWarpSize;
#pragma unroll 1
  for (int q = own; q < queries; q += warps) {
    float merged[kLaneDims];
    merge_parts<kLaneDims, 2>(
        warps, [&](int warp) { return PartStats{result_of(warp)->largest[q], result_of(warp)->sum[q]}; },
        [&](int warp) { return result_of(warp)->values[q] + lane * kLaneDims; }, merged);
#pragma unroll
    for (int i = 0; i < kLaneDims; i += 2) {
      reinterpret_cast<unsigned*>(output_of(q) + lane * kLaneDims)[i / 2] =
          packed<T>(merged[i], merged[i + 1]);
    }
  }
}

// Whether (row, head)s fill the device with four warps each; (item, head)s if rows share an item. Fewer of them are
// faster with more warps, which hold the cache in registers.
inline bool are_many_rows(int64_t units) { return units >= multiprocessor_count(); }

template <typename T, int kDims>
cudaError_t launch_many_rows_kernel(const DecodeAttention& attention, int64_t items, unsigned groups,
                                    cudaStream_t stream) {
  const int64_t units = items * attention.heads * groups;
  const int64_t most_warps = int64_t(kTwoStagesBlocks) * kManyRowsAttentionWarps * multiprocessor_count();
  unsigned warps = kManyRowsAttentionWarps;
  while (warps > 1 && (units * warps > most_warps || warps / 2 * kTileKeys >= attention.capacity)) warps /= 2;
  const bool has_room = units * warps <= most_warps || kManyRowsBlocks<kDims> == kTwoStagesBlocks;
  const ManyRows many{attention, has_room ? 2 : 1};
  const unsigned units_of_block = kManyRowsAttentionWarps / warps;
  const LaunchShape shape{.blocks = static_cast<unsigned>(ceil_div(items, units_of_block)),
                          .threads = warps * kWarpSize,
                          .shared_bytes = static_cast<size_t>(kManyRowsAttentionWarps) * many.stages * kTileStageBytes,
                          .cluster_blocks = 1,
                          .blocks_y = static_cast<unsigned>(attention.heads),
                          .blocks_z = groups,
                          .threads_y = units_of_block};
  const auto kernel = attention.ancestry != nullptr ? decode_attention_many_rows_kernel<T, kDims, true>
                                                    : decode_attention_many_rows_kernel<T, kDims, false>;
  return launch_dependent(kernel, many, shape, attention.pdl, stream);
}

}  // namespace fuseopt
