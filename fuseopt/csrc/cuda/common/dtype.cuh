// Element types: conversions to and from the type of the arithmetic, and access to tensors whose type is known at run
// time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/launchers.h"

namespace fuseopt {

template <typename T>
struct TypeTag {
  using type = T;
};

// In place of an element type that is known only at run time; for tensors that are small or cached.
struct AnyType {};

template <typename T>
constexpr int kDType = kFloat32;
template <>
constexpr int kDType<__half> = kFloat16;
template <>
constexpr int kDType<__nv_bfloat16> = kBFloat16;
template <>
constexpr int kDType<double> = kFloat64;

// Calls `function(TypeTag<T>)` for the dtypes that the fast kernels are compiled for; returns false for any other.
template <typename Function>
bool dispatch_fast_dtype(int dtype, Function function) {
  switch (static_cast<DType>(dtype)) {
    case kFloat32: function(TypeTag<float>{}); return true;
    case kFloat16: function(TypeTag<__half>{}); return true;
    case kBFloat16: function(TypeTag<__nv_bfloat16>{}); return true;
    case kFloat64: break;
  }
  return false;
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Acc is float or double. Rounding is to nearest even, as in torch.
template <typename T, typename Acc>
__device__ inline T from_acc(Acc x) {
  if constexpr (std::is_same_v<T, __half>) {
    if constexpr (std::is_same_v<Acc, double>) return __double2half(x);
    else return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if constexpr (std::is_same_v<Acc, double>) return __double2bfloat16(x);
    else return __float2bfloat16_rn(x);
  } else {
    return static_cast<T>(x);
  }
}

template <typename Acc>
__device__ inline Acc load_as(TypedPointer tensor, int64_t i) {
  switch (static_cast<DType>(tensor.dtype)) {
    case kFloat32: return static_cast<const float*>(tensor.data)[i];
    case kFloat16: return __half2float(static_cast<const __half*>(tensor.data)[i]);
    case kBFloat16: return __bfloat162float(static_cast<const __nv_bfloat16*>(tensor.data)[i]);
    case kFloat64: return static_cast<Acc>(static_cast<const double*>(tensor.data)[i]);
  }
  __trap();
  return Acc(0);
}

template <typename Acc>
__device__ inline void store_as(TypedPointer tensor, int64_t i, Acc x) {
  switch (static_cast<DType>(tensor.dtype)) {
    case kFloat32: static_cast<float*>(tensor.data)[i] = static_cast<float>(x); return;
    case kFloat16: static_cast<__half*>(tensor.data)[i] = from_acc<__half>(x); return;
    case kBFloat16: static_cast<__nv_bfloat16*>(tensor.data)[i] = from_acc<__nv_bfloat16>(x); return;
    case kFloat64: static_cast<double*>(tensor.data)[i] = x; return;
  }
  __trap();
}

// x rounded as if stored in a tensor of `dtype` and read back.
template <typename Acc>
__device__ inline Acc round_to(int dtype, Acc x) {
  switch (static_cast<DType>(dtype)) {
    case kFloat16: return __half2float(from_acc<__half>(x));
    case kBFloat16: return __bfloat162float(from_acc<__nv_bfloat16>(x));
    case kFloat32: return static_cast<float>(x);
    case kFloat64: return x;
  }
  __trap();
  return x;
}

}  // namespace fuseopt
