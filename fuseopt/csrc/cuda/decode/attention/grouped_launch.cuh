// How decode_attention_grouped_kernel is launched, and the kernel that merges the parts of a long cache.
#pragma once

#include "cuda/decode/attention/attention_launchers.h"
#include "cuda/decode/attention/grouped.cuh"

namespace fuseopt {

constexpr int kMergeThreads = 256, kMergeDims = 2 * kWarpSize, kMaxParts = 128;

// Merges what blocks have left in the workspace; a block has kMergeDims dimensions of one query, and its warps share the
// parts. All loads of a thread are in flight together, as the latency of the L2 cache is what it waits for.
template <typename T>
__global__ void __launch_bounds__(kMergeThreads)
    decode_attention_merge_kernel(const __grid_constant__ GroupedAttention grouped) {
  let_successor_start();
  constexpr int kWarps = kMergeThreads / kWarpSize, kLoads = kMaxParts / kWarps, kLaneParts = kMaxParts / kWarpSize;
  __shared__ float2 sums[kWarps][kWarpSize];
  __shared__ float shares[kMaxParts];
  const DecodeAttention& attention = grouped.attention;
  const int head_dim = static_cast<int>(attention.head_dim), parts = grouped.blocks, size = head_dim + 2;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, dim = blockIdx.y * kMergeDims + 2 * lane;
  const float* const first = part_of(attention, blockIdx.x, parts, 0);
  wait_for_predecessor();
  float2 values[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int part = i * kWarps + warp;
    const bool is_there = part < parts && dim < head_dim;
    values[i] = is_there ? *reinterpret_cast<const float2*>(first + part * size + 2 + dim) : float2{};
  }
  if (warp == 0) {
    PartStats stats[kLaneParts];
    float largest = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < kLaneParts; ++i) {
      const int part = i * kWarpSize + lane;
      if (part < parts) stats[i] = *reinterpret_cast<const PartStats*>(first + part * size);
      largest = fmaxf(largest, stats[i].largest);
    }
    largest = warp_reduce<Max>(largest);
#pragma unroll
    for (int i = 0; i < kLaneParts; ++i) sum += factor_of_part(stats[i].largest, largest) * stats[i].sum;
    const float reciprocal = reciprocal_of_sum(warp_reduce<Sum>(sum));
#pragma unroll
    for (int i = 0; i < kLaneParts; ++i) {
      shares[i * kWarpSize + lane] = factor_of_part(stats[i].largest, largest) * reciprocal;
    }
  }
  __syncthreads();
  float2 total = {};
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const float share = shares[i * kWarps + warp];
    total.x += share * values[i].x;
    total.y += share * values[i].y;
  }
  sums[warp][lane] = total;
  __syncthreads();
  if (warp != 0 || dim >= head_dim) return;
#pragma unroll
  for (int i = 1; i < kWarps; ++i) {
    total.x += sums[i][lane].x;
    total.y += sums[i][lane].y;
  }
  T* const output = static_cast<T*>(attention.output) + int64_t(blockIdx.x) * head_dim + dim;
  *reinterpret_cast<unsigned*>(output) = packed<T>(total.x, total.y);
}

inline int64_t grouped_units(const DecodeAttention& attention) {
  return attention.rows * attention.group / attention.queries_per_kv * attention.kv_heads *
         ceil_div(attention.queries_per_kv, kTileQueries);
}

