// decode_attention for float32 caches with heads of 64 or 128 dimensions, in multiply-adds: the tensor cores have no product
// of float32, and reading the cache takes longer than the multiply-adds.
//
// A warp loads a tile of keys and values straight into registers; neighbouring lanes share a key. Those of a warp's first
// tile, with mask and bias, are loaded before the kernel waits for its predecessor, since earlier steps have written them.
// Beams that share an item are queries of one warp, which reads each key once for up to 4 of them. The lanes of a key run
// the online softmax over their own keys; warps and blocks are merged at the end.
#pragma once

#include "cuda/decode/attention/mma.cuh"

namespace fuseopt {

template <int kDims, int kMostQueries>
struct Float32Shape {
  static constexpr int kQuadDims = 4, kQuads = 2;  // of a lane: 16-byte accesses, so that those of a key are neighbours
  static constexpr int kKeyLanes = kDims / (kQuadDims * kQuads), kTogether = kWarpSize / kKeyLanes;
  // TUNED: H200, 12 heads, 2 keys of a lane in flight instead of 4: 64 rows of 192 places 28.8 -> 26.3 us, 32 x 4 beams
  // 16.3 -> 14.5, 8 rows 4.9 -> 5.2; blocks of 4 or 8 warps instead of 16: 8 rows 6.4 and 6.6 (04e8b8d).
  static constexpr int kUnroll = 2;                  // keys of a lane in flight
  static constexpr int kKeys = kTogether * kUnroll;  // of a warp's tile
  // The most threads of a block, and the blocks that a multiprocessor has registers for.
  static constexpr int kThreads = kMostQueries == 1 ? 512 : 128, kBlocks = kMostQueries == 1 ? 1 : 3;
};

// 8 dimensions of a vector: a lane's, in two pieces.
using LaneQuads = float4[2];

__device__ inline float product_of(const LaneQuads& a, const LaneQuads& b) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) sum = fmaf(a[i].x, b[i].x, fmaf(a[i].y, b[i].y, fmaf(a[i].z, b[i].z, fmaf(a[i].w, b[i].w, sum))));
  return sum;
}

// The running softmax of one query's scores over the keys of the lanes that share a key, in powers of two.
struct Float32Attended {
  alignas(16) float weighted[8] = {};
  float largest = -INFINITY, sum = 0.f;

  // Rescales for scores up to `raised`.
  __device__ void raise(float raised) {
    const float factor = factor_of_part(largest, raised);
    sum *= factor;
#pragma unroll
    for (float& value : weighted) value *= factor;
    largest = raised;
  }

  __device__ void add(float weight, const LaneQuads& value) {
    const auto& values = reinterpret_cast<const float(&)[8]>(value);
    sum += weight;
#pragma unroll
    for (int i = 0; i < 8; ++i) weighted[i] = fmaf(weight, values[i], weighted[i]);
  }

  // Of all lanes of the warp. Each keeps the first four of its values, or the others if it `keeps_second`, in their place.
  template <int kKeyLanes>
  __device__ void merge_lanes(bool keeps_second) {
    float raised = largest;
#pragma unroll
    for (int distance = kKeyLanes; distance < kWarpSize; distance *= 2) {
      raised = fmaxf(raised, __shfl_xor_sync(kFullWarp, raised, distance));
    }
    raise(raised);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float given = keeps_second ? weighted[i] : weighted[i + 4], kept = keeps_second ? weighted[i + 4] : weighted[i];
      weighted[i] = kept + __shfl_xor_sync(kFullWarp, given, kKeyLanes);
    }
#pragma unroll
    for (int distance = kKeyLanes; distance < kWarpSize; distance *= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, distance);
#pragma unroll
      for (int i = 0; distance > kKeyLanes && i < 4; ++i) weighted[i] += __shfl_xor_sync(kFullWarp, weighted[i], distance);
    }
  }
};

