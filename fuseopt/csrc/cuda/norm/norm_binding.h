// What the bindings of RMSNorm and LayerNorm share: residual sums, parameter gradients, and memory for partial sums.
#pragma once

#include "cast_order.h"
#include "shared_arguments.h"
#include "cuda/common/binding.h"

namespace fuseopt {

// Memory for the partial column sums of a backward; absent when no gradient of a parameter is wanted.
inline std::optional<Tensor> norm_bwd_workspace(const Tensor& input, const std::optional<Tensor>& weight, Matrix shape,
                                                int tensors) {
  if (tensors == 0) return std::nullopt;
  const bool float64 =
      dtype_of(input) == ScalarType::Double || (weight.has_value() && dtype_of(*weight) == ScalarType::Double);
  const size_t bytes = fuseopt_norm_bwd_workspace_bytes(shape.rows, shape.columns, tensors, float64);
  return allocate(input, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
}

// `count` statistics of each row of a forward's `input`, float64 for float64 inputs, else float32. Allocated if a
// backward will read them; absent otherwise.
class RowStatistics {
 public:
  RowStatistics(const char* op, const Tensor& input, int count, bool kept) : op_(op) {
    if (!kept) return;
    const ScalarType type = dtype_of(input) == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    for (int i = 0; i < count; ++i) tensors_.push_back(allocate(input, input.sizes().slice(0, input.dim() - 1), type));
  }

  TypedPointer pointer(int index) const {
    return tensors_.empty() ? TypedPointer{nullptr, kFloat32} : fuseopt::pointer(op_, tensors_[index]);
  }
  const std::vector<Tensor>& tensors() const { return tensors_; }

 private:
  const char* op_;
  std::vector<Tensor> tensors_;
};

// A forward's statistic of each row of `input`, contiguous, in the dtype in which RowStatistics has it.
inline Tensor row_statistic(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  const bool is_wide = dtype_of(input) == ScalarType::Double;
  FUSEOPT_CHECK(dtype_of(tensor) == (is_wide ? ScalarType::Double : ScalarType::Float), "fuseopt::", op, ": ", name,
                " must be ", is_wide ? "float64" : "float32", ", not ", name_of(dtype_of(tensor)));
  const int64_t rows = matrix_of(op, input).rows;
  FUSEOPT_CHECK(tensor.numel() == rows, "fuseopt::", op, ": ", name, " has ", tensor.numel(), " elements for ", rows,
                " rows");
  return as_contiguous(tensor);
}

// Returns `tensor`, which must have the shape of `input`, as contiguous; or none.
inline std::optional<Tensor> like_input(const char* op, const char* name, const std::optional<Tensor>& tensor,
                                        const Tensor& input) {
  if (!tensor.has_value()) return std::nullopt;
  check_same(op, name, *tensor, input);
  return as_contiguous(*tensor);
}

// Allocates input + residual in the dtype that the two promote to; absent without a residual.
inline std::optional<Tensor> allocate_sum(const Tensor& input, const std::optional<Tensor>& residual) {
  if (!residual.has_value()) return std::nullopt;
  return allocate_like(input, promote_types(dtype_of(input), dtype_of(*residual)));
}

// Allocates [columns] for a wanted gradient of a parameter, else [0].
inline Tensor allocate_parameter_grad(const Tensor& input, const std::optional<Tensor>& parameter, int64_t columns,
                                      bool wanted) {
  return allocate(input, {wanted ? columns : 0},
                  parameter.has_value() ? dtype_of(*parameter) : dtype_of(input));
}

inline TypedPointer wanted_pointer(const char* op, const Tensor& grad, bool wanted) {
  return wanted ? pointer(op, grad) : TypedPointer{nullptr, kFloat32};
}

}  // namespace fuseopt