template <typename T, int kDims, typename Stored>
GroupedShape grouped_shape(const DecodeAttention& attention) {
  using Memory = GroupedMemory<T, kDims, Stored>;
  // TUNED: H200, bfloat16, 160 to 32768 keys, 1 to 64 rows of 8 heads of keys. Blocks of which two fit on a multiprocessor
  // are faster than those with more stages, as their clusters all find a place. 2048 keys of 128 dimensions, 1 row: 8.6 us
  // in clusters of 16 blocks, 7.5 with as many that leave parts; of 64 dimensions, clusters of 8: 5.8 and 6.3 (2992d6f).
  // Layers of Llama-3.2-1B, 1 row, 160 of 512 places: 707 us with clusters of two blocks, 669 with one of two stages.
  // One row of 32768 keys, behind a layer: 1 head of keys of 256 dimensions: 16.8 us with 128 blocks of 8 warps, 12.8 with
  // 4 warps of 3 stages; 2 heads of 64: 8.9 with 128 blocks, 6.7 with 66 of 3 stages; 8 heads: 33 blocks are best (5b3e12e).
  // Elements of 8 bits take twice the arithmetic a byte, so 8 warps a multiprocessor are too few if heads have 64 dimensions:
  // int8, 16 rows of 16384 keys, 8 heads: 125 us with one block of two stages a head, 69 with a cluster of two; 2048 keys: 18
  // and 14.6 us. 16 rows of 1024 keys, 12 heads: 11.1 us with one stage, 9.6 with two (bdb7a21d).
  constexpr bool kTakesMoreWarps = Memory::kIsQuantized && kDims == 64;
  // So many warps fit on a multiprocessor. TUNED: int8, heads of 64, 64 rows of 1024 keys of 8 heads: 23.6 us with 8 warps a
  // head, 19.7 with 4; 16 rows of 256 keys of 12 heads: 4.9 with 8, 5.7 with 4 (bdb7a21d).
  constexpr int64_t kResidentWarps = kDims > 128 ? 8 : 16;
  constexpr int64_t kLongTiles = 128, kFewTiles = 16;
  constexpr unsigned kManyParts = 64;
  static_assert(Memory::fixed_bytes() + kMaxGroupedWarps / 2 * sizeof(typename Memory::Tiles) <= kLeastSharedBytesOfSm80);
  const int64_t processors = multiprocessor_count(), units = grouped_units(attention);
  const int64_t longest = attention.window > 0 ? std::min(attention.window, attention.capacity) : attention.capacity;
  const int64_t tiles = ceil_div(longest, Memory::kKeys);
  const auto fits = [](const GroupedShape& shape) { return Memory::bytes(shape) <= shared_bytes_of_block(); };
  GroupedShape shape{kMaxGroupedWarps, 1, 1, false};
  while (shape.warps > 1 && (!fits(shape) || shape.warps / 2 >= tiles)) shape.warps /= 2;
  if (units > processors) {
    if constexpr (Memory::kIsQuantized) {
      while (shape.warps > 2 && units * shape.warps > kResidentWarps * processors) shape.warps /= 2;
    } else if (tiles <= kFewTiles) {
      shape.warps = std::min(shape.warps, 4u);
    }
    if (const GroupedShape two{shape.warps, 1, 2, false}; kTakesMoreWarps && shape.warps < tiles && fits(two)) return two;
    return shape;
  }
  if (const GroupedShape two{kMaxGroupedWarps, 2, 2, !is_sm90_or_newer()};
      kTakesMoreWarps && units * 2 > processors && tiles >= (two.leaves_parts ? kLongTiles : 2 * kFewTiles) && fits(two)) {
    return two;
  }
  const int64_t long_tiles = is_sm90_or_newer() ? kLongTiles : 2 * shape.warps;  // elsewhere there are no clusters
  if (tiles >= long_tiles && units * 2 <= processors) {
    const auto parts_of = [&](const GroupedShape& of, int64_t resident) {
      const int64_t most = std::min<int64_t>(tiles / of.warps, kMaxParts);
      return static_cast<unsigned>(std::min(resident * processors / units, most));
    };
    shape.blocks = parts_of(shape, shared_bytes_of_multiprocessor() >= 2 * (Memory::bytes(shape) + 1024) ? 2 : 1);
    if (shape.blocks > kManyParts) {
      // One block a multiprocessor instead of two, or half as many warps, leave room for more stages.
      GroupedShape staged{kMaxGroupedWarps, 1, 3, false};
      while (staged.warps > kMaxGroupedWarps / 2 && !fits(staged)) staged.warps /= 2;
      while (staged.stages > 1 && !fits(staged)) --staged.stages;
      staged.blocks = parts_of(staged, 1);
      if (staged.stages > 1) shape = staged;
    }
    shape.leaves_parts = shape.blocks > 1;
    return shape;
  }
  // A cluster starts when the previous kernel has ended, a block before that.
  while (is_sm90_or_newer() && tiles > kFewTiles && shape.blocks < kMaxClusterSize && shape.warps * shape.blocks * 2 <= tiles &&
         units * shape.blocks * 2 <= processors) {
    shape.blocks *= 2;
  }
  const GroupedShape two_stages{shape.warps, 1, 2, false};
  if (shape.blocks == 1 && shape.warps < tiles && fits(two_stages)) return two_stages;
  return shape;
}

