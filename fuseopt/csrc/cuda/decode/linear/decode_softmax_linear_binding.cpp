#include "cuda/decode/linear/decode_linear_binding.h"

namespace fuseopt::decode_softmax_linear_binding {
namespace {

constexpr const char* kOp = "decode_softmax_linear";

Tensor decode_softmax_linear(Tensor scores, Tensor weight, std::optional<Tensor> residual, int64_t groups, bool pdl,
                             std::vector<Tensor> prefetch) {
  PdlGuard guard(pdl);
  LinearCall call = linear_call(kOp, guard, scores, {weight}, {}, residual, {}, prefetch);
  DecodeLinear& layer = call.layer;
  FUSEOPT_CHECK(groups > 0 && layer.in_features % groups == 0, "fuseopt::", kOp, ": ", layer.in_features,
                " scores are no ", groups, " groups of one size");
  const Launch launch(kOp, call.output);
  if (fuseopt_takes_decode_softmax_linear(layer, groups)) {
    launch.check(fuseopt_decode_softmax_linear(layer, groups, launch.stream()));
    return call.output;
  }
  const Tensor probabilities = allocate_like(scores, dtype_of(weight));
  if (layer.in_features > 0) {
    launch.check(fuseopt_softmax_fwd(layer.input, {}, pointer(kOp, probabilities), layer.rows * groups,
                                     layer.in_features / groups, 1, launch.stream()));
  }
  layer.input = pointer(kOp, probabilities);
  launch.check(fuseopt_decode_linear(layer, launch.stream()));
  return call.output;
}

constexpr auto kDecodeSoftmaxLinear = arguments("decode_softmax_linear", {
    {"scores", kFloats}, {"weight", kFloats}, {"residual", kFloats}, {"prefetch", kFloats}});

}  // namespace
}  // namespace fuseopt::decode_softmax_linear_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_softmax_linear_binding;
  library.impl("decode_softmax_linear", TORCH_BOX((fuseopt::checked<decode_softmax_linear, kDecodeSoftmaxLinear>)));
}
