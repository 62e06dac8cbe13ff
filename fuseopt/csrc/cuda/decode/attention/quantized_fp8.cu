// decode_attention's kernel for caches of e4m3. It has a file of its own to shorten the build.
#include "cuda/decode/attention/grouped_launch.cuh"

namespace fuseopt {

template int64_t grouped_workspace<__half, Fp8>(const DecodeAttention&);
template int64_t grouped_workspace<__nv_bfloat16, Fp8>(const DecodeAttention&);
template bool launch_decode_attention_grouped<__half, Fp8>(const DecodeAttention&, cudaStream_t, cudaError_t&);
template bool launch_decode_attention_grouped<__nv_bfloat16, Fp8>(const DecodeAttention&, cudaStream_t, cudaError_t&);

}  // namespace fuseopt
