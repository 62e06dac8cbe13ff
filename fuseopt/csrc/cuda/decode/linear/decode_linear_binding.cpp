#include "cuda/decode/linear/decode_linear_binding.h"
#include "shared_arguments.h"

namespace fuseopt::decode_linear_binding {
namespace {

constexpr const char* kOp = "decode_linear";

Tensor decode_linear(Tensor input, std::vector<Tensor> weights, std::vector<Tensor> biases,
                     std::optional<Tensor> residual, std::string norm, std::optional<Tensor> norm_weight,
                     std::optional<Tensor> norm_bias, double eps, std::string activation, bool gated, bool pdl,
                     std::vector<Tensor> prefetch) {
  PdlGuard guard(pdl);
  const LinearCall call = linear_call(kOp, guard, input, weights, biases, residual, {norm, norm_weight, norm_bias, eps},
                                      prefetch, activation, gated);
  const Launch launch(kOp, call.output);
  launch.check(fuseopt_decode_linear(call.layer, launch.stream()));
  return call.output;
}

}  // namespace
}  // namespace fuseopt::decode_linear_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_linear_binding;
  library.impl("decode_linear", TORCH_BOX((fuseopt::checked<decode_linear, fuseopt::declared::kDecodeLinear>)));
}
