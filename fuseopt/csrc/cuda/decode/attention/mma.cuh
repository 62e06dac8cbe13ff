// decode_attention for 16-bit caches on the tensor cores, for so few rows that each head of an item can have a block or
// a cluster of blocks.
//
// A warp takes tiles of 16 keys. A tile's keys and values are loaded straight into registers, as fragments. Those of a
// warp's first tile, with mask and bias, are loaded before the kernel waits for its predecessor, since earlier steps
// have written them. After the wait it loads the query and the new key and value; then follow 4 products for the
// scores, a softmax within the warp, 5 products for the values, and the merge of the warps.
#pragma once

#include "cuda/attention/attention_parts.cuh"
#include "cuda/decode/attention/many_rows.cuh"
#include "cuda/common/dependent_launch.cuh"

namespace fuseopt {

// TUNED: one row, 128 positions: clusters of two or four blocks are faster than eight (239f1cf).
constexpr unsigned kMaxAttentionBlocks = 4;

template <int kDims>
constexpr int kMmaThreads = kDims == 64 ? 512 : 256;  // needs 128 registers or more

// kAlone: one query, in one block.
template <typename T, int kDims, bool kAncestry, bool kAlone>
__global__ void __launch_bounds__(kMmaThreads<kDims>)
    decode_attention_mma_kernel(const __grid_constant__ DecodeAttention attention) {
  using Tile = Tile<T, kDims>;
  let_successor_start();
  const unsigned item = cluster_index(), head = blockIdx.y, heads = gridDim.y;
  const int beams = kAlone ? 1 : static_cast<int>(attention.queries_per_kv), lane = threadIdx.x % kWarpSize;
  const unsigned row = item * beams + (kAlone ? 0 : blockIdx.z * kTileQueries);
  const int queries = kAlone ? 1 : min(beams - static_cast<int>(blockIdx.z) * kTileQueries, kTileQueries);
  const Lengths lengths(attention, item);
  extern __shared__ __align__(16) char shared[];
  std::conditional_t<kAlone, OwnParts<kDims>, Parts> parts(shared, queries, kDims);

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
  T* const output = settled(static_cast<T*>(attention.output) + (uint64_t(row) * heads + head) * kDims);
  const float scale = attention.score_scale;
  const FilledPlaces places(attention, lengths);
  T* const key_to = settled(keys + places.token * kDims);
  T* const value_to = settled(values + places.token * kDims);
  // The offset of a place from `keys` and `values`.
  const auto offset_of = [&](int place) {
    place = min(place, capacity - 1);
    if constexpr (!kAncestry) {
      return static_cast<unsigned>(place) * kDims;
    } else {
      return (int64_t(ancestor_of(attention, row, place)) - row) * heads * head_size + place * kDims;
    }
  };

  Tile tiles[1];
  Tile& tile = tiles[0];
  float addends[1][2];
  bool token_is_kept = false;
  // Loads a tile except the new token, which the previous kernel computes.
  const auto load_tile = [&](int base) {
    tile.load(keys, values, [&](int key) { return offset_of(base + key); });
    const bool kept_by_lane = mask_of(attention, item, min(base + lane % kTileKeys, capacity - 1)) != 0;
    float biases[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) biases[h] = bias_of<T>(attention, places, head, base + Tile::key_of(h));
    const unsigned kept = __ballot_sync(kFullWarp, kept_by_lane && lane < kTileKeys && places.has(base + lane));
#pragma unroll
    for (int h = 0; h < 2; ++h) addends[0][h] = kept >> Tile::key_of(h) & 1 ? biases[h] : -INFINITY;
    const unsigned dropped = ~kept & kAllTileKeys;
    if (dropped != 0) tile.drop_values(dropped);
    token_is_kept = kept >> (places.token - base & kTileKeys - 1) & 1;
  };
  uint4 query[Tile::kKeyParts] = {};
  Attended<T, kDims> attended;
  const auto attend = [&](int base, auto is_first) {
    const int token = places.token - base;
    if (token >= 0 && token < kTileKeys) {
      tile.replace(token, token_key, token_value, key_to, value_to, 0, token_is_kept);
    }
    attended.template add<decltype(is_first)::value>(tiles, query, kAlone ? 1 : kTileQueries, addends, 0u, scale);
  };

  const int first = places.first + parts.own() * kTileKeys, step = parts.count() * kTileKeys;
  const bool has_keys = first < places.end, has_query = lane / 4 < queries;
  if (has_keys) load_tile(first);
  wait_for_predecessor_settled(capacity < 0);
  if (has_query) Tile::load_parts(query_at, query);
  if (has_keys) {
    attend(first, std::true_type());
#pragma unroll 1
    for (int base = first + step; base < places.end; base += step) {
      load_tile(base);
      attend(base, std::false_type());
    }
  }

  const int filled = min((places.end - places.first + kTileKeys - 1) / kTileKeys, parts.count());
  if constexpr (kAlone) {
    if (has_keys) parts.leave(attended);
    __syncthreads();
    if (threadIdx.x < kWarpSize) parts.store_merged(output, filled);
  } else {
    parts.await_first_block();
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int part_query = lane % 4 * 2 + q;
      if (part_query >= queries) continue;
#pragma unroll
      for (int i = 0; i < Tile::kValueParts; ++i) {
        float values[8];
#pragma unroll
        for (int d = 0; d < 8; ++d) values[d] = attended.weighted[i * 4 + d / 2][d % 2 * 2 + q];
        parts.leave_values(part_query, Tile::value_dim() + i * 64, values);
      }
      if (lane / 4 == 0) parts.leave_stats(part_query, attended.largest[q], attended.sum[q]);
    }
    if (!parts.gather()) return;
    for (unsigned index = threadIdx.x; index < queries * kDims; index += blockDim.x) {
      const unsigned query = index / kDims, dim = index % kDims;
      output[uint64_t(query) * heads * kDims + dim] = from_acc<T>(parts.merged(query, dim, filled));
    }
  }
}

