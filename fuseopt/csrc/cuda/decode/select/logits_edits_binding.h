// What the bindings of ops on logits share: token ids, and edits of scores by decode ops.
#pragma once

#include "cuda/common/pdl.h"

namespace fuseopt {

inline TokenIds token_ids(const char* op, const char* name, const Tensor& ids) {
  FUSEOPT_CHECK(ids.dim() == 2, "fuseopt::", op, ": ", name, " must be [rows, length]");
  return {ids.data_ptr(), dtype_of(ids) == ScalarType::Int ? 4 : 8, ids.size(1), ids.stride(0), ids.stride(1)};
}

inline ScoreMatrix score_matrix(const char* op, const Tensor& scores) {
  FUSEOPT_CHECK(scores.dim() == 2, "fuseopt::", op, ": scores must be [rows, vocabulary]");
  return {scores.data_ptr(), dtype_code(op, dtype_of(scores)), scores.stride(0), scores.stride(1)};
}

// The tensors of fuseopt.ops.decode.edit_logits.LogitsEdits, as they are named in schemas.
constexpr Argument kOfEdits[] = {{"edited_ids", kOnlyLong},           {"edited_length", kOnlyLong},
                                 {"prompt_ignore_length", kOnlyLong}, {"encoder_ids", kOnlyLong},
                                 {"token_rules", kOnlyByte},          {"rule_bounds", kOnlyLong}};

// The arguments of LogitsEdits in schemas, in their order.
struct EditArguments {
  const std::optional<Tensor>& ids;
  const std::optional<Tensor>& length;
  double repetition_penalty;
  const std::optional<Tensor>& prompt_ignore_length;
  int64_t ngram_size;
  const std::optional<Tensor>& encoder_ids;
  int64_t encoder_ngram_size;
  const std::optional<Tensor>& token_rules;
  const std::optional<Tensor>& rule_bounds;
  int64_t forcing_rules;
  double temperature;
};

inline LogitsEdits logits_edits(const char* op, const Tensor& scores, PdlGuard& guard,
                                const EditArguments& arguments) {
  const auto vector = [&](const char* name, const Tensor& tensor, int64_t elements) {
    FUSEOPT_CHECK(tensor.numel() == elements, "fuseopt::", op, ": ", name, " must have ", elements, " elements");
    return guard.contiguous(tensor).data_ptr();
  };
  const int64_t rows = scores.size(0);
  LogitsEdits edits = {};
  edits.rows_per_encoder_row = 1;
  edits.repetition_penalty = arguments.repetition_penalty;
  edits.temperature = arguments.temperature;
  edits.input_ids = token_ids(op, "edits.ids", *arguments.ids);
  FUSEOPT_CHECK(arguments.ids->size(0) == rows, "fuseopt::", op, ": edits.ids must have a row for each of the scores'");
  edits.length = static_cast<const int64_t*>(vector("edits.length", arguments.length.value(), 1));
  if (arguments.prompt_ignore_length.has_value()) {
    edits.penalty_begin = static_cast<const int64_t*>(
        vector("edits.prompt_ignore_length", *arguments.prompt_ignore_length, rows));
  }
  edits.ngram_size = arguments.ngram_size;
  if (arguments.encoder_ids.has_value() && arguments.encoder_ngram_size > 0) {
    edits.encoder_input_ids = token_ids(op, "edits.encoder_ids", *arguments.encoder_ids);
    edits.encoder_ngram_size = arguments.encoder_ngram_size;
    const int64_t encoder_rows = arguments.encoder_ids->size(0);
    FUSEOPT_CHECK(encoder_rows > 0 && rows % encoder_rows == 0, "fuseopt::", op,
                  ": edits.encoder_ids must have rows among which the ", rows, " of the scores can be divided");
    edits.rows_per_encoder_row = std::max<int64_t>(1, rows / encoder_rows);
  }
  if (arguments.token_rules.has_value()) {
    edits.rules.of_tokens =
        static_cast<const uint8_t*>(vector("edits.token_rules", *arguments.token_rules, scores.size(1)));
    const Tensor& bounds = arguments.rule_bounds.value();
    FUSEOPT_CHECK(bounds.dim() == 2 && bounds.size(0) <= TokenRules::kMost, "fuseopt::", op,
                  ": edits.rule_bounds must be [rules, 2] of at most ", TokenRules::kMost, " rules");
    edits.rules.count = static_cast<int>(bounds.size(0));
    edits.rules.bounds =
        static_cast<const int64_t*>(vector("edits.rule_bounds", bounds, 2 * edits.rules.count));
    edits.rules.forcing = static_cast<unsigned>(arguments.forcing_rules);
  }
  return edits;
}

}  // namespace fuseopt
