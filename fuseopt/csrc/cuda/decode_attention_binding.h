// From tensors to parts of a DecodeAttention, for the ops that have one.
#pragma once

#include "overlap.h"

namespace fuseopt {

// One integer for all of `items`, or one for each.
inline DecodeAttention::Integers integers_of(const char* op, const char* name, const std::optional<Tensor>& tensor,
                                             int64_t items) {
  if (!tensor.has_value()) return {nullptr, 4, 0};
  FUSEOPT_CHECK(tensor->dim() <= 1 && (tensor->numel() == 1 || tensor->numel() == items), "fuseopt::", op, ": ", name,
                " must have one element or ", items, ", in one dimension");
  const ScalarType type = dtype_of(*tensor);
  const bool is_shared = tensor->numel() <= 1;
  return {tensor->data_ptr(), type == ScalarType::Int ? 4 : 8, is_shared ? 0 : tensor->stride(tensor->dim() - 1)};
}

}  // namespace fuseopt
