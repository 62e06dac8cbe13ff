// From tensors to an EmbeddingTable, for the ops that have one.
#pragma once

#include "cuda/common/pdl.h"

namespace fuseopt {

// Of contiguous tensors, which must stay there until the launch.
inline EmbeddingTable table_of(const Tensor& weight, const Tensor& indices) {
  return {weight.data_ptr(), weight.size(0), indices.data_ptr(), dtype_of(indices) == ScalarType::Int ? 4 : 8};
}

}  // namespace fuseopt
