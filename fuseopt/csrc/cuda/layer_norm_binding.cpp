#include "norm_binding.h"

namespace fuseopt {
namespace {

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd(Tensor input, std::optional<Tensor> weight,
                                                  std::optional<Tensor> bias, double eps, ScalarType output_dtype) {
  constexpr const char* kOp = "layer_norm_fwd";
  const Matrix shape = matrix_of(kOp, input);
  const Tensor x = as_contiguous(input);
  const auto scale = parameter(kOp, "weight", weight, input);
  const auto shift = parameter(kOp, "bias", bias, input);
  const Launch launch(kOp, x);
  Tensor output = allocate_like(x, output_dtype);
  Tensor mean = allocate_statistic(x);
  Tensor rstd = allocate_statistic(x);
  launch.check(fuseopt_layer_norm_fwd(pointer(kOp, x), pointer(kOp, scale), pointer(kOp, shift), pointer(kOp, output),
                                      pointer(kOp, mean), pointer(kOp, rstd), shape.rows, shape.columns, eps,
                                      launch.stream()));
  return {output, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(Tensor grad_output, Tensor input, std::optional<Tensor> weight,
                                                  Tensor mean, Tensor rstd, bool need_weight_grad,
                                                  bool need_bias_grad) {
  constexpr const char* kOp = "layer_norm_bwd";
  const Matrix shape = matrix_of(kOp, input);
  check_same(kOp, "grad_output", grad_output, input);
  const Tensor grad = as_contiguous(grad_output), x = as_contiguous(input), row_mean = as_contiguous(mean),
               row_rstd = as_contiguous(rstd);
  const auto scale = parameter(kOp, "weight", weight, input);
  const bool weight_wanted = need_weight_grad && scale.has_value();
  const Launch launch(kOp, x);
  Tensor grad_input = allocate_like(x, x.scalar_type());
  Tensor grad_weight = allocate_parameter_grad(x, scale, shape.columns, weight_wanted);
  Tensor grad_bias = allocate_parameter_grad(x, scale, shape.columns, need_bias_grad);
  const auto workspace = norm_bwd_workspace(x, scale, shape, weight_wanted || need_bias_grad ? 2 : 0);
  launch.check(fuseopt_layer_norm_bwd(
      pointer(kOp, grad), pointer(kOp, x), pointer(kOp, scale), pointer(kOp, row_mean), pointer(kOp, row_rstd),
      pointer(kOp, grad_input), wanted_pointer(kOp, grad_weight, weight_wanted),
      wanted_pointer(kOp, grad_bias, need_bias_grad), data_of(workspace), shape.rows, shape.columns, launch.stream()));
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace
}  // namespace fuseopt

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt;
  library.impl("layer_norm_fwd", TORCH_BOX(&layer_norm_fwd));
  library.impl("layer_norm_bwd", TORCH_BOX(&layer_norm_bwd));
}
