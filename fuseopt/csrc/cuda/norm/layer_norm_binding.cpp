#include "cuda/norm/norm_binding.h"

namespace fuseopt::layer_norm_binding {
namespace {

struct Forward {
  Tensor output;
  std::optional<Tensor> sum;
  std::vector<Tensor> statistics;  // mean and rstd, if they are kept
};

Forward forward(const char* op, const Tensor& input, const std::optional<Tensor>& residual,
                const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps,
                std::optional<ScalarType> output_dtype, bool keep_statistics) {
  const Matrix shape = matrix_of(op, input);
  const Tensor x = as_contiguous(input);
  const auto addend = like_input(op, "residual", residual, input);
  const auto scale = parameter(op, "weight", weight, input);
  const auto shift = parameter(op, "bias", bias, input);
  const Launch launch(op, x);
  const auto sum = allocate_sum(x, addend);
  const Tensor& normalised = sum.has_value() ? *sum : x;
  Tensor output = allocate_like(x, output_dtype.value_or(dtype_of(normalised)));
  const RowStatistics statistics(op, normalised, 2, keep_statistics);
  launch.check(fuseopt_layer_norm_fwd({.input = pointer(op, x),
                                       .residual = pointer(op, addend),
                                       .weight = pointer(op, scale),
                                       .bias = pointer(op, shift),
                                       .output = pointer(op, output),
                                       .sum = pointer(op, sum),
                                       .mean = statistics.pointer(0),
                                       .rstd = statistics.pointer(1),
                                       .rows = shape.rows,
                                       .columns = shape.columns,
                                       .eps = eps},
                                      launch.stream()));
  return {output, sum, statistics.tensors()};
}

std::tuple<Tensor, Tensor, Tensor> backward(const char* op, const Tensor& grad_output,
                                            const std::optional<Tensor>& grad_sum, const Tensor& input,
                                            const std::optional<Tensor>& weight, const Tensor& mean,
                                            const Tensor& rstd, bool need_weight_grad, bool need_bias_grad,
                                            std::optional<ScalarType> bias_dtype) {
  const Matrix shape = matrix_of(op, input);
  check_same(op, "grad_output", grad_output, input);
  const Tensor grad = as_contiguous(grad_output), x = as_contiguous(input), row_mean = row_statistic(op, "mean", mean, input),
               row_rstd = row_statistic(op, "rstd", rstd, input);
  const auto added = like_input(op, "grad_sum", grad_sum, input);
  const auto scale = parameter(op, "weight", weight, input);
  const bool weight_wanted = need_weight_grad && scale.has_value();
  const Launch launch(op, x);
  Tensor grad_input = allocate_like(x, dtype_of(x));
  Tensor grad_weight = allocate_parameter_grad(x, scale, shape.columns, weight_wanted);
  Tensor grad_bias = allocate(x, {need_bias_grad ? shape.columns : 0}, bias_dtype.value_or(dtype_of(grad_weight)));
  const auto workspace = norm_bwd_workspace(x, scale, shape, weight_wanted || need_bias_grad ? 2 : 0);
  launch.check(fuseopt_layer_norm_bwd({.grad_output = pointer(op, grad),
                                       .grad_sum = pointer(op, added),
                                       .input = pointer(op, x),
                                       .weight = pointer(op, scale),
                                       .mean = pointer(op, row_mean),
                                       .rstd = pointer(op, row_rstd),
                                       .grad_input = pointer(op, grad_input),
                                       .grad_weight = wanted_pointer(op, grad_weight, weight_wanted),
                                       .grad_bias = wanted_pointer(op, grad_bias, need_bias_grad),
                                       .workspace = data_of(workspace),
                                       .rows = shape.rows,
                                       .columns = shape.columns},
                                      launch.stream()));
  return {grad_input, grad_weight, grad_bias};
}

Tensor layer_norm(Tensor input, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps,
                  std::optional<ScalarType> output_dtype) {
  return forward("layer_norm", input, std::nullopt, weight, bias, eps, output_dtype, false).output;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd(Tensor input, std::optional<Tensor> weight,
                                                  std::optional<Tensor> bias, double eps,
                                                  std::optional<ScalarType> output_dtype) {
  const auto result = forward("layer_norm_fwd", input, std::nullopt, weight, bias, eps, output_dtype, true);
  return {result.output, result.statistics[0], result.statistics[1]};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(Tensor grad_output, Tensor input, std::optional<Tensor> weight,
                                                  Tensor mean, Tensor rstd, bool need_weight_grad,
                                                  bool need_bias_grad, std::optional<ScalarType> bias_dtype) {
  return backward("layer_norm_bwd", grad_output, std::nullopt, input, weight, mean, rstd, need_weight_grad,
                  need_bias_grad, bias_dtype);
}

std::tuple<Tensor, Tensor> add_layer_norm(Tensor input, Tensor residual, std::optional<Tensor> weight,
                                          std::optional<Tensor> bias, double eps,
                                          std::optional<ScalarType> output_dtype) {
  const auto result = forward("add_layer_norm", input, residual, weight, bias, eps, output_dtype, false);
  return {result.output, *result.sum};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_fwd(Tensor input, Tensor residual,
                                                              std::optional<Tensor> weight, std::optional<Tensor> bias,
                                                              double eps, std::optional<ScalarType> output_dtype) {
  const auto result = forward("add_layer_norm_fwd", input, residual, weight, bias, eps, output_dtype, true);
  return {result.output, *result.sum, result.statistics[0], result.statistics[1]};
}

std::tuple<Tensor, Tensor, Tensor> add_layer_norm_bwd(Tensor grad_output, std::optional<Tensor> grad_sum, Tensor sum,
                                                      std::optional<Tensor> weight, Tensor mean, Tensor rstd,
                                                      bool need_weight_grad, bool need_bias_grad,
                                                      std::optional<ScalarType> bias_dtype) {
  return backward("add_layer_norm_bwd", grad_output, grad_sum, sum, weight, mean, rstd, need_weight_grad,
                  need_bias_grad, bias_dtype);
}

}  // namespace
}  // namespace fuseopt::layer_norm_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::layer_norm_binding;
  library.impl("layer_norm", TORCH_BOX((fuseopt::checked<layer_norm, fuseopt::declared::kLayerNorm>)));
  library.impl("add_layer_norm", TORCH_BOX((fuseopt::checked<add_layer_norm, fuseopt::declared::kAddLayerNorm>)));
  library.impl("layer_norm_fwd", TORCH_BOX((fuseopt::checked<layer_norm_fwd, fuseopt::declared::kLayerNormFwd>)));
  library.impl("layer_norm_bwd", TORCH_BOX((fuseopt::checked<layer_norm_bwd, fuseopt::declared::kLayerNormBwd>)));
  library.impl("add_layer_norm_fwd", TORCH_BOX((fuseopt::checked<add_layer_norm_fwd, fuseopt::declared::kAddLayerNormFwd>)));
  library.impl("add_layer_norm_bwd", TORCH_BOX((fuseopt::checked<add_layer_norm_bwd, fuseopt::declared::kAddLayerNormBwd>)));
}
