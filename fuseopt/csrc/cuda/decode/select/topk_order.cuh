// The highest of some scores, in the order of torch.topk on a GPU. Its documentation does not say which of equal scores
// it takes, or in what order, but beam search depends on that in a tie. First come the scores above the lowest one
// taken, in the order of the input; then as many as are wanted of those equal to it, also in input order. A bitonic
// network then sorts them, and does not keep the order of equal scores. At most 32 are taken, one per lane.
#pragma once

#include <climits>

#include "cuda/common/row_team.cuh"

namespace fuseopt {

constexpr int kMaxTaken = kWarpSize;
constexpr unsigned kNoKey = 0;  // below the key of every score

// Keys in torch.topk's order: NaN is the highest, and 0 is above -0.
__device__ inline unsigned key_of(float score) {
  if (isnan(score)) return 0xffffffffu;
  const unsigned bits = __float_as_uint(score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float score_of(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ inline unsigned max_of_warp(unsigned value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kFullWarp, value);
#else
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
#endif
}

__device__ inline int min_of_warp(int value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(kFullWarp, value);
#else
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = min(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
#endif
}

struct Taken {
  unsigned key;
  int place;
};

// Lane i < count gets the i-th highest of `size` keys in shared memory and its place; of equal keys the first comes
// first. Keys that are taken are overwritten with kNoKey. Lanes get kNoKey if no key is left.
__device__ inline Taken take_highest(unsigned* keys, int size, int count) {
  // TUNED: beam search (aa092c7).
  constexpr int kGroups = 4;  // groups of a lane's keys; for each key taken, one group is searched again
  const int lane = threadIdx.x % kWarpSize, group_keys = (size + kGroups * kWarpSize - 1) / (kGroups * kWarpSize);
  const auto look = [&](int group) {
    const int end = min(size, (group + 1) * group_keys * kWarpSize);
    Taken best = {kNoKey, INT_MAX};
#pragma unroll 8
    for (int i = group * group_keys * kWarpSize + lane; i < end; i += kWarpSize) {
      if (keys[i] > best.key) best = {keys[i], i};
    }
    return best;
  };
  Taken of_group[kGroups], taken = {};
#pragma unroll
  for (int group = 0; group < kGroups; ++group) of_group[group] = look(group);
  for (int i = 0; i < count; ++i) {
    Taken own = of_group[0];
#pragma unroll
    for (int group = 1; group < kGroups; ++group) {
      if (of_group[group].key > own.key) own = of_group[group];
    }
    const unsigned highest = max_of_warp(own.key);
    const int first = min_of_warp(own.key == highest ? own.place : INT_MAX);
    if (lane == i) taken = {highest, first};
    if (highest == kNoKey || own.place != first) continue;
    keys[first] = kNoKey;
    const int taken_from = first / (group_keys * kWarpSize);
    const Taken next = look(taken_from);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group == taken_from) of_group[group] = next;
    }
  }
  __syncwarp();
  return taken;
}

// A lane of the sorting network.
struct Sorted {
  Taken taken;
  bool is_valid;  // invalid elements are sorted after all valid ones
};

// Exchanges lanes `distance` apart if they are out of order.
__device__ inline void order_lanes(Sorted& own, int distance, bool ascending) {
  const Sorted other = {{__shfl_xor_sync(kFullWarp, own.taken.key, distance),
                         __shfl_xor_sync(kFullWarp, own.taken.place, distance)},
                        __shfl_xor_sync(kFullWarp, own.is_valid, distance) != 0};
  const bool is_first = (threadIdx.x & distance) == 0;
  const Sorted &first = is_first ? own : other, &second = is_first ? other : own;
  const float score = score_of(first.taken.key), next_score = score_of(second.taken.key);
  const bool is_greater = (isnan(score) && !isnan(next_score)) || score > next_score;
  const bool is_descending = (is_greater && first.is_valid) || !second.is_valid;
  if (is_descending == ascending) own = other;
}

// Reorders the result of `take_highest`, with places in the input, to torch.topk's order. `scratch` [kMaxTaken] is
// shared memory.
__device__ inline Taken in_topk_order(Taken taken, int count, Taken* scratch) {
  const int lane = threadIdx.x % kWarpSize;
  const bool is_valid = lane < count;
  const unsigned lowest = __shfl_sync(kFullWarp, taken.key, count - 1);
  const bool is_above = is_valid && taken.key > lowest;
  int rank = is_above ? 0 : lane;  // those equal to the lowest come last, in input order
  for (int i = 0; i < count; ++i) {
    const unsigned key = __shfl_sync(kFullWarp, taken.key, i);
    const int place = __shfl_sync(kFullWarp, taken.place, i);
    if (is_above && key > lowest && place < taken.place) ++rank;
  }
  scratch[rank] = taken;
  __syncwarp();
  Sorted own = {scratch[lane], is_valid};
  __syncwarp();
#pragma unroll
  for (int size = 2; size <= kWarpSize; size *= 2) {
#pragma unroll
    for (int distance = size / 2; distance > 0; distance /= 2) {
      order_lanes(own, distance, size < kWarpSize && (lane & size) != 0);
    }
  }
  return own.taken;
}

}  // namespace fuseopt
