// The best of scores and where it stands, for who looks for it in parts.
#pragma once

#include "cuda/decode/select/topk_order.cuh"

namespace fuseopt {

__device__ inline unsigned long long key_of(double score) {
  if (isnan(score)) return ~0ull;
  const auto bits = static_cast<unsigned long long>(__double_as_longlong(score));
  return bits >> 63 != 0 ? ~bits : bits | 1ull << 63;
}

// The key of a score and where it stands; 0 is below all. NaN is above everything, and of equals, as 0 and -0 are, the
// first wins, as in torch.argmax.
template <typename Acc>
struct Candidate {
  using Key = decltype(key_of(Acc()));
  static_assert(sizeof(Key) == sizeof(Acc));
  Key key = 0;
  int token = INT32_MAX;

  // Of tokens that come in order.
  __device__ void consider(Acc score, int its_token) {
    const Key its_key = key_of(score + Acc(0));
    if (its_key > key) key = its_key, token = its_token;
  }

  __device__ void consider(const Candidate& other) {
    if (other.key > key || (other.key == key && other.token < token)) *this = other;
  }

  // Over every `lanes` neighbouring lanes of a warp, a power of two of them.
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
