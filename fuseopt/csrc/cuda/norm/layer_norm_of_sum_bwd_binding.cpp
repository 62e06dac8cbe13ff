#include "cuda/norm/norm_binding.h"

namespace fuseopt::layer_norm_of_sum_bwd_binding {
namespace {

constexpr const char* kOp = "layer_norm_of_sum_bwd";
constexpr int kAlignment = 16;

// Returns the tensor as the kernel reads it: contiguous, at a multiple of kAlignment.
Tensor laid_out(const Tensor& tensor) {
  const Tensor found = as_contiguous(tensor);
  return reinterpret_cast<uintptr_t>(found.data_ptr()) % kAlignment == 0 ? found : torch::stable::clone(found);
}

// Returns `tensor`, which has the shape of `like`, in the kernel's layout.
Tensor matrix_of(const char* name, const Tensor& tensor, const Tensor& like) {
  check_same(kOp, name, tensor, like);
  return laid_out(tensor);
}

Tensor vector_of(const char* name, const Tensor& vector, int64_t elements) {
  FUSEOPT_CHECK(vector.numel() == elements, "fuseopt::", kOp, ": ", name, " must have ", elements, " elements");
  return laid_out(vector);
}

const float* floats_of(const Tensor& tensor) { return static_cast<const float*>(tensor.data_ptr()); }

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> layer_norm_of_sum_bwd(
    Tensor grad_output, Tensor grad_sum, Tensor base, std::vector<Tensor> addends, Tensor weight, Tensor bias,
    Tensor mean, Tensor rstd) {
  const Matrix shape = fuseopt::matrix_of(kOp, grad_output);
  const ScalarType narrow = dtype_of(grad_output), wide = ScalarType::Float;
  const Launch launch(kOp, grad_output);
  LayerNormOfSumBwd call = {};
  call.rows = shape.rows;
  call.columns = shape.columns;
  call.grad_output.dtype = dtype_code(kOp, narrow);
  FUSEOPT_CHECK(shape.columns * (call.grad_output.dtype == kFloat32 ? 4 : 2) % kAlignment == 0 &&
                    shape.columns <= call.kMostColumns,
                "fuseopt::", kOp, ": rows must be whole 16 bytes and ", call.kMostColumns, " columns at most, not ",
                shape.columns);
  FUSEOPT_CHECK(addends.size() <= call.kMostAddends, "fuseopt::", kOp, ": ", addends.size(), " addends are too many");
  // The kernel's layout from here on. Copies live until the launch.
  grad_output = matrix_of("grad_output", grad_output, grad_output);
  grad_sum = matrix_of("grad_sum", grad_sum, grad_output);
  base = matrix_of("base", base, grad_output);
  for (Tensor& addend : addends) addend = matrix_of("an addend", addend, grad_output);
  weight = vector_of("weight", weight, shape.columns);
  bias = vector_of("bias", bias, shape.columns);
  mean = vector_of("mean", mean, shape.rows);
  rstd = vector_of("rstd", rstd, shape.rows);
  call.grad_output.data = grad_output.data_ptr();
  call.grad_sum = floats_of(grad_sum);
  call.base = floats_of(base);
  for (const Tensor& addend : addends) call.addends[call.addend_count++] = addend.data_ptr();
  call.weight = floats_of(weight);
  call.bias = floats_of(bias);
  call.mean = floats_of(mean);
  call.rstd = floats_of(rstd);
  Tensor output = allocate_like(grad_output, narrow), grad = allocate_like(grad_output, wide),
         rounded = allocate_like(grad_output, narrow);
  Tensor grad_weight = allocate(grad_output, {shape.columns}, wide),
         grad_bias = allocate(grad_output, {shape.columns}, wide),
         grad_columns = allocate(grad_output, {shape.columns}, wide);
  const auto workspace = norm_bwd_workspace(grad_output, weight, shape, 3);
  call.output = output.data_ptr();
  call.grad = static_cast<float*>(grad.data_ptr());
  call.rounded = rounded.data_ptr();
  call.grad_weight = static_cast<float*>(grad_weight.data_ptr());
  call.grad_bias = static_cast<float*>(grad_bias.data_ptr());
  call.grad_columns = static_cast<float*>(grad_columns.data_ptr());
  call.workspace = data_of(workspace);
  launch.check(fuseopt_layer_norm_of_sum_bwd(call, launch.stream()));
  return {output, grad, rounded, grad_weight, grad_bias, grad_columns};
}

constexpr auto kLayerNormOfSumBwd = arguments("layer_norm_of_sum_bwd", {
    {"grad_output", kUpToFloat}, {"grad_sum", kOnlyFloat}, {"base", kOnlyFloat},
    {"addends", kUpToFloat, "grad_output"}, {"weight", kOnlyFloat}, {"bias", kOnlyFloat}, {"mean", kOnlyFloat},
    {"rstd", kOnlyFloat}});

}  // namespace
}  // namespace fuseopt::layer_norm_of_sum_bwd_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::layer_norm_of_sum_bwd_binding;
  library.impl("layer_norm_of_sum_bwd", TORCH_BOX((fuseopt::checked<layer_norm_of_sum_bwd, kLayerNormOfSumBwd>)));
}
