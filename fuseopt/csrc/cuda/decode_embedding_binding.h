// From tensors to an EmbeddingTable, for the ops that have one.
#pragma once

#include "overlap.h"

namespace fuseopt {

// Of contiguous tensors, which must stay there until the launch.
inline EmbeddingTable table_of(const char* op, const Tensor& weight, const Tensor& indices) {
  const ScalarType type = dtype_of(indices);
  FUSEOPT_CHECK(type == ScalarType::Int || type == ScalarType::Long, "fuseopt::", op,
                ": tokens and positions must be int32 or int64");
  FUSEOPT_CHECK(indices.is_cuda() && indices.get_device_index() == weight.get_device_index(), "fuseopt::", op,
                ": tokens and positions must be on the device of the weights");
  return {weight.data_ptr(), weight.size(0), indices.data_ptr(), type == ScalarType::Int ? 4 : 8};
}

}  // namespace fuseopt
