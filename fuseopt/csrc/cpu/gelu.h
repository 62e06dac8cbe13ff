// The two GELUs: value and gradient.
#pragma once

#include "cpu/vec_math.h"

namespace fuseopt {

/// x * Phi(x), Phi the normal distribution function.
struct ErfGelu {
  template <typename Math>
  static Math value(Math x) {
    return x * normal_cdf(x);
  }
  template <typename Math>
  static Math slope(Math x) {
    return normal_cdf(x) + x * normal_pdf(x);
  }
  template <typename Math>
  static Math backward(Math grad_output, Math x) {
    return grad_output * slope(x);
  }
};

/// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x sigmoid(2u): no cancellation for x < 0.
struct TanhGelu {
  template <typename Math>
  static Math value(Math x) {
    const Math q = sigmoid_tail(x);
    return x * (x < 0 ? q : 1 - q);
  }
  template <typename Math>
  static Math slope(Math x) {
    const Math q = sigmoid_tail(x);
    const Math two_u_slope = static_cast<Math>(kLinear) + static_cast<Math>(3 * kCubic) * x * x;
    return (x < 0 ? q : 1 - q) + x * (q * (1 - q)) * two_u_slope;
  }
  template <typename Math>
  static Math backward(Math grad_output, Math x) {
    return grad_output * slope(x);
  }

 private:
  static constexpr double kLinear = 1.5957691216057307;  // 2 sqrt(2 / pi)
  static constexpr double kCubic = kLinear * 0.044715;
  /// sigmoid(-|2u|)
  template <typename Math>
  static Math sigmoid_tail(Math x) {
    const Math two_u = x * (static_cast<Math>(kLinear) + static_cast<Math>(kCubic) * x * x);
    const Math e = exp(-std::fabs(two_u));
    return e / (1 + e);
  }
};

}  // namespace fuseopt
