#include "cuda/decode/select/decode_select_binding.h"

namespace fuseopt::decode_sample_binding {
namespace {

constexpr const char* kOp = "decode_sample_";
constexpr const char* kFilterOp = "filter_scores";

struct Filters {
  int64_t top_k;
  double top_p, min_p, typical_p;
  int64_t min_tokens;
};

// Fills in what both ops have, and launches.
void launch_sample(const char* op, DecodeSample& sample, const Tensor& logits, const Filters& filters, PdlGuard& guard,
                   const EditArguments& edits, const Launch& launch) {
  constexpr int64_t kMostMinTokens = 128;
  DecodeSelect& select = sample.select;
  select.has_edits = edits.ids.has_value();
  if (select.has_edits) select.edits = logits_edits(op, logits, guard, edits);
  FUSEOPT_CHECK(filters.top_k >= 0, "fuseopt::", op, ": top_k must not be negative");
  FUSEOPT_CHECK(filters.min_tokens > 0 && filters.min_tokens <= kMostMinTokens, "fuseopt::", op,
                ": min_tokens must be between 1 and ", kMostMinTokens, ", not ", filters.min_tokens);
  sample.top_k = filters.top_k == 0 ? select.vocabulary : filters.top_k;
  sample.top_p = filters.top_p;
  sample.min_p = filters.min_p;
  sample.typical_p = filters.typical_p;
  sample.min_tokens = static_cast<int>(filters.min_tokens);
  sample.blocks = static_cast<int>(fuseopt_decode_sample_blocks(select.rows, select.vocabulary));
  FUSEOPT_CHECK(sample.blocks > 0, "fuseopt::", op, ": a vocabulary of ", select.vocabulary,
                " is too large for this device");
  const int64_t scratch_floats = select.rows * fuseopt_decode_sample_scratch(select.rows, select.vocabulary);
  std::optional<Tensor> scratch;
  if (scratch_floats > 0) scratch = allocate(logits, {scratch_floats}, ScalarType::Float);
  sample.scratch = static_cast<float*>(data_of(scratch));
  select.pdl = guard.allowed();
  launch.check(fuseopt_decode_sample(sample, launch.stream()));
}

void decode_sample(Tensor logits, std::optional<Tensor> divisors, std::optional<Tensor> random, int64_t top_k,
                   double top_p, double min_p, double typical_p, int64_t min_tokens, Tensor tokens, Tensor ids,
                   Tensor length, Tensor unfinished, Tensor going, Tensor pad, std::optional<Tensor> eos,
                   std::vector<Tensor> counters, std::vector<Tensor> kept, bool pdl, std::optional<Tensor> edited_ids,
                   std::optional<Tensor> edited_length, double repetition_penalty,
                   std::optional<Tensor> prompt_ignore_length, int64_t ngram_size, std::optional<Tensor> encoder_ids,
                   int64_t encoder_ngram_size, std::optional<Tensor> token_rules, std::optional<Tensor> rule_bounds,
                   int64_t forcing_rules, double temperature) {
  const Launch launch(kOp, logits);
  PdlGuard guard(pdl);
  DecodeSample sample = {};
  DecodeSelect& select = sample.select;
  select = decode_select_of(kOp, logits, tokens, ids, length, unfinished, going, pad, eos, counters, guard);
  FUSEOPT_CHECK(divisors.has_value() != random.has_value(), "fuseopt::", kOp, ": needs either divisors or random");
  if (divisors.has_value()) {
    FUSEOPT_CHECK(divisors->numel() == logits.numel(), "fuseopt::", kOp, ": divisors must have the shape of logits");
    select.divisors = static_cast<const float*>(guard.contiguous(*divisors).data_ptr());
  } else {
    constexpr int64_t kMostNumbers = (int64_t{1} << 31) / sizeof(float);  // torch draws more in several launches
    FUSEOPT_CHECK(random->is_contiguous() && random->numel() == 3 && logits.numel() <= kMostNumbers, "fuseopt::", kOp,
                  ": random must be contiguous, of 3 elements, for up to ", kMostNumbers, " logits");
    sample.random = static_cast<const int64_t*>(random->data_ptr());
  }
  for (const Tensor& scores : kept) {  // one at most
    FUSEOPT_CHECK(scores.is_contiguous() && scores.numel() == logits.numel(), "fuseopt::", kOp,
                  ": kept must be contiguous, of the shape of logits");
    sample.kept = static_cast<float*>(scores.data_ptr());
  }
  const Tensor candidates = candidates_for(select, logits, 1);
  launch_sample(kOp, sample, logits, {top_k, top_p, min_p, typical_p, min_tokens}, guard,
                {edited_ids, edited_length, repetition_penalty, prompt_ignore_length, ngram_size, encoder_ids,
                 encoder_ngram_size, token_rules, rule_bounds, forcing_rules, temperature},
                launch);
}

std::tuple<Tensor, Tensor> filter_scores(Tensor scores, int64_t top_k, double top_p, double min_p, double typical_p,
                                         int64_t min_tokens, bool pdl, std::optional<Tensor> edited_ids,
                                         std::optional<Tensor> edited_length, double repetition_penalty,
                                         std::optional<Tensor> prompt_ignore_length, int64_t ngram_size,
                                         std::optional<Tensor> encoder_ids, int64_t encoder_ngram_size,
                                         std::optional<Tensor> token_rules, std::optional<Tensor> rule_bounds,
                                         int64_t forcing_rules, double temperature) {
  const Launch launch(kFilterOp, scores);
  PdlGuard guard(pdl);
  DecodeSample sample = {};
  sample.select.scores = score_matrix(kFilterOp, scores);
  sample.select.rows = scores.size(0);
  sample.select.vocabulary = scores.size(1);
  Tensor kept = allocate(scores, {scores.size(0), scores.size(1)}, ScalarType::Float);
  Tensor highest = allocate(scores, {scores.size(0)}, ScalarType::Float);
  sample.kept = static_cast<float*>(kept.data_ptr());
  sample.highest = static_cast<float*>(highest.data_ptr());
  launch_sample(kFilterOp, sample, scores, {top_k, top_p, min_p, typical_p, min_tokens}, guard,
                {edited_ids, edited_length, repetition_penalty, prompt_ignore_length, ngram_size, encoder_ids,
                 encoder_ngram_size, token_rules, rule_bounds, forcing_rules, temperature},
                launch);
  return {kept, highest};
}

constexpr auto kDecodeSampleInPlace = arguments("decode_sample_", {
    {"logits", kUpToFloat}, {"divisors", kOnlyFloat}, {"random", kOnlyLong}, {"tokens", kOnlyLong}, {"ids", kOnlyLong}, {"length", kOnlyLong},
    {"unfinished", kOnlyBool}, {"going", kOnlyBool}, {"pad", kOnlyLong}, {"eos", kOnlyLong},
    {"counters", kOnlyLong}, {"kept", kOnlyFloat}}) + kOfEdits;

constexpr auto kFilterScores = arguments("filter_scores", {{"scores", kUpToFloat}}) + kOfEdits;

}  // namespace
}  // namespace fuseopt::decode_sample_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_sample_binding;
  library.impl("decode_sample_", TORCH_BOX((fuseopt::checked<decode_sample, kDecodeSampleInPlace>)));
  library.impl("filter_scores", TORCH_BOX((fuseopt::checked<filter_scores, kFilterScores>)));
}