// Floats of global memory for the parts.
inline int64_t workspace_of(const DecodeAttention& attention, const GroupedShape& shape) {
  return shape.leaves_parts ? attention.rows * attention.heads * shape.blocks * (attention.head_dim + 2) : 0;
}

template <typename T, int kDims, typename Stored>
cudaError_t launch_grouped_kernel(const DecodeAttention& attention, const GroupedShape& grouped, cudaStream_t stream) {
  const int64_t items = attention.rows * attention.group / attention.queries_per_kv;
  const LaunchShape shape{.blocks = static_cast<unsigned>(items) * grouped.blocks,
                          .threads = grouped.warps * kWarpSize,
                          .shared_bytes = GroupedMemory<T, kDims, Stored>::bytes(grouped),
                          .cluster_blocks = grouped.leaves_parts ? 1 : grouped.blocks,
                          .blocks_y = static_cast<unsigned>(attention.kv_heads),
                          .blocks_z = static_cast<unsigned>(ceil_div(attention.queries_per_kv, kTileQueries))};
  const auto kernel = decode_attention_grouped_kernel<T, kDims, Stored>;
  const GroupedAttention argument{attention, static_cast<int>(grouped.blocks), grouped.stages, grouped.leaves_parts};
  const cudaError_t error = launch_dependent(kernel, argument, shape, attention.pdl, stream);
  if (error != cudaSuccess || !grouped.leaves_parts) return error;
  const LaunchShape merge{.blocks = static_cast<unsigned>(attention.rows * attention.heads),
                          .threads = kMergeThreads,
                          .shared_bytes = 0,
                          .cluster_blocks = 1,
                          .blocks_y = static_cast<unsigned>(ceil_div(attention.head_dim, kMergeDims))};
  return launch_dependent(decode_attention_merge_kernel<T>, argument, merge, attention.pdl, stream);
}

// Calls `function` with the tag of the compiled head size, and returns its result.
template <typename Function>
auto with_grouped_dims(const DecodeAttention& attention, Function function) {
  return attention.head_dim <= 64    ? function(IntTag<64>{})
         : attention.head_dim <= 128 ? function(IntTag<128>{})
                                     : function(IntTag<256>{});
}

// `Stored` as in grouped.cuh.
template <typename T, typename Stored>
bool takes_grouped(const DecodeAttention& attention) {
  constexpr int kPieceDims = std::is_same_v<T, Stored> ? 8 : 16;
  return compute_capability_major() >= 8 && attention.head_dim % kPieceDims == 0 && attention.head_dim <= 256;
}

template <typename T, typename Stored>
int64_t grouped_workspace(const DecodeAttention& attention) {
  if (!takes_grouped<T, Stored>(attention)) return 0;
  return with_grouped_dims(attention, [&](auto dims) {
    return workspace_of(attention, grouped_shape<T, decltype(dims)::value, Stored>(attention));
  });
}

template <typename T, typename Stored>
bool launch_decode_attention_grouped(const DecodeAttention& attention, cudaStream_t stream, cudaError_t& error) {
  if (!takes_grouped<T, Stored>(attention)) return false;
  error = with_grouped_dims(attention, [&](auto dims) {
    constexpr int kDims = decltype(dims)::value;
    return launch_grouped_kernel<T, kDims, Stored>(attention, grouped_shape<T, kDims, Stored>(attention), stream);
  });
  return true;
}

}  // namespace fuseopt
