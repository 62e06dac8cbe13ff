// decode_linear's kernels of many rows, in a file of their own for the sake of build time.
#include "cuda/decode/linear/many_rows.cuh"

namespace fuseopt {

template bool launch_decode_linear_many_rows<__half>(const DecodeLinear&, cudaStream_t, cudaError_t&);
template bool launch_decode_linear_many_rows<__nv_bfloat16>(const DecodeLinear&, cudaStream_t, cudaError_t&);

}  // namespace fuseopt
