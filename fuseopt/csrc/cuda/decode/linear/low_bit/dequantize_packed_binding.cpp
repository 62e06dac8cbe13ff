#include "cuda/decode/linear/low_bit/packed_binding.h"

namespace fuseopt::dequantize_packed_binding {
namespace {

constexpr const char* kOp = "dequantize_packed";

Tensor dequantize_packed(Tensor data, int64_t outputs, int64_t inputs, int64_t bits, int64_t group, bool has_zeros,
                         ScalarType dtype) {
  PackedLinear packed = packed_linear(kOp, inputs, bits, group, has_zeros);
  check_packed(kOp, packed, data, outputs);
  FUSEOPT_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, "fuseopt::", kOp,
                ": dtype must be bfloat16 or float16, not ", toString(dtype));
  PdlGuard guard(false);
  const Tensor aligned = guard.aligned(data);
  const Launch launch(kOp, aligned);
  Tensor weight = allocate(aligned, {outputs, inputs}, dtype);
  packed.layer.weights[0] = aligned.data_ptr();
  packed.layer.weight_dtype = dtype_code(kOp, dtype);
  packed.layer.out_features = outputs;
  packed.layer.output = pointer(kOp, weight);
  launch.check(fuseopt_dequantize_packed(packed, launch.stream()));
  return weight;
}

constexpr auto kDequantizePacked = arguments("dequantize_packed", {{"data", kOnlyByte}});

}  // namespace
}  // namespace fuseopt::dequantize_packed_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::dequantize_packed_binding;
  library.impl("dequantize_packed", TORCH_BOX((fuseopt::checked<dequantize_packed, kDequantizePacked>)));
}
