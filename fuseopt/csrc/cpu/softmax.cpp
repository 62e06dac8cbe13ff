#include "cpu/ops.h"
#include "cpu/vec_math.h"

namespace fuseopt {
namespace {

template <typename Math>
Tensor softmax_forward(const Tensor& input, const std::optional<Tensor>& mask, double scale, ScalarType output_dtype) {
  const Rows x_rows(input);
  const std::optional<Rows> mask_rows = mask ? std::optional<Rows>(std::in_place, *mask, input.sizes()) : std::nullopt;
  const int64_t n = x_rows.n_cols();
  // Without a mask logits are x / 2 or -x / 2, exact, and 2 |scale| multiplies their differences, which stay finite.
  const Math wanted = static_cast<Math>(scale);
  const bool is_split = !mask && wanted != 0 && wanted != 1;
  const Math factor = is_split ? std::copysign(Math(0.5), wanted) : wanted;
  const Math steepness = is_split ? 2 * std::fabs(wanted) : 1;
  Tensor output = empty_like(input, output_dtype);
  const OutputRows y_rows(output, n);

  parallel(x_rows.n_rows(), n, [&](int64_t begin, int64_t end) {
    const RowBuffer<Math> x_buffer(n);
    const RowBuffer<Math> mask_buffer(n);
    const RowBuffer<Math> y_buffer(n);
    for (int64_t row = begin; row < end; ++row) {
      const Math* x = x_rows.read(row, x_buffer.get());
      Math* y = y_rows.target(row, y_buffer.get());
      if (mask_rows) {
        const Math* m = mask_rows->read(row, mask_buffer.get());
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) y[i] = x[i] * factor + m[i];
        x = y;
      } else if (factor != 1) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) y[i] = x[i] * factor;
        x = y;
      }
      // A row of -inf only gives NaN, as in torch: -inf - -inf.
      const Math largest = max(x, n);
      const double total = sum<Math>(n, [=](int64_t i) { return y[i] = exp((x[i] - largest) * steepness); });
      const Math inverse = static_cast<Math>(1 / total);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) y[i] *= inverse;
      y_rows.commit(row, y);
    }
  });
  return output;
}

template <typename Math>
Tensor softmax_backward(const Tensor& grad_output, const Tensor& output, double scale, ScalarType input_dtype) {
  const Rows g_rows(grad_output, output.sizes());
  const Rows y_rows(output);
  const int64_t n = y_rows.n_cols();
  const Math factor = static_cast<Math>(scale);
  Tensor grad_input = empty_like(output, input_dtype);
  const OutputRows dx_rows(grad_input, n);

  parallel(y_rows.n_rows(), n, [&](int64_t begin, int64_t end) {
    const RowBuffer<Math> g_buffer(n);
    const RowBuffer<Math> y_buffer(n);
    const RowBuffer<Math> dx_buffer(n);
    for (int64_t row = begin; row < end; ++row) {
      const Math* g = g_rows.read(row, g_buffer.get());
      const Math* y = y_rows.read(row, y_buffer.get());
      Math* dx = dx_rows.target(row, dx_buffer.get());
      const Math dot = static_cast<Math>(sum<Math>(n, [=](int64_t i) { return g[i] * y[i]; }));
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) dx[i] = factor * y[i] * (g[i] - dot);
      dx_rows.commit(row, dx);
    }
  });
  return grad_input;
}

}  // namespace

Tensor softmax_fwd(const Tensor& input, const std::optional<Tensor>& mask, double scale,
                   std::optional<ScalarType> output_dtype) {
  const auto run = any_double(input, mask) ? softmax_forward<double> : softmax_forward<float>;
  return run(input, mask, scale, output_dtype.value_or(input.scalar_type()));
}

Tensor softmax_bwd(const Tensor& grad_output, const Tensor& output, double scale, ScalarType input_dtype) {
  const auto run = any_double(output, grad_output) ? softmax_backward<double> : softmax_backward<float>;
  return run(grad_output, output, scale, input_dtype);
}

}  // namespace fuseopt
