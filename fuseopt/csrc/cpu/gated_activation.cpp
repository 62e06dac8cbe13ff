#include "cast_order.h"
#include "check.h"
#include "cpu/gelu.h"
#include "cpu/ops.h"

namespace fuseopt {
namespace {

/// x * sigmoid(x)
struct Silu {
  template <typename Math>
  static Math value(Math x) {
    return x / (1 + exp(-x));
  }
  template <typename Math>
  static Math backward(Math grad_output, Math x) {
    const Math sigmoid = 1 / (1 + exp(-x));
    return grad_output * sigmoid * (1 + x * (1 - sigmoid));
  }
};

struct Relu {
  template <typename Math>
  static Math value(Math x) {
    return x <= 0 ? 0 : x;
  }
  template <typename Math>
  static Math backward(Math grad_output, Math x) {
    return x <= 0 ? 0 : grad_output;
  }
};

bool all_contiguous(const Tensor& a, const Tensor& b) { return a.is_contiguous() && b.is_contiguous(); }

template <typename Activation, typename Math>
Tensor gated_activation_forward(const Tensor& gate, const Tensor& up, DType activation_dtype, ScalarType output_dtype) {
  const bool single = all_contiguous(gate, up);
  const Rows gate_rows = single ? Rows::single(gate) : Rows(gate);
  const Rows up_rows = single ? Rows::single(up) : Rows(up);
  Tensor output = empty_like(gate, output_dtype);
  const OutputRows y_rows(output, gate_rows.n_cols());
  for_each_piece(gate_rows, [&](int64_t row, int64_t col, int64_t n) {
    alignas(64) Math x_buffer[kPiece], up_buffer[kPiece], activated[kPiece], y_buffer[kPiece];
    const Math* x = gate_rows.read(row, col, n, x_buffer);
    const Math* factor = up_rows.read(row, col, n, up_buffer);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) activated[i] = Activation::value(x[i]);
    round_row(activated, n, activation_dtype);
    Math* y = y_rows.target(row, col, y_buffer);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = activated[i] * factor[i];
    y_rows.commit(row, col, n, y);
  });
  return output;
}

template <typename Activation, typename Math>
std::tuple<Tensor, Tensor> gated_activation_backward(const Tensor& grad_output, const Tensor& gate, const Tensor& up,
                                                     DType activation_dtype) {
  const bool single = all_contiguous(gate, up) && grad_output.is_contiguous();
  const Rows g_rows = single ? Rows::single(grad_output) : Rows(grad_output);
  const Rows gate_rows = single ? Rows::single(gate) : Rows(gate);
  const Rows up_rows = single ? Rows::single(up) : Rows(up);
  Tensor grad_gate = empty_like(gate, gate.scalar_type());
  Tensor grad_up = empty_like(gate, up.scalar_type());
  const OutputRows dgate_rows(grad_gate, gate_rows.n_cols());
  const OutputRows dup_rows(grad_up, gate_rows.n_cols());
  for_each_piece(gate_rows, [&](int64_t row, int64_t col, int64_t n) {
    alignas(64) Math g_buffer[kPiece], x_buffer[kPiece], up_buffer[kPiece], activated[kPiece], d_buffer[kPiece];
    const Math* g = g_rows.read(row, col, n, g_buffer);
    const Math* x = gate_rows.read(row, col, n, x_buffer);
    const Math* factor = up_rows.read(row, col, n, up_buffer);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) activated[i] = Activation::value(x[i]);
    round_row(activated, n, activation_dtype);
    Math* dup = dup_rows.target(row, col, d_buffer);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) dup[i] = g[i] * activated[i];
    dup_rows.commit(row, col, n, dup);

    Math* grad_activated = activated;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) grad_activated[i] = g[i] * factor[i];
    round_row(grad_activated, n, activation_dtype);
    Math* dgate = dgate_rows.target(row, col, d_buffer);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) dgate[i] = Activation::backward(grad_activated[i], x[i]);
    dgate_rows.commit(row, col, n, dgate);
  });
  return {grad_gate, grad_up};
}

/// Calls run(Activation{}) with the activation of that index in fuseopt/ops/gated_activation.py.
template <typename Run>
auto dispatch(int64_t activation, const Run& run) {
  switch (activation) {
    case 0: return run(ErfGelu{});
    case 1: return run(TanhGelu{});
    case 2: return run(Silu{});
    case 3: return run(Relu{});
    default: fail("fuseopt: activation must be from 0 to 3, got ", activation);
  }
}

bool is_wide(const Tensor& gate, const Tensor& up, ScalarType activation_dtype) {
  return any_double(gate, up) || activation_dtype == ScalarType::Double;
}

}  // namespace

Tensor gated_activation_fwd(const Tensor& gate, const Tensor& up, int64_t activation,
                            std::optional<ScalarType> activation_dtype) {
  check_same_shape("up", up, "gate", gate);
  const ScalarType activated = activation_dtype.value_or(gate.scalar_type());
  return dispatch(activation, [&](auto functor) {
    using Activation = decltype(functor);
    const auto run = is_wide(gate, up, activated) ? gated_activation_forward<Activation, double>
                                                  : gated_activation_forward<Activation, float>;
    return run(gate, up, to_dtype(activated), promote_types(activated, up.scalar_type()));
  });
}

std::tuple<Tensor, Tensor> gated_activation_bwd(const Tensor& grad_output, const Tensor& gate, const Tensor& up,
                                                int64_t activation, std::optional<ScalarType> activation_dtype) {
  check_same_shape("up", up, "gate", gate);
  check_same_shape("grad_output", grad_output, "gate", gate);
  const ScalarType activated = activation_dtype.value_or(gate.scalar_type());
  return dispatch(activation, [&](auto functor) {
    using Activation = decltype(functor);
    const auto run = is_wide(gate, up, activated) ? gated_activation_backward<Activation, double>
                                                  : gated_activation_backward<Activation, float>;
    return run(grad_output, gate, up, to_dtype(activated));
  });
}

}  // namespace fuseopt
