// RMSNorm, and the forward of LayerNorm, over rows of 16-bit elements that begin at any address.
#pragma once

#include "cuda/common/column_sums.cuh"

namespace fuseopt {

// Launches return false for arguments that they do not take. All tensors must be contiguous and of one dtype, without a
// residual, with some hundreds of columns, up to as many as a warp holds. `weight` and `bias` may be absent.
bool launch_odd_rows_fwd(const NormFwd& call, bool is_layer_norm, cudaStream_t stream);

// RMSNorm. `grad_sum` may be absent. Sets the count of `partials`, whose data is null if no gradient of the weight is
// wanted.
bool launch_odd_rows_bwd(const NormBwd& call, Partials<float>& partials, cudaStream_t stream);

}  // namespace fuseopt
