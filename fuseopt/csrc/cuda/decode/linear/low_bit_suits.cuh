// Which layers decode_low_bit_linear's tensor core kernel takes.
#pragma once

#include "cuda/decode/linear/params.cuh"

namespace fuseopt {

template <typename T>
bool suits_low_bit(const LowBitLinear& low_bit) {
  const DecodeLinear& layer = low_bit.layer;
  constexpr int64_t kRowBytes = 16;
  bool suits = compute_capability_major() >= 8 && suits_mma<T>(layer, INT32_MAX) &&
               layer.in_features * low_bit.bits / 8 % kRowBytes == 0 &&
               low_bit.scale_dtype == (low_bit.bits == 8 ? kFloat32 : kDType<T>);
  for (int i = 0; i < layer.weight_count; ++i) suits &= is_aligned(low_bit.scales[i]) && is_aligned(low_bit.zeros[i]);
  return suits;
}

// For layers that suit; for more rows than the kernel takes, several times.
template <typename T>
cudaError_t launch_low_bit(const LowBitLinear& low_bit, cudaStream_t stream);

extern template cudaError_t launch_low_bit<__half>(const LowBitLinear&, cudaStream_t);
extern template cudaError_t launch_low_bit<__nv_bfloat16>(const LowBitLinear&, cudaStream_t);

}  // namespace fuseopt
