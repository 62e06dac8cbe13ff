#include "cuda/decode/select/decode_select_binding.h"

namespace fuseopt::decode_select_binding {
namespace {

constexpr const char* kOp = "decode_select_";

void decode_select(Tensor scores, Tensor tokens, Tensor ids, Tensor length, Tensor unfinished, Tensor going, Tensor pad,
                   std::optional<Tensor> eos, std::vector<Tensor> counters,
                   std::optional<Tensor> divisors, bool pdl, std::optional<Tensor> edited_ids,
                   std::optional<Tensor> edited_length, double repetition_penalty,
                   std::optional<Tensor> prompt_ignore_length, int64_t ngram_size, std::optional<Tensor> encoder_ids,
                   int64_t encoder_ngram_size, std::optional<Tensor> token_rules, std::optional<Tensor> rule_bounds,
                   int64_t forcing_rules, double temperature) {
  const Launch launch(kOp, scores);
  PdlGuard guard(pdl);
  DecodeSelect select =
      decode_select_of(kOp, scores, tokens, ids, length, unfinished, going, pad, eos, counters, guard);
  const Tensor candidates = candidates_for(select, scores, fuseopt_decode_select_chunks(select.vocabulary));
  if (divisors.has_value()) {
    FUSEOPT_CHECK(dtype_of(scores) == ScalarType::Float && divisors->numel() == scores.numel(), "fuseopt::", kOp,
                  ": divisors must be float32 as the scores, of their shape");
    select.divisors = static_cast<const float*>(guard.contiguous(*divisors).data_ptr());
  }
  select.has_edits = edited_ids.has_value();
  if (select.has_edits) {
    select.edits = logits_edits(kOp, scores, guard,
                                {edited_ids, edited_length, repetition_penalty, prompt_ignore_length, ngram_size,
                                 encoder_ids, encoder_ngram_size, token_rules, rule_bounds, forcing_rules, temperature});
  }
  select.pdl = guard.allowed();
  launch.check(fuseopt_decode_select(select, launch.stream()));
}

constexpr auto kDecodeSelectInPlace = arguments("decode_select_", {
    {"scores", kFloats}, {"tokens", kOnlyLong}, {"ids", kOnlyLong}, {"length", kOnlyLong}, {"unfinished", kOnlyBool},
    {"going", kOnlyBool}, {"pad", kOnlyLong}, {"eos", kOnlyLong}, {"counters", kOnlyLong}, {"divisors", kOnlyFloat}}) + kOfEdits;

}  // namespace
}  // namespace fuseopt::decode_select_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_select_binding;
  library.impl("decode_select_", TORCH_BOX((fuseopt::checked<decode_select, kDecodeSelectInPlace>)));
}
