#include "cpu/gelu.h"
#include "cpu/ops.h"

namespace fuseopt {
namespace {

/// x + bias for one piece; `buffer` must not overlap x.
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
  return bias ? flatten_parameter<Math>(*bias, n, "bias") : std::vector<Math>();
}

template <typename Gelu, typename Math>
Tensor gelu_forward(const Tensor& input, const std::optional<Tensor>& bias, ScalarType output_dtype) {
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
Tensor gelu_backward(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& bias) {
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
    for (int64_t i = 0; i < n; ++i) dx[i] = Gelu::backward(g[i], x[i]);
    dx_rows.commit(row, col, n, dx);
  });
  return grad_input;
}

}  // namespace

Tensor gelu_fwd(const Tensor& input, bool tanh, const std::optional<Tensor>& bias,
                std::optional<ScalarType> output_dtype) {
  const bool wide = any_double(input, bias);
  const auto run = tanh ? wide ? gelu_forward<TanhGelu, double> : gelu_forward<TanhGelu, float>
                        : wide ? gelu_forward<ErfGelu, double> : gelu_forward<ErfGelu, float>;
  return run(input, bias, output_dtype.value_or(input.scalar_type()));
}

Tensor gelu_bwd(const Tensor& grad_output, const Tensor& input, bool tanh, const std::optional<Tensor>& bias) {
  const bool wide = any_double(input, bias);
  const auto run = tanh ? wide ? gelu_backward<TanhGelu, double> : gelu_backward<TanhGelu, float>
                        : wide ? gelu_backward<ErfGelu, double> : gelu_backward<ErfGelu, float>;
  return run(grad_output, input, bias);
}

}  // namespace fuseopt
