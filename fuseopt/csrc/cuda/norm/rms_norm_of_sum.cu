// RMSNorm forward of a sum. It has a file of its own to shorten the build.
#include "cuda/norm/rms_norm.cuh"

namespace fuseopt::rms_norm {

template bool launch_fwd<true>(const NormFwd&, bool, cudaStream_t);

}  // namespace fuseopt::rms_norm
