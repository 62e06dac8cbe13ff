// decode_linear's kernels of tiles, in a file of their own for the sake of build time.
#include "cuda/decode/linear/tiles.cuh"

namespace fuseopt {

template bool launch_decode_linear_tiles<__half>(const DecodeLinear&, cudaStream_t, cudaError_t&);
template bool launch_decode_linear_tiles<__nv_bfloat16>(const DecodeLinear&, cudaStream_t, cudaError_t&);

}  // namespace fuseopt
