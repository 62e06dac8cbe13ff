#include "check.h"
#include "cpu/column_sums.h"
#include "cpu/ops.h"
#include "cpu/stream_rows.h"
#include "cpu/vec_math.h"

namespace fuseopt {
namespace {

template <typename Math>
std::vector<Math> values_or(const std::optional<Tensor>& tensor, Math value, int64_t n, const char* name) {
  return tensor ? flatten_parameter<Math>(*tensor, n, name) : std::vector<Math>(n, value);
}

/// The mean is summed as distances from the first element, so that it is exact for a constant row and keeps its
/// precision if large.
template <typename Math>
Math mean_of(const Math* x, int64_t n) {
  if (n == 0) return std::numeric_limits<Math>::quiet_NaN();
  const Math first = x[0];
  const double distance = sum<Math>(n, [=](int64_t i) { return x[i] - first; }) / n;
  return static_cast<Math>(static_cast<double>(first) + distance);
}

struct LayerNormForward {
  Tensor output;
  std::optional<Tensor> sum;
  std::optional<Tensor> mean;  // only if they are kept
  std::optional<Tensor> rstd;
};

template <typename Math>
LayerNormForward layer_norm_forward(const Tensor& input, const std::optional<Tensor>& residual,
                                    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps,
                                    std::optional<ScalarType> output_dtype, bool keep_statistics) {
  const StreamRows<Math> x_rows(input, residual);
  const int64_t n = x_rows.n_cols();
  const std::vector<Math> weights = values_or<Math>(weight, 1, n, "weight");
  const std::vector<Math> biases = values_or<Math>(bias, 0, n, "bias");
  const ScalarType stream_type = x_rows.sum().value_or(input).scalar_type();
  Tensor output = empty_like(input, output_dtype.value_or(stream_type));
  const OutputRows y_rows(output, n);
  std::optional<Tensor> mean, rstd;
  std::optional<OutputRows> mean_rows, rstd_rows;
  if (keep_statistics) {
    const ScalarType type = stream_type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    mean = empty_per_row(input, type);
    rstd = empty_per_row(input, type);
    mean_rows.emplace(*mean, 1);
    rstd_rows.emplace(*rstd, 1);
  }

  parallel(x_rows.n_rows(), n, [&](int64_t begin, int64_t end) {
    const RowBuffer<Math> x_buffer(n);
    const RowBuffer<Math> residual_buffer(residual ? n : 0);
    const RowBuffer<Math> y_buffer(n);
    for (int64_t row = begin; row < end; ++row) {
      const Math* x = x_rows.read(row, x_buffer.get(), residual_buffer.get());
      Math* y = y_rows.target(row, y_buffer.get());
      const Math m = mean_of(x, n);
      const double square = sum<Math>(n, [=](int64_t i) { return (x[i] - m) * (x[i] - m); });
      const Math r = static_cast<Math>(1.0 / std::sqrt(square / n + eps));
      const Math* w = weights.data();
      const Math* b = biases.data();
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - m) * r * w[i] + b[i];
      y_rows.commit(row, y);
      if (keep_statistics) {
        mean_rows->store(row, 0, 1, &m);
        rstd_rows->store(row, 0, 1, &r);
      }
    }
  });
  return {output, x_rows.sum(), mean, rstd};
}

template <typename Math>
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad_output, const std::optional<Tensor>& grad_sum,
                                                       const Tensor& input, const std::optional<Tensor>& weight,
                                                       const Tensor& mean, const Tensor& rstd, bool need_weight_grad,
                                                       bool need_bias_grad, std::optional<ScalarType> bias_dtype) {
  const Rows g_rows(grad_output, input.sizes());
  std::optional<Rows> grad_sum_rows;
  if (grad_sum) grad_sum_rows.emplace(*grad_sum, input.sizes());
  const Rows x_rows(input);
  const int64_t n = x_rows.n_cols();
  const std::vector<Math> weights = values_or<Math>(weight, 1, n, "weight");
  const std::vector<Math> means = flatten<Math>(mean, x_rows.n_rows(), "mean");
  const std::vector<Math> rstds = flatten<Math>(rstd, x_rows.n_rows(), "rstd");
  Tensor grad_input = empty_like(input, input.scalar_type());
  const OutputRows dx_rows(grad_input, n);
  ColumnSums<Math> weight_grad(x_rows.n_rows(), n);
  ColumnSums<Math> bias_grad(x_rows.n_rows(), n);

  parallel(weight_grad.n_parts(), x_rows.n_rows() / weight_grad.n_parts() * n, [&](int64_t begin, int64_t end) {
    const RowBuffer<Math> g_buffer(n);
    const RowBuffer<Math> x_buffer(n);
    const RowBuffer<Math> dx_buffer(n);
    for (int64_t part = begin; part < end; ++part) {
      Math* dw = weight_grad.part(part);
      Math* db = bias_grad.part(part);
      for (int64_t row = weight_grad.part_begin(part); row < weight_grad.part_begin(part + 1); ++row) {
        const Math* g = g_rows.read(row, g_buffer.get());
        const Math* x = x_rows.read(row, x_buffer.get());
        Math* dx = dx_rows.target(row, dx_buffer.get());
        const Math* w = weights.data();
        const Math m = means[row];
        const Math r = rstds[row];
        const double total = sum<Math>(n, [=](int64_t i) { return g[i] * w[i]; });
        const double dot = sum<Math>(n, [=](int64_t i) { return g[i] * w[i] * ((x[i] - m) * r); });
        const Math mean_total = static_cast<Math>(total / n);
        const Math mean_dot = static_cast<Math>(dot / n);
        if (need_weight_grad) {
#pragma omp simd
          for (int64_t i = 0; i < n; ++i) dw[i] += g[i] * ((x[i] - m) * r);
        }
        if (need_bias_grad) {
#pragma omp simd
          for (int64_t i = 0; i < n; ++i) db[i] += g[i];
        }
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) dx[i] = r * (g[i] * w[i] - mean_total - (x[i] - m) * r * mean_dot);
        if (grad_sum_rows) {
          const Math* h = grad_sum_rows->read(row, x_buffer.get());
#pragma omp simd
          for (int64_t i = 0; i < n; ++i) dx[i] += h[i];
        }
        dx_rows.commit(row, dx);
      }
    }
  });
  const int64_t none = 0;
  const ScalarType type = weight ? weight->scalar_type() : input.scalar_type(), bias_type = bias_dtype.value_or(type);
  return {grad_input, need_weight_grad ? weight_grad.total(type) : empty(&none, 1, type),
          need_bias_grad ? bias_grad.total(bias_type) : empty(&none, 1, bias_type)};
}

