#include "check.h"
#include "cpu/column_sums.h"
#include "cpu/ops.h"
#include "cpu/stream_rows.h"
#include "cpu/vec_math.h"

namespace fuseopt {
namespace {

/// weight + offset, or ones.
template <typename Math>
std::vector<Math> scale_of(const std::optional<Tensor>& weight, double offset, int64_t n) {
  if (!weight) return std::vector<Math>(n, Math{1});
  std::vector<Math> scale = flatten_parameter<Math>(*weight, n, "weight");
  for (Math& value : scale) value += static_cast<Math>(offset);
  return scale;
}

/// y = round(x * rstd) * scale, rounded to what norm_type holds.
template <typename Math>
void normalise(const Math* x, Math rstd, const Math* scale, DType norm_type, int64_t n, Math* y) {
  if (norm_type == dtype_of<Math>) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * rstd * scale[i];
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * rstd;
    round_row(y, n, norm_type);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] *= scale[i];
  }
}

struct RmsNormForward {
  Tensor output;
  std::optional<Tensor> sum;
  std::optional<Tensor> rstd;  // only if it is kept
};

template <typename Math>
RmsNormForward rms_norm_forward(const Tensor& input, const std::optional<Tensor>& residual,
                                const std::optional<Tensor>& weight, double eps, double offset, NormDtypes dtypes,
                                bool keep_rstd) {
  const StreamRows<Math> x_rows(input, residual);
  const int64_t n = x_rows.n_cols();
  const std::vector<Math> scale = scale_of<Math>(weight, offset, n);
  const DType norm_type = to_dtype(dtypes.norm);
  Tensor output = empty_like(input, dtypes.output);
  const OutputRows y_rows(output, n);
  std::optional<Tensor> rstd;
  std::optional<OutputRows> rstd_rows;
  if (keep_rstd) {
    const DType stream_type = dtype(x_rows.sum().value_or(input));
    rstd = empty_per_row(input, stream_type == kFloat64 ? ScalarType::Double : ScalarType::Float);
    rstd_rows.emplace(*rstd, 1);
  }

  parallel(x_rows.n_rows(), n, [&](int64_t begin, int64_t end) {
    const RowBuffer<Math> x_buffer(n);
    const RowBuffer<Math> residual_buffer(residual ? n : 0);
    alignas(64) Math y_buffer[kPiece];
    for (int64_t row = begin; row < end; ++row) {
      const Math* x = x_rows.read(row, x_buffer.get(), residual_buffer.get());
      const double square = sum<Math>(n, [=](int64_t i) { return x[i] * x[i]; });
      const Math r = static_cast<Math>(1.0 / std::sqrt(square / n + eps));
      if (rstd_rows) rstd_rows->store(row, 0, 1, &r);
      for (int64_t col = 0; col < n; col += kPiece) {
        const int64_t count = std::min(kPiece, n - col);
        Math* y = y_rows.target(row, col, y_buffer);
        normalise(x + col, r, scale.data() + col, norm_type, count, y);
        y_rows.commit(row, col, count, y);
      }
    }
  });
  return {output, x_rows.sum(), rstd};
}

