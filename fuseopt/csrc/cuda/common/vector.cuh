// 16-byte accesses: a thread moves memory as Vector<T>, the widest access that every GPU from sm_75 has.
#pragma once

#include "cuda/common/dtype.cuh"

namespace fuseopt {

constexpr int kAccessBytes = 16;

template <typename T>
constexpr int kVectorWidth = kAccessBytes / static_cast<int>(sizeof(T));

// Aligned to one 16-byte access, even if it takes several: is_aligned checks no more than that. From sm_100 on the
// compiler would use 32-byte accesses for a larger alignment.
template <typename T, int kWidth = kVectorWidth<T>>
struct alignas(sizeof(T) * kWidth < kAccessBytes ? sizeof(T) * kWidth : kAccessBytes) Vector {
  T values[kWidth];

  __device__ float operator[](int i) const {
    // Converted from the 32-bit word that holds a pair: one instruction, while extracting the 16 bits first takes two.
    if constexpr (std::is_same_v<T, __nv_bfloat16> && kWidth % 2 == 0) {
      const unsigned pair = reinterpret_cast<const unsigned*>(values)[i / 2];
      return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    } else if constexpr (std::is_same_v<T, __half> && kWidth % 2 == 0) {
      const __half2 pair = reinterpret_cast<const __half2*>(values)[i / 2];
      return i % 2 == 0 ? __low2float(pair) : __high2float(pair);
    } else {
      return to_float(values[i]);
    }
  }
};

template <typename T, int kWidth = kVectorWidth<T>>
__device__ inline Vector<T, kWidth> load_vector(const T* data, int64_t vector) {
  return reinterpret_cast<const Vector<T, kWidth>*>(data)[vector];
}

// True where vector accesses to `data` are aligned; an absent tensor always is.
inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAccessBytes == 0; }

template <typename T, int kWidth>
__device__ inline void load_floats_as(const void* data, int64_t i, int64_t stride, float (&out)[kWidth]) {
  const T* first = static_cast<const T*>(data) + i;
  if (stride == 1 && reinterpret_cast<uintptr_t>(first) % alignof(Vector<T, kWidth>) == 0) {
    const auto vector = *reinterpret_cast<const Vector<T, kWidth>*>(first);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out[j] = vector[j];
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out[j] = to_float(first[j * stride]);
  }
}

// Loads the kWidth elements at i, i + stride ... of a small or cached tensor of any 16- or 32-bit dtype, in the widest
// accesses that the address allows.
template <int kWidth>
__device__ inline void load_floats(TypedPointer tensor, int64_t i, float (&out)[kWidth], int64_t stride = 1) {
  switch (static_cast<DType>(tensor.dtype)) {
    case kFloat16: load_floats_as<__half>(tensor.data, i, stride, out); return;
    case kBFloat16: load_floats_as<__nv_bfloat16>(tensor.data, i, stride, out); return;
    case kFloat32: load_floats_as<float>(tensor.data, i, stride, out); return;
    case kFloat64: break;
  }
  __trap();
}

// The same for a tensor of A or B.
template <typename A, typename B, int kWidth>
__device__ inline void load_floats(TypedPointer tensor, int64_t i, float (&out)[kWidth]) {
  if (std::is_same_v<A, B> || tensor.dtype == kDType<A>) load_floats_as<A>(tensor.data, i, 1, out);
  else load_floats_as<B>(tensor.data, i, 1, out);
}

// Uses a vector, whose elements are converted in pairs. Single conversions would occupy the special function unit.
template <typename T, int kWidth>
__device__ inline void round_floats_as(float (&x)[kWidth]) {
  Vector<T, kWidth> rounded;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) rounded.values[j] = from_acc<T>(x[j]);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) x[j] = rounded[j];
}

// Rounds each element as if stored in a tensor of `dtype` and read back.
template <int kWidth>
__device__ inline void round_floats(int dtype, float (&x)[kWidth]) {
  if (dtype == kFloat16) round_floats_as<__half>(x);
  if (dtype == kBFloat16) round_floats_as<__nv_bfloat16>(x);
}

template <typename T, int kWidth>
__device__ inline void store_floats_as(void* data, int64_t vector, const float (&in)[kWidth]) {
  Vector<T, kWidth> packed;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) packed.values[j] = from_acc<T>(in[j]);
  static_cast<Vector<T, kWidth>*>(data)[vector] = packed;
}

// Stores the vector-th group of kWidth elements. The dtype is a run-time argument: nothing waits for a store, and
// output dtypes stay out of the template lists.
template <int kWidth>
__device__ inline void store_floats(TypedPointer tensor, int64_t vector, const float (&in)[kWidth]) {
  switch (static_cast<DType>(tensor.dtype)) {
    case kFloat16: store_floats_as<__half>(tensor.data, vector, in); return;
    case kBFloat16: store_floats_as<__nv_bfloat16>(tensor.data, vector, in); return;
    case kFloat32: store_floats_as<float>(tensor.data, vector, in); return;
    case kFloat64: break;
  }
  __trap();
}

}  // namespace fuseopt
