// From tensors to parts of a DecodeAttention, for the ops that have one.
#pragma once

#include "overlap.h"

namespace fuseopt {

inline DecodeAttention::Integers integers_of(const char* op, const char* name, const std::optional<Tensor>& tensor,
                                             const Tensor& other) {
  if (!tensor.has_value()) return {nullptr, 4, 0};
  const ScalarType type = dtype_of(*tensor);
  FUSEOPT_CHECK(type == ScalarType::Int || type == ScalarType::Long, "fuseopt::", op, ": ", name,
                " must be int32 or int64");
  FUSEOPT_CHECK(tensor->is_cuda() && tensor->get_device_index() == other.get_device_index(), "fuseopt::", op, ": ",
                name, " is not on the device of the other tensors");
  const bool is_shared = tensor->numel() <= 1;
  return {tensor->data_ptr(), type == ScalarType::Int ? 4 : 8, is_shared ? 0 : tensor->stride(tensor->dim() - 1)};
}

}  // namespace fuseopt
