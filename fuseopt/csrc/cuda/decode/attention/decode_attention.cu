// Attention of one query per row over a static cache whose filled length is on the device, in plain multiply-adds, for
// any dtype, head size and alignment. The launcher chooses between this kernel and the others.
//
// A (row, head) has up to 8 blocks, over which its places are spread evenly at any length. A group of lanes takes a
// key, with 8 dimensions per lane, and runs the online softmax over its own places. The groups of a warp merge their
// results by shuffles. The warps of all blocks store theirs in the shared memory of the first block, which merges them
// in a fixed order. The blocks form one cluster, so neither global memory nor counters are needed.
#include "cuda/common/dependent_launch.cuh"
#include "cuda/common/partial_softmax.cuh"
#include "cuda/decode/attention/head_rotation.cuh"
#include "cuda/decode/attention/attention_launchers.h"

namespace fuseopt::decode_attention {

namespace {

// TUNED: measurement not recorded (c8f4b08); `fuseopt bench kernels --model gpt2` measures it again.
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kUnroll = 4;  // keys in flight per group
constexpr int kMaxSplits = 8;
constexpr int kPlacesPerSplit = 64;
constexpr int kMaxHeadDim = kWarpSize * kLaneDims;
// Longer caches are read by the kernel for grouped queries, which splits them further.
constexpr int64_t kMaxMmaCapacity = 4096;

struct SplitAttention {
  DecodeAttention attention;
  unsigned splits;  // blocks per (row, head)
  bool aligned;
  bool rotates;  // queries and keys are normalised or rotated
};

// Places [first, last) of a row's cache are one block's share of [start, end).
struct Places {
  int end, first, last;

  __device__ Places(const SplitAttention& split, int item, int rank) {
    const DecodeAttention& attention = split.attention;
    const int64_t length = integer_at(attention.lengths, item) + (attention.key.data != nullptr ? 1 : 0);
    int64_t begin = integer_at(attention.starts, item);
    if (attention.window > 0) begin = max(begin, length - attention.window);
    end = static_cast<int>(max(min(length, attention.capacity), int64_t(0)));
    const int start = static_cast<int>(min(max(begin, int64_t(0)), int64_t(end)));
    const int each = static_cast<int>(static_cast<unsigned>(end - start + split.splits - 1) / split.splits);
    first = min(start + rank * each, end);
    last = min(first + each, end);
  }
};

// The running softmax: the largest score (in powers of two), the sum of exponentials, and the values weighted by them.
template <typename Acc>
struct Partial {
  Acc largest = -INFINITY, sum = 0;
  Acc values[kLaneDims] = {};

