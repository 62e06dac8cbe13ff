// Element types in calls from bindings, which know torch, to kernels, which do not.
#pragma once

namespace fuseopt {

enum DType : int {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kFloat64 = 3,
};

// Dtype of the elements of caches of keys and values.
enum CacheDType : int {
  kAsQuery = 0,  // the query's
  kInt8 = 1,
  kFp8 = 2,  // e4m3
};

constexpr int element_size(DType dtype) {
  return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2;
}

}  // namespace fuseopt
