// Makes a PackedLinear from tensors, for the ops that take one.
#pragma once

#include "cuda/decode/linear/decode_linear_binding.h"

namespace fuseopt {

// Sets `in_features` only, not the rest of the layer.
inline PackedLinear packed_linear(const char* op, int64_t in_features, int64_t bits, int64_t group, bool has_zeros) {
  const bool is_group = group == 32 || group == 64 || group == 128;
  FUSEOPT_CHECK(bits == 8 ? !has_zeros : bits == 4 && is_group, "fuseopt::", op, ": ", bits, " bits with groups of ", group,
                "; 8 bits have no zero points, 4 bits groups of 32, 64 or 128");
  PackedLinear packed{{}, static_cast<int>(bits), group, has_zeros};
  packed.layer.in_features = in_features;
  return packed;
}

// Raises if a packed weight's size does not match its number of outputs.
inline void check_packed(const char* op, const PackedLinear& packed, const Tensor& weight, int64_t outputs) {
  constexpr int64_t kLineOutputs = 16;
  const int64_t lines = (outputs + kLineOutputs - 1) / kLineOutputs, line_bytes = fuseopt_packed_line_bytes(packed);
  FUSEOPT_CHECK(weight.dim() == 2 && weight.size(0) == lines && weight.size(1) == line_bytes, "fuseopt::", op,
                ": a packed weight of ", outputs, " outputs must be [", lines, ", ", line_bytes, "]");
}

}  // namespace fuseopt
