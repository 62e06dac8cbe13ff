// decode_attention for 16-bit caches whose heads of keys serve a group of queries each, with rotation, norms, windows and
// soft caps, and for long caches.
//
// A head of keys of an item has one or several blocks, which read each key once for up to 8 queries: a group's, or those
// of several beams. More queries have further blocks, which find the keys in the L2 cache. The warps take tiles of keys
// in turn, through stages in shared memory as in many_rows.cuh. Meanwhile the queries and the new key are normalised and
// rotated; they are shared by the block's warps. Parts are merged in a block, then in a cluster of up to 16 blocks. A
// long cache has more blocks: they leave their parts in global memory, and a second kernel merges them.
//
// `Stored` is T, or Int8 or Fp8 for caches of 8 bits (quantized_tile.cuh).
#pragma once

#include "cuda/decode/attention/head_rotation.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/decode/attention/quantized_tile.cuh"

namespace fuseopt {

constexpr int kMaxGroupedWarps = 8;

// Warps of a block, blocks of a head of keys, and stages of a warp. The blocks are a cluster, unless `leaves_parts`.
struct GroupedShape {
  unsigned warps, blocks;
  int stages;
  bool leaves_parts;
};

struct GroupedAttention {
  DecodeAttention attention;
  int blocks, stages;
  bool leaves_parts;  // in `attention.workspace`
};

// The part of one block in the workspace: [rows, heads, blocks] of stats and `head_dim` weighted values.
__device__ inline float* part_of(const DecodeAttention& attention, int64_t row_and_head, int blocks, int block) {
  return attention.workspace + (row_and_head * blocks + block) * (attention.head_dim + 2);
}

template <typename T, int kDims, typename Stored>
struct GroupedMemory {
  static constexpr bool kIsQuantized = !std::is_same_v<T, Stored>;
  using Element = std::conditional_t<kIsQuantized, unsigned char, T>;  // of the caches
  using Factor = std::conditional_t<kIsQuantized, __half, T>;          // of the products
  using Tile = std::conditional_t<kIsQuantized, QuantizedTile<Stored, kDims>, SharedTile<T, kDims>>;
  static constexpr int kTiles = kIsQuantized ? 2 : kTileStageBytes > sizeof(Tile) ? kTileStageBytes / sizeof(Tile) : 1;
  static constexpr int kKeys = kTiles * kTileKeys;
  using Tiles = Tile[kTiles];
  static constexpr int kPitch = kDims + 8;  // so that rows are in different banks
  static constexpr int kVectors = kTileQueries + 2;

  Factor vectors[kVectors][kPitch];  // queries, then the new key and value, which are Elements
  alignas(float2) float merged[kTileQueries][kDims];  // of this block
  PartStats stats[kTileQueries];
  float scales[kIsQuantized ? kVectors : 2];  // of `vectors`
  float scratch[kMaxGroupedWarps * kWarpSize * LaneRotation<float>::kScratch];