  // Rescales for scores up to `score`.
  __device__ void raise(Acc score) {
    const Acc raised = fmax(largest, score), factor = factor_of_part(largest, raised);
    sum *= factor;
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) values[i] *= factor;
    largest = raised;
  }
};

template <typename T, int kGroup>
__global__ void __launch_bounds__(kThreads) decode_attention_kernel(const __grid_constant__ SplitAttention split) {
  using Acc = AccFor<T>;
  constexpr int kGroups = kWarpSize / kGroup;  // per warp, each with one key at a time
  const DecodeAttention& attention = split.attention;
  const int head_dim = static_cast<int>(attention.head_dim);
  const int rank = static_cast<int>(blockIdx.x % split.splits);
  const unsigned heads = static_cast<unsigned>(attention.heads), row = blockIdx.x / split.splits / heads;
  const unsigned head = blockIdx.x / split.splits % heads;
  const unsigned group = static_cast<unsigned>(attention.group), kv_head = head / group;
  const int item = static_cast<int>(row * group / static_cast<unsigned>(attention.queries_per_kv));
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int dim = lane % kGroup * kLaneDims;
  const int64_t cache = (item * attention.kv_heads + kv_head) * attention.capacity * head_dim;
  T* const keys = static_cast<T*>(attention.key_cache) + cache;
  T* const values = static_cast<T*>(attention.value_cache) + cache;

  // The largest score, the sum and the values of each warp of each block; then each lane's part of a rotation.
  extern __shared__ __align__(16) char shared[];
  Acc* const partials = reinterpret_cast<Acc*>(shared);

  let_successor_start();
  if (split.splits > 1) arrive_at_cluster_barrier();
  if (attention.pdl && attention.ancestry == nullptr) {
    // Only a hint, so a possibly outdated length is enough: what is in the L2 cache is never out of date.
    constexpr int kLine = 128 / sizeof(T);
    const Places guess(split, item, rank);
    for (int64_t i = int64_t(guess.first) * head_dim + threadIdx.x * kLine; i < int64_t(guess.last) * head_dim; i += kThreads * kLine) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(keys + i));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(values + i));
    }
  }
  const LaneRotation<Acc> rotation(attention.rotation, row, dim, head_dim);
  wait_for_predecessor();

  const auto vector_of = [&](const DecodeAttention::Heads& heads, unsigned of_head) {
    return static_cast<const T*>(heads.data) + row * heads.row_stride + of_head * heads.head_stride;
  };
  LaneVector<T> query;
  query.load(vector_of(attention.query, head), dim, head_dim, split.aligned);
  const Places places(split, item, rank);
  // The place of the new key, which is the last one, or -1.
  const int written =
      attention.key.data != nullptr && integer_at(attention.lengths, item) < attention.capacity ? places.end - 1 : -1;
  const T* const new_key = attention.key.data != nullptr ? vector_of(attention.key, kv_head) : nullptr;
  const T* const new_value = attention.key.data != nullptr ? vector_of(attention.value, kv_head) : nullptr;
  LaneVector<T> token_key = {};
  if (new_key != nullptr) token_key.load(new_key, dim, head_dim, split.aligned);
  if (split.rotates) {
    Acc* const scratch = partials + split.splits * kWarps * (2 + head_dim) +
                         (threadIdx.x - lane % kGroup) * LaneRotation<Acc>::kScratch;
    query.template rotate<kGroup>(rotation, HeadPart::kQuery, scratch);
    token_key.template rotate<kGroup>(rotation, HeadPart::kKey, scratch);
  }
  if (written >= 0 && rank == 0 && head % group == 0 && threadIdx.x < kGroup) {
    token_key.store(keys + int64_t(written) * head_dim, dim, head_dim, split.aligned);
    LaneVector<T> vector;
    vector.load(new_value, dim, head_dim, split.aligned);
    vector.store(values + int64_t(written) * head_dim, dim, head_dim, split.aligned);
  }

  // The offset of a place's key and value from those of the row itself.
  const auto offset_of = [&](int place) {
    int64_t rows = 0;
    if (attention.ancestry != nullptr) {
      const auto source = static_cast<unsigned>(attention.ancestry[row * attention.capacity + place]);
      rows = int64_t(min(source, static_cast<unsigned>(attention.rows - 1))) - row;
    }
    return (rows * attention.kv_heads * attention.capacity + place) * head_dim;
  };
  const Acc scale = static_cast<Acc>(attention.scale * 1.4426950408889634);
  const Acc cap = static_cast<Acc>(attention.softcap * 1.4426950408889634);  // 0: none
  Partial<Acc> partial;
  constexpr int kStep = kWarps * kGroups;
  for (int base = places.first + warp * kGroups + lane / kGroup; base - lane / kGroup < places.last;
       base += kUnroll * kStep) {
    LaneVector<T> key[kUnroll], value[kUnroll];
    Acc scores[kUnroll];
    bool attended[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int place = base + u * kStep;
      attended[u] = place < places.last;
      const int bounded_dim = attended[u] ? dim : head_dim;
      const int64_t offset = attended[u] && place != written ? offset_of(place) : 0;
      key[u].load(keys + offset, place == written ? head_dim : bounded_dim, head_dim, split.aligned);
      if (place == written) key[u] = token_key;
      value[u].load(place == written ? new_value : values + offset, bounded_dim, head_dim, split.aligned);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int place = base + u * kStep;
      scores[u] = 0;
      if (attended[u] && attention.mask != nullptr) attended[u] = attention.mask[item * attention.capacity + place];
      if (attended[u] && attention.bias.data != nullptr) {
        const int64_t distance = min(int64_t(places.end - 1 - place), attention.bias_columns - 1);
        scores[u] = load_as<Acc>(attention.bias, head * attention.bias_columns + distance) *
                    static_cast<Acc>(1.4426950408889634);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Acc product = 0;
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) product += query[i] * key[u][i];
#pragma unroll
      for (int distance = kGroup / 2; distance > 0; distance /= 2) {
        product += __shfl_xor_sync(kFullWarp, product, distance);
      }
      product *= scale;
      if (cap > 0) product = cap * tanh(product / cap);
      scores[u] = attended[u] ? product + scores[u] : Acc(-INFINITY);
    }
    Acc largest = scores[0];
#pragma unroll
    for (int u = 1; u < kUnroll; ++u) largest = fmax(largest, scores[u]);
    partial.raise(largest);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (!attended[u]) continue;
      const Acc weight = exp2_as(scores[u] - origin_of(partial.largest));
      partial.sum += weight;
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) partial.values[i] += weight * value[u][i];
    }
  }

