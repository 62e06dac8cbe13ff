// Rows of any element type, read and written as float or double.
#pragma once

#include <cstdint>
#include <type_traits>

#include "dtypes.h"

namespace fuseopt {

template <typename Math>
constexpr DType dtype_of = std::is_same_v<Math, double> ? kFloat64 : kFloat32;

/// dst[i] = src[i * stride] for i < n; `stride` in elements of `dtype`, any sign or zero.
template <typename Math>
void load_row(const void* src, DType dtype, int64_t stride, int64_t n, Math* dst);

/// dst[i] = src[i], rounded to nearest even, for i < n; a double reaches a half type through float, as in torch.
template <typename Math>
void store_row(const Math* src, int64_t n, DType dtype, void* dst);

/// Rounds n elements in place to `dtype`.
template <typename Math>
void round_row(Math* row, int64_t n, DType dtype);

}  // namespace fuseopt