  static constexpr size_t fixed_bytes() { return (sizeof(GroupedMemory) + kRingAlignment - 1) / kRingAlignment * kRingAlignment; }
  static size_t bytes(const GroupedShape& shape) { return fixed_bytes() + sizeof(Tiles) * shape.warps * shape.stages; }
};

template <typename T, int kDims, typename Stored>
__global__ void __launch_bounds__(kMaxGroupedWarps* kWarpSize, kDims > 128 ? 1 : 2)
    decode_attention_grouped_kernel(const __grid_constant__ GroupedAttention grouped) {
  using Memory = GroupedMemory<T, kDims, Stored>;
  using Element = typename Memory::Element;
  using Tile = typename Memory::Tile;
  using Tiles = typename Memory::Tiles;
  using Result = SharedResult<kDims>;
  constexpr bool kIsQuantized = Memory::kIsQuantized;
  constexpr int kKeys = Memory::kKeys, kPieces = Tile::kPieces, kPieceDims = Tile::kPieceDims;
  constexpr int kVectorLanes = kDims / 8;  // of a query, and of the new key and value
  static_assert(sizeof(Result) <= sizeof(Tiles));
  let_successor_start();
  const DecodeAttention& attention = grouped.attention;
  const int lane = threadIdx.x % kWarpSize, own = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int blocks = grouped.blocks, rank = static_cast<int>(blockIdx.x) % blocks;
  const int head_dim = static_cast<int>(attention.head_dim), group = static_cast<int>(attention.group);
  const int beams = static_cast<int>(attention.queries_per_kv) / group;  // rows that share an item
  const unsigned item = blockIdx.x / blocks, kv_head = blockIdx.y, kv_heads = gridDim.y, heads = kv_heads * group;
  const int first_query = blockIdx.z * kTileQueries;
  const int queries = min(beams * group - first_query, kTileQueries);
  // Without a division where an item has one row.
  const auto row_of = [&](int query) { return beams == 1 ? item : item * beams + (first_query + query) / group; };
  const auto head_of = [&](int query) {
    return kv_head * group + (beams == 1 ? first_query + query : (first_query + query) % group);
  };
  const unsigned row = item * beams;  // the only one if there is an ancestry or a new key
  const bool has_token = attention.key.data != nullptr, has_piece = Tile::own_piece() * kPieceDims < head_dim;
  extern __shared__ __align__(kRingAlignment) char grouped_shared[];
  auto& memory = *reinterpret_cast<Memory*>(grouped_shared);
  Tiles* const stages = reinterpret_cast<Tiles*>(grouped_shared + Memory::fixed_bytes()) + own * grouped.stages;

  const int capacity = static_cast<int>(attention.capacity);
  const int64_t head_size = static_cast<int64_t>(capacity) * head_dim, row_size = kv_heads * head_size;
  const int64_t head_offset = item * row_size + kv_head * head_size;
  Element* const key_cache = static_cast<Element*>(attention.key_cache) + head_offset;
  Element* const value_cache = static_cast<Element*>(attention.value_cache) + head_offset;
  const Lengths lengths(attention, item);
  const int vector_piece = threadIdx.x % kVectorLanes, vector_dim = vector_piece * 8;
  const LaneRotation<float> rotation(attention.rotation, row, vector_dim, head_dim);
  FilledPlaces places(attention, lengths);
  if (attention.window > 0) {
    places.start = max(places.start, places.end - static_cast<int>(attention.window));
    places.first = max(places.first, min(places.start, places.end - 1));
  }
  const int written = places.token >= 0 ? places.token : places.end;  // places before it are already in the cache
  const int step = blocks * warps * kKeys;
  const auto place_of_lane = [&](int base) { return min(base + lane % kKeys, capacity - 1); };
  const auto mask_of_lane = [&](int base) { return mask_of(attention, item, place_of_lane(base)); };
  const auto ancestor_of_lane = [&](int base) {
    return attention.ancestry == nullptr ? row : ancestor_of(attention, row, place_of_lane(base));
  };
  // Of a key and its value.
  const int64_t scales_offset = (int64_t(item) * kv_heads + kv_head) * capacity;
  const auto scales_of_lane = [&](int base) {
    float2 scales = {};
    if constexpr (kIsQuantized) {
      const int64_t of_ancestor = static_cast<int>(ancestor_of_lane(base) - row) * int64_t(kv_heads) * capacity;
      const int64_t index = scales_offset + of_ancestor + place_of_lane(base);
      scales = {__ldcg(attention.key_scales + index), __ldcg(attention.value_scales + index)};
    }
    return scales;
  };
  // Evicted first, as in many_rows.cuh, unless other blocks read the same keys.
  const uint64_t policy = evict_first();
  const auto fetch = [&](Tiles& tiles, int base, unsigned ancestor) {
    const int place = base + Tile::own_key();
    const int64_t from = static_cast<int64_t>(place) * head_dim + Tile::own_piece() * kPieceDims;
    const int there = has_piece ? written - place : 0;
    // Without an ancestry nothing has to be exchanged. TUNED: int8, 16 rows of 8192 keys of 8 heads of 128: 69.7 and 66.0 us;
    // 16 rows of 2048 keys of 8 heads of 64: 18.2 and 17.2 (bdb7a21d).
    if (kIsQuantized && attention.ancestry == nullptr && gridDim.z == 1) {
      const auto offset_of = [&](int key) { return int64_t(key) * head_dim; };
      Tile::fetch(tiles, key_cache + from, value_cache + from, there, offset_of, policy);
      return;
    }
    const auto offset_of = [&](int key) {
      const unsigned source = __shfl_sync(kFullWarp, ancestor, key + Tile::own_key());
      return static_cast<int>(source - row) * row_size + key * head_dim;
    };
    if (gridDim.z == 1) Tile::fetch(tiles, key_cache + from, value_cache + from, there, offset_of, policy);
    else Tile::fetch(tiles, key_cache + from, value_cache + from, there, offset_of);
  };

  int base = places.first + (rank * warps + own) * kKeys;
  unsigned next_ancestor = ancestor_of_lane(base);
#pragma unroll 1
  for (int s = 0; s < grouped.stages; ++s) {
    const unsigned ancestor = next_ancestor;
    next_ancestor = ancestor_of_lane(base + (s + 1) * step);
    if (base + s * step < places.end) fetch(stages[s], base + s * step, ancestor);
    end_copy_group();
  }
  unsigned next_mask = mask_of_lane(base);
  float2 next_scales = scales_of_lane(base);
  wait_for_predecessor();

  // Queries, and the new key and value: kVectorLanes lanes take one.
  const int vectors = has_token ? queries + 2 : queries;
  constexpr int kTogether = kWarpSize / kVectorLanes;
#pragma unroll 1
  for (int first = own * kTogether; first < vectors; first += warps * kTogether) {
    const int vector = first + lane / kVectorLanes;
    const HeadPart part = vector < queries    ? HeadPart::kQuery
                          : vector == queries ? HeadPart::kKey
                                              : HeadPart::kValue;
    Vector<T, 8> piece = {};
    if (vector < vectors && vector_dim < head_dim) {
      const auto& of_heads = part == HeadPart::kQuery ? attention.query
                             : part == HeadPart::kKey ? attention.key
                                                      : attention.value;
      const unsigned of_row = part == HeadPart::kQuery ? row_of(vector) : row;
      const unsigned of_head = part == HeadPart::kQuery ? head_of(vector) : kv_head;
      const T* const from = static_cast<const T*>(of_heads.data) + of_row * of_heads.row_stride + of_head * of_heads.head_stride;
      const uint4 loaded = __ldcg(reinterpret_cast<const uint4*>(from) + vector_piece);
      piece = reinterpret_cast<const Vector<T, 8>&>(loaded);
    }
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = piece[i];
    constexpr int kScratch = LaneRotation<float>::kScratch;
    rotation.apply<kVectorLanes>(x, part, memory.scratch + (threadIdx.x - lane % kVectorLanes) * kScratch);
#pragma unroll
    for (int i = 0; i < 8; ++i) piece.values[i] = from_acc<T>(x[i]);
    if constexpr (kIsQuantized) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = piece[i];
      const float largest = largest_magnitude<kVectorLanes>(x);
      float scale = power_of_two(largest);
      if (vector < queries) {
        const float per_scale = inverse(scale);
        Vector<__half, 8> halves;
#pragma unroll
        for (int i = 0; i < 8; ++i) halves.values[i] = __float2half_rn(x[i] * per_scale);
        reinterpret_cast<Vector<__half, 8>*>(memory.vectors[vector])[vector_piece] = halves;
      } else if (vector < vectors) {
        reinterpret_cast<uint2*>(memory.vectors[vector])[vector_piece] = quantized<Stored>(x, largest, scale);
      }
      if (vector < vectors && vector_piece == 0) memory.scales[vector] = scale;
    } else if (vector < vectors) {
      reinterpret_cast<Vector<T, 8>*>(memory.vectors[vector])[vector_piece] = piece;
    }
  }
  __syncthreads();
  unsigned query[kDims / 8] = {};
  if (lane / 4 < queries) {
    if constexpr (kIsQuantized) {
      const auto quads = reinterpret_cast<const uint2*>(memory.vectors[lane / 4]) + lane % 4;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        query[i * 2] = __byte_perm(quads[i * 4].x, quads[i * 4].y, 0x5410);
        query[i * 2 + 1] = __byte_perm(quads[i * 4].x, quads[i * 4].y, 0x7632);
      }
    } else {
      const auto pairs = reinterpret_cast<const unsigned*>(memory.vectors[lane / 4]) + lane % 4;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) query[i] = pairs[i * 4];
    }
  }
  float query_scales[2] = {1, 1};
  if constexpr (kIsQuantized) {
#pragma unroll
    for (int q = 0; q < 2; ++q) query_scales[q] = memory.scales[min(lane % 4 * 2 + q, queries - 1)] * Stored::unit();
  }

  const float scale = attention.score_scale;
  const float cap = static_cast<float>(attention.softcap), cap_scale = cap > 0 ? scale / (cap * kLog2E) : 0.f;
  std::conditional_t<kIsQuantized, QuantizedAttended<Stored, kDims>, Attended<T, kDims>> attended;
