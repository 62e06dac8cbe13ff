// What the bindings share. A binding registers the kernels of one op with PyTorch's dispatcher, through the stable ABI
// only: one build serves many versions of torch. Schemas are defined in Python (fuseopt/ops); a function of a binding
// takes the arguments of its schema in order.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "cuda/common/launchers.h"
#include "new_tensor.h"

namespace fuseopt {

using torch::headeronly::IntHeaderOnlyArrayRef;

struct CudaLibrary {
  static int32_t device_type() { return aoti_torch_device_type_cuda(); }

  // Makes the tensors' device current during a call, since launchers choose and launch kernels for the current device.
  class Scope {
   public:
    explicit Scope(int32_t device) {
      int current = 0;
      FUSEOPT_CHECK(cudaGetDevice(&current) == cudaSuccess, "fuseopt: there is no current CUDA device");
      if (current != device) guard_.emplace(device);
      former_ = std::exchange(device_of_launch, device);  // last, since nothing would undo it if the above throws
    }
    ~Scope() { device_of_launch = former_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    std::optional<torch::stable::accelerator::DeviceGuard> guard_;  // only if needed: costs more than cudaGetDevice
    int former_ = kNoDevice;
  };
};

// A launch on the current stream of the tensor's device.
class Launch {
 public:
  Launch(const char* op, const Tensor& tensor) : op_(op), device_(tensor.get_device_index()) {
    void* stream = nullptr;
    FUSEOPT_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream) == TORCH_SUCCESS, "fuseopt::", op,
                  ": no current CUDA stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }

  int32_t device() const { return device_; }
  cudaStream_t stream() const { return stream_; }

  void check(cudaError_t error) const {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // otherwise torch's next launch would report it
    FUSEOPT_CHECK(false, "fuseopt::", op_, ": CUDA failed: ", cudaGetErrorString(error));
  }

 private:
  const char* op_;
  int32_t device_;
  cudaStream_t stream_ = nullptr;
};

// A function of a binding as it is registered: it checks its tensors first.
template <auto function, const auto& declaration>
constexpr auto checked = &Checked<function, declaration, CudaLibrary>::call;

inline ScalarType dtype_of(const Tensor& tensor) { return scalar_type_of(tensor); }

inline int32_t number_of(ScalarType type) {
  for (size_t i = 0; i < std::size(kNamedTypes); ++i) {
    if (kNamedTypes[i].type == type) return known_numbers()[i];
  }
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
}

inline int dtype_code(const char* op, ScalarType type) {
  switch (type) {
    case ScalarType::Float: return kFloat32;
    case ScalarType::Half: return kFloat16;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Double: return kFloat64;
    default:
      FUSEOPT_CHECK(false, "fuseopt::", op, ": dtype ", toString(type),
                    " is not supported; use float32, float16, bfloat16 or float64");
  }
}

inline TypedPointer pointer(const char* op, const Tensor& tensor) {
  return {tensor.data_ptr(), dtype_code(op, dtype_of(tensor))};
}

inline TypedPointer pointer(const char* op, const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? pointer(op, *tensor) : TypedPointer{nullptr, kFloat32};
}

inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// A parameter with one element for each column of `input`, or none.
inline std::optional<Tensor> parameter(const char* op, const char* name, const std::optional<Tensor>& tensor,
                                       const Tensor& input) {
  if (!tensor.has_value()) return std::nullopt;
  FUSEOPT_CHECK(tensor->dim() == 1, "fuseopt::", op, ": ", name, " has ", tensor->dim(), " dimensions, expected one");
  FUSEOPT_CHECK(tensor->numel() == input.size(input.dim() - 1), "fuseopt::", op, ": ", name, " has ", tensor->numel(),
                " elements, the last dimension of the input ", input.size(input.dim() - 1));
  return as_contiguous(*tensor);
}

struct Matrix {
  int64_t rows;
  int64_t columns;
};

// The shape flattened to two dimensions.
inline Matrix matrix_of(const char* op, const Tensor& tensor) {
  FUSEOPT_CHECK(tensor.dim() >= 1, "fuseopt::", op, ": a tensor without dimensions has no last dimension to work on");
  const int64_t columns = tensor.size(tensor.dim() - 1);
  int64_t rows = 1;
  for (int64_t dim = 0; dim < tensor.dim() - 1; ++dim) rows *= tensor.size(dim);
  return {rows, columns};
}

inline void check_same(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  bool same = tensor.dim() == input.dim();
  for (int64_t dim = 0; same && dim < input.dim(); ++dim) same = tensor.size(dim) == input.size(dim);
  FUSEOPT_CHECK(same, "fuseopt::", op, ": ", name, " has not the shape of the input");
}

// An uninitialised contiguous tensor on the device of `like`.
inline Tensor allocate(const Tensor& like, IntHeaderOnlyArrayRef sizes, ScalarType type) {
  return new_tensor(sizes, number_of(type), aoti_torch_device_type_cuda(), like.get_device_index());
}

inline Tensor allocate_like(const Tensor& like, ScalarType type) {
  return allocate(like, like.sizes(), type);
}

inline void* data_of(const std::optional<Tensor>& tensor) { return tensor.has_value() ? tensor->data_ptr() : nullptr; }

}  // namespace fuseopt
