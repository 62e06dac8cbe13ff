// Exponentials, at the precision that the result's rounding needs.
#pragma once

namespace fuseopt {

constexpr float kLog2E = 1.4426950408889634f;

// x * y, which the compiler does not fuse with a subtraction of the largest of such products: that would leave the
// rounding error of the product, which exceeds the range of exponents for large scores.
__device__ inline float rounded_product(float x, float y) { return __fmul_rn(x, y); }
__device__ inline double rounded_product(double x, double y) { return __dmul_rn(x, y); }

// 2^x with a relative error under 2^-22; results under 2^-126 become zero.
__device__ inline float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// e^x. The imprecise one takes a fifth of the instructions. It is enough for results that are rounded to 16 bits, whose
// kernels the precise one would limit.
template <bool kPrecise>
__device__ inline float exp_as(float x) {
  if constexpr (kPrecise) return expf(x);
  else return exp2_approx(x * kLog2E);
}

// e^(x * factor).
template <bool kPrecise>
struct ScaledExp {
  float power;  // for imprecise ones, of 2

  __device__ explicit ScaledExp(float factor) : power(kPrecise ? factor : factor * kLog2E) {}
  __device__ float operator()(float x) const {
    if constexpr (kPrecise) return expf(x * power);
    else return exp2_approx(x * power);
  }
};

// x / y for a y that many x share, given its reciprocal.
template <bool kPrecise>
__device__ inline float divide(float x, float y, float reciprocal_of_y) {
  const float quotient = x * reciprocal_of_y;
  return kPrecise ? fmaf(fmaf(-quotient, y, x), reciprocal_of_y, quotient) : quotient;
}

}  // namespace fuseopt