template <typename Math>
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_output, const std::optional<Tensor>& grad_sum,
                                             const Tensor& input, const std::optional<Tensor>& weight,
                                             const Tensor& rstd, double offset, bool need_weight_grad) {
  const Rows g_rows(grad_output, input.sizes());
  std::optional<Rows> grad_sum_rows;
  if (grad_sum) grad_sum_rows.emplace(*grad_sum, input.sizes());
  const Rows x_rows(input);
  const int64_t n = x_rows.n_cols();
  const std::vector<Math> scale = scale_of<Math>(weight, offset, n);
  const std::vector<Math> rstds = flatten<Math>(rstd, x_rows.n_rows(), "rstd");
  Tensor grad_input = empty_like(input, input.scalar_type());
  const OutputRows dx_rows(grad_input, n);
  ColumnSums<Math> weight_grad(x_rows.n_rows(), n);

  parallel(weight_grad.n_parts(), x_rows.n_rows() / weight_grad.n_parts() * n, [&](int64_t begin, int64_t end) {
    const RowBuffer<Math> g_buffer(n);
    const RowBuffer<Math> x_buffer(n);
    const RowBuffer<Math> dx_buffer(n);
    for (int64_t part = begin; part < end; ++part) {
      Math* dw = weight_grad.part(part);
      for (int64_t row = weight_grad.part_begin(part); row < weight_grad.part_begin(part + 1); ++row) {
        const Math* g = g_rows.read(row, g_buffer.get());
        const Math* x = x_rows.read(row, x_buffer.get());
        Math* dx = dx_rows.target(row, dx_buffer.get());
        const Math* s = scale.data();
        const Math r = rstds[row];
        const double dot = sum<Math>(n, [=](int64_t i) { return g[i] * s[i] * (x[i] * r); });
        const Math mean_dot = static_cast<Math>(dot / n);
        if (need_weight_grad) {
#pragma omp simd
          for (int64_t i = 0; i < n; ++i) dw[i] += g[i] * (x[i] * r);
        }
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) dx[i] = r * (g[i] * s[i] - x[i] * r * mean_dot);
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
  const ScalarType weight_type = weight ? weight->scalar_type() : input.scalar_type();
  return {grad_input, need_weight_grad ? weight_grad.total(weight_type) : empty(&none, 1, weight_type)};
}

RmsNormForward dispatch_rms_norm(const char* op, const Tensor& input, const std::optional<Tensor>& residual,
                                 const std::optional<Tensor>& weight, double eps, int64_t cast_order, double offset,
                                 bool keep_rstd) {
  FUSEOPT_CHECK(input.dim() > 0, "fuseopt::", op, ": input has no dimension to normalise");
  const bool is_wide = any_double(input, weight) || any_double(input, residual);
  const auto run = is_wide ? rms_norm_forward<double> : rms_norm_forward<float>;
  const ScalarType stream_type =
      residual ? promote_types(input.scalar_type(), residual->scalar_type()) : input.scalar_type();
  const auto weight_type = weight ? std::optional<ScalarType>(weight->scalar_type()) : std::nullopt;
  return run(input, residual, weight, eps, offset, norm_dtypes(op, cast_order, stream_type, weight_type), keep_rstd);
}

}  // namespace

Tensor rms_norm(const Tensor& input, const std::optional<Tensor>& weight, double eps, int64_t cast_order,
                double offset) {
  return dispatch_rms_norm("rms_norm", input, std::nullopt, weight, eps, cast_order, offset, false).output;
}

std::tuple<Tensor, Tensor> rms_norm_fwd(const Tensor& input, const std::optional<Tensor>& weight, double eps,
                                        int64_t cast_order, double offset) {
  const auto result = dispatch_rms_norm("rms_norm_fwd", input, std::nullopt, weight, eps, cast_order, offset, true);
  return {result.output, *result.rstd};
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual,
                                        const std::optional<Tensor>& weight, double eps, int64_t cast_order,
                                        double offset) {
  const auto result = dispatch_rms_norm("add_rms_norm", input, residual, weight, eps, cast_order, offset, false);
  return {result.output, *result.sum};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_fwd(const Tensor& input, const Tensor& residual,
                                                    const std::optional<Tensor>& weight, double eps,
                                                    int64_t cast_order, double offset) {
  const auto result = dispatch_rms_norm("add_rms_norm_fwd", input, residual, weight, eps, cast_order, offset, true);
  return {result.output, *result.sum, *result.rstd};
}

std::tuple<Tensor, Tensor> add_rms_norm_bwd(const Tensor& grad_output, const std::optional<Tensor>& grad_sum,
                                            const Tensor& input, const std::optional<Tensor>& weight,
                                            const Tensor& rstd, double offset, bool need_weight_grad) {
  FUSEOPT_CHECK(input.dim() > 0, "fuseopt::rms_norm_bwd: input has no dimension to normalise");
  const auto run = any_double(input, weight) ? rms_norm_backward<double> : rms_norm_backward<float>;
  return run(grad_output, grad_sum, input, weight, rstd, offset, need_weight_grad);
}

std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& grad_output, const Tensor& input,
                                        const std::optional<Tensor>& weight, const Tensor& rstd, double offset,
                                        bool need_weight_grad) {
  return add_rms_norm_bwd(grad_output, std::nullopt, input, weight, rstd, offset, need_weight_grad);
}

}  // namespace fuseopt
