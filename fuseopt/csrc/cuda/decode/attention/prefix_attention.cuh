// Causal attention of a short prompt to a cache whose length is on the device: flash attention with the keys split
// among blocks (Flash-Decoding, Dao et al. 2023), so that a few queries after a long prefix occupy the whole device.
//
// A cluster of blocks has a few strips of 16 queries, of the heads that share a head of keys. Its blocks take tiles of
// keys in turn, as many as there are at the time. Their results are merged through shared memory. Tiles before the
// prompt's own tokens are copied before the kernel waits for its predecessor, which writes those tokens.
#pragma once

#include "cuda/attention/query_strip.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/dependent_launch.cuh"
#include "cuda/common/launchers.h"
#include "cuda/common/vector.cuh"

namespace fuseopt {

// Strips of queries of a block, warps that share the keys of a strip, keys of a tile, and tiles in shared memory.
template <int kDims_, int kStrips_, int kGroups_, int kTileKeys_, int kStages_>
struct PrefixShape {
  static constexpr int kDims = kDims_, kStrips = kStrips_, kGroups = kGroups_;
  static constexpr int kTileKeys = kTileKeys_, kStages = kStages_;
  static constexpr int kThreads = kStrips * kGroups * kWarpSize, kQueries = kStrips * kStripQueries;
  static constexpr int kPieces = kDims / 8, kCopyRows = kThreads / kPieces, kKeys = kTileKeys / kGroups;
  static constexpr int kPitch = kDims + 8;  // so that lines of a result are in different banks
  static_assert(kStages >= 2 && kKeys % 16 == 0 && kTileKeys % kCopyRows == 0);

  // Of 16-byte pieces.
  struct Tile {
    uint4 keys[kTileKeys * kPieces], values[kTileKeys * kPieces];
  };
  struct Results {
    float weighted[kGroups][kQueries][kPitch];  // the first group's are later the block's
    PartStats stats[kGroups][kQueries], merged[kQueries];
  };
  struct Memory {  // later the Results
    uint4 queries[kQueries * kPieces];
    Tile tiles[kStages];
  };
  static_assert(sizeof(Results) <= sizeof(Memory));
};

struct SplitPrefixAttention {
  PrefixAttention attention;
  int blocks;  // of a cluster
};

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    prefix_attention_kernel(const __grid_constant__ SplitPrefixAttention split) {
  constexpr int kDims = Shape::kDims, kPieces = Shape::kPieces, kCopyRows = Shape::kCopyRows, kKeys = Shape::kKeys;
  constexpr int kTileKeys = Shape::kTileKeys, kStages = Shape::kStages, kQueries = Shape::kQueries;
  let_successor_start();
  extern __shared__ __align__(kRingAlignment) char shared[];
  auto& memory = *reinterpret_cast<typename Shape::Memory*>(shared);
  const PrefixAttention& attention = split.attention;
  const int blocks = split.blocks, rank = static_cast<int>(blockIdx.x) % blocks;
  const int row = blockIdx.z, kv_head = blockIdx.y, heads = static_cast<int>(attention.heads);
  const int head_dim = static_cast<int>(attention.head_dim), group = heads / static_cast<int>(attention.kv_heads);
  // Queries are numbered by token, then by head of the group.
  const int first_query = static_cast<int>(blockIdx.x) / blocks * kQueries;
  const int queries = min(static_cast<int>(attention.length) * group - first_query, kQueries);
  const int first_token = first_query / group, last_token = (first_query + queries - 1) / group;

  const auto number_of = [](const int64_t* number) { return __ldcg(reinterpret_cast<const int*>(number)); };
  const int start = attention.start == nullptr ? 0 : number_of(attention.start);
  const int window = attention.window > 0 ? static_cast<int>(attention.window) : static_cast<int>(attention.capacity);
  const int begin = max(start + first_token + 1 - window, 0);
  const int seen_end = min(start + last_token + 1, static_cast<int>(attention.capacity));
  const int tiles = (seen_end - begin + kTileKeys - 1) / kTileKeys;
  const int end = attention.filled == nullptr ? seen_end : min(seen_end, number_of(attention.filled));

  const int own_row = threadIdx.x / kPieces, own_piece = threadIdx.x % kPieces;
  const bool has_piece = own_piece * 8 < head_dim;
  const auto vectors_of = [&](const TokenHeads& of, int head) {
    return static_cast<const T*>(of.data) + row * of.row_stride + head * of.head_stride + own_piece * 8;
  };
  const T* const keys_from = vectors_of(attention.key_cache, kv_head);
  const T* const values_from = vectors_of(attention.value_cache, kv_head);
  const auto fetch = [&](int tile, int stage) {
    auto& to = memory.tiles[stage];
#pragma unroll
    for (int r = 0; r < kTileKeys; r += kCopyRows) {
      const int64_t slot = begin + tile * kTileKeys + r + own_row;
      const int index = piece_index<kPieces>(r + own_row, own_piece);
      const bool is_there = has_piece && slot < end;
      copy_async(&to.keys[index], keys_from + slot * attention.key_cache.token_stride, is_there);
      copy_async(&to.values[index], values_from + slot * attention.value_cache.token_stride, is_there);
    }
  };
  const auto is_cached = [&](int tile) { return begin + (tile + 1) * kTileKeys <= start; };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    const int tile = rank + s * blocks;
    if (tile < tiles && is_cached(tile)) fetch(tile, s);
  }
  const int lane = threadIdx.x % kWarpSize, line = lane / 4, place = lane % 4;
  const int strip = threadIdx.x / kWarpSize % Shape::kStrips, own_group = threadIdx.x / kWarpSize / Shape::kStrips;
  const int lines_index = strip_lines_index<kPieces>();
  int own_slot[2];  // of the tokens of the lane's queries, counted from the lane's first key of a tile 0
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = first_query + strip * kStripQueries + line + half * 8;
    own_slot[half] = start + query / group - begin - own_group * kKeys - place * 2;
  }
  wait_for_predecessor();

  const T* const query_from = vectors_of(attention.query, kv_head * group);
