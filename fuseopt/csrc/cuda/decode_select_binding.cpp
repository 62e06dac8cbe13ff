#include "logits_edits_binding.h"

namespace fuseopt::decode_select_binding {
namespace {

constexpr const char* kOp = "decode_select_";

int64_t* integers(const char* name, const Tensor& tensor) {
  FUSEOPT_CHECK(tensor.is_cuda() && tensor.scalar_type() == ScalarType::Long, "fuseopt::", kOp, ": ", name,
                " must be int64 on the device of the scores");
  return static_cast<int64_t*>(tensor.data_ptr());
}

bool* flags(const char* name, const Tensor& tensor) {
  FUSEOPT_CHECK(tensor.is_cuda() && tensor.scalar_type() == ScalarType::Bool && tensor.is_contiguous(), "fuseopt::",
                kOp, ": ", name, " must be bool, contiguous and on the device of the scores");
  return static_cast<bool*>(tensor.data_ptr());
}

void decode_select(Tensor scores, Tensor tokens, Tensor ids, Tensor length, Tensor unfinished, Tensor going, Tensor pad,
                   std::optional<Tensor> eos, std::vector<Tensor> counters,
                   std::optional<Tensor> divisors, bool overlap, std::optional<Tensor> edited_ids,
                   std::optional<Tensor> edited_length, double repetition_penalty,
                   std::optional<Tensor> prompt_ignore_length, int64_t ngram_size, std::optional<Tensor> encoder_ids,
                   int64_t encoder_ngram_size, std::optional<Tensor> token_rules, std::optional<Tensor> rule_bounds,
                   int64_t forcing_rules, double temperature) {
  FUSEOPT_CHECK(scores.dim() == 2 && ids.dim() == 2 && ids.size(0) == scores.size(0), "fuseopt::", kOp,
                ": scores must be [rows, vocabulary], ids [rows, length]");
  FUSEOPT_CHECK(counters.size() <= DecodeSelect::kMaxCounters, "fuseopt::", kOp, ": at most ",
                DecodeSelect::kMaxCounters, " counters, not ", counters.size());
  FUSEOPT_CHECK(tokens.is_contiguous(), "fuseopt::", kOp, ": tokens must be contiguous");
  const Tensor read = scores.stride(1) == 1 ? scores : torch::stable::contiguous(scores);
  const Launch launch(kOp, scores);
  DecodeSelect select = {};
  select.scores = score_matrix(kOp, read);
  select.rows = read.size(0);
  select.vocabulary = read.size(1);
  select.tokens = integers("tokens", tokens);
  select.ids = integers("ids", ids);
  select.ids_columns = ids.size(1);
  select.ids_row_stride = ids.stride(0);
  select.ids_column_stride = ids.stride(1);
  select.length = integers("length", length);
  select.unfinished = flags("unfinished", unfinished);
  select.going = flags("going", going);
  select.pad = integers("pad", pad);
  const auto ends = eos.has_value() ? std::optional(as_contiguous(*eos)) : std::nullopt;
  select.eos = ends.has_value() ? integers("eos", *ends) : nullptr;
  select.eos_count = ends.has_value() ? ends->numel() : 0;
  select.counter_count = static_cast<int>(counters.size());
  for (size_t i = 0; i < counters.size(); ++i) {
    FUSEOPT_CHECK(counters[i].is_contiguous(), "fuseopt::", kOp, ": counters must be contiguous");
    select.counters[i] = integers("a counter", counters[i]);
    select.counter_sizes[i] = counters[i].numel();
  }
  select.chunks = fuseopt_decode_select_chunks(select.vocabulary);
  const Tensor candidates =
      allocate(scores, {select.rows * select.chunks * DecodeSelect::kCandidateBytes}, ScalarType::Byte);
  select.candidates = candidates.data_ptr();
  if (divisors.has_value()) {
    FUSEOPT_CHECK(divisors->is_cuda() && divisors->scalar_type() == ScalarType::Float && divisors->is_contiguous() &&
                      scores.scalar_type() == ScalarType::Float && divisors->numel() == scores.numel(),
                  "fuseopt::", kOp, ": divisors must be float32 as the scores, contiguous, of their shape");
    select.divisors = static_cast<const float*>(divisors->data_ptr());
  }
  select.has_edits = edited_ids.has_value();
  if (select.has_edits) {
    select.edits = logits_edits(kOp, scores,
                                {edited_ids, edited_length, repetition_penalty, prompt_ignore_length, ngram_size,
                                 encoder_ids, encoder_ngram_size, token_rules, rule_bounds, forcing_rules, temperature});
  }
  select.overlap = overlap;
  launch.check(fuseopt_decode_select(select, launch.stream()));
}

}  // namespace
}  // namespace fuseopt::decode_select_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_select_binding;
  library.impl("decode_select_", TORCH_BOX(&decode_select));
}
