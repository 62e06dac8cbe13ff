// Element types as they cross the border between torch-aware bindings and torch-free kernels.
#pragma once

namespace fuseopt {

enum DType : int {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kFloat64 = 3,
};

constexpr int element_size(DType dtype) {
  return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2;
}

}  // namespace fuseopt
