// decode_low_bit_linear's kernels for float16 and int8, in a file of their own for the sake of build time.
#include "cuda/decode/linear/low_bit.cuh"

namespace fuseopt {

template cudaError_t launch_low_bit<__half, 8>(const LowBitLinear&, const LowBitPlan&, bool, cudaStream_t);
template cudaError_t launch_low_bit<__half>(const LowBitLinear&, cudaStream_t);
}  // namespace fuseopt
