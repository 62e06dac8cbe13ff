// From tensors to a DecodeSelect, for the ops that end a decoding step.
#pragma once

#include "cuda/decode/select/logits_edits_binding.h"

namespace fuseopt {

// Fills in everything but the edits or divisors of scores, and `pdl`.
inline DecodeSelect decode_select_of(
    const char* op, const Tensor& scores, const Tensor& tokens, const Tensor& ids, const Tensor& length,
    const Tensor& unfinished, const Tensor& going, const Tensor& pad, const std::optional<Tensor>& eos,
    const std::vector<Tensor>& counters, PdlGuard& guard) {
  const auto integers = [](const Tensor& tensor) { return static_cast<int64_t*>(tensor.data_ptr()); };
  const auto flags = [op](const char* name, const Tensor& tensor) {
    FUSEOPT_CHECK(tensor.is_contiguous(), "fuseopt::", op, ": ", name, " must be contiguous");
    return static_cast<bool*>(tensor.data_ptr());
  };
  FUSEOPT_CHECK(scores.dim() == 2 && ids.dim() == 2 && ids.size(0) == scores.size(0), "fuseopt::", op,
                ": scores must be [rows, vocabulary], ids [rows, length]");
  FUSEOPT_CHECK(counters.size() <= DecodeSelect::kMaxCounters, "fuseopt::", op, ": at most ",
                DecodeSelect::kMaxCounters, " counters, not ", counters.size());
  FUSEOPT_CHECK(tokens.is_contiguous(), "fuseopt::", op, ": tokens must be contiguous");
  DecodeSelect select = {};
  select.scores = score_matrix(op, guard.with_unit_stride(scores));
  select.rows = scores.size(0);
  select.vocabulary = scores.size(1);
  select.tokens = integers(tokens);
  select.ids = integers(ids);
  select.ids_columns = ids.size(1);
  select.ids_row_stride = ids.stride(0);
  select.ids_column_stride = ids.stride(1);
  select.length = integers(length);
  select.unfinished = flags("unfinished", unfinished);
  FUSEOPT_CHECK(going.numel() > 0, "fuseopt::", op, ": going must have an element at least");
  select.going = flags("going", going);
  select.going_count = going.numel();
  select.pad = integers(pad);
  if (eos.has_value()) {
    select.eos = integers(guard.contiguous(*eos));
    select.eos_count = eos->numel();
  }
  select.counter_count = static_cast<int>(counters.size());
  for (size_t i = 0; i < counters.size(); ++i) {
    FUSEOPT_CHECK(counters[i].is_contiguous(), "fuseopt::", op, ": counters must be contiguous");
    select.counters[i] = integers(counters[i]);
    select.counter_sizes[i] = counters[i].numel();
  }
  return select;
}

// Allocates memory for the best candidate of each of `chunks` of each row.
inline Tensor candidates_for(DecodeSelect& select, const Tensor& scores, int64_t chunks) {
  select.chunks = chunks;
  Tensor candidates = allocate(scores, {select.rows * chunks * DecodeSelect::kCandidateBytes}, ScalarType::Byte);
  select.candidates = candidates.data_ptr();
  return candidates;
}

}  // namespace fuseopt
