#include "cuda/norm/norm_binding.h"

namespace fuseopt::rms_norm_binding {
namespace {

struct Forward {
  Tensor output;
  std::optional<Tensor> sum;
  std::vector<Tensor> statistics;  // rstd, if it is kept
};

// Without a weight kernels multiply by 1, and there is nothing to add the offset to.
double weight_offset(const std::optional<Tensor>& weight, double offset) { return weight.has_value() ? offset : 0.0; }

Forward forward(const char* op, const Tensor& input, const std::optional<Tensor>& residual,
                const std::optional<Tensor>& weight, double eps, int64_t cast_order, double offset, bool keep_rstd) {
  const Matrix shape = matrix_of(op, input);
  const Tensor x = as_contiguous(input);
  const auto addend = like_input(op, "residual", residual, input);
  const auto scale = parameter(op, "weight", weight, input);
  const Launch launch(op, x);
  const auto sum = allocate_sum(x, addend);
  const Tensor& normalised = sum.has_value() ? *sum : x;
  const NormDtypes dtypes =
      norm_dtypes(op, cast_order, dtype_of(normalised),
                  scale.has_value() ? std::optional<ScalarType>(dtype_of(*scale)) : std::nullopt);
  Tensor output = allocate_like(x, dtypes.output);
  const RowStatistics rstd(op, normalised, 1, keep_rstd);
  launch.check(fuseopt_rms_norm_fwd({.input = pointer(op, x),
                                     .residual = pointer(op, addend),
                                     .weight = pointer(op, scale),
                                     .output = pointer(op, output),
                                     .sum = pointer(op, sum),
                                     .rstd = rstd.pointer(0),
                                     .rows = shape.rows,
                                     .columns = shape.columns,
                                     .eps = eps,
                                     .offset = weight_offset(scale, offset),
                                     .norm_dtype = dtype_code(op, dtypes.norm)},
                                    launch.stream()));
  return {output, sum, rstd.tensors()};
}

std::tuple<Tensor, Tensor> backward(const char* op, const Tensor& grad_output, const std::optional<Tensor>& grad_sum,
                                    const Tensor& input, const std::optional<Tensor>& weight, const Tensor& rstd,
                                    double offset, bool need_weight_grad) {
  const Matrix shape = matrix_of(op, input);
  check_same(op, "grad_output", grad_output, input);
  const Tensor grad = as_contiguous(grad_output), x = as_contiguous(input),
               row_rstd = row_statistic(op, "rstd", rstd, input);
  const auto added = like_input(op, "grad_sum", grad_sum, input);
  const auto scale = parameter(op, "weight", weight, input);
  const bool wanted = need_weight_grad && scale.has_value();
  const Launch launch(op, x);
  Tensor grad_input = allocate_like(x, dtype_of(x));
  Tensor grad_weight = allocate_parameter_grad(x, scale, shape.columns, wanted);
  const auto workspace = norm_bwd_workspace(x, scale, shape, wanted ? 1 : 0);
  launch.check(fuseopt_rms_norm_bwd({.grad_output = pointer(op, grad),
                                     .grad_sum = pointer(op, added),
                                     .input = pointer(op, x),
                                     .weight = pointer(op, scale),
                                     .rstd = pointer(op, row_rstd),
                                     .grad_input = pointer(op, grad_input),
                                     .grad_weight = wanted_pointer(op, grad_weight, wanted),
                                     .workspace = data_of(workspace),
                                     .rows = shape.rows,
                                     .columns = shape.columns,
                                     .offset = weight_offset(scale, offset)},
                                    launch.stream()));
  return {grad_input, grad_weight};
}

Tensor rms_norm(Tensor input, std::optional<Tensor> weight, double eps, int64_t cast_order, double offset) {
  return forward("rms_norm", input, std::nullopt, weight, eps, cast_order, offset, false).output;
}

std::tuple<Tensor, Tensor> rms_norm_fwd(Tensor input, std::optional<Tensor> weight, double eps, int64_t cast_order,
                                        double offset) {
  const auto result = forward("rms_norm_fwd", input, std::nullopt, weight, eps, cast_order, offset, true);
  return {result.output, result.statistics[0]};
}

std::tuple<Tensor, Tensor> rms_norm_bwd(Tensor grad_output, Tensor input, std::optional<Tensor> weight, Tensor rstd,
                                        double offset, bool need_weight_grad) {
  return backward("rms_norm_bwd", grad_output, std::nullopt, input, weight, rstd, offset, need_weight_grad);
}

std::tuple<Tensor, Tensor> add_rms_norm(Tensor input, Tensor residual, std::optional<Tensor> weight, double eps,
                                        int64_t cast_order, double offset) {
  const auto result = forward("add_rms_norm", input, residual, weight, eps, cast_order, offset, false);
  return {result.output, *result.sum};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_fwd(Tensor input, Tensor residual, std::optional<Tensor> weight,
                                                    double eps, int64_t cast_order, double offset) {
  const auto result = forward("add_rms_norm_fwd", input, residual, weight, eps, cast_order, offset, true);
  return {result.output, *result.sum, result.statistics[0]};
}

std::tuple<Tensor, Tensor> add_rms_norm_bwd(Tensor grad_output, std::optional<Tensor> grad_sum, Tensor sum,
                                            std::optional<Tensor> weight, Tensor rstd, double offset,
                                            bool need_weight_grad) {
  return backward("add_rms_norm_bwd", grad_output, grad_sum, sum, weight, rstd, offset, need_weight_grad);
}

}  // namespace
}  // namespace fuseopt::rms_norm_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::rms_norm_binding;
  library.impl("rms_norm", TORCH_BOX((fuseopt::checked<rms_norm, fuseopt::declared::kRmsNorm>)));
  library.impl("add_rms_norm", TORCH_BOX((fuseopt::checked<add_rms_norm, fuseopt::declared::kAddRmsNorm>)));
  library.impl("rms_norm_fwd", TORCH_BOX((fuseopt::checked<rms_norm_fwd, fuseopt::declared::kRmsNormFwd>)));
  library.impl("rms_norm_bwd", TORCH_BOX((fuseopt::checked<rms_norm_bwd, fuseopt::declared::kRmsNormBwd>)));
  library.impl("add_rms_norm_fwd", TORCH_BOX((fuseopt::checked<add_rms_norm_fwd, fuseopt::declared::kAddRmsNormFwd>)));
  library.impl("add_rms_norm_bwd", TORCH_BOX((fuseopt::checked<add_rms_norm_bwd, fuseopt::declared::kAddRmsNormBwd>)));
}
