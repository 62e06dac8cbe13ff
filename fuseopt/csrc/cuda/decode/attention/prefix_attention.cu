// How prefix_attention_kernel is launched.
#include "cuda/decode/attention/prefix_attention.cuh"

namespace fuseopt {
namespace {

// As many blocks a cluster as fill the device, and no more than there are tiles of keys.
template <typename T, typename Shape>
cudaError_t launch(const PrefixAttention& attention, cudaStream_t stream) {
  constexpr unsigned kMostBlocks = 8;  // that any device can run as a cluster
  const int64_t queries = attention.length * (attention.heads / attention.kv_heads);
  const int64_t clusters = ceil_div(queries, Shape::kQueries) * attention.kv_heads * attention.rows;
  const int64_t seen = attention.window > 0 ? attention.window + Shape::kQueries : attention.capacity;
  const int64_t tiles = ceil_div(std::min(seen, attention.capacity), Shape::kTileKeys);
  unsigned blocks = 1;
  while (is_sm90_or_newer() && blocks < kMostBlocks && blocks < tiles && clusters * blocks <= multiprocessor_count()) blocks *= 2;
  return launch_prefix_kernel<T, Shape>(attention, blocks, stream);
}

template <typename T>
cudaError_t launch(const PrefixAttention& attention, cudaStream_t stream) {
  if (attention.head_dim <= 64) return launch<T, PrefixShape<64, 2, 2, 64, 4>>(attention, stream);
  if (attention.head_dim <= 128) return launch<T, PrefixShape<128, 2, 2, 64, 2>>(attention, stream);
  return launch<T, PrefixShape<256, 1, 2, 32, 2>>(attention, stream);
}

}  // namespace

extern "C" cudaError_t fuseopt_prefix_attention(PrefixAttention attention, cudaStream_t stream) {
  if (attention.rows * attention.length * attention.heads == 0) return cudaSuccess;
  if (compute_capability_major() < 8) return cudaErrorNotSupported;
  attention.score_scale = static_cast<float>(attention.scale * kLog2E);
  return attention.dtype == kFloat16 ? launch<__half>(attention, stream) : launch<__nv_bfloat16>(attention, stream);
}

}  // namespace fuseopt