#pragma unroll
  for (int distance = kGroup; distance < kWarpSize; distance *= 2) {
    partial.raise(__shfl_xor_sync(kFullWarp, partial.largest, distance));
    partial.sum += __shfl_xor_sync(kFullWarp, partial.sum, distance);
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      partial.values[i] += __shfl_xor_sync(kFullWarp, partial.values[i], distance);
    }
  }
  const int columns = 2 + head_dim;
  Acc* const own = partials + (rank * kWarps + warp) * columns;
  if (split.splits > 1) wait_at_cluster_barrier();  // the first block is running
  if (lane < kGroup) {
    if (lane == 0) {
      store_to_block(own, 0, partial.largest);
      store_to_block(own + 1, 0, partial.sum);
    }
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      if (dim + i < head_dim) store_to_block(own + 2 + dim + i, 0, partial.values[i]);
    }
  }
  if (split.splits > 1) {
    __syncwarp();
    arrive_at_cluster_barrier();
    wait_at_cluster_barrier();
    if (rank != 0) return;
  } else {
    __syncthreads();
  }

  // Each lane has the weight of one part. Every warp computes all weights for itself.
  static_assert(kMaxSplits * kWarps <= kWarpSize);
  const int parts = static_cast<int>(split.splits) * kWarps;
  const bool has_part = lane < parts;
  const Acc share = share_of_part<kWarpSize>(has_part ? partials[lane * columns] : Acc(-INFINITY),
                                             has_part ? partials[lane * columns + 1] : Acc(0));
  for (int d = threadIdx.x; d < (head_dim + kWarpSize - 1) / kWarpSize * kWarpSize; d += kThreads) {
    Acc total = 0;
#pragma unroll 8
    for (int part = 0; part < parts; ++part) {
      const Acc share_of = __shfl_sync(kFullWarp, share, part);
      if (d < head_dim) total += share_of * partials[part * columns + 2 + d];
    }
    if (d < head_dim) {
      static_cast<T*>(attention.output)[(row * attention.heads + head) * head_dim + d] = from_acc<T>(total);
    }
  }
}

// As many blocks per (row, head) as its places can fill, while the device can hold them.
unsigned splits_for(const DecodeAttention& attention) {
  if (!is_sm90_or_newer()) return 1;
  unsigned splits = kMaxSplits;
  while (splits > 1 && ((splits - 1) * kPlacesPerSplit >= attention.capacity ||
                        attention.rows * attention.heads * splits > tuning().decode_attention_blocks * multiprocessor_count())) {
    splits /= 2;
  }
  return splits;
}

// Whether a head of keys has one query of each row, and its scores are only scaled and biased.
bool is_plain(const DecodeAttention& attention) {
  return attention.group == 1 && !attention.has_rotation() && attention.window == 0 && attention.softcap == 0;
}

// Whether mma.cuh takes it.
bool suits_mma(const DecodeAttention& attention) {
  return is_plain(attention) && (attention.head_dim == 64 || attention.head_dim == 128) &&
         attention.capacity <= kMaxMmaCapacity;
}

// False if no kernel of the tensor cores takes it.
template <typename T>
bool launch_on_tensor_cores(const DecodeAttention& attention, cudaStream_t stream, cudaError_t& error) {
  if (suits_mma(attention) && launch_decode_attention_mma<T>(attention, stream, error)) return true;
  return launch_decode_attention_grouped<T>(attention, stream, error);
}

template <typename T, int kGroup>
cudaError_t launch_plain(const SplitAttention& split, cudaStream_t stream) {
  using Acc = AccFor<T>;
  const DecodeAttention& attention = split.attention;
  const size_t parts = split.splits * kWarps * (2 + attention.head_dim);
  const size_t scratch = split.rotates ? kThreads * LaneRotation<Acc>::kScratch : 0;
  const LaunchShape shape{static_cast<unsigned>(attention.rows * attention.heads) * split.splits, kThreads,
                          (parts + scratch) * sizeof(Acc), split.splits};
  return launch_dependent(decode_attention_kernel<T, kGroup>, split, shape, attention.pdl, stream);
}

