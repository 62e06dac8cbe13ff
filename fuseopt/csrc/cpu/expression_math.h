// The functions of an elementwise expression (fuseopt/extend/expression.py), without branches for the float type: a
// compiler vectorises them inside `#pragma omp simd` loops.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/vec_math.h"

namespace fuseopt::expression {

/// Natural logarithm within 1 ulp: fdlibm's reduction to sqrt(1/2) <= m < sqrt(2) and its polynomial.
inline double log(double x) {
  const bool is_small = x < std::numeric_limits<double>::min();
  const double normal = is_small ? x * 0x1p54 : x;
  const int64_t bits = std::bit_cast<int64_t>(normal);
  const int64_t shifted = bits - 0x3fe6a09e667f3bcdLL;  // sqrt(1/2)
  const int64_t exponent = shifted >> 52;
  const double m = std::bit_cast<double>(bits - (exponent << 52));
  const double k = static_cast<double>(exponent) - (is_small ? 54.0 : 0.0);
  const double f = m - 1, s = f / (2 + f), z = s * s, half_square = 0.5 * f * f;
  const double r = z * polynomial(z, 6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
                                  2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
                                  1.479819860511658591e-01);
  const double value = k * 6.93147180369123816490e-01 +
                       (f - (half_square - (s * (half_square + r) + k * 1.90821492927058770002e-10)));
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double at_edge = x == 0 ? -kInfinity : x > 0 ? x : std::numeric_limits<double>::quiet_NaN();
  return x > 0 && x < kInfinity ? value : at_edge;
}
inline float log(float x) { return static_cast<float>(log(static_cast<double>(x))); }

/// x to the power n, computed in double.
inline float pow(float x, float n) {
  const double size = fuseopt::exp(static_cast<double>(n) * log(static_cast<double>(std::fabs(x))));
  const float half = 0.5f * n;
  const bool is_whole = std::floor(n) == n, is_odd = is_whole && std::floor(half) != half;
  const float value = static_cast<float>(std::signbit(x) && is_odd ? -size : size);
  const bool is_real = x >= 0 || is_whole || x == -std::numeric_limits<float>::infinity();
  const float result = is_real ? value : std::numeric_limits<float>::quiet_NaN();
  const bool is_one = n == 0 || x == 1 || (x == -1 && std::fabs(n) == std::numeric_limits<float>::infinity());
  return is_one ? 1.0f : x != x ? x : result;
}
inline double pow(double x, double n) { return std::pow(x, n); }

template <typename Math>
inline Math sigmoid(Math x) {
  return 1 / (1 + fuseopt::exp(-x));
}

inline float tanh(float x) {
  const float a = std::fabs(x), square = x * x;
  // Cephes' fit for |x| < 0.625; the other form cancels there.
  const float near = x + x * square * polynomial(square, -3.33332819422e-1f, 1.33314422036e-1f, -5.37397155531e-2f,
                                                 2.06390887954e-2f, -5.70498872745e-3f);
  const float far = 1 - 2 / (1 + fuseopt::exp(2 * a));
  return a < 0.625f ? near : std::copysign(far, x);
}
inline double tanh(double x) { return std::tanh(x); }

inline float erf(float x) {
  const float z = x * 1.41421356237f, square = z * z;
  // Twice normal_cdf's fit of (cdf(z) - 1/2) / z, without the half that cancels.
  const float near = z * polynomial(square, 0.7978845602f, -0.13298071984f, 0.01994664682f, -0.002372659884f,
                                    0.0002269727444f, -1.5308416922e-05f);
  const float far = 1 - 2 * normal_cdf(-std::fabs(z));
  return std::fabs(z) < 1 ? near : std::copysign(far, x);
}
inline double erf(double x) { return std::erf(x); }

inline float softplus(float x) {
  const float tail = fuseopt::exp(-std::fabs(x));
  const float log1p = tail < 1e-8f ? tail : static_cast<float>(log(1 + static_cast<double>(tail)));
  return (x < 0 ? 0 : x) + log1p;
}
inline double softplus(double x) { return (x < 0 ? 0 : x) + std::log1p(std::exp(-std::fabs(x))); }

/// Unlike fuseopt::exp, finite up to 88.7, where the largest float is.
inline float exp(float x) {
  const bool is_large = x > 87;
  const float value = fuseopt::exp(is_large ? x - 1 : x);
  return is_large ? value * 2.718281828459045f : value;
}
inline double exp(double x) { return fuseopt::exp(x); }
template <typename Math>
inline Math sqrt(Math x) {
  return std::sqrt(x);
}
template <typename Math>
inline Math abs(Math x) {
  return std::fabs(x);
}
template <typename Math>
inline Math relu(Math x) {
  return x <= 0 ? 0 : x;
}
template <typename Math>
inline Math silu(Math x) {
  return x / (1 + fuseopt::exp(-x));
}
using fuseopt::normal_cdf;
using fuseopt::normal_pdf;
template <typename Math>
inline Math gelu(Math x) {
  return x * normal_cdf(x);
}
template <typename Math>
inline Math gelu_tanh(Math x) {
  constexpr double kLinear = 1.5957691216057307;  // 2 sqrt(2 / pi)
  return x * sigmoid(x * (static_cast<Math>(kLinear) + static_cast<Math>(kLinear * 0.044715) * x * x));
}

/// The smaller; NaN if one of them is.
template <typename Math>
inline Math min(Math a, Math b) {
  return a < b ? a : b <= a ? b : a + b;
}
template <typename Math>
inline Math max(Math a, Math b) {
  return a > b ? a : b >= a ? b : a + b;
}
template <typename Math>
inline Math clamp(Math x, Math low, Math high) {
  return min(max(x, low), high);
}

}  // namespace fuseopt::expression
