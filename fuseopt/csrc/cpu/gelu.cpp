#include "../check.h"
#include "ops.h"
#include "vec_math.h"

namespace fuseopt {
namespace {

/// x * Phi(x), Phi the normal distribution function.
struct Erf {
  template <typename Math>
  static Math value(Math x) {
    return x * normal_cdf(x);
  }
  template <typename Math>
  static Math slope(Math x) {
    return normal_cdf(x) + x * normal_pdf(x);
  }
};

/// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x sigmoid(2u): no cancellation for x < 0.
struct Tanh {
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

/// Calls body(row, first column, count) for every piece of every row.
template <typename Body>
void for_each_piece(const Rows& rows, const Body& body) {
  const int64_t pieces = (rows.n_cols() + kPiece - 1) / kPiece;
  parallel(rows.n_rows() * pieces, std::min(rows.n_cols(), kPiece), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t col = i % pieces * kPiece;
      body(i / pieces, col, std::min(kPiece, rows.n_cols() - col));
    }
  });
}

/// x + bias for one piece; `buffer` must not hold x.
template <typename Math>
const Math* add_bias(const Math* x, const std::vector<Math>& bias, int64_t col, int64_t n, Math* buffer) {
  if (bias.empty()) return x;
  const Math* b = bias.data() + col;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) buffer[i] = x[i] + b[i];
  return buffer;
}

template <typename Math>
std::vector<Math> bias_of(const std::optional<Tensor>& bias, int64_t n) {
  return bias ? flatten<Math>(*bias, n, "bias") : std::vector<Math>();
}

template <typename Gelu, typename Math>
Tensor forward(const Tensor& input, const std::optional<Tensor>& bias, ScalarType output_dtype) {
  const Rows x_rows = !bias && input.is_contiguous() ? Rows::single(input) : Rows(input);
  const std::vector<Math> biases = bias_of<Math>(bias, x_rows.n_cols());
  Tensor output = empty_like(input, output_dtype);
  const OutputRows y_rows(output, x_rows.n_cols());
  for_each_piece(x_rows, [&](int64_t row, int64_t col, int64_t n) {
    alignas(64) Math x_buffer[kPiece], sum_buffer[kPiece], y_buffer[kPiece];
    const Math* x = add_bias(x_rows.read(row, col, n, x_buffer), biases, col, n, sum_buffer);
    Math* y = y_rows.target(row, col, y_buffer);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = Gelu::value(x[i]);
    y_rows.commit(row, col, n, y);
  });
  return output;
}

template <typename Gelu, typename Math>
Tensor backward(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& bias) {
  const bool single = !bias && input.is_contiguous() && grad_output.is_contiguous();
  const Rows x_rows = single ? Rows::single(input) : Rows(input);
  const Rows g_rows = single ? Rows::single(grad_output) : Rows(grad_output, input.sizes());
  const std::vector<Math> biases = bias_of<Math>(bias, x_rows.n_cols());
  Tensor grad_input = empty_like(input, input.scalar_type());
  const OutputRows dx_rows(grad_input, x_rows.n_cols());
  for_each_piece(x_rows, [&](int64_t row, int64_t col, int64_t n) {
    alignas(64) Math x_buffer[kPiece], sum_buffer[kPiece], g_buffer[kPiece], dx_buffer[kPiece];
    const Math* x = add_bias(x_rows.read(row, col, n, x_buffer), biases, col, n, sum_buffer);
    const Math* g = g_rows.read(row, col, n, g_buffer);
    Math* dx = dx_rows.target(row, col, dx_buffer);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) dx[i] = g[i] * Gelu::slope(x[i]);
    dx_rows.commit(row, col, n, dx);
  });
  return grad_input;
}

bool is_tanh(const std::string& approximate) {
  FUSEOPT_CHECK(approximate == "none" || approximate == "tanh",
                "fuseopt: gelu's approximate must be 'none' or 'tanh', got '", approximate, "'");
  return approximate == "tanh";
}

}  // namespace

Tensor gelu_fwd(const Tensor& input, const std::optional<Tensor>& bias, const std::string& approximate,
                ScalarType output_dtype) {
  const bool wide = any_double(input, bias);
  const auto run = is_tanh(approximate) ? wide ? forward<Tanh, double> : forward<Tanh, float>
                                        : wide ? forward<Erf, double> : forward<Erf, float>;
  return run(input, bias, output_dtype);
}

Tensor gelu_bwd(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& bias,
                const std::string& approximate) {
  const bool wide = any_double(input, bias);
  const auto run = is_tanh(approximate) ? wide ? backward<Tanh, double> : backward<Tanh, float>
                                        : wide ? backward<Erf, double> : backward<Erf, float>;
  return run(grad_output, input, bias);
}

}  // namespace fuseopt