LayerNormForward dispatch_layer_norm(const char* op, const Tensor& input, const std::optional<Tensor>& residual,
                                     const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps,
                                     std::optional<ScalarType> output_dtype, bool keep_statistics) {
  FUSEOPT_CHECK(input.dim() > 0, "fuseopt::", op, ": input has no dimension to normalise");
  const bool is_wide = any_double(input, weight) || any_double(input, residual);
  const auto run = is_wide ? layer_norm_forward<double> : layer_norm_forward<float>;
  return run(input, residual, weight, bias, eps, output_dtype, keep_statistics);
}

}  // namespace

Tensor layer_norm(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                  double eps, std::optional<ScalarType> output_dtype) {
  return dispatch_layer_norm("layer_norm", input, std::nullopt, weight, bias, eps, output_dtype, false).output;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd(const Tensor& input, const std::optional<Tensor>& weight,
                                                  const std::optional<Tensor>& bias, double eps,
                                                  std::optional<ScalarType> output_dtype) {
  const auto result = dispatch_layer_norm("layer_norm_fwd", input, std::nullopt, weight, bias, eps, output_dtype, true);
  return {result.output, *result.mean, *result.rstd};
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual,
                                          const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                          double eps, std::optional<ScalarType> output_dtype) {
  const auto result = dispatch_layer_norm("add_layer_norm", input, residual, weight, bias, eps, output_dtype, false);
  return {result.output, *result.sum};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_fwd(const Tensor& input, const Tensor& residual,
                                                              const std::optional<Tensor>& weight,
                                                              const std::optional<Tensor>& bias, double eps,
                                                              std::optional<ScalarType> output_dtype) {
  const auto result = dispatch_layer_norm("add_layer_norm_fwd", input, residual, weight, bias, eps, output_dtype, true);
  return {result.output, *result.sum, *result.mean, *result.rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_layer_norm_bwd(const Tensor& grad_output, const std::optional<Tensor>& grad_sum,
                                                      const Tensor& input, const std::optional<Tensor>& weight,
                                                      const Tensor& mean, const Tensor& rstd, bool need_weight_grad,
                                                      bool need_bias_grad, std::optional<ScalarType> bias_dtype) {
  FUSEOPT_CHECK(input.dim() > 0, "fuseopt::layer_norm_bwd: input has no dimension to normalise");
  const auto run = any_double(input, weight) ? layer_norm_backward<double> : layer_norm_backward<float>;
  return run(grad_output, grad_sum, input, weight, mean, rstd, need_weight_grad, need_bias_grad, bias_dtype);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& grad_output, const Tensor& input,
                                                  const std::optional<Tensor>& weight, const Tensor& mean,
                                                  const Tensor& rstd, bool need_weight_grad, bool need_bias_grad,
                                                  std::optional<ScalarType> bias_dtype) {
  return add_layer_norm_bwd(grad_output, std::nullopt, input, weight, mean, rstd, need_weight_grad, need_bias_grad,
                            bias_dtype);
}

}  // namespace fuseopt
