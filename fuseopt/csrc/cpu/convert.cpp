#include "cpu/convert.h"
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace fuseopt {
namespace {

using c10::BFloat16;
using c10::Half;

template <typename From, typename To>
inline To convert(From value) {
  return static_cast<To>(value);
}
template <>
inline Half convert(double value) {
  return static_cast<Half>(static_cast<float>(value));
}
template <>
inline BFloat16 convert(double value) {
  return static_cast<BFloat16>(static_cast<float>(value));
}

template <typename From, typename To>
void convert_contiguous(const From* __restrict src, To* __restrict dst, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = convert<From, To>(src[i]);
}

#if defined(__F16C__)
// Compilers do not vectorise these two loops by themselves.
template <>
void convert_contiguous(const Half* __restrict src, float* __restrict dst, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(half));
  }
  for (; i < n; ++i) dst[i] = src[i];
}
template <>
void convert_contiguous(const float* __restrict src, Half* __restrict dst, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), half);
  }
  for (; i < n; ++i) dst[i] = src[i];
}
#endif

template <typename T, typename Math>
void load(const void* src, int64_t stride, int64_t n, Math* dst) {
  const T* typed = static_cast<const T*>(src);
  if (stride == 1) return convert_contiguous<T, Math>(typed, dst, n);
  for (int64_t i = 0; i < n; ++i) dst[i] = convert<T, Math>(typed[i * stride]);
}

template <typename T, typename Math>
void round_to(Math* row, int64_t n) {
  constexpr int64_t kBlock = 256;
  T rounded[kBlock];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = n - i < kBlock ? n - i : kBlock;
    convert_contiguous<Math, T>(row + i, rounded, count);
    convert_contiguous<T, Math>(rounded, row + i, count);
  }
}

}  // namespace

template <typename Math>
void load_row(const void* src, DType dtype, int64_t stride, int64_t n, Math* dst) {
  switch (dtype) {
    case kFloat32: return load<float>(src, stride, n, dst);
    case kFloat16: return load<Half>(src, stride, n, dst);
    case kBFloat16: return load<BFloat16>(src, stride, n, dst);
    case kFloat64: return load<double>(src, stride, n, dst);
  }
}

template <typename Math>
void store_row(const Math* src, int64_t n, DType dtype, void* dst) {
  switch (dtype) {
    case kFloat32: return convert_contiguous(src, static_cast<float*>(dst), n);
    case kFloat16: return convert_contiguous(src, static_cast<Half*>(dst), n);
    case kBFloat16: return convert_contiguous(src, static_cast<BFloat16*>(dst), n);
    case kFloat64: return convert_contiguous(src, static_cast<double*>(dst), n);
  }
}

template <typename Math>
void round_row(Math* row, int64_t n, DType dtype) {
  switch (dtype) {
    case kFloat32: return std::is_same_v<Math, float> ? void() : round_to<float>(row, n);
    case kFloat16: return round_to<Half>(row, n);
    case kBFloat16: return round_to<BFloat16>(row, n);
    case kFloat64: return;
  }
}

template void load_row(const void*, DType, int64_t, int64_t, float*);
template void load_row(const void*, DType, int64_t, int64_t, double*);
template void store_row(const float*, int64_t, DType, void*);
template void store_row(const double*, int64_t, DType, void*);
template void round_row(float*, int64_t, DType);
template void round_row(double*, int64_t, DType);

}  // namespace fuseopt
