// decode_linear's tensor core kernels for float16 weights, in a file of their own for the sake of build time.
#include "cuda/decode/linear/dispatch.cuh"

namespace fuseopt {

template bool launch_decode_linear_few_rows<__half>(const DecodeLinear&, cudaStream_t, cudaError_t&);
template int64_t decode_linear_parts<__half>(const DecodeLinear&);
template bool emits_partials<__half>(const DecodeLinear&);
template bool accepts_partials<__half>(const DecodeLinear&);

}  // namespace fuseopt
