// RMSNorm forward of a sum, in a file of its own for the sake of build time.
#include "cuda/norm/rms_norm.cuh"

namespace fuseopt::rms_norm {

template bool launch_fwd<true>(const FwdArguments&, bool, cudaStream_t);

}  // namespace fuseopt::rms_norm
