// Norm and rotation of a prompt's queries and keys, and the store of its keys and values to a cache, before attention. A
// warp takes heads of one token, so that it loads the token's cosines and sines once.
#include "cuda/common/dependent_launch.cuh"
#include "cuda/decode/attention/head_rotation.cuh"

namespace fuseopt::rotary_store {
namespace {

// TUNED: as many warps as keep a multiprocessor busy; not compared with others.
constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
constexpr int kWarpsOfProcessor = 32;
constexpr int kMaxHeadDim = kWarpSize * kLaneDims;

template <typename T, int kGroup>
__global__ void __launch_bounds__(kThreads) rotary_store_kernel(const __grid_constant__ RotaryStore store) {
  using Acc = AccFor<T>;
  constexpr int kGroups = kWarpSize / kGroup;  // heads that a warp takes at once
  follow_predecessor();
  __shared__ Acc scratch[kThreads * LaneRotation<Acc>::kScratch];
  const int64_t index = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (index >= store.rows * store.length) return;
  const int lane = threadIdx.x % kWarpSize, dim = lane % kGroup * kLaneDims, head_dim = static_cast<int>(store.head_dim);
  const int64_t row = index / store.length, token = index % store.length;
  const int heads = static_cast<int>(store.heads), kv_heads = static_cast<int>(store.kv_heads);
  const int total = heads + 2 * kv_heads;
  const LaneRotation<Acc> rotation(store.rotation, index, dim, head_dim);
  Acc* const own_scratch = scratch + (threadIdx.x - lane % kGroup) * LaneRotation<Acc>::kScratch;
  const auto vector_of = [&](const TokenHeads& of, int head, int64_t first = 0) {
    return static_cast<T*>(of.data) + row * of.row_stride + (first + token) * of.token_stride + head * of.head_stride;
  };
  const int64_t slot = store.slot == nullptr ? 0 : *store.slot;
  for (int first = blockIdx.y * kGroups; first < total; first += gridDim.y * kGroups) {
    const int head = first + lane / kGroup;
    const HeadPart part = head < heads              ? HeadPart::kQuery
                          : head < heads + kv_heads ? HeadPart::kKey
                                                    : HeadPart::kValue;
    LaneVector<T> vector = {};
    if (head < total) vector.load(vector_of(store.qkv, head), dim, head_dim, store.aligned);
    vector.template rotate<kGroup>(rotation, part, own_scratch);
    if (head >= total) continue;
    T* const to = part == HeadPart::kQuery ? vector_of(store.query, head)
                  : part == HeadPart::kKey ? vector_of(store.key_cache, head - heads, slot)
                                           : vector_of(store.value_cache, head - heads - kv_heads, slot);
    vector.store(to, dim, head_dim, store.aligned);
  }
}

template <typename T, int kGroup>
cudaError_t launch(const RotaryStore& store, cudaStream_t stream) {
  const int64_t tokens = store.rows * store.length, passes = ceil_div(store.heads + 2 * store.kv_heads, kWarpSize / kGroup);
  const int64_t wanted = ceil_div(kWarpsOfProcessor * multiprocessor_count(), tokens);
  const LaunchShape shape{.blocks = static_cast<unsigned>(ceil_div(tokens, kWarps)),
                          .threads = kThreads,
                          .shared_bytes = 0,
                          .cluster_blocks = 1,
                          .blocks_y = static_cast<unsigned>(std::min(passes, wanted))};
  return launch_dependent(rotary_store_kernel<T, kGroup>, store, shape, store.pdl, stream);
}

template <typename T>
cudaError_t launch_as(RotaryStore store, cudaStream_t stream) {
  store.aligned = store.head_dim % kLaneDims == 0;
  for (const auto& heads : {store.qkv, store.key_cache, store.value_cache, store.query}) {
    store.aligned &= is_aligned(heads.data);
    for (int64_t stride : {heads.row_stride, heads.token_stride, heads.head_stride}) {
      store.aligned &= stride * sizeof(T) % kAccessBytes == 0;
    }
  }
  if constexpr (!std::is_same_v<T, double>) {  // double is for comparison only and need not be fast
    if (store.head_dim <= 8 * kLaneDims) return launch<T, 8>(store, stream);
    if (store.head_dim <= 16 * kLaneDims) return launch<T, 16>(store, stream);
  }
  return store.head_dim <= kMaxHeadDim ? launch<T, 32>(store, stream) : cudaErrorInvalidValue;
}

}  // namespace

extern "C" cudaError_t fuseopt_rotary_store(RotaryStore store, cudaStream_t stream) {
  if (store.rows * store.length * (store.heads + store.kv_heads) * store.head_dim == 0) return cudaSuccess;
  switch (static_cast<DType>(store.dtype)) {
    case kFloat16: return launch_as<__half>(store, stream);
    case kBFloat16: return launch_as<__nv_bfloat16>(store, stream);
    case kFloat64: return launch_as<double>(store, stream);
    case kFloat32: return launch_as<float>(store, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fuseopt::rotary_store
