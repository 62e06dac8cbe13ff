#include "norm_binding.h"

namespace fuseopt {
namespace {

struct Forward {
  Tensor output;
  std::optional<Tensor> sum;
  Tensor rstd;
};

Forward forward(const char* op, const Tensor& input, const std::optional<Tensor>& residual,
                const std::optional<Tensor>& weight, double eps, double offset, ScalarType norm_dtype,
                ScalarType output_dtype) {
  const Matrix shape = matrix_of(op, input);
  const Tensor x = as_contiguous(input);
  const auto addend = like_input(op, "residual", residual, input);
  const auto scale = parameter(op, "weight", weight, input);
  const Launch launch(op, x);
  Tensor output = allocate_like(x, output_dtype);
  const auto sum = allocate_sum(x, addend);
  Tensor rstd = allocate_statistic(sum.has_value() ? *sum : x);
  launch.check(fuseopt_rms_norm_fwd(pointer(op, x), pointer(op, addend), pointer(op, scale), pointer(op, output),
                                    pointer(op, sum), pointer(op, rstd), shape.rows, shape.columns, eps, offset,
                                    dtype_code(op, norm_dtype), launch.stream()));
  return {output, sum, rstd};
}

std::tuple<Tensor, Tensor> backward(const char* op, const Tensor& grad_output, const std::optional<Tensor>& grad_sum,
                                    const Tensor& input, const std::optional<Tensor>& weight, const Tensor& rstd,
                                    double offset, bool need_weight_grad) {
  const Matrix shape = matrix_of(op, input);
  check_same(op, "grad_output", grad_output, input);
  const Tensor grad = as_contiguous(grad_output), x = as_contiguous(input), row_rstd = as_contiguous(rstd);
  const auto added = like_input(op, "grad_sum", grad_sum, input);
  const auto scale = parameter(op, "weight", weight, input);
  const bool wanted = need_weight_grad && scale.has_value();
  const Launch launch(op, x);
  Tensor grad_input = allocate_like(x, x.scalar_type());
  Tensor grad_weight = allocate_parameter_grad(x, scale, shape.columns, wanted);
  const auto workspace = norm_bwd_workspace(x, scale, shape, wanted ? 1 : 0);
  launch.check(fuseopt_rms_norm_bwd(pointer(op, grad), pointer(op, added), pointer(op, x), pointer(op, scale),
                                    pointer(op, row_rstd), pointer(op, grad_input),
                                    wanted_pointer(op, grad_weight, wanted), data_of(workspace), shape.rows,
                                    shape.columns, offset, launch.stream()));
  return {grad_input, grad_weight};
}

std::tuple<Tensor, Tensor> rms_norm_fwd(Tensor input, std::optional<Tensor> weight, double eps, double offset,
                                        ScalarType norm_dtype, ScalarType output_dtype) {
  const auto result = forward("rms_norm_fwd", input, std::nullopt, weight, eps, offset, norm_dtype, output_dtype);
  return {result.output, result.rstd};
}

std::tuple<Tensor, Tensor> rms_norm_bwd(Tensor grad_output, Tensor input, std::optional<Tensor> weight, Tensor rstd,
                                        double offset, bool need_weight_grad) {
  return backward("rms_norm_bwd", grad_output, std::nullopt, input, weight, rstd, offset, need_weight_grad);
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_fwd(Tensor input, Tensor residual, std::optional<Tensor> weight,
                                                    double eps, double offset, ScalarType norm_dtype,
                                                    ScalarType output_dtype) {
  const auto result = forward("add_rms_norm_fwd", input, residual, weight, eps, offset, norm_dtype, output_dtype);
  return {result.output, *result.sum, result.rstd};
}

std::tuple<Tensor, Tensor> add_rms_norm_bwd(Tensor grad_output, std::optional<Tensor> grad_sum, Tensor sum,
                                            std::optional<Tensor> weight, Tensor rstd, double offset,
                                            bool need_weight_grad) {
  return backward("add_rms_norm_bwd", grad_output, grad_sum, sum, weight, rstd, offset, need_weight_grad);
}

}  // namespace
}  // namespace fuseopt

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt;
  library.impl("rms_norm_fwd", TORCH_BOX(&rms_norm_fwd));
  library.impl("rms_norm_bwd", TORCH_BOX(&rms_norm_bwd));
  library.impl("add_rms_norm_fwd", TORCH_BOX(&add_rms_norm_fwd));
  library.impl("add_rms_norm_bwd", TORCH_BOX(&add_rms_norm_bwd));
}
