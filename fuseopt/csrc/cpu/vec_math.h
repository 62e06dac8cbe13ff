// Branch-free elementary functions, which compilers vectorise inside `#pragma omp simd` loops; and row reductions.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace fuseopt {

/// c0 + c1 x + c2 x^2 ..., by Horner's rule.
template <typename Math>
inline Math polynomial(Math, Math c0) {
  return c0;
}
template <typename Math, typename... Rest>
inline Math polynomial(Math x, Math c0, Rest... rest) {
  return c0 + x * polynomial<Math>(x, rest...);
}

/// (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2: a minimax fit, with which e^r has a relative error of 3e-9.
inline float exp_remainder(float r) {
  return polynomial(r, 0.4999999345f, 0.1666652064f, 0.04166838777f, 0.008368715305f, 0.001381461062f);
}
/// The Taylor series; terms below 1e-17 are left out.
inline double exp_remainder(double r) {
  return polynomial(r, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880,
                    1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800);
}

template <typename Math>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  using Int = int32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr int kBias = 127;
  // ln 2 in two parts: n * kLn2High is exact for every n that occurs.
  static constexpr float kLn2High = 0.693359375f;
  static constexpr float kLn2Low = -2.12194440e-4f;
  // exp() is 0 below this range and infinite above: n = -127 has the bits of 0, n = 128 those of infinity.
  static constexpr float kLow = -88.0f;
  static constexpr float kHigh = 89.0f;
};

template <>
struct ExpConstants<double> {
  using Int = int64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr int kBias = 1023;
  static constexpr double kLn2High = 6.93147180369123816490e-1;
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kLow = -709.0;
  static constexpr double kHigh = 710.0;
};

/// e^x within 2 ulp where it is a normal number; 0 below, inf above (from 88.4 on in float), nan for nan.
template <typename Math>
inline Math exp(Math x) {
  using C = ExpConstants<Math>;
  using Int = typename C::Int;
  constexpr Math kRound = static_cast<Math>(Int{3} << (C::kMantissaBits - 1));  // adding it rounds to an integer
  x = x < C::kLow ? C::kLow : x;
  x = x > C::kHigh ? C::kHigh : x;
  const Math shifted = x * static_cast<Math>(1.4426950408889634) + kRound;
  const Int n = std::bit_cast<Int>(shifted) - std::bit_cast<Int>(kRound);
  const Math whole = shifted - kRound;
  const Math r = (x - whole * C::kLn2High) - whole * C::kLn2Low;
  const Math power = std::bit_cast<Math>((n + C::kBias) << C::kMantissaBits);
  return (1 + (r + r * r * exp_remainder(r))) * power;
}

constexpr double kInvSqrt2Pi = 0.39894228040143267794;

/// Density of the standard normal distribution.
template <typename Math>
inline Math normal_pdf(Math x) {
  return static_cast<Math>(kInvSqrt2Pi) * exp(static_cast<Math>(-0.5) * x * x);
}

/// Distribution function of the standard normal distribution, (1 + erf(x / sqrt 2)) / 2, without its cancellation for
/// negative x.
inline float normal_cdf(float x) {
  const float a = std::fabs(x);
  // Minimax fit of exp(a^2 / 2) cdf(-a) / t in t = 1 / (1 + 0.235 a) for a <= 15: relative error 3e-9.
  const float t = 1.0f / (1.0f + 0.235f * a);
  const float fit = polynomial(t, 0.09373779819f, 0.09406381571f, 0.08544705759f, 0.09621064312f, -0.002200082602f,
                               0.2049579973f, -0.2248575173f, 0.2715978175f, -0.1466252257f, 0.02766769474f);
  const float tail = fit * t * exp(-0.5f * x * x);
  const float far = x < 0 ? tail : 1.0f - tail;
  // Minimax fit of (cdf(x) - 1/2) / x in x^2 for |x| <= 1: relative error 7e-10. The other fit cancels there.
  const float near = 0.5f + x * polynomial(x * x, 0.3989422801f, -0.06649035992f, 0.00997332341f, -0.001186329942f,
                                           0.0001134863722f, -7.654208461e-06f);
  return a < 1.0f ? near : far;
}

inline double normal_cdf(double x) { return 0.5 * std::erfc(-x * 0.70710678118654752440); }

// Bytes of a vector register.
#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif

/// The sum of term(i) for i < n. Blocks are added in double, so that the error does not grow with n, and the order of
/// additions depends only on n. Within a block each vector element adds 32 terms, on every processor.
template <typename Math, typename Term>
inline double sum(int64_t n, Term term) {
  constexpr int64_t kBlock = 32 * kVectorBytes / sizeof(Math);
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    Math block = 0;
#pragma omp simd reduction(+ : block)
    for (int64_t i = begin; i < end; ++i) block += term(i);
    total += static_cast<double>(block);
  }
  return total;
}

/// The largest of n values, -inf for none; NaN is ignored.
template <typename Math>
inline Math max(const Math* values, int64_t n) {
  Math largest = -std::numeric_limits<Math>::infinity();
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) largest = values[i] > largest ? values[i] : largest;
  return largest;
}

}  // namespace fuseopt
