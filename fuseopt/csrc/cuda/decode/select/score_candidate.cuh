// The best of several scores and its token, for searches that work in parts.
#pragma once

#include "cuda/decode/select/topk_order.cuh"

namespace fuseopt {

__device__ inline unsigned long long key_of(double score) {
  if (isnan(score)) return ~0ull;
  const auto bits = static_cast<unsigned long long>(__double_as_longlong(score));
  return bits >> 63 != 0 ? ~bits : bits | 1ull << 63;
}

// A score's key and its token; key 0 is below all scores. NaN is the highest, and the first of equal scores wins, as in
// torch.argmax; 0 and -0 are equal.
template <typename Acc>
struct Candidate {
  using Key = decltype(key_of(Acc()));
  static_assert(sizeof(Key) == sizeof(Acc));
  Key key = 0;
  int token = INT32_MAX;

  // Takes tokens in ascending order.
  __device__ void consider(Acc score, int its_token) {
    const Key its_key = key_of(score + Acc(0));
    if (its_key > key) key = its_key, token = its_token;
  }

  __device__ void consider(const Candidate& other) {
    if (other.key > key || (other.key == key && other.token < token)) *this = other;
  }

  // Reduces over every `lanes` neighbouring lanes of a warp; `lanes` is a power of two.
  __device__ void reduce(int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      const Key other = __shfl_xor_sync(kFullWarp, key, distance);
      consider({other, __shfl_xor_sync(kFullWarp, token, distance)});
    }
  }

  __device__ void reduce() {
    if constexpr (std::is_same_v<Acc, double>) {
      reduce(kWarpSize);
    } else {
      const Key highest = max_of_warp(key);
      token = min_of_warp(key == highest ? token : INT32_MAX);
      key = highest;
    }
  }
};

}  // namespace fuseopt
