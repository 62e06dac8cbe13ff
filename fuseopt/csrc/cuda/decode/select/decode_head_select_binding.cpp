#include "cuda/decode/linear/decode_linear_binding.h"
#include "cuda/decode/select/decode_select_binding.h"

namespace fuseopt::decode_head_select_binding {
namespace {

constexpr const char* kOp = "decode_head_select_";

bool has_only_rules(const LogitsEdits& edits) {
  return edits.repetition_penalty == 1 && edits.ngram_size == 0 && edits.encoder_ngram_size == 0 &&
         edits.suppressed_count == 0 && edits.temperature == 1;
}

void decode_head_select(Tensor input, std::optional<Tensor> partials, Tensor weight, std::string norm,
                        std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias, double eps,
                        std::vector<Tensor> prefetch, Tensor tokens, Tensor ids, Tensor length, Tensor unfinished,
                        Tensor going, Tensor pad, std::optional<Tensor> eos, std::vector<Tensor> counters, bool pdl,
                        std::optional<Tensor> edited_ids, std::optional<Tensor> edited_length,
                        double repetition_penalty, std::optional<Tensor> prompt_ignore_length, int64_t ngram_size,
                        std::optional<Tensor> encoder_ids, int64_t encoder_ngram_size,
                        std::optional<Tensor> token_rules, std::optional<Tensor> rule_bounds, int64_t forcing_rules,
                        double temperature) {
  PdlGuard guard(pdl);
  LinearCall head =
      linear_call(kOp, guard, input, {weight}, {}, std::nullopt, {norm, norm_weight, norm_bias, eps}, prefetch);
  if (partials.has_value()) add_to_input(kOp, head, input, *partials, guard);
  const Launch launch(kOp, head.output);
  DecodeSelect select =
      decode_select_of(kOp, head.output, tokens, ids, length, unfinished, going, pad, eos, counters, guard);
  select.has_edits = edited_ids.has_value();
  if (select.has_edits) {
    select.edits = logits_edits(kOp, head.output, guard,
                                {edited_ids, edited_length, repetition_penalty, prompt_ignore_length, ngram_size,
                                 encoder_ids, encoder_ngram_size, token_rules, rule_bounds, forcing_rules, temperature});
  }
  const bool is_by_rules = !select.has_edits || has_only_rules(select.edits);
  const int64_t parts = is_by_rules ? fuseopt_decode_linear_parts(head.layer) : 0;
  const Tensor candidates =
      candidates_for(select, head.output, parts > 0 ? parts : fuseopt_decode_select_chunks(select.vocabulary));
  select.has_candidates = parts > 0;
  head.layer.best = parts > 0 ? select.candidates : nullptr;
  head.layer.rules = parts > 0 ? select.edits.rules : TokenRules{};
  head.layer.sequence_length = select.edits.length;
  head.layer.pdl = guard.allowed();  // all copies have been made by now
  select.pdl = true;                       // safe after the layer, which reads none of it
  launch.check(fuseopt_decode_linear(head.layer, launch.stream()));
  launch.check(fuseopt_decode_select(select, launch.stream()));
}

constexpr auto kDecodeHeadSelectInPlace = arguments("decode_head_select_", {
    {"input", kFloats}, {"split_k_partials", kOnlyFloat}, {"weight", kFloats}, {"norm_weight", kFloats}, {"norm_bias", kFloats},
    {"prefetch", kFloats}, {"tokens", kOnlyLong}, {"ids", kOnlyLong}, {"length", kOnlyLong}, {"unfinished", kOnlyBool},
    {"going", kOnlyBool}, {"pad", kOnlyLong}, {"eos", kOnlyLong}, {"counters", kOnlyLong}}) + kOfEdits;

}  // namespace
}  // namespace fuseopt::decode_head_select_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_head_select_binding;
  library.impl("decode_head_select_", TORCH_BOX((fuseopt::checked<decode_head_select, kDecodeHeadSelectInPlace>)));
}
