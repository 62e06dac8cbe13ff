// Repetition penalty, then banned tokens, then temperature: see fuseopt/ops/process_logits.py.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <limits>
#include <type_traits>
#include <utility>

#include "check.h"
#include "cpu/ops.h"

namespace fuseopt {
namespace {

/// Token ids [rows, length] of int32 or int64, any strides.
class TokenRows {
 public:
  explicit TokenRows(const Tensor& ids)
      : data_(static_cast<const char*>(ids.const_data_ptr())),
        is_int32_(ids.scalar_type() == ScalarType::Int),
        length_(ids.size(1)),
        row_stride_(ids.stride(0)),
        col_stride_(ids.stride(1)) {
    FUSEOPT_CHECK(is_int32_ || ids.scalar_type() == ScalarType::Long,
                  "fuseopt: token ids must be int32 or int64, got ", ids.scalar_type());
  }

  int64_t length() const { return length_; }

  /// One row as int64: in place, or copied to `buffer`.
  const int64_t* read(int64_t row, std::vector<int64_t>& buffer) const {
    if (is_int32_) return copy(reinterpret_cast<const int32_t*>(data_) + row * row_stride_, buffer);
    const int64_t* ids = reinterpret_cast<const int64_t*>(data_) + row * row_stride_;
    return col_stride_ == 1 ? ids : copy(ids, buffer);
  }

 private:
  template <typename Id>
  const int64_t* copy(const Id* ids, std::vector<int64_t>& buffer) const {
    buffer.resize(length_);
    for (int64_t i = 0; i < length_; ++i) buffer[i] = ids[i * col_stride_];
    return buffer.data();
  }