template <int kDims, int kMostQueries, bool kAncestry>
__global__ void
__launch_bounds__(Float32Shape<kDims, kMostQueries>::kThreads, Float32Shape<kDims, kMostQueries>::kBlocks)
    decode_attention_float32_kernel(const __grid_constant__ DecodeAttention attention) {
  using Shape = Float32Shape<kDims, kMostQueries>;
  constexpr int kKeyLanes = Shape::kKeyLanes, kUnroll = Shape::kUnroll, kHalf = kDims / 2;
  let_successor_start();
  const unsigned item = cluster_index(), head = blockIdx.y, heads = gridDim.y;
  const int beams = kMostQueries == 1 ? 1 : static_cast<int>(attention.queries_per_kv), lane = threadIdx.x % kWarpSize;
  const unsigned row = item * beams + blockIdx.z * kMostQueries;
  const int queries = kMostQueries == 1 ? 1 : min(beams - static_cast<int>(blockIdx.z) * kMostQueries, kMostQueries);
  const int own_key = lane / kKeyLanes, dim = lane % kKeyLanes * Shape::kQuadDims;
  const Lengths lengths(attention, item);
  extern __shared__ __align__(16) char shared[];
  Parts parts(shared, queries, kDims);

  const int capacity = static_cast<int>(attention.capacity);
  const unsigned head_size = capacity * kDims;
  const int64_t row_size = static_cast<int64_t>(heads) * head_size;
  const int64_t own_offset = item * row_size + static_cast<int64_t>(head) * head_size + dim;
  float* const keys = static_cast<float*>(attention.key_cache) + own_offset;
  float* const values = static_cast<float*>(attention.value_cache) + own_offset;
  const auto vector_of = [&](const DecodeAttention::Heads& heads, int query) {
    return static_cast<const float*>(heads.data) + int64_t(row + query) * heads.row_stride + head * heads.head_stride + dim;
  };
  const float scale = attention.score_scale;
  const FilledPlaces places(attention, lengths);
  const auto load_quads = [](const float* vector, LaneQuads& quads) {
#pragma unroll
    for (int i = 0; i < 2; ++i) quads[i] = __ldcg(reinterpret_cast<const float4*>(vector + i * kHalf));
  };
  const auto store_quads = [](float* vector, const LaneQuads& quads) {
#pragma unroll
    for (int i = 0; i < 2; ++i) *reinterpret_cast<float4*>(vector + i * kHalf) = quads[i];
  };

  LaneQuads key[kUnroll], value[kUnroll];
  float addends[kUnroll];  // -INFINITY excludes a key
  const auto place_of = [&](int base, int u) { return base + u * Shape::kTogether + own_key; };
  const auto is_kept = [&](int base, int u) {
    const int place = place_of(base, u);
    return places.has(place) && mask_of(attention, item, place) != 0;
  };
  // Loads a tile except the new token, which the previous kernel computes.
  const auto load_tile = [&](int base) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int place = place_of(base, u);
      key[u][0] = key[u][1] = value[u][0] = value[u][1] = {};
      if (place >= places.end || place == places.token) continue;
      int64_t offset = static_cast<int64_t>(place) * kDims;
      if constexpr (kAncestry) offset += (static_cast<int64_t>(ancestor_of(attention, row, place)) - row) * row_size;
      load_quads(keys + offset, key[u]);
      load_quads(values + offset, value[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      addends[u] = -INFINITY;
      if (is_kept(base, u)) addends[u] = bias_of<float>(attention, places, head, place_of(base, u));
      else value[u][0] = value[u][1] = {};  // needed because a weight of 0 times NaN or infinity is NaN
    }
  };
  LaneQuads query[kMostQueries] = {};
  Float32Attended attended[kMostQueries];
  const auto attend = [&](int base) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (place_of(base, u) != places.token) continue;
      const int offset = places.token * kDims;
      LaneQuads token;
      load_quads(vector_of(attention.key, 0), key[u]);
      load_quads(vector_of(attention.value, 0), token);
      store_quads(keys + offset, key[u]);
      store_quads(values + offset, token);
      if (is_kept(base, u)) value[u][0] = token[0], value[u][1] = token[1];
    }
    float scores[kMostQueries][kUnroll];
