// decode_linear's kernels for packed 8-bit weights with float16 inputs, in a file of their own for the sake of build time.
#include "cuda/decode/linear/low_bit/packed_launch.cuh"

namespace fuseopt {

template cudaError_t launch_packed_rows<__half, 8>(const DecodeLinear&, const PackedShape&, cudaStream_t);

}  // namespace fuseopt
