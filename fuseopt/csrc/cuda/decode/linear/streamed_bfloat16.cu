// decode_linear's kernels that stream weights of bfloat16, in a file of their own for the sake of build time.
#include "cuda/decode/linear/gemv.cuh"
#include "cuda/decode/linear/streamed_kn.cuh"
#include "cuda/decode/linear/streamed_nk.cuh"

namespace fuseopt {

template cudaError_t launch_gemv<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);
template cudaError_t launch_streamed_kn<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);
template cudaError_t launch_streamed_nk<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);

}  // namespace fuseopt