// How many warps share the places of a block's queries (a power of two), in how many blocks: enough warps to hold all
// places in registers at once, if they fit on the device. One row with many heads has a cluster of two blocks per head,
// only because a cluster starts when the previous kernel ends. Otherwise these blocks, and those of the next layer that
// start with them, would load while the previous kernel still does.
struct Split {
  unsigned parts, blocks;

  Split(const DecodeAttention& attention, int64_t units, size_t bytes_of_part, unsigned most_warps,
        int64_t keys_of_warp = kTileKeys) {
    constexpr size_t kSharedBytes = 96 * 1024;
    static_assert(kSharedBytes + sizeof(float4) <= kLeastSharedBytesOfSm80);
    parts = is_sm90_or_newer() ? most_warps * kMaxAttentionBlocks : most_warps;
    while (parts > 4 && (parts / 2 * keys_of_warp >= attention.capacity || parts * bytes_of_part > kSharedBytes ||
                         units * parts > tuning().decode_attention_warps * multiprocessor_count())) {
      parts /= 2;
    }
    const bool has_many_heads = attention.heads >= tuning().decode_attention_many_heads;
    if (is_sm90_or_newer() && attention.rows == 1 && has_many_heads && parts == most_warps) parts *= 2;
    blocks = (parts + most_warps - 1) / most_warps;
  }

  unsigned threads() const { return parts / blocks * kWarpSize; }
};

template <typename T, int kDims>
cudaError_t launch_mma_kernel(const DecodeAttention& attention, cudaStream_t stream) {
  const int64_t items = attention.rows / attention.queries_per_kv;
  const auto groups = static_cast<unsigned>(ceil_div(attention.queries_per_kv, kTileQueries));
  if (are_many_rows(items * attention.heads * groups)) {
    return launch_many_rows_kernel<T, kDims>(attention, items, groups, stream);
  }
  const int64_t queries = std::min<int64_t>(attention.queries_per_kv, kTileQueries);
  const Split split(attention, items * attention.heads * groups, Parts::bytes_of_part(queries, kDims),
                    kMmaThreads<kDims> / kWarpSize);
  const LaunchShape shape{static_cast<unsigned>(items) * split.blocks,
                          split.threads(),
                          Parts::bytes(split.parts, queries, kDims),
                          split.blocks,
                          static_cast<unsigned>(attention.heads),
                          groups};
  const bool follows = attention.ancestry != nullptr;
  const auto kernel = attention.queries_per_kv == 1 && split.blocks == 1
                          ? follows ? decode_attention_mma_kernel<T, kDims, true, true>
                                    : decode_attention_mma_kernel<T, kDims, false, true>
                      : follows ? decode_attention_mma_kernel<T, kDims, true, false>
                                : decode_attention_mma_kernel<T, kDims, false, false>;
  return launch_dependent(kernel, attention, shape, attention.pdl, stream);
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
