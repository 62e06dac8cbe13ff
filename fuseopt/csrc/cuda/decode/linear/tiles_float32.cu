// decode_linear's kernels of tiles for float32, in a file of their own for the sake of build time.
#include "cuda/decode/linear/tiles.cuh"

namespace fuseopt {

template bool launch_decode_linear_tiles<float>(const DecodeLinear&, cudaStream_t, cudaError_t&);

}  // namespace fuseopt
