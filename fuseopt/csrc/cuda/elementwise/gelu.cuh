// GELU (Hendrycks and Gimpel, 2016): x * Phi(x), with Phi exact ("none" in torch) or by its tanh approximation. The
// precise variants are for float32 results, the others for results that are rounded to 16 bits.
#pragma once

#include "cuda/common/math.cuh"

namespace fuseopt {

constexpr float kSqrtHalf = 0.70710678118654752f;
constexpr float kInvSqrt2Pi = 0.39894228040143268f;

// Phi(x), for results in float32.
__device__ inline float normal_cdf_precise(float x) { return 0.5f * (1.0f + erff(x * kSqrtHalf)); }

// Phi(x) to a relative error of 6e-6 for |x| < 6 (beyond that, below 1e-9 absolute), for results rounded to 16 bits: a
// third of erff's instructions. 2^polynomial(|x|) is the upper tail Phi(-|x|); the coefficients are a least-maximum fit
// of its log2 on [0, 6].
__device__ inline float normal_cdf_16_bit(float x) {
  const float a = fabsf(x);
  float log2_tail = -1.8348145e-06f;
  log2_tail = fmaf(log2_tail, a, 6.1598352e-05f);
  log2_tail = fmaf(log2_tail, a, -9.3052530e-04f);
  log2_tail = fmaf(log2_tail, a, 8.5078925e-03f);
  log2_tail = fmaf(log2_tail, a, -5.3960074e-02f);
  log2_tail = fmaf(log2_tail, a, -4.5846438e-01f);
  log2_tail = fmaf(log2_tail, a, -1.1512511e+00f);
  log2_tail = fmaf(log2_tail, a, -9.9999529e-01f);
  const float tail = exp2_approx(log2_tail);
  return x < 0 ? tail : 1.0f - tail;
}

template <bool kPrecise>
struct ErfGelu {
  __device__ static float cdf(float x) { return kPrecise ? normal_cdf_precise(x) : normal_cdf_16_bit(x); }
  __device__ static double cdf(double x) { return normcdf(x); }

  template <typename Acc>
  __device__ static Acc value(Acc x) {
    return x * cdf(x);
  }

  __device__ static float derivative(float x) { return cdf(x) + x * kInvSqrt2Pi * exp_as<kPrecise>(-0.5f * x * x); }
  __device__ static double derivative(double x) { return cdf(x) + x * 0.39894228040143267794 * exp(-0.5 * x * x); }

  template <typename Acc>
  __device__ static Acc backward(Acc grad_output, Acc x) {
    return grad_output * derivative(x);
  }
};

// 0.5 * (1 + tanh(u)) = sigmoid(z) with z = 2u = 2 sqrt(2 / pi) * (x + 0.044715 x^3). With e = exp(-|z|) and r = 1 / (1
// + e) nothing cancels or overflows: sigmoid(z) is r or e * r, depending on the sign of z, and its derivative is e * r
// * r.
template <bool kPrecise>
struct TanhGelu {
  static constexpr double kTwoSqrt2OverPi = 1.5957691216057308;
  static constexpr double kCubic = 0.044715;

  __device__ static float exp_negative(float x) { return exp_as<kPrecise>(-x); }
  __device__ static double exp_negative(double x) { return exp(-x); }

  __device__ static float reciprocal(float x) {
    const float r = __fdividef(1.0f, x);
    return kPrecise ? fmaf(r, fmaf(-x, r, 1.0f), r) : r;
  }
  __device__ static double reciprocal(double x) { return 1 / x; }

  template <typename Acc>
  __device__ static Acc twice_u(Acc x) {
    return x * (Acc(kTwoSqrt2OverPi) + Acc(kTwoSqrt2OverPi * kCubic) * x * x);
  }

  template <typename Acc>
  __device__ static Acc value(Acc x) {
    const Acc z = twice_u(x);
    const Acc e = exp_negative(fabs(z));
    const Acc r = reciprocal(1 + e);
    return x * (z < 0 ? e * r : r);
  }

  template <typename Acc>
  __device__ static Acc derivative(Acc x) {
    const Acc z = twice_u(x);
    const Acc e = exp_negative(fabs(z));
    const Acc r = reciprocal(1 + e);
    const Acc dz = Acc(kTwoSqrt2OverPi) + Acc(3 * kTwoSqrt2OverPi * kCubic) * x * x;
    return (z < 0 ? e * r : r) + x * dz * (e * r * r);
  }

  template <typename Acc>
  __device__ static Acc backward(Acc grad_output, Acc x) {
    return grad_output * derivative(x);
  }
};

}  // namespace fuseopt
