#include "cuda/decode/select/logits_edits_binding.h"

namespace fuseopt::edit_logits_binding {
namespace {

constexpr const char* kOp = "edit_logits";

Tensor edit_logits(Tensor logits, bool pdl, std::optional<Tensor> ids, std::optional<Tensor> length,
                   double repetition_penalty, std::optional<Tensor> prompt_ignore_length, int64_t ngram_size,
                   std::optional<Tensor> encoder_ids, int64_t encoder_ngram_size, std::optional<Tensor> token_rules,
                   std::optional<Tensor> rule_bounds, int64_t forcing_rules, double temperature) {
  const Launch launch(kOp, logits);
  Tensor output = allocate_like(logits, ScalarType::Float);
  EditLogits edit = {};
  edit.logits = score_matrix(kOp, logits);
  edit.rows = logits.size(0);
  edit.vocabulary = logits.size(1);
  PdlGuard guard(pdl);
  edit.edits = logits_edits(kOp, logits, guard,
                            {ids, length, repetition_penalty, prompt_ignore_length, ngram_size, encoder_ids,
                             encoder_ngram_size, token_rules, rule_bounds, forcing_rules, temperature});
  edit.pdl = guard.allowed();
  edit.output = static_cast<float*>(output.data_ptr());
  launch.check(fuseopt_edit_logits(edit, launch.stream()));
  return output;
}

constexpr auto kEditLogits = arguments("edit_logits", {
    {"logits", kFloats}}) + kOfEdits;

}  // namespace
}  // namespace fuseopt::edit_logits_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::edit_logits_binding;
  library.impl("edit_logits", TORCH_BOX((fuseopt::checked<edit_logits, kEditLogits>)));
}
