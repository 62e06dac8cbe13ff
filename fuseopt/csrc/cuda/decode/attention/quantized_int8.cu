// decode_attention's kernel for caches of int8. It has a file of its own to shorten the build.
#include "cuda/decode/attention/grouped_launch.cuh"

namespace fuseopt {

template int64_t grouped_workspace<__half, Int8>(const DecodeAttention&);
template int64_t grouped_workspace<__nv_bfloat16, Int8>(const DecodeAttention&);
template bool launch_decode_attention_grouped<__half, Int8>(const DecodeAttention&, cudaStream_t, cudaError_t&);
template bool launch_decode_attention_grouped<__nv_bfloat16, Int8>(const DecodeAttention&, cudaStream_t, cudaError_t&);

}  // namespace fuseopt
