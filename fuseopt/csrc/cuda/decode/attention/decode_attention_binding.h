// From tensors to parts of a DecodeAttention, for the ops that take one.
#pragma once

#include "cuda/common/pdl.h"

namespace fuseopt {

// Whether heads' vectors, in the last dimension, begin at multiples of 16 bytes and have neighbouring elements of 16 bits.
inline bool has_aligned_vectors(const Tensor& tensor) {
  constexpr int kBytes = 16, kWidth = kBytes / 2;
  bool result = tensor.stride(tensor.dim() - 1) == 1 && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kBytes == 0;
  for (int64_t dim = 0; dim < tensor.dim() - 1; ++dim) result = result && tensor.stride(dim) % kWidth == 0;
  return result;
}

// One integer for all of `items`, or one for each: a vector of any stride, or contiguous.
inline Integers integers_of(const char* op, const char* name, const std::optional<Tensor>& tensor, int64_t items) {
  if (!tensor.has_value()) return {nullptr, 4, 0};
  const bool is_shared = tensor->numel() == 1, is_vector = tensor->dim() == 1;
  FUSEOPT_CHECK(is_shared || (tensor->numel() == items && (is_vector || tensor->is_contiguous())), "fuseopt::", op, ": ",
                name, " must have one element or ", items, ", in a vector");
  const int bytes = dtype_of(*tensor) == ScalarType::Int ? 4 : 8;
  return {tensor->data_ptr(), bytes, is_shared ? 0 : is_vector ? tensor->stride(0) : 1};
}

// Arguments of a HeadRotation, in the order of the ops.
struct RotationArguments {
  std::optional<Tensor> rotary, row_positions;
  bool interleaved;
  std::optional<Tensor> q_norm, k_norm;
  double norm_eps, norm_offset;
};

// `positions`: the number of row positions. The guard keeps copies.
inline HeadRotation rotation_of(const char* op, const RotationArguments& arguments, int64_t head_dim, int64_t positions,
                                PdlGuard& guard) {
  for (const auto& weight : {arguments.q_norm, arguments.k_norm}) {
    FUSEOPT_CHECK(!weight.has_value() || weight->numel() == head_dim, "fuseopt::", op, ": q_norm and k_norm must be [",
                  head_dim, "]");
  }
  HeadRotation rotation = {};
  rotation.q_norm = pointer(op, guard.contiguous(arguments.q_norm));
  rotation.k_norm = pointer(op, guard.contiguous(arguments.k_norm));
  rotation.eps = arguments.norm_eps;
  rotation.offset = arguments.norm_offset;
  const auto table = guard.contiguous(arguments.rotary);
  if (!table.has_value()) return rotation;
  FUSEOPT_CHECK(table->dim() == 2 && table->size(0) > 0 && table->size(1) % 2 == 0 && table->size(1) <= head_dim &&
                    arguments.row_positions.has_value(),
                "fuseopt::", op, ": rotary must be [positions, rotated] with an even rotated of at most ", head_dim,
                ", and needs row_positions");
  rotation.table = static_cast<const float*>(table->data_ptr());
  rotation.positions = table->size(0);
  rotation.rotated = static_cast<int>(table->size(1));
  rotation.interleaved = arguments.interleaved;
  rotation.row_positions = integers_of(op, "row_positions", arguments.row_positions, positions);
  return rotation;
}

}  // namespace fuseopt
