// decode_linear's tensor core kernels for bfloat16 weights, in a file of their own for the sake of build time.
#include "cuda/decode/linear/dispatch.cuh"

namespace fuseopt {

template bool launch_decode_linear_few_rows<__nv_bfloat16>(const DecodeLinear&, cudaStream_t, cudaError_t&);
template int64_t decode_linear_parts<__nv_bfloat16>(const DecodeLinear&);
template bool emits_partials<__nv_bfloat16>(const DecodeLinear&);
template bool accepts_partials<__nv_bfloat16>(const DecodeLinear&);

}  // namespace fuseopt
