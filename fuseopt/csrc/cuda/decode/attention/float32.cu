// decode_attention's kernels for float32, in a file of their own for the sake of build time.
#include "cuda/decode/attention/float32.cuh"

namespace fuseopt {

bool launch_decode_attention_float32(const DecodeAttention& attention, cudaStream_t stream, cudaError_t& error) {
  const auto launch = [&]<int kDims>() {
    return attention.queries_per_kv == 1 ? launch_float32_kernel<kDims, 1>(attention, stream)
                                         : launch_float32_kernel<kDims, 4>(attention, stream);
  };
  switch (attention.head_dim) {
    case 64: error = launch.template operator()<64>(); return true;
    case 128: error = launch.template operator()<128>(); return true;
    default: return false;
  }
}

}  // namespace fuseopt
