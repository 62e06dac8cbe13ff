#include "norm_binding.h"

namespace fuseopt {
namespace {

std::tuple<Tensor, Tensor> rms_norm_fwd(Tensor input, std::optional<Tensor> weight, double eps, double offset,
                                        ScalarType norm_dtype, ScalarType output_dtype) {
  constexpr const char* kOp = "rms_norm_fwd";
  const Matrix shape = matrix_of(kOp, input);
  const Tensor x = as_contiguous(input);
  const auto scale = parameter(kOp, "weight", weight, input);
  const Launch launch(kOp, x);
  Tensor output = allocate_like(x, output_dtype);
  Tensor rstd = allocate_statistic(x);
  launch.check(fuseopt_rms_norm_fwd(pointer(kOp, x), pointer(kOp, scale), pointer(kOp, output), pointer(kOp, rstd),
                                    shape.rows, shape.columns, eps, offset, dtype_code(kOp, norm_dtype),
                                    launch.stream()));
  return {output, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_bwd(Tensor grad_output, Tensor input, std::optional<Tensor> weight, Tensor rstd,
                                        double offset, bool need_weight_grad) {
  constexpr const char* kOp = "rms_norm_bwd";
  const Matrix shape = matrix_of(kOp, input);
  check_same(kOp, "grad_output", grad_output, input);
  const Tensor grad = as_contiguous(grad_output), x = as_contiguous(input), row_rstd = as_contiguous(rstd);
  const auto scale = parameter(kOp, "weight", weight, input);
  const bool wanted = need_weight_grad && scale.has_value();
  const Launch launch(kOp, x);
  Tensor grad_input = allocate_like(x, x.scalar_type());
  Tensor grad_weight = allocate_parameter_grad(x, scale, shape.columns, wanted);
  const auto workspace = norm_bwd_workspace(x, scale, shape, wanted ? 1 : 0);
  launch.check(fuseopt_rms_norm_bwd(pointer(kOp, grad), pointer(kOp, x), pointer(kOp, scale), pointer(kOp, row_rstd),
                                    pointer(kOp, grad_input), wanted_pointer(kOp, grad_weight, wanted),
                                    data_of(workspace), shape.rows, shape.columns, offset, launch.stream()));
  return {grad_input, grad_weight};
}

}  // namespace
}  // namespace fuseopt

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt;
  library.impl("rms_norm_fwd", TORCH_BOX(&rms_norm_fwd));
  library.impl("rms_norm_bwd", TORCH_BOX(&rms_norm_bwd));
}
