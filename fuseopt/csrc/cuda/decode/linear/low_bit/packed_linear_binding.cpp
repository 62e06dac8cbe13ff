#include "cuda/decode/linear/low_bit/packed_binding.h"

namespace fuseopt::packed_linear_binding {
namespace {

constexpr const char* kOp = "decode_packed_linear";

Tensor decode_packed_linear(Tensor input, std::vector<Tensor> weights, std::vector<int64_t> outputs, int64_t bits,
                            int64_t group, bool has_zeros, std::vector<Tensor> biases, std::optional<Tensor> residual,
                            std::string norm, std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias,
                            double eps, std::string activation, bool gated, bool pdl, std::vector<Tensor> prefetch) {
  check_weight_count(kOp, weights.size());
  FUSEOPT_CHECK(outputs.size() == weights.size(), "fuseopt::", kOp, ": ", outputs.size(), " numbers of outputs for ",
                weights.size(), " weights");
  PdlGuard guard(pdl);
  const int64_t columns = matrix_of(kOp, input).columns;
  PackedLinear packed = packed_linear(kOp, columns, bits, group, has_zeros);
  StoredWeights stored{{}, outputs, dtype_of(input), columns, columns};
  for (size_t i = 0; i < weights.size(); ++i) {
    check_packed(kOp, packed, weights[i], outputs[i]);
    stored.tensors.push_back(guard.aligned(weights[i]));
  }
  const NormArguments of_norm{norm, guard.aligned(norm_weight), guard.aligned(norm_bias), eps};
  const LinearCall call = linear_call(kOp, guard, guard.aligned(input), stored, biases, residual, of_norm, prefetch,
                                      activation, gated);
  packed.layer = call.layer;
  const Launch launch(kOp, call.output);
  launch.check(fuseopt_decode_packed_linear(packed, launch.stream()));
  return call.output;
}

constexpr auto kDecodePackedLinear = arguments("decode_packed_linear", {
    {"input", kHalves}, {"weights", kOnlyByte}, {"biases", kHalves, "input"}, {"residual", kUpToFloat},
    {"norm_weight", kHalves, "input"}, {"norm_bias", kHalves, "input"}, {"prefetch", kFloats | kOnlyByte}});

}  // namespace
}  // namespace fuseopt::packed_linear_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::packed_linear_binding;
  library.impl("decode_packed_linear", TORCH_BOX((fuseopt::checked<decode_packed_linear, kDecodePackedLinear>)));
}
