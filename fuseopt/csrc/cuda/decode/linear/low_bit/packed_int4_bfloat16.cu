// decode_linear's kernels for packed 4-bit weights with bfloat16 inputs, in a file of their own for the sake of build time.
#include "cuda/decode/linear/low_bit/packed_launch.cuh"

namespace fuseopt {

template cudaError_t launch_packed_rows<__nv_bfloat16, 4>(const DecodeLinear&, const PackedShape&, cudaStream_t);

}  // namespace fuseopt
