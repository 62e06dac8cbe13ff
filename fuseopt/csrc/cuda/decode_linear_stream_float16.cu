// decode_linear's kernels that stream weights of float16, in a file of their own for the sake of build time.
#include "decode_linear_gemv.cuh"
#include "decode_linear_lines.cuh"
#include "decode_linear_stream.cuh"

namespace fuseopt {

template cudaError_t launch_gemv<__half>(const DecodeLinear&, cudaStream_t);
template cudaError_t launch_lines<__half>(const DecodeLinear&, cudaStream_t);
template cudaError_t launch_stream<__half>(const DecodeLinear&, cudaStream_t);

}  // namespace fuseopt
