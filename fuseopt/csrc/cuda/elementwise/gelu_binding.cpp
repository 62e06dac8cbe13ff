#include "shared_arguments.h"
#include "cuda/common/binding.h"

namespace fuseopt::gelu_binding {
namespace {

Tensor gelu_fwd(Tensor input, bool tanh, std::optional<Tensor> bias, std::optional<ScalarType> output_dtype) {
  constexpr const char* kOp = "gelu_fwd";
  const Tensor x = as_contiguous(input);
  const auto shift = bias.has_value() ? parameter(kOp, "bias", bias, input) : std::nullopt;
  const int64_t columns = x.dim() > 0 ? x.size(x.dim() - 1) : 1;
  const Launch launch(kOp, x);
  Tensor output = allocate_like(x, output_dtype.value_or(dtype_of(x)));
  launch.check(fuseopt_gelu_fwd(pointer(kOp, x), pointer(kOp, shift), pointer(kOp, output), x.numel(), columns,
                                tanh ? kTanh : kErf, launch.stream()));
  return output;
}

Tensor gelu_bwd(Tensor grad_output, Tensor input, bool tanh, std::optional<Tensor> bias) {
  constexpr const char* kOp = "gelu_bwd";
  check_same(kOp, "grad_output", grad_output, input);
  const Tensor grad = as_contiguous(grad_output), x = as_contiguous(input);
  const auto shift = bias.has_value() ? parameter(kOp, "bias", bias, input) : std::nullopt;
  const int64_t columns = x.dim() > 0 ? x.size(x.dim() - 1) : 1;
  const Launch launch(kOp, x);
  Tensor grad_input = allocate_like(x, dtype_of(x));
  launch.check(fuseopt_gelu_bwd(pointer(kOp, grad), pointer(kOp, x), pointer(kOp, shift), pointer(kOp, grad_input),
                                x.numel(), columns, tanh ? kTanh : kErf, launch.stream()));
  return grad_input;
}

std::tuple<Tensor, Tensor> gelu_bias_bwd(Tensor grad_output, Tensor input, bool tanh, Tensor bias) {
  constexpr const char* kOp = "gelu_bias_bwd";
  check_same(kOp, "grad_output", grad_output, input);
  const Tensor grad = as_contiguous(grad_output), x = as_contiguous(input);
  const auto shift = parameter(kOp, "bias", bias, input);
  const Matrix shape = matrix_of(kOp, x);
  const Launch launch(kOp, x);
  Tensor grad_input = allocate_like(x, dtype_of(x)), grad_bias = allocate_like(*shift, dtype_of(*shift));
  const size_t bytes = fuseopt_gelu_bias_bwd_workspace_bytes(shape.rows, shape.columns);
  std::optional<Tensor> workspace;
  if (bytes > 0) workspace = allocate(x, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  launch.check(fuseopt_gelu_bias_bwd(pointer(kOp, grad), pointer(kOp, x), pointer(kOp, shift), pointer(kOp, grad_input),
                                     pointer(kOp, grad_bias), data_of(workspace), shape.rows, shape.columns,
                                     tanh ? kTanh : kErf, launch.stream()));
  return {grad_input, grad_bias};
}

constexpr auto kGeluBiasBwd = arguments("gelu_bias_bwd", {
    {"grad_output", kFloats}, {"input", kFloats}, {"bias", kFloats}});

}  // namespace
}  // namespace fuseopt::gelu_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::gelu_binding;
  library.impl("gelu_fwd", TORCH_BOX((fuseopt::checked<gelu_fwd, fuseopt::declared::kGeluFwd>)));
  library.impl("gelu_bwd", TORCH_BOX((fuseopt::checked<gelu_bwd, fuseopt::declared::kGeluBwd>)));
  library.impl("gelu_bias_bwd", TORCH_BOX((fuseopt::checked<gelu_bias_bwd, kGeluBiasBwd>)));
}
