// decode_linear's kernels with low-rank updates for bfloat16 weights, in a file of their own for the sake of build time.
#include "cuda/decode/linear/dispatch.cuh"

namespace fuseopt {

template bool takes_low_rank<__nv_bfloat16>(const DecodeLinear&);
template cudaError_t launch_low_rank<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);

}  // namespace fuseopt