#pragma unroll
    for (int q = 0; q < kMostQueries; ++q) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) scores[q][u] = product_of(query[q], key[u]);
      warp_reduce<Sum, kKeyLanes>(scores[q]);
    }
#pragma unroll
    for (int q = 0; q < kMostQueries; ++q) {
      float raised = attended[q].largest;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        scores[q][u] = addends[u] == -INFINITY ? -INFINITY : fmaf(scores[q][u], scale, addends[u]);
        raised = fmaxf(raised, scores[q][u]);
      }
      attended[q].raise(raised);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) attended[q].add(exp2_approx(scores[q][u] - origin_of(raised)), value[u]);
    }
  };

  const int first = places.first + parts.own() * Shape::kKeys, step = parts.count() * Shape::kKeys;
  if (first < places.end) load_tile(first);
  wait_for_predecessor();
#pragma unroll
  for (int q = 0; q < kMostQueries; ++q) {
    if (q < queries) load_quads(vector_of(attention.query, q), query[q]);
  }
  if (first < places.end) {
    attend(first);
#pragma unroll 1
    for (int base = first + step; base < places.end; base += step) {
      load_tile(base);
      attend(base);
    }
  }

  parts.await_first_block();
  const bool keeps_second = (lane & kKeyLanes) != 0;
#pragma unroll
  for (int q = 0; q < kMostQueries; ++q) {
    attended[q].template merge_lanes<kKeyLanes>(keeps_second);
    if (q >= queries || lane >= 2 * kKeyLanes) continue;
    const auto& weighted = reinterpret_cast<const float(&)[4]>(attended[q].weighted);
    parts.leave_values(q, dim + (keeps_second ? kHalf : 0), weighted);
    if (lane == 0) parts.leave_stats(q, attended[q].largest, attended[q].sum);
  }
  if (!parts.gather()) return;
  float* const output = static_cast<float*>(attention.output) + (static_cast<int64_t>(row) * heads + head) * kDims;
  const int filled = min((places.end - places.first + Shape::kKeys - 1) / Shape::kKeys, parts.count());
  for (int index = threadIdx.x; index < queries * kDims; index += blockDim.x) {
    const int query = index / kDims, at = index % kDims;
    output[static_cast<int64_t>(query) * heads * kDims + at] = parts.merged(query, at, filled);
  }
}

template <int kDims, int kMostQueries>
cudaError_t launch_float32_kernel(const DecodeAttention& attention, cudaStream_t stream) {
  using Shape = Float32Shape<kDims, kMostQueries>;
  const int64_t items = attention.rows / attention.queries_per_kv;
  const auto groups = static_cast<unsigned>(ceil_div(attention.queries_per_kv, kMostQueries));
  const int64_t queries = std::min<int64_t>(attention.queries_per_kv, kMostQueries);
  const Split split(attention, items * attention.heads * groups, Parts::bytes_of_part(queries, kDims),
                    Shape::kThreads / kWarpSize, Shape::kKeys);
  const LaunchShape shape{static_cast<unsigned>(items) * split.blocks,
                          split.threads(),
                          Parts::bytes(split.parts, queries, kDims),
                          split.blocks,
                          static_cast<unsigned>(attention.heads),
                          groups};
  auto kernel = decode_attention_float32_kernel<kDims, kMostQueries, false>;
  if constexpr (kMostQueries == 1) {  // with an ancestry each row has an item of its own
    if (attention.ancestry != nullptr) kernel = decode_attention_float32_kernel<kDims, 1, true>;
  }
  return launch_dependent(kernel, attention, shape, attention.pdl, stream);
}

}  // namespace fuseopt
