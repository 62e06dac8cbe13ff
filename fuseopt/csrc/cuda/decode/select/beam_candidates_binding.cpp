#include "cuda/decode/select/logits_edits_binding.h"

namespace fuseopt::beam_candidates_binding {
namespace {

constexpr const char* kOp = "beam_candidates";

std::tuple<Tensor, Tensor> beam_candidates(Tensor scores, Tensor running_scores, int64_t count, bool log_softmax,
                                           std::optional<Tensor> highest, std::optional<Tensor> random, bool pdl,
                                           std::optional<Tensor> edited_ids,
                                           std::optional<Tensor> edited_length, double repetition_penalty,
                                           std::optional<Tensor> prompt_ignore_length, int64_t ngram_size,
                                           std::optional<Tensor> encoder_ids, int64_t encoder_ngram_size,
                                           std::optional<Tensor> token_rules, std::optional<Tensor> rule_bounds,
                                           int64_t forcing_rules, double temperature) {
  FUSEOPT_CHECK(scores.dim() == 2 && running_scores.dim() == 2 && scores.size(0) == running_scores.numel(),
                "fuseopt::", kOp, ": scores must be [items * beams, vocabulary], running_scores [items, beams]");
  FUSEOPT_CHECK(count > 0 && count <= BeamCandidates::kMaxCount, "fuseopt::", kOp, ": count must be between 1 and ",
                BeamCandidates::kMaxCount, ", not ", count);
  FUSEOPT_CHECK(running_scores.size(1) * scores.size(1) <= INT32_MAX, "fuseopt::", kOp,
                ": the continuations of an item are more than 2^31");
  const Launch launch(kOp, scores);
  PdlGuard guard(pdl);
  const Tensor running = guard.contiguous(running_scores);
  BeamCandidates candidates = {};
  candidates.scores = score_matrix(kOp, scores);
  candidates.vocabulary = scores.size(1);
  candidates.running_scores = static_cast<const float*>(running.data_ptr());
  candidates.items = running.size(0);
  candidates.beams = running.size(1);
  candidates.count = static_cast<int>(count);
  const int64_t chunks = scores.size(0) * fuseopt_beam_candidates_chunks(scores.size(1));
  const Tensor chunk_keys = allocate(scores, {chunks, count}, ScalarType::Int);
  const Tensor chunk_tokens = allocate(scores, {chunks, count}, ScalarType::Int);
  candidates.chunk_keys = static_cast<unsigned*>(chunk_keys.data_ptr());
  candidates.chunk_tokens = static_cast<int*>(chunk_tokens.data_ptr());
  Tensor values = allocate(scores, {candidates.items, count}, ScalarType::Float);
  Tensor places = allocate(scores, {candidates.items, count}, ScalarType::Long);
  candidates.values = static_cast<float*>(values.data_ptr());
  candidates.places = static_cast<int64_t*>(places.data_ptr());
  const std::optional<Tensor> sums =
      log_softmax ? std::optional(allocate(scores, {chunks, 2}, ScalarType::Float)) : std::nullopt;
  candidates.partial_sums = static_cast<float*>(data_of(sums));
  candidates.has_edits = edited_ids.has_value();
  if (candidates.has_edits) {
    candidates.edits = logits_edits(kOp, scores, guard,
                                    {edited_ids, edited_length, repetition_penalty, prompt_ignore_length, ngram_size,
                                     encoder_ids, encoder_ngram_size, token_rules, rule_bounds, forcing_rules,
                                     temperature});
  }
  if (highest.has_value()) {
    FUSEOPT_CHECK(random.has_value() && random->is_contiguous() && random->numel() == 3, "fuseopt::", kOp,
                  ": random must be contiguous, of 3 elements");
    FUSEOPT_CHECK(dtype_of(scores) == ScalarType::Float && !candidates.has_edits && !log_softmax, "fuseopt::", kOp,
                  ": sampled scores must be float32, without edits or log_softmax");
    FUSEOPT_CHECK(highest->numel() == scores.size(0), "fuseopt::", kOp, ": highest must have an element for each row");
    candidates.highest = static_cast<const float*>(guard.contiguous(*highest).data_ptr());
    candidates.random = static_cast<const int64_t*>(random->data_ptr());
  }
  candidates.pdl = guard.allowed();
  launch.check(fuseopt_beam_candidates(candidates, launch.stream()));
  return {values, places};
}

constexpr auto kBeamCandidates = arguments("beam_candidates", {
    {"scores", kUpToFloat}, {"running_scores", kOnlyFloat}, {"highest", kOnlyFloat}, {"random", kOnlyLong}}) + kOfEdits;

}  // namespace
}  // namespace fuseopt::beam_candidates_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::beam_candidates_binding;
  library.impl("beam_candidates", TORCH_BOX((fuseopt::checked<beam_candidates, kBeamCandidates>)));
}
