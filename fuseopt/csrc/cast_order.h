// Where the upstream RMSNorm classes round. Both libraries use the codes of fuseopt/ops/rms_norm.py: one code is a much
// cheaper argument than the two dtypes that it stands for.
#pragma once

#include <cstdint>
#include <optional>

#include "check.h"

namespace fuseopt {

using torch::headeronly::ScalarType;

// The same as torch.promote_types, for floating point types.
inline ScalarType promote_types(ScalarType a, ScalarType b) {
  if (a == b) return a;
  return a == ScalarType::Double || b == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

struct NormDtypes {
  ScalarType norm;  // dtype of the normalised input, before the weight
  ScalarType output;
};

inline NormDtypes norm_dtypes(const char* op, int64_t cast_order, ScalarType input, std::optional<ScalarType> weight) {
  const ScalarType scale = weight.value_or(input);
  const bool has_double = input == ScalarType::Double || scale == ScalarType::Double;
  const ScalarType wide = has_double ? ScalarType::Double : ScalarType::Float;
  switch (cast_order) {
    case 0: return {wide, input};
    case 1: {
      const ScalarType norm = scale == ScalarType::Half || scale == ScalarType::BFloat16 ? scale : wide;
      return {norm, norm};
    }
    case 2: return {input, promote_types(input, scale)};
    default: fail("fuseopt::", op, ": cast_order must be 0, 1 or 2, not ", cast_order);
  }
}

}  // namespace fuseopt
