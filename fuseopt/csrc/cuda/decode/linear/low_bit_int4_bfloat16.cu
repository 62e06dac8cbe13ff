// decode_low_bit_linear's kernels for bfloat16 and int4, in a file of their own for the sake of build time.
#include "cuda/decode/linear/low_bit.cuh"

namespace fuseopt {

template cudaError_t launch_low_bit<__nv_bfloat16, 4>(const LowBitLinear&, const LowBitPlan&, bool, cudaStream_t);

}  // namespace fuseopt
