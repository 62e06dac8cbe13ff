// decode_linear's kernels of many rows for bfloat16 weights, in a file of their own for the sake of build time.
#include "decode_linear_many_rows.cuh"

namespace fuseopt {

template bool launch_decode_linear_many_rows<__nv_bfloat16>(const DecodeLinear&, cudaStream_t, cudaError_t&);

}  // namespace fuseopt
