#include "decode_linear_binding.h"
#include "decode_select_binding.h"

namespace fuseopt::decode_head_select_binding {
namespace {

constexpr const char* kOp = "decode_head_select_";

void decode_head_select(Tensor input, Tensor weight, std::string norm, std::optional<Tensor> norm_weight,
                        std::optional<Tensor> norm_bias, double eps, std::vector<Tensor> ahead, Tensor tokens,
                        Tensor ids, Tensor length, Tensor unfinished, Tensor going, Tensor pad,
                        std::optional<Tensor> eos, std::vector<Tensor> counters, bool overlap) {
  LinearCall head = linear_call(kOp, input, {weight}, {}, std::nullopt, norm, norm_weight, norm_bias, eps, "", false,
                                overlap, ahead);
  const Launch launch(kOp, head.output);
  auto [select, kept] =
      decode_select_of(kOp, head.output, tokens, ids, length, unfinished, going, pad, eos, counters, true);
  const int64_t parts = fuseopt_decode_linear_parts(head.layer);
  const Tensor candidates =
      candidates_for(select, head.output, parts > 0 ? parts : fuseopt_decode_select_chunks(select.vocabulary));
  select.has_candidates = parts > 0;
  head.layer.best = parts > 0 ? select.candidates : nullptr;
  launch.check(fuseopt_decode_linear(head.layer, launch.stream()));
  launch.check(fuseopt_decode_select(select, launch.stream()));
}

}  // namespace
}  // namespace fuseopt::decode_head_select_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_head_select_binding;
  library.impl("decode_head_select_", TORCH_BOX(&decode_head_select));
}
