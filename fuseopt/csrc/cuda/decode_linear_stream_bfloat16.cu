// decode_linear's kernels that stream weights of bfloat16, in a file of their own for the sake of build time.
#include "decode_linear_gemv.cuh"
#include "decode_linear_lines.cuh"
#include "decode_linear_stream.cuh"

namespace fuseopt {

template cudaError_t launch_gemv<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);
template cudaError_t launch_lines<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);
template cudaError_t launch_stream<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);

}  // namespace fuseopt
