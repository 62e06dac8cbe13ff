// New tensors by torch's C interface. torch::stable::empty_like and its like look up their op by name in every call, which
// takes longer than a small kernel. Sources given to `Op.native` may include it: #include "new_tensor.h".
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "check.h"

namespace fuseopt {

// An uninitialised contiguous tensor. `type` and `device_type` are numbers of the C interface.
inline torch::stable::Tensor new_tensor(torch::headeronly::IntHeaderOnlyArrayRef sizes, int32_t type,
                                        int32_t device_type, int32_t device_index) {
  constexpr size_t kMaxDims = 64;  // as in most of torch's own kernels
  FUSEOPT_CHECK(sizes.size() <= kMaxDims, "fuseopt: a tensor of ", sizes.size(), " dimensions; at most ", kMaxDims);
  int64_t strides[kMaxDims];
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  AtenTensorHandle handle = nullptr;
  const auto status = aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides, type,
                                               device_type, device_index, &handle);
  // Begins like torch's message, which callers search for before they retry with a smaller batch.
  const char* const device = device_type == aoti_torch_device_type_cuda() ? "CUDA" : "CPU";
  FUSEOPT_CHECK(status == TORCH_SUCCESS, device, " out of memory. fuseopt tried to allocate a tensor of ", stride,
                " elements");
  return torch::stable::Tensor(handle);
}

// An uninitialised contiguous tensor of the dtype and on the device of `like`.
inline torch::stable::Tensor new_tensor(const torch::stable::Tensor& like,
                                        torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  int32_t type = 0, device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  return new_tensor(sizes, type, device_type, like.get_device_index());
}

inline torch::stable::Tensor new_tensor_like(const torch::stable::Tensor& like) { return new_tensor(like, like.sizes()); }

}  // namespace fuseopt
