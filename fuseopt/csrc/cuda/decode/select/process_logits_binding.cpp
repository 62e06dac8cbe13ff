#include "shared_arguments.h"
#include "cuda/decode/select/logits_edits_binding.h"

namespace fuseopt::process_logits_binding {
namespace {

// A vector of integers as contiguous int64.
std::optional<Tensor> as_int64(const char* op, const char* name, const std::optional<Tensor>& ids) {
  if (!ids.has_value()) return std::nullopt;
  FUSEOPT_CHECK(ids->dim() == 1, "fuseopt::", op, ": ", name, " must have one dimension");
  return as_contiguous(dtype_of(*ids) == ScalarType::Long ? *ids : torch::stable::to(*ids, ScalarType::Long));
}

void edit(const char* op, const Tensor& input_ids, const Tensor& scores, const Tensor& output, int64_t ngram_size,
          double repetition_penalty, double temperature, const std::optional<Tensor>& suppress_tokens,
          const std::optional<Tensor>& encoder_input_ids, int64_t encoder_ngram_size,
          const std::optional<Tensor>& prompt_ignore_length) {
  const ScoreMatrix from = score_matrix(op, scores), to = score_matrix(op, output);
  const int64_t rows = scores.size(0);
  LogitsEdits edits{.input_ids = token_ids(op, "input_ids", input_ids),
                    .rows_per_encoder_row = 1,
                    .ngram_size = ngram_size,
                    .repetition_penalty = repetition_penalty,
                    .temperature = temperature};
  FUSEOPT_CHECK(input_ids.size(0) == rows, "fuseopt::", op, ": input_ids has ", input_ids.size(0), " rows, scores ",
                rows);
  FUSEOPT_CHECK(ngram_size >= 0 && encoder_ngram_size >= 0, "fuseopt::", op, ": an n-gram size is negative");

  std::optional<Tensor> encoder_ids;
  if (encoder_input_ids.has_value() && encoder_ngram_size > 0) {
    encoder_ids = dtype_of(*encoder_input_ids) == dtype_of(input_ids)
                      ? *encoder_input_ids
                      : torch::stable::to(*encoder_input_ids, dtype_of(input_ids));
    edits.encoder_input_ids = token_ids(op, "encoder_input_ids", *encoder_ids);
    edits.encoder_ngram_size = encoder_ngram_size;
    const int64_t encoder_rows = encoder_ids->size(0);
    FUSEOPT_CHECK(rows == 0 || (encoder_rows > 0 && rows % encoder_rows == 0), "fuseopt::", op, ": ", rows,
                  " rows of scores cannot be divided among ", encoder_rows, " encoder rows");
    if (rows > 0) edits.rows_per_encoder_row = rows / encoder_rows;
  }
  const auto penalty_begin = as_int64(op, "prompt_ignore_length", prompt_ignore_length);
  if (penalty_begin.has_value()) {
    FUSEOPT_CHECK(penalty_begin->numel() == rows, "fuseopt::", op, ": prompt_ignore_length has ",
                  penalty_begin->numel(), " elements for ", rows, " rows");
    edits.penalty_begin = static_cast<const int64_t*>(penalty_begin->data_ptr());
  }
  const auto suppressed = as_int64(op, "suppress_tokens", suppress_tokens);
  if (suppressed.has_value()) {
    edits.suppressed = static_cast<const int64_t*>(suppressed->data_ptr());
    edits.suppressed_count = suppressed->numel();
  }

  const Launch launch(op, scores);
  launch.check(fuseopt_process_logits(&edits, from, to, rows, scores.size(1), launch.stream()));
}

Tensor process_logits(Tensor input_ids, Tensor scores, int64_t no_repeat_ngram_size, double repetition_penalty,
                      double temperature, std::optional<Tensor> suppress_tokens, std::optional<Tensor> encoder_input_ids,
                      int64_t encoder_no_repeat_ngram_size, std::optional<Tensor> prompt_ignore_length) {
  Tensor output = allocate_like(scores, dtype_of(scores));
  edit("process_logits", input_ids, scores, output, no_repeat_ngram_size, repetition_penalty, temperature,
       suppress_tokens, encoder_input_ids, encoder_no_repeat_ngram_size, prompt_ignore_length);
  return output;
}

void process_logits_(Tensor input_ids, Tensor scores, int64_t no_repeat_ngram_size, double repetition_penalty,
                     double temperature, std::optional<Tensor> suppress_tokens, std::optional<Tensor> encoder_input_ids,
                     int64_t encoder_no_repeat_ngram_size, std::optional<Tensor> prompt_ignore_length) {
  FUSEOPT_CHECK(scores.dim() == 2, "fuseopt::process_logits_: scores must be [rows, vocabulary]");
  for (int64_t dim = 0; dim < 2; ++dim) {
    FUSEOPT_CHECK(scores.stride(dim) != 0 || scores.size(dim) <= 1, "fuseopt::process_logits_: scores are expanded");
  }
  edit("process_logits_", input_ids, scores, scores, no_repeat_ngram_size, repetition_penalty, temperature,
       suppress_tokens, encoder_input_ids, encoder_no_repeat_ngram_size, prompt_ignore_length);
}

}  // namespace
}  // namespace fuseopt::process_logits_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::process_logits_binding;
  library.impl("process_logits", TORCH_BOX((fuseopt::checked<process_logits, fuseopt::declared::kProcessLogits>)));
  library.impl("process_logits_", TORCH_BOX((fuseopt::checked<process_logits_, fuseopt::declared::kProcessLogitsInPlace>)));
}