#pragma unroll
  for (int r = 0; r < kQueries; r += kCopyRows) {
    const int query = r + own_row, number = first_query + query;
    if (kQueries % kCopyRows != 0 && query >= kQueries) break;
    const T* const from =
        query_from + number / group * attention.query.token_stride + number % group * attention.query.head_stride;
    copy_async(&memory.queries[piece_index<kPieces>(query, own_piece)], from, has_piece && query < queries);
  }
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    const int tile = rank + s * blocks;
    if (tile < tiles && !is_cached(tile)) fetch(tile, s);
    end_copy_group();
  }

  constexpr bool kKeepsQueries = kDims <= 128;  // in registers
  const auto load_query = [&](int i) {
    return load_lines(&memory.queries[strip * kStripQueries * kPieces + (lines_index ^ i)]);
  };
  uint4 query[kKeepsQueries ? kPieces / 2 : 1];
  StripAttended<kDims> attended;
  int stage = 0;
#pragma unroll 1
  for (int tile = rank; tile < tiles; tile += blocks) {
    await_copy_groups<kStages - 2>();
    __syncthreads();
    if constexpr (kKeepsQueries) {
      if (tile == rank) {
#pragma unroll
        for (int i = 0; i < kPieces; i += 2) query[i / 2] = load_query(i);
      }
    }
    const int next = tile + (kStages - 1) * blocks;
    if (next < tiles) fetch(next, stage == 0 ? kStages - 1 : stage - 1);
    end_copy_group();

    const uint4* const keys = memory.tiles[stage].keys + own_group * kKeys * kPieces;
    const uint4* const values = memory.tiles[stage].values + own_group * kKeys * kPieces;
    float score[kKeys / 8][4] = {};
    multiply_strip_keys<T, kDims, kKeys>(score, keys, [&](int i) {
      if constexpr (kKeepsQueries) return query[i / 2];
      else return load_query(i);
    });
    const int first_slot = begin + tile * kTileKeys;
    const bool is_seen_by_all =
        first_slot + kTileKeys - 1 <= start + first_token && first_slot > start + last_token - window;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int last_seen = is_seen_by_all ? kTileKeys : own_slot[half] - tile * kTileKeys;
      const int first_unseen = is_seen_by_all ? -kTileKeys : last_seen - window;
      const auto is_seen = [&](int key) { return key <= last_seen && key > first_unseen; };
      attended.weigh(score, half, attention.score_scale, is_seen);
    }
    const auto add = [](float (&sums)[4], uint2 low, uint2 high, unsigned low_keys, unsigned high_keys) {
      multiply<T>(sums, low, high, low_keys, high_keys);
    };
    attended.template add_values<T>(score, values, add);
    stage = stage + 1 < kStages ? stage + 1 : 0;
  }

  __syncthreads();
  auto& results = *reinterpret_cast<typename Shape::Results*>(shared);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_query = strip * kStripQueries + line + half * 8;
    const float sum = attended.total(half);
    if (place == 0) results.stats[own_group][of_query] = {attended.largest[half], sum};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const auto& weighted = attended.weighted[i];
      reinterpret_cast<float2&>(results.weighted[own_group][of_query][i * 8 + place * 2]) = {weighted[half * 2],
                                                                                           weighted[half * 2 + 1]};
    }
  }
  __syncthreads();
  constexpr int kQuads = kDims / 4;
  using Quad = Vector<float, 4>;
  const auto store = [&](int of_query, int dim, const Quad& merged, float sum) {
    const float reciprocal = reciprocal_of_sum(sum);
    const int number = first_query + of_query;
    const int64_t token = static_cast<int64_t>(row) * attention.length + number / group;
    const int64_t vector = token * heads + kv_head * group + number % group;
    T* const output = static_cast<T*>(attention.output) + vector * head_dim + dim;
    *reinterpret_cast<uint2*>(output) = {packed<T>(merged[0] * reciprocal, merged[1] * reciprocal),
                                         packed<T>(merged[2] * reciprocal, merged[3] * reciprocal)};
  };
  const auto quad_of = [&](int of_group, int of_query, int dim) -> Quad& {
    return reinterpret_cast<Quad&>(results.weighted[of_group][of_query][dim]);
  };
  const int filled_blocks = min(blocks, tiles);
  for (int index = threadIdx.x; index < queries * kQuads; index += Shape::kThreads) {
    const int of_query = index / kQuads, dim = index % kQuads * 4;
    if (dim >= head_dim) continue;
    Quad merged;
    const PartStats all = merge_some_parts<Shape::kGroups>(
        Shape::kGroups, [&](int of_group) { return results.stats[of_group][of_query]; },
        [&](int of_group) { return quad_of(of_group, of_query, dim); }, merged);
    if (filled_blocks == 1) {
      if (rank == 0) store(of_query, dim, merged, all.sum);
    } else {
      quad_of(0, of_query, dim) = merged;
      if (dim == 0) results.merged[of_query] = all;
    }
  }
  if (filled_blocks == 1) return;
  cluster_barrier();
  for (int index = rank * Shape::kThreads + threadIdx.x; index < queries * kQuads; index += blocks * Shape::kThreads) {
    const int of_query = index / kQuads, dim = index % kQuads * 4;
    if (dim >= head_dim) continue;
    Quad merged;
    const PartStats all = merge_some_parts<kMaxClusterSize>(
        filled_blocks,
        [&](int block) { return load_from_block(&results.merged[of_query], block); },
        [&](int block) { return load_from_block(&quad_of(0, of_query, dim), block); }, merged);
    store(of_query, dim, merged, all.sum);
  }
  cluster_barrier();  // the others' memory is read until here
}

template <typename T, typename Shape>
cudaError_t launch_prefix_kernel(const PrefixAttention& attention, unsigned blocks, cudaStream_t stream) {
  const int64_t queries = attention.length * (attention.heads / attention.kv_heads);
  const LaunchShape shape{.blocks = static_cast<unsigned>(ceil_div(queries, Shape::kQueries)) * blocks,
                          .threads = Shape::kThreads,
                          .shared_bytes = sizeof(typename Shape::Memory),
                          .cluster_blocks = blocks,
                          .blocks_y = static_cast<unsigned>(attention.kv_heads),
                          .blocks_z = static_cast<unsigned>(attention.rows)};
  const auto kernel = prefix_attention_kernel<T, Shape>;
  const SplitPrefixAttention split{attention, static_cast<int>(blocks)};
  return launch_dependent(kernel, split, shape, attention.pdl, stream);
}

}  // namespace fuseopt
