// RMSNorm, and the forward of LayerNorm, over rows of 16-bit elements that begin at any address.
#pragma once

#include "cuda/common/column_sums.cuh"

namespace fuseopt {

// Launches return false for arguments that they do not take. All tensors must be contiguous and of one dtype, without a
// residual, with some hundreds of columns, up to as many as a warp holds. `weight` and `bias` may be absent.
struct OddRowsFwd {
  TypedPointer input, weight, output;
  float* rstd;  // or null
  int64_t rows, columns;
  float eps;
  // RMSNorm only.
  float offset = 0;
  int norm_dtype = kFloat32;
  // LayerNorm only.
  bool is_layer_norm = false;
  TypedPointer bias = {};
  float* mean = nullptr;
};
bool launch_odd_rows_fwd(const OddRowsFwd& call, cudaStream_t stream);

// `grad_sum` may be absent. Sets the count of `partials`, whose data is null if no gradient of the weight is wanted.
struct OddRowsBwd {
  TypedPointer grad_output, grad_sum, input, weight, grad_input;
  const float* rstd;
  int64_t rows, columns;
  float offset;
};
bool launch_odd_rows_bwd(const OddRowsBwd& call, Partials<float>& partials, cudaStream_t stream);

}  // namespace fuseopt
