#include "norm_binding.h"

namespace fuseopt::layer_norm_of_sum_bwd_binding {
namespace {

constexpr const char* kOp = "layer_norm_of_sum_bwd";
constexpr int kAlignment = 16;

// `tensor`, of the shape and on the device of `like`, contiguous and of dtype `type`.
void* matrix_of(const char* name, const Tensor& tensor, const Tensor& like, ScalarType type) {
  check_same(kOp, name, tensor, like);
  FUSEOPT_CHECK(tensor.scalar_type() == type && tensor.is_contiguous() &&
                    reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kAlignment == 0,
                "fuseopt::", kOp, ": ", name, " must be contiguous ", toString(type), ", aligned to 16 bytes");
  return tensor.data_ptr();
}

const float* vector_of(const char* name, const Tensor& vector, int64_t elements, const Tensor& like) {
  FUSEOPT_CHECK(vector.is_cuda() && vector.get_device_index() == like.get_device_index() && vector.is_contiguous() &&
                    vector.scalar_type() == ScalarType::Float && vector.numel() == elements &&
                    reinterpret_cast<uintptr_t>(vector.data_ptr()) % kAlignment == 0,
                "fuseopt::", kOp, ": ", name, " must be ", elements, " contiguous floats, aligned to 16 bytes");
  return static_cast<const float*>(vector.data_ptr());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> layer_norm_of_sum_bwd(
    Tensor grad_output, Tensor grad_sum, Tensor base, std::vector<Tensor> addends, Tensor weight, Tensor bias,
    Tensor mean, Tensor rstd) {
  const Matrix shape = fuseopt::matrix_of(kOp, grad_output);
  const ScalarType narrow = grad_output.scalar_type(), wide = ScalarType::Float;
  const Launch launch(kOp, grad_output);
  LayerNormOfSumBwd call = {};
  call.rows = shape.rows;
  call.columns = shape.columns;
  call.grad_output = {matrix_of("grad_output", grad_output, grad_output, narrow), dtype_code(kOp, narrow)};
  FUSEOPT_CHECK(call.grad_output.dtype != kFloat64, "fuseopt::", kOp, ": float64 is not supported");
  FUSEOPT_CHECK(shape.columns * (call.grad_output.dtype == kFloat32 ? 4 : 2) % kAlignment == 0 &&
                    shape.columns <= call.kMostColumns,
                "fuseopt::", kOp, ": rows must be whole 16 bytes and ", call.kMostColumns, " columns at most, not ",
                shape.columns);
  FUSEOPT_CHECK(addends.size() <= call.kMostAddends, "fuseopt::", kOp, ": ", addends.size(), " addends are too many");
  call.grad_sum = static_cast<const float*>(matrix_of("grad_sum", grad_sum, grad_output, wide));
  call.base = static_cast<const float*>(matrix_of("base", base, grad_output, wide));
  for (const Tensor& addend : addends) {
    call.addends[call.addend_count++] = matrix_of("an addend", addend, grad_output, narrow);
  }
  call.weight = vector_of("weight", weight, shape.columns, grad_output);
  call.bias = vector_of("bias", bias, shape.columns, grad_output);
  call.mean = vector_of("mean", mean, shape.rows, grad_output);
  call.rstd = vector_of("rstd", rstd, shape.rows, grad_output);
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

}  // namespace
}  // namespace fuseopt::layer_norm_of_sum_bwd_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  library.impl("layer_norm_of_sum_bwd", TORCH_BOX(&fuseopt::layer_norm_of_sum_bwd_binding::layer_norm_of_sum_bwd));
}