#pragma unroll 1
  for (int stage = 0; base < places.end; base += step, stage = stage + 1 < grouped.stages ? stage + 1 : 0) {
    Tiles& tiles = stages[stage];
    const int place = base + lane % kKeys;
    const bool is_kept = next_mask != 0 && places.has(place);
    const unsigned kept = __ballot_sync(kFullWarp, is_kept);
    const unsigned dropped = __ballot_sync(kFullWarp, !is_kept && place < places.end);
    next_mask = mask_of_lane(base + step);
    float2 scales = next_scales;
    next_scales = scales_of_lane(base + step);
    if (grouped.stages == 1) await_copy_groups<0>();
    else if (grouped.stages == 2) await_copy_groups<1>();
    else await_copy_groups<2>();
    __syncwarp();
    const int token_key = places.token - base;
    if (token_key >= 0 && token_key < kKeys) {
#pragma unroll
      for (int i = lane; i < 2 * kPieces; i += kWarpSize) {
        const bool is_value = i >= kPieces;
        const uint4 piece = reinterpret_cast<const uint4*>(memory.vectors[queries + is_value])[Tile::own_piece()];
        Tile::put(tiles, token_key, is_value, piece);
        Element* const to = (is_value ? value_cache : key_cache) + static_cast<int64_t>(places.token) * head_dim;
        if (has_piece && blockIdx.z == 0) reinterpret_cast<uint4*>(to)[Tile::own_piece()] = piece;
      }
      if constexpr (kIsQuantized) {
        if (lane == token_key) {
          scales = {memory.scales[queries], memory.scales[queries + 1]};
          attention.key_scales[scales_offset + places.token] = scales.x;
          attention.value_scales[scales_offset + places.token] = scales.y;
        }
      }
      __syncwarp();
    }
    float key_scales[kIsQuantized ? Memory::kTiles * 2 : 1];
    if constexpr (kIsQuantized) {
#pragma unroll
      for (int i = 0; i < Memory::kTiles * 2; ++i) key_scales[i] = __shfl_sync(kFullWarp, scales.x, i * 8 + lane / 4);
    }
    const auto to_scores = [&](float (&scores)[Memory::kTiles][4], int q) {
      const auto for_each = [&](auto change) {
#pragma unroll
        for (int i = 0; i < Memory::kTiles * 2; ++i) change(scores[i / 2][i % 2 * 2 + q], i * 8 + lane / 4);
      };
      if constexpr (kIsQuantized) {
#pragma unroll
        for (int i = 0; i < Memory::kTiles * 2; ++i) {
          scores[i / 2][i % 2 * 2 + q] *= key_scales[i] * query_scales[q];
        }
      }
      if (cap > 0) for_each([&](float& score, int) { score = cap * kLog2E * tanhf(score * cap_scale); });
      else for_each([&](float& score, int) { score *= scale; });
      if (attention.bias.data != nullptr) {
        const unsigned head = head_of(min(lane % 4 * 2 + q, queries - 1));  // a tile may have fewer queries than columns
        for_each([&](float& score, int key) { score += bias_of<T>(attention, places, head, base + key); });
      }
      for_each([&](float& score, int key) { score = kept >> key & 1 ? score : -INFINITY; });
    };
    if constexpr (kIsQuantized) attended.add_scored(tiles, query, queries, dropped, is_kept ? scales.y : 0, to_scores);
    else attended.add_scored(tiles, query, queries, dropped, to_scores);
    __syncwarp();
    const unsigned ancestor = next_ancestor;
    next_ancestor = ancestor_of_lane(base + (grouped.stages + 1) * step);
    if (base + grouped.stages * step < places.end) fetch(tiles, base + grouped.stages * step, ancestor);
    end_copy_group();
  }

  if constexpr (kIsQuantized) attended.finish();
  reinterpret_cast<Result*>(stages)->template leave<Tile>(attended, queries);
  __syncthreads();
  const auto result_of = [&](int warp) { return reinterpret_cast<const Result*>(stages + (warp - own) * grouped.stages); };
  using Pair = Vector<float, 2>;  // neighbouring dimensions, which a thread merges
  const auto index_of = [&](int query) { return uint64_t(row_of(query)) * heads + head_of(query); };
  const auto store = [&](int query, int dim, const Pair& merged, float sum) {
    const float reciprocal = reciprocal_of_sum(sum);
    T* const output = static_cast<T*>(attention.output) + index_of(query) * head_dim + dim;
    *reinterpret_cast<unsigned*>(output) = packed<T>(merged[0] * reciprocal, merged[1] * reciprocal);
  };
  constexpr int kPairs = kDims / 2;
  for (int index = threadIdx.x; index < queries * kPairs; index += blockDim.x) {
    const int q = index / kPairs, dim = index % kPairs * 2;
    if (dim >= head_dim) continue;
    Pair merged;
    const PartStats all = merge_some_parts<kMaxGroupedWarps>(
        warps,
        [&](int warp) { return PartStats{result_of(warp)->largest[q], result_of(warp)->sum[q]}; },
        [&](int warp) { return reinterpret_cast<const Pair&>(result_of(warp)->values[q][dim]); }, merged);
    if (grouped.leaves_parts) {
      float* const part = part_of(attention, index_of(q), blocks, rank);
      *reinterpret_cast<Pair*>(part + 2 + dim) = merged;
      if (dim == 0) *reinterpret_cast<PartStats*>(part) = all;
    } else if (blocks > 1) {
      reinterpret_cast<Pair&>(memory.merged[q][dim]) = merged;
      if (dim == 0) memory.stats[q] = all;
    } else {
      store(q, dim, merged, all.sum);
    }
  }
  if (blocks == 1 || grouped.leaves_parts) return;
  cluster_barrier();
  const auto remote = [&](const float& value, int block) {
    return __uint_as_float(load_from_block(reinterpret_cast<const unsigned*>(&value), block));
  };
  for (int index = rank * blockDim.x + threadIdx.x; index < queries * kPairs; index += blocks * blockDim.x) {
    const int q = index / kPairs, dim = index % kPairs * 2;
    if (dim >= head_dim) continue;
    Pair merged;
    const PartStats all = merge_some_parts<kMaxClusterSize>(
        blocks,
        [&](int block) { return PartStats{remote(memory.stats[q].largest, block), remote(memory.stats[q].sum, block)}; },
        [&](int block) { return Pair{remote(memory.merged[q][dim], block), remote(memory.merged[q][dim + 1], block)}; },
        merged);
    store(q, dim, merged, all.sum);
  }
  cluster_barrier();  // the others' memory is read until here
}

}  // namespace fuseopt
