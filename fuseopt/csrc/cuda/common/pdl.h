// Programmatic dependent launch by an op that may have to copy its arguments first.
#pragma once

#include "cuda/common/binding.h"

namespace fuseopt {

// Whether an op's kernels may start before the previous kernel on the stream has ended. The caller asks for it without
// knowing of copies. But a kernel reads parameters before it waits, and if one is a copy, the previous kernel is still
// writing it. So an op with PDL makes all copies through this class, and calls `allowed` after the last one.
class PdlGuard {
 public:
  explicit PdlGuard(bool is_asked) : allowed_(is_asked) {}
  PdlGuard(const PdlGuard&) = delete;
  PdlGuard& operator=(const PdlGuard&) = delete;

  // The tensor, or a contiguous copy that lives as long as this object.
  Tensor contiguous(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : copy_of(tensor); }
  std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? std::optional(contiguous(*tensor)) : std::nullopt;
  }

  // The tensor, or a copy, contiguous from a multiple of 16 bytes on.
  Tensor aligned(const Tensor& tensor) {
    if (tensor.is_contiguous() && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0) return tensor;
    allowed_ = false;
    return copies_.emplace_back(torch::stable::clone(torch::stable::contiguous(tensor)));
  }
  std::optional<Tensor> aligned(const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? std::optional(aligned(*tensor)) : std::nullopt;
  }

  // The same if the last dimension's stride is not 1.
  Tensor with_unit_stride(const Tensor& tensor) {
    const int64_t last = tensor.dim() - 1;
    return tensor.size(last) <= 1 || tensor.stride(last) == 1 ? tensor : copy_of(tensor);
  }

  Tensor copy_of(const Tensor& tensor) {
    allowed_ = false;
    return copies_.emplace_back(torch::stable::contiguous(tensor));
  }

  bool allowed() const { return allowed_; }

 private:
  bool allowed_;
  std::vector<Tensor> copies_;
};

}  // namespace fuseopt
