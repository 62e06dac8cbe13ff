#include "cuda/decode/linear/decode_linear_binding.h"

namespace fuseopt::packed_linear_binding {
namespace {

constexpr const char* kOp = "decode_packed_linear";
constexpr int64_t kLineOutputs = 16;

Tensor decode_packed_linear(Tensor input, std::vector<Tensor> weights, std::vector<int64_t> outputs, int64_t bits,
                            int64_t group, bool has_zeros, std::vector<Tensor> biases, std::optional<Tensor> residual,
                            std::string norm, std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias,
                            double eps, std::string activation, bool gated, bool pdl, std::vector<Tensor> prefetch) {
  check_weight_count(kOp, weights.size());
  FUSEOPT_CHECK(outputs.size() == weights.size(), "fuseopt::", kOp, ": ", outputs.size(), " numbers of outputs for ",
                weights.size(), " weights");
  const bool is_group = group == 32 || group == 64 || group == 128;
  FUSEOPT_CHECK(bits == 8 ? !has_zeros : bits == 4 && is_group, "fuseopt::", kOp, ": ", bits, " bits with groups of ", group,
                "; 8 bits have no zero points, 4 bits groups of 32, 64 or 128");
  PdlGuard guard(pdl);
  const int64_t columns = matrix_of(kOp, input).columns;
  PackedLinear packed{{}, static_cast<int>(bits), group, has_zeros};
  packed.layer.in_features = columns;
  const int64_t line_bytes = fuseopt_packed_line_bytes(packed);
  StoredWeights stored{{}, outputs, dtype_of(input), columns, columns};
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t lines = (outputs[i] + kLineOutputs - 1) / kLineOutputs;
    FUSEOPT_CHECK(weights[i].dim() == 2 && weights[i].size(0) == lines && weights[i].size(1) == line_bytes, "fuseopt::", kOp,
                  ": weight ", i, " must be [", lines, ", ", line_bytes, "]");
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