template <typename T>
cudaError_t launch_as(const DecodeAttention& attention, cudaStream_t stream) {
  SplitAttention split{attention, splits_for(attention), attention.head_dim % kLaneDims == 0,
                       attention.has_rotation()};
  for (const void* data : {attention.query.data, attention.key.data, attention.value.data,
                           static_cast<const void*>(attention.key_cache),
                           static_cast<const void*>(attention.value_cache)}) {
    split.aligned &= is_aligned(data);
  }
  for (const auto& heads : {attention.query, attention.key, attention.value}) {
    split.aligned &= heads.row_stride * sizeof(T) % kAccessBytes == 0;
    split.aligned &= heads.head_stride * sizeof(T) % kAccessBytes == 0;
  }
  if constexpr (sizeof(T) == 2) {
    cudaError_t error = cudaSuccess;
    if (split.aligned && launch_on_tensor_cores<T>(attention, stream, error)) return error;
  }
  if constexpr (std::is_same_v<T, float>) {
    cudaError_t error = cudaSuccess;
    if (split.aligned && is_plain(attention) && launch_decode_attention_float32(attention, stream, error)) return error;
  }
  if constexpr (!std::is_same_v<T, double>) {  // double is for comparison only and need not be fast
    if (attention.head_dim <= 8 * kLaneDims) return launch_plain<T, 8>(split, stream);
    if (attention.head_dim <= 16 * kLaneDims) return launch_plain<T, 16>(split, stream);
  }
  if (attention.head_dim <= kMaxHeadDim) return launch_plain<T, 32>(split, stream);
  return cudaErrorInvalidValue;
}

// Calls `function` with type tags for the query's dtype and for the 8-bit elements of the caches. Returns `otherwise` if no
// kernel supports them.
template <typename Function, typename Result>
Result with_quantized(const DecodeAttention& attention, Function function, Result otherwise) {
  const auto of_query = [&](auto stored) {
    if (attention.dtype == kFloat16) return function(TypeTag<__half>{}, stored);
    return attention.dtype == kBFloat16 ? function(TypeTag<__nv_bfloat16>{}, stored) : otherwise;
  };
  switch (attention.cache_dtype) {
    case kInt8: return of_query(TypeTag<Int8>{});
    case kFp8: return of_query(TypeTag<Fp8>{});
    case kAsQuery: break;
  }
  return otherwise;
}

int64_t quantized_workspace(const DecodeAttention& attention) {
  return with_quantized(
      attention,
      [&](auto of_query, auto stored) {
        return grouped_workspace<typename decltype(of_query)::type, typename decltype(stored)::type>(attention);
      },
      int64_t(0));
}

cudaError_t launch_quantized(const DecodeAttention& attention, cudaStream_t stream) {
  return with_quantized(
      attention,
      [&](auto of_query, auto stored) {
        cudaError_t error = cudaErrorInvalidValue;
        launch_decode_attention_grouped<typename decltype(of_query)::type, typename decltype(stored)::type>(
            attention, stream, error);
        return error;
      },
      cudaErrorInvalidValue);
}

}  // namespace

extern "C" int64_t fuseopt_decode_attention_workspace(const DecodeAttention& attention) {
  if (attention.rows * attention.heads * attention.head_dim == 0) return 0;
  if (attention.cache_dtype != kAsQuery) return quantized_workspace(attention);
  if (suits_mma(attention)) return 0;
  if (attention.dtype == kFloat16) return grouped_workspace<__half>(attention);
  return attention.dtype == kBFloat16 ? grouped_workspace<__nv_bfloat16>(attention) : 0;
}

extern "C" cudaError_t fuseopt_decode_attention(DecodeAttention attention, cudaStream_t stream) {
  if (attention.rows == 0 || attention.heads == 0 || attention.head_dim == 0) return cudaSuccess;
  attention.score_scale = static_cast<float>(attention.scale) * kLog2E;
  if (attention.cache_dtype != kAsQuery) return launch_quantized(attention, stream);
  switch (static_cast<DType>(attention.dtype)) {
    case kFloat16: return launch_as<__half>(attention, stream);
    case kBFloat16: return launch_as<__nv_bfloat16>(attention, stream);
    case kFloat64: return launch_as<double>(attention, stream);
    case kFloat32: return launch_as<float>(attention, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fuseopt::decode_attention
