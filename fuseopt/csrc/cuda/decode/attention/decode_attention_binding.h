// From tensors to parts of a DecodeAttention, for the ops that take one.
#pragma once

#include "cuda/common/pdl.h"

namespace fuseopt {

// One integer for all of `items`, or one for each: a vector of any stride, or contiguous.
inline DecodeAttention::Integers integers_of(const char* op, const char* name, const std::optional<Tensor>& tensor,
                                             int64_t items) {
  if (!tensor.has_value()) return {nullptr, 4, 0};
  const bool is_shared = tensor->numel() == 1, is_vector = tensor->dim() == 1;
  FUSEOPT_CHECK(is_shared || (tensor->numel() == items && (is_vector || tensor->is_contiguous())), "fuseopt::", op, ": ",
                name, " must have one element or ", items, ", in a vector");
  const int bytes = dtype_of(*tensor) == ScalarType::Int ? 4 : 8;
  return {tensor->data_ptr(), bytes, is_shared ? 0 : is_vector ? tensor->stride(0) : 1};
}

}  // namespace fuseopt
