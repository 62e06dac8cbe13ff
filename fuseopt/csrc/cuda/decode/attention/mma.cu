// decode_attention's tensor core kernels. They have a file of their own to shorten the build.
#include "cuda/decode/attention/mma.cuh"

namespace fuseopt {

template bool launch_decode_attention_mma<__half>(const DecodeAttention&, cudaStream_t, cudaError_t&);
template bool launch_decode_attention_mma<__nv_bfloat16>(const DecodeAttention&, cudaStream_t, cudaError_t&);

}  // namespace fuseopt