  const char* data_;
  bool is_int32_;
  int64_t length_;
  int64_t row_stride_;
  int64_t col_stride_;
};

struct Options {
  double repetition_penalty;
  std::vector<int64_t> prompt_ignore_length;  // one per row, or empty
  int64_t ngram_size;                         // 0: no ban
  std::optional<TokenRows> encoder_ids;
  int64_t encoder_ngram_size;
  int64_t rows_per_encoder_row;
  std::vector<int64_t> suppressed;  // all in the vocabulary
  double temperature;
};

/// A vector of integers of any strides as int64; it must have `n` elements unless `n` is negative.
std::vector<int64_t> integers(const char* name, const std::optional<Tensor>& ids, int64_t n) {
  if (!ids) return {};
  FUSEOPT_CHECK(ids->dim() == 1 && (n < 0 || ids->numel() == n), "fuseopt: ", name, " has ", ids->numel(),
                " elements for ", n, " rows");
  std::vector<int64_t> buffer;
  const int64_t* data = TokenRows(torch::stable::unsqueeze(*ids, 0)).read(0, buffer);
  return std::vector<int64_t>(data, data + ids->numel());
}

/// The edits of one row, determined before anything is written.
struct RowEdits {
  std::vector<int64_t> penalised;  // may name a token more than once
  std::vector<int64_t> banned;
  int64_t negative_id = 0;  // a negative id of the row, for the error message; 0: none
};

/// Appends to `banned` the token after each place in `ids` that repeats the last n - 1 tokens of `history`.
void find_continuations(const int64_t* ids, int64_t length, const int64_t* history, int64_t history_length, int64_t n,
                        std::vector<int64_t>& banned) {
  if (n == 0 || history_length < n - 1) return;
  const int64_t* prefix = history + history_length - (n - 1);
  for (int64_t begin = 0; begin + n <= length; ++begin) {
    int64_t k = 0;
    while (k < n - 1 && ids[begin + k] == prefix[k]) ++k;
    if (k == n - 1) banned.push_back(ids[begin + n - 1]);
  }
}

RowEdits find_edits(const TokenRows& id_rows, int64_t row, int64_t vocab, const Options& options) {
  RowEdits edits;
  std::vector<int64_t> buffer, encoder_buffer;
  const int64_t* ids = id_rows.read(row, buffer);
  const int64_t length = id_rows.length();
  if (options.repetition_penalty != 1) {
    const int64_t ignored = options.prompt_ignore_length.empty() ? 0 : options.prompt_ignore_length[row];
    edits.penalised.assign(ids + std::clamp<int64_t>(ignored, 0, length), ids + length);
  }
  find_continuations(ids, length, ids, length, options.ngram_size, edits.banned);
  if (options.encoder_ids) {
    const int64_t* encoder_ids = options.encoder_ids->read(row / options.rows_per_encoder_row, encoder_buffer);
    find_continuations(encoder_ids, options.encoder_ids->length(), ids, length, options.encoder_ngram_size,
                       edits.banned);
  }
  for (std::vector<int64_t>* tokens : {&edits.penalised, &edits.banned}) {
    std::erase_if(*tokens, [&](int64_t token) {
      if (token < 0) edits.negative_id = token;
      return token < 0 || token >= vocab;
    });
  }
  edits.banned.insert(edits.banned.end(), options.suppressed.begin(), options.suppressed.end());
  return edits;
}

/// Writes one edited row of scores to `out`, which is contiguous and may be the row itself. 16-bit scores are computed
/// in float, as torch does.
template <typename T>
void edit_row(const T* scores, int64_t col_stride, int64_t vocab, const RowEdits& edits, const Options& options,
              T* out) {
  using Math = std::conditional_t<std::is_same_v<T, double>, double, float>;
  constexpr DType kDType = std::is_same_v<T, double>          ? kFloat64
                           : std::is_same_v<T, float>         ? kFloat32
                           : std::is_same_v<T, c10::BFloat16> ? kBFloat16
                                                              : kFloat16;
  const Math penalty = static_cast<Math>(options.repetition_penalty);
  const Math temperature = static_cast<Math>(options.temperature);
  const auto tempered = [&](T x) {
    return options.temperature == 1 ? x : static_cast<T>(static_cast<Math>(x) / temperature);
  };
  std::vector<T> penalised;  // computed from the original scores, so that a token named twice is penalised once
  penalised.reserve(edits.penalised.size());
  for (const int64_t token : edits.penalised) {
    const Math x = static_cast<Math>(scores[token * col_stride]);
    penalised.push_back(tempered(static_cast<T>(x < 0 ? x * penalty : x / penalty)));
  }
  if (options.temperature != 1) {
    Math piece[kPiece];
    for (int64_t begin = 0; begin < vocab; begin += kPiece) {
      const int64_t n = std::min(kPiece, vocab - begin);
      load_row(scores + begin * col_stride, kDType, col_stride, n, piece);
      for (int64_t i = 0; i < n; ++i) piece[i] /= temperature;
      store_row(piece, n, kDType, out + begin);
    }
  } else if (out != scores && col_stride == 1) {
    std::copy_n(scores, vocab, out);
  } else if (out != scores) {
    for (int64_t i = 0; i < vocab; ++i) out[i] = scores[i * col_stride];
  }
  for (size_t i = 0; i < penalised.size(); ++i) out[edits.penalised[i]] = penalised[i];
  const T banned = tempered(static_cast<T>(-std::numeric_limits<float>::infinity()));
  for (const int64_t token : edits.banned) out[token] = banned;
}

template <typename T>
void edit_rows(const TokenRows& id_rows, const Tensor& scores, const Options& options, Tensor& output) {
  const int64_t n_rows = scores.size(0);
  const int64_t vocab = scores.size(1);
  const T* src = static_cast<const T*>(scores.const_data_ptr());
  const int64_t row_stride = scores.stride(0);
  const int64_t col_stride = scores.stride(1);
  T* out = static_cast<T*>(output.mutable_data_ptr());
  const int64_t out_stride = output.stride(0);
  std::vector<RowEdits> edits(n_rows);
  const int64_t ids_per_row = id_rows.length() + (options.encoder_ids ? options.encoder_ids->length() : 0);
  parallel(n_rows, ids_per_row, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) edits[row] = find_edits(id_rows, row, vocab, options);
  });
  for (const RowEdits& row : edits) {  // outside the threads, where an exception would lose its message
    FUSEOPT_CHECK(row.negative_id == 0, "fuseopt: token id ", row.negative_id,
                  " would be penalised or banned but is negative");
  }
  const bool is_dense = src != out || options.temperature != 1;
  parallel(n_rows, ids_per_row + (is_dense ? vocab : 0), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      edit_row(src + row * row_stride, col_stride, vocab, edits[row], options, out + row * out_stride);
  });
}

