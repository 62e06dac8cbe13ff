// decode_attention's tensor core kernels, in a file of their own for the sake of build time.
#include "cuda/decode/attention/mma.cuh"

namespace fuseopt {

template bool launch_decode_attention_mma<__half>(const DecodeAttention&, cudaStream_t, cudaError_t&);
template bool launch_decode_attention_mma<__nv_bfloat16>(const DecodeAttention&, cudaStream_t, cudaError_t&);

}  // namespace fuseopt
