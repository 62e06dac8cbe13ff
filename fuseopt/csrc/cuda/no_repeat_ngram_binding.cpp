#include "binding.h"

namespace fuseopt {
namespace {

TokenIds token_ids(const char* op, const char* name, const Tensor& ids) {
  FUSEOPT_CHECK(ids.dim() == 2, "fuseopt::", op, ": ", name, " must be [rows, length]");
  FUSEOPT_CHECK(ids.scalar_type() == ScalarType::Int || ids.scalar_type() == ScalarType::Long, "fuseopt::", op, ": ",
                name, " must be int32 or int64");
  return {ids.data_ptr(), ids.scalar_type() == ScalarType::Int ? 4 : 8, ids.size(1), ids.stride(0), ids.stride(1)};
}

// `windows` holds the n-grams to avoid, `input_ids` the sequences that must not complete them. `output` absent: in
// place.
void ban_ngrams(const char* op, const Tensor& windows, const Tensor& input_ids, const Tensor& scores,
                const std::optional<Tensor>& output, int64_t ngram_size) {
  FUSEOPT_CHECK(ngram_size > 0, "fuseopt::", op, ": ngram_size must be positive, not ", ngram_size);
  FUSEOPT_CHECK(scores.dim() == 2, "fuseopt::", op, ": scores must be [rows, vocabulary]");
  const int64_t rows = scores.size(0);
  FUSEOPT_CHECK(input_ids.size(0) == rows, "fuseopt::", op, ": input_ids has ", input_ids.size(0), " rows, scores ",
                rows);
  const Tensor window_ids =
      windows.scalar_type() == input_ids.scalar_type() ? windows : torch::stable::to(windows, input_ids.scalar_type());
  const int64_t window_rows = window_ids.size(0);
  FUSEOPT_CHECK(rows == 0 || (window_rows > 0 && rows % window_rows == 0), "fuseopt::", op, ": ", rows,
                " rows of scores cannot be divided among ", window_rows, " encoder rows");
  const Launch launch(op, scores);
  const ScoreMatrix matrix{scores.data_ptr(), dtype_code(op, scores.scalar_type()), scores.stride(0), scores.stride(1)};
  launch.check(fuseopt_no_repeat_ngram(
      token_ids(op, "encoder_input_ids", window_ids), token_ids(op, "input_ids", input_ids), matrix, data_of(output),
      rows, scores.size(1), rows == 0 ? 1 : rows / window_rows, ngram_size, launch.stream()));
}

Tensor no_repeat_ngram(Tensor input_ids, Tensor scores, int64_t ngram_size) {
  Tensor output = allocate_like(scores, scores.scalar_type());
  ban_ngrams("no_repeat_ngram", input_ids, input_ids, scores, output, ngram_size);
  return output;
}

void no_repeat_ngram_(Tensor input_ids, Tensor scores, int64_t ngram_size) {
  ban_ngrams("no_repeat_ngram_", input_ids, input_ids, scores, std::nullopt, ngram_size);
}

Tensor encoder_no_repeat_ngram(Tensor encoder_input_ids, Tensor input_ids, Tensor scores, int64_t ngram_size) {
  Tensor output = allocate_like(scores, scores.scalar_type());
  ban_ngrams("encoder_no_repeat_ngram", encoder_input_ids, input_ids, scores, output, ngram_size);
  return output;
}

}  // namespace
}  // namespace fuseopt

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt;
  library.impl("no_repeat_ngram", TORCH_BOX(&no_repeat_ngram));
  library.impl("no_repeat_ngram_", TORCH_BOX(&no_repeat_ngram_));
  library.impl("encoder_no_repeat_ngram", TORCH_BOX(&encoder_no_repeat_ngram));
}