Options check(const Tensor& input_ids, const Tensor& scores, int64_t ngram_size, double repetition_penalty,
              double temperature, const std::optional<Tensor>& suppress_tokens,
              const std::optional<Tensor>& encoder_input_ids, int64_t encoder_ngram_size,
              const std::optional<Tensor>& prompt_ignore_length) {
  FUSEOPT_CHECK(ngram_size >= 0 && encoder_ngram_size >= 0, "fuseopt: an n-gram size must not be negative, got ",
                std::min(ngram_size, encoder_ngram_size));
  FUSEOPT_CHECK(input_ids.dim() == 2 && scores.dim() == 2, "fuseopt: token ids and scores must have two dimensions");
  const int64_t n_rows = scores.size(0);
  const int64_t vocab = scores.size(1);
  FUSEOPT_CHECK(input_ids.size(0) == n_rows, "fuseopt: ", input_ids.size(0), " rows of input_ids for ", n_rows,
                " rows of scores");
  Options options{.repetition_penalty = repetition_penalty,
                  .prompt_ignore_length = integers("prompt_ignore_length", prompt_ignore_length, n_rows),
                  .ngram_size = ngram_size,
                  .encoder_ids = std::nullopt,
                  .encoder_ngram_size = encoder_ngram_size,
                  .rows_per_encoder_row = 1,
                  .suppressed = integers("suppress_tokens", suppress_tokens, -1),
                  .temperature = temperature};
  std::erase_if(options.suppressed, [&](int64_t id) { return id < 0 || id >= vocab; });
  if (encoder_input_ids && encoder_ngram_size > 0) {
    FUSEOPT_CHECK(encoder_input_ids->dim() == 2, "fuseopt: token ids and scores must have two dimensions");
    const int64_t batch = encoder_input_ids->size(0);
    FUSEOPT_CHECK(n_rows == 0 || (batch > 0 && n_rows >= batch && n_rows % batch == 0), "fuseopt: ", n_rows,
                  " rows of scores are not a multiple of the ", batch, " rows of encoder_input_ids");
    options.encoder_ids.emplace(*encoder_input_ids);
    if (n_rows > 0) options.rows_per_encoder_row = n_rows / batch;
  }
  return options;
}

void edit(const Tensor& input_ids, const Tensor& scores, const Options& options, Tensor& output) {
  const TokenRows id_rows(input_ids);
  switch (dtype(scores)) {
    case kFloat32: return edit_rows<float>(id_rows, scores, options, output);
    case kFloat16: return edit_rows<c10::Half>(id_rows, scores, options, output);
    case kBFloat16: return edit_rows<c10::BFloat16>(id_rows, scores, options, output);
    case kFloat64: return edit_rows<double>(id_rows, scores, options, output);
  }
}

}  // namespace

Tensor process_logits(const Tensor& input_ids, const Tensor& scores, int64_t no_repeat_ngram_size,
                      double repetition_penalty, double temperature, const std::optional<Tensor>& suppress_tokens,
                      const std::optional<Tensor>& encoder_input_ids, int64_t encoder_no_repeat_ngram_size,
                      const std::optional<Tensor>& prompt_ignore_length) {
  const Options options =
      check(input_ids, scores, no_repeat_ngram_size, repetition_penalty, temperature, suppress_tokens,
            encoder_input_ids, encoder_no_repeat_ngram_size, prompt_ignore_length);
  Tensor output = empty_like(scores, scores.scalar_type());
  edit(input_ids, scores, options, output);
  return output;
}

void process_logits_(const Tensor& input_ids, Tensor scores, int64_t no_repeat_ngram_size,
                     double repetition_penalty, double temperature, const std::optional<Tensor>& suppress_tokens,
                     const std::optional<Tensor>& encoder_input_ids, int64_t encoder_no_repeat_ngram_size,
                     const std::optional<Tensor>& prompt_ignore_length) {
  const Options options =
      check(input_ids, scores, no_repeat_ngram_size, repetition_penalty, temperature, suppress_tokens,
            encoder_input_ids, encoder_no_repeat_ngram_size, prompt_ignore_length);
  for (int64_t dim = 0; dim < 2; ++dim) {
    FUSEOPT_CHECK(scores.stride(dim) != 0 || scores.size(dim) <= 1, "fuseopt::process_logits_: scores are expanded");
  }
  if (scores.stride(1) == 1) return edit(input_ids, scores, options, scores);
  Tensor output = empty_like(scores, scores.scalar_type());
  edit(input_ids, scores, options, output);
  torch::stable::copy_(scores, output);
}

}  // namespace fuseopt
