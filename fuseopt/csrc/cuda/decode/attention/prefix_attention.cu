// How prefix_attention_kernel is launched.
#include "cuda/decode/attention/prefix_attention.cuh"

namespace fuseopt {
namespace {

// As many blocks a cluster as fill the device, and no more than there are tiles of keys.
template <typename T, typename Shape>
cudaError_t launch(const PrefixAttention& attention, cudaStream_t stream) {
  // TUNED: H200, bfloat16, 32 tokens after 2048, us in clusters of 4, 8 and 16 blocks: 32 heads of 64, 8 of keys: 12.5,
  // 10.0, 16.4; 32 heads of 128, 8 of keys: 20.2, 14.5, 22.6; 4 heads of 256, 1 of keys: 14.4, 10.3, 17.3 (49dff6c9).
  constexpr unsigned kMostBlocks = 8;
  const int64_t queries = attention.length * (attention.heads / attention.kv_heads);
  const int64_t clusters = ceil_div(queries, Shape::kQueries) * attention.kv_heads * attention.rows;
  const int64_t slots = attention.start == nullptr ? attention.length : attention.capacity;
  const int64_t seen = attention.window > 0 ? std::min(attention.window + Shape::kQueries, slots) : slots;
  const int64_t tiles = ceil_div(seen, Shape::kTileKeys);
  unsigned blocks = 1;
  while (is_sm90_or_newer() && blocks < kMostBlocks && blocks < tiles && clusters * blocks <= multiprocessor_count()) {
    blocks *= 2;
  }
  return launch_prefix_kernel<T, Shape>(attention, blocks, stream);
}

// TUNED: H200, bfloat16, 32 tokens after 2048, us: 32 heads of 64, 8 of keys: with 2 strips and 2 groups 10.0, others 11.0
// and more; 32 heads of 128, 8 of keys: 14.5, others 15.7 and more; 4 heads of 256, 1 of keys: with 1 strip and 4 groups
// 10.3, others 10.9 and more (49dff6c9).
template <typename T>
cudaError_t launch(const PrefixAttention& attention, cudaStream_t stream) {
  using Wide = PrefixShape<256, 1, 4, 64, 2>;
  if (attention.head_dim <= 64) return launch<T, PrefixShape<64, 2, 2, 64, 4>>(attention, stream);
  if (attention.head_dim <= 128) return launch<T, PrefixShape<128, 2, 2, 64, 2>>(attention, stream);
  if (sizeof(Wide::Memory) <= shared_bytes_of_block()) return launch<T, Wide>(attention, stream);
  return launch<T, PrefixShape<256, 2, 2, 32, 2>>(attention, stream);
}

}  // namespace

extern "C" cudaError_t fuseopt_prefix_attention(PrefixAttention attention, cudaStream_t stream) {
  if (attention.rows * attention.length * attention.heads == 0) return cudaSuccess;
  if (compute_capability_major() < 8) return cudaErrorNotSupported;
  attention.score_scale = static_cast<float>(attention.scale * kLog2E);
  return attention.dtype == kFloat16 ? launch<__half>(attention, stream) : launch<__nv_bfloat16>(attention, stream);
}

}  // namespace fuseopt
