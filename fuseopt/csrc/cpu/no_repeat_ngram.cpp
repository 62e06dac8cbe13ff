#include <atomic>
#include <cstring>

#include "../check.h"
#include "ops.h"

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

  /// One row as int64: in place, or copied to `buffer` of at least length().
  const int64_t* read(int64_t row, int64_t* buffer) const {
    if (is_int32_) return copy(reinterpret_cast<const int32_t*>(data_) + row * row_stride_, buffer);
    const int64_t* ids = reinterpret_cast<const int64_t*>(data_) + row * row_stride_;
    return col_stride_ == 1 ? ids : copy(ids, buffer);
  }

 private:
  template <typename Id>
  const int64_t* copy(const Id* ids, int64_t* buffer) const {
    for (int64_t i = 0; i < length_; ++i) buffer[i] = ids[i * col_stride_];
    return buffer;
  }

  const char* data_;
  bool is_int32_;
  int64_t length_;
  int64_t row_stride_;
  int64_t col_stride_;
};

/// Calls ban(id) for the token after every place in `ids` where the `prefix_length` tokens of `prefix` stand.
template <typename Ban>
void for_each_continuation(const int64_t* ids, int64_t length, const int64_t* prefix, int64_t prefix_length,
                           const Ban& ban) {
  for (int64_t begin = 0; begin + prefix_length < length; ++begin) {
    int64_t k = 0;
    while (k < prefix_length && ids[begin + k] == prefix[k]) ++k;
    if (k == prefix_length) ban(ids[begin + prefix_length]);
  }
}

template <typename Bits>
void copy_row(const void* scores, int64_t row_stride, int64_t col_stride, int64_t row, int64_t n, Bits* out) {
  const Bits* src = static_cast<const Bits*>(scores) + row * row_stride;
  if (col_stride == 1) {
    std::memcpy(out, src, n * sizeof(Bits));
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = src[i * col_stride];
  }
}

/// scores with -inf where a token of `source` rows follows the last n - 1 tokens of input_ids; elements as raw bits.
template <typename Bits>
Tensor ban_continuations(const Tensor& source, const Tensor& input_ids, const Tensor& scores, int64_t ngram_size,
                         Bits minus_infinity) {
  const TokenRows source_rows(source);
  const TokenRows id_rows(input_ids);
  const int64_t n_rows = scores.size(0);
  const int64_t vocab = scores.size(1);
  const int64_t rows_per_source = source.size(0) > 0 ? n_rows / source.size(0) : 1;
  const int64_t prefix_length = ngram_size - 1;
  const int64_t prefix_begin = id_rows.length() - prefix_length;
  const void* src = scores.const_data_ptr();
  const int64_t row_stride = scores.stride(0);
  const int64_t col_stride = scores.stride(1);
  Tensor output = empty_like(scores, scores.scalar_type());
  Bits* out = static_cast<Bits*>(output.mutable_data_ptr());
  std::atomic<int64_t> negative_id{0};

  parallel(n_rows, vocab + source_rows.length(), [&](int64_t begin, int64_t end) {
    std::vector<int64_t> source_buffer(source_rows.length());
    std::vector<int64_t> id_buffer(id_rows.length());
    for (int64_t row = begin; row < end; ++row) {
      Bits* out_row = out + row * vocab;
      copy_row(src, row_stride, col_stride, row, vocab, out_row);
      if (prefix_begin < 0) continue;
      const int64_t* ids = source_rows.read(row / rows_per_source, source_buffer.data());
      const int64_t* prefix = id_rows.read(row, id_buffer.data()) + prefix_begin;
      for_each_continuation(ids, source_rows.length(), prefix, prefix_length, [&](int64_t id) {
        if (id < 0) {
          negative_id.store(id, std::memory_order_relaxed);
        } else if (id < vocab) {
          out_row[id] = minus_infinity;
        }
      });
    }
  });
  FUSEOPT_CHECK(negative_id == 0, "fuseopt: token id ", negative_id.load(), " would be banned but is negative");
  return output;
}

Tensor ban(const Tensor& source, const Tensor& input_ids, const Tensor& scores, int64_t ngram_size) {
  FUSEOPT_CHECK(ngram_size > 0, "fuseopt: ngram_size must be positive, got ", ngram_size);
  FUSEOPT_CHECK(source.dim() == 2 && input_ids.dim() == 2 && scores.dim() == 2,
                "fuseopt: token ids and scores must have two dimensions");
  FUSEOPT_CHECK(input_ids.size(0) == scores.size(0), "fuseopt: ", input_ids.size(0), " rows of input_ids for ",
                scores.size(0), " rows of scores");
  switch (dtype(scores)) {
    case kFloat32: return ban_continuations<uint32_t>(source, input_ids, scores, ngram_size, 0xff800000u);
    case kFloat16: return ban_continuations<uint16_t>(source, input_ids, scores, ngram_size, 0xfc00);
    case kBFloat16: return ban_continuations<uint16_t>(source, input_ids, scores, ngram_size, 0xff80);
    case kFloat64: break;
  }
  return ban_continuations<uint64_t>(source, input_ids, scores, ngram_size, 0xfff0000000000000u);
}

}  // namespace

Tensor no_repeat_ngram(const Tensor& input_ids, const Tensor& scores, int64_t ngram_size) {
  return ban(input_ids, input_ids, scores, ngram_size);
}

Tensor encoder_no_repeat_ngram(const Tensor& encoder_input_ids, const Tensor& input_ids, const Tensor& scores,
                               int64_t ngram_size) {
  const Tensor source = encoder_input_ids.dim() == 1 ? torch::stable::unsqueeze(encoder_input_ids, 0)
                                                     : encoder_input_ids;
  FUSEOPT_CHECK(source.dim() == 2 && scores.dim() == 2, "fuseopt: token ids and scores must have two dimensions");
  const int64_t batch = source.size(0);
  const int64_t n_rows = scores.size(0);
  FUSEOPT_CHECK(n_rows == 0 || (batch > 0 && n_rows >= batch && n_rows % batch == 0), "fuseopt: ", n_rows,
                " rows of scores are not a multiple of the ", batch, " rows of encoder_input_ids");
  return ban(source, input_ids, scores, ngram_size);
}

}  // namespace fuseopt
