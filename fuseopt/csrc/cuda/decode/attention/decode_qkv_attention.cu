// Attention of one row together with what precedes it in a layer: the norm, and the projection to query, key and value.
// A head has a cluster of three blocks with a strip of columns each: its query, key and value. The first block receives
// the values of the two others and computes attention. By then the head's cache is in its shared memory, copied after
// the weights. So the values never go through global memory, and no kernel boundary separates projection and attention.
#include "cuda/attention/attention_parts.cuh"
#include "cuda/decode/attention/many_rows.cuh"
#include "cuda/decode/linear/dispatch.cuh"
#include "cuda/decode/linear/input_rows.cuh"
#include "cuda/decode/linear/row_moments.cuh"

namespace fuseopt::decode_qkv_attention {
namespace {

constexpr int kHeadDim = kLineColumns;
enum Part { kQuery, kKey, kValue, kParts };

// A head's keys and values, for one query. They are spread over the block's warps, two tiles at a time.
template <typename T>
class HeadCache {
  using Tile = SharedTile<T, kHeadDim>;
  using Pair = Tile[2];
  static constexpr int kKeys = 2 * kTileKeys;
  // TUNED: measurement not recorded (e2b31b9); `fuseopt bench kernels --model gpt2` measures it again.
  static constexpr int kMostPairs = 2;  // per warp

 public:
  static constexpr int kMostPlaces = kMostPairs * kLineWarps * kKeys;
  static int64_t shared_bytes(int64_t capacity) { return ceil_div(capacity, kKeys) * sizeof(Pair); }

  __device__ HeadCache(const DecodeAttention& attention, const FilledPlaces& places, char* shared)
      : attention_(attention), places_(places), pairs_(reinterpret_cast<Pair*>(shared)) {}

  // The number of warps that have a part of the cache.
  __device__ int filled() const { return min((places_.end - places_.first + kKeys - 1) / kKeys, kLineWarps); }

  // Starts copies of what earlier steps have written, as one copy group.
  __device__ void fetch(const T* keys, const T* values) {
#pragma unroll
    for (int p = 0; p < kMostPairs; ++p) {
      const int base = base_of(p), place = base + Tile::own_key();
      kept_[p] = 0;
      if (base >= places_.end) continue;
      const int written = places_.token >= 0 ? places_.token : places_.end;
      const int from = place * kHeadDim + Tile::own_piece() * kLaneValues;
      Tile::fetch(pair_of(p), keys + from, values + from, written - place, [](int key) { return key * kHeadDim; });
      const int of_lane = base + lane();
      const bool is_kept = mask_of(attention_, 0, min(of_lane, static_cast<int>(attention_.capacity) - 1)) != 0;
      kept_[p] = __ballot_sync(kFullWarp, is_kept && places_.has(of_lane));
    }
    end_copy_group();
  }

  __device__ void settle() { fuseopt::settle(kept_); }

  // Attention of tokens[kQuery] over the calling warp's part of the cache, including the new key and value.
  __device__ Attended<T, kHeadDim> attend(const T (&tokens)[kParts][kHeadDim]) const {
    unsigned query[Tile::kPieces] = {};
    if (lane() < 4) {
#pragma unroll
      for (int i = 0; i < Tile::kPieces; ++i) query[i] = reinterpret_cast<const unsigned*>(tokens[kQuery])[lane() + i * 4];
    }
    Attended<T, kHeadDim> attended;
#pragma unroll 1
    for (int p = 0; p < kMostPairs && base_of(p) < places_.end; ++p) {
      const int base = base_of(p), token = places_.token - base;
      if (token >= 0 && token < kKeys) {
        const int is_value = lane() / Tile::kPieces;
        if (is_value < 2) {
          const auto pieces = reinterpret_cast<const uint4*>(tokens[kKey + is_value]);
          Tile::put(pair_of(p), token, is_value, pieces[Tile::own_piece()]);
        }
        __syncwarp();
      }
      const unsigned kept = p == 0 ? kept_[0] : kept_[1], there = places_.end - base;
      float addends[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) addends[i / 2][i % 2] = kept >> (i * 8 + lane() / 4) & 1 ? 0.f : -INFINITY;
      const unsigned filled = there >= kKeys ? ~0u : (1u << there) - 1;
      attended.add(pair_of(p), query, 1, addends, ~kept & filled, attention_.score_scale);
    }
    return attended;
  }

 private:
  static __device__ int lane() { return threadIdx.x % kWarpSize; }
  static __device__ int index_of(int p) { return p * kLineWarps + threadIdx.x / kWarpSize; }
  __device__ int base_of(int p) const { return places_.first + index_of(p) * kKeys; }
  __device__ Pair& pair_of(int p) const { return pairs_[index_of(p)]; }

  const DecodeAttention& attention_;
  const FilledPlaces places_;
  Pair* const pairs_;
  unsigned kept_[kMostPairs];
};

template <typename T>
struct QkvAttention {
  LineLayer<T> layer;
  DecodeAttention attention;
};

template <typename T, typename Stages>
__global__ void __launch_bounds__(kLineThreads, 1)
    decode_qkv_attention_kernel(const __grid_constant__ QkvAttention<T> both) {
  using Strip = GemvStrip<T, true, Stages>;
  const LineLayer<T>& layer = both.layer;
  const DecodeAttention& attention = both.attention;
  const int warp = threadIdx.x / kWarpSize, part = cluster_rank(), head = static_cast<int>(cluster_index());
  const int strip = part * static_cast<int>(attention.heads) + head;

  // The strip's weights; in the first block also the head's cache, which the warps' results then overwrite.
  extern __shared__ __align__(kRingAlignment) char shared[];
  __shared__ __align__(16) Deviations deviations_of[kLineWarps];
  __shared__ __align__(16) T tokens[kParts][kHeadDim];
  __shared__ Mailbox mailbox;

  const Lengths lengths(attention, 0);
  Strip product(layer, strip, warp, kLineWarps, shared, deviations_of);
  product.fetch();
  let_successor_start();
  if (part == kQuery) mailbox.open((kParts - 1) * kHeadDim * sizeof(T));
  arrive_relaxed_at_cluster_barrier();
  product.load_norm();
  const bool is_column = threadIdx.x < kLineColumns;
  float offset = 0.f;
  if (is_column && layer.biases[0] != nullptr) offset = to_float(layer.biases[0][strip * kLineColumns + threadIdx.x]);
  product.hold();

  const FilledPlaces places(attention, lengths);
  const unsigned of_head = head * static_cast<unsigned>(attention.capacity) * kHeadDim;
  T* const keys = static_cast<T*>(attention.key_cache) + of_head;
  T* const values = static_cast<T*>(attention.value_cache) + of_head;
  HeadCache<T> cache(attention, places, shared + Strip::kSharedBytes);
  if (part == kQuery) cache.fetch(keys, values);
  else end_copy_group();
  cache.settle();
  product.settle();
  const T* const input = settled(static_cast<const T*>(layer.input) + product.k());
  int takes = product.has_values();
  T* const cached = settled((part == kKey ? keys : values) + places.token * kHeadDim + threadIdx.x);
  int is_pair = is_column && threadIdx.x % 2 == 0, is_cached = is_pair && part != kQuery && places.token >= 0;
  settle(takes), settle(is_pair), settle(is_cached);
  wait_for_predecessor_settled(layer.in_features < 0);

  uint4 words = {};
  if (takes > 0) words = __ldcg(reinterpret_cast<const uint4*>(input));
  product.put(words);
  product.template await_weights<1>();  // the cache's copies follow the weights'
  product.multiply();
  __syncthreads();
  wait_at_cluster_barrier();  // the first block is running
  if (is_column) {
    const float value = offset + product.normalised(product.total(threadIdx.x), product.deviations());
    const unsigned pair = packed<T>(value, __shfl_down_sync(kFullWarp, value, 1));
    float* const token = reinterpret_cast<float*>(&tokens[part][threadIdx.x]);
    if (is_pair > 0) {
      if (part == kQuery) *token = __uint_as_float(pair);
      else mailbox.send(token, __uint_as_float(pair), kQuery);
    }
    if (is_cached > 0) *reinterpret_cast<unsigned*>(cached) = pair;
  }
  if (part != kQuery) return;

  await_copy_groups<0>();
  __syncthreads();
  mailbox.wait();
  const Attended<T, kHeadDim> attended = cache.attend(tokens);
  OwnParts<kHeadDim> parts(shared, 1, kHeadDim);
  const int filled = cache.filled();
  if (warp < filled) parts.leave_of_shared(attended);
  __syncthreads();
  if (warp == 0) parts.store_merged(static_cast<T*>(attention.output) + head * kHeadDim, filled);
}

inline int stages_of_warp(const DecodeLinear& layer) {
  return static_cast<int>(ceil_div(layer.in_features, kLineWarps * kLineK));
}

template <typename T, typename Stages>
size_t shared_bytes_of(const DecodeAttention& attention) {
  return GemvStrip<T, true, Stages>::kSharedBytes + HeadCache<T>::shared_bytes(attention.capacity);
}

template <typename T>
bool has_room(const DecodeLinear& layer, const DecodeAttention& attention) {
  constexpr size_t kDeclared = 1024;  // upper bound of the kernel's static shared memory
  return stages_of_warp(layer) <= MostGemvStages::kAll && attention.capacity <= HeadCache<T>::kMostPlaces &&
         with_gemv_stages<MostGemvStages>(stages_of_warp(layer), [&]<typename Stages>(Stages) {
           return shared_bytes_of<T, Stages>(attention) + kDeclared <= shared_bytes_of_block();
         });
}

template <typename T>
bool takes(const DecodeLinear& layer, const DecodeAttention& attention) {
  const bool is_head = attention.head_dim == kHeadDim && layer.out_features == kParts * attention.heads * kHeadDim;
  return is_sm90_or_newer() && layer.rows == 1 && layer.norm != kNoNorm && is_plain_of_lines<T>(layer) && is_head &&
         attention.dtype == layer.weight_dtype && is_aligned(attention.key_cache) &&
         is_aligned(attention.value_cache) && has_room<T>(layer, attention) &&
         attention.heads * attention.capacity * kHeadDim <= INT32_MAX;
}

template <typename T>
cudaError_t launch(const DecodeLinear& layer, const DecodeAttention& attention, cudaStream_t stream) {
  const QkvAttention<T> both{{mma_layer<T>(layer)}, attention};
  return with_gemv_stages<MostGemvStages>(stages_of_warp(layer), [&]<typename Stages>(Stages) {
    const LaunchShape shape{static_cast<unsigned>(kParts * attention.heads), kLineThreads,
                            shared_bytes_of<T, Stages>(attention), kParts};
    return launch_dependent(decode_qkv_attention_kernel<T, Stages>, both, shape, layer.pdl, stream);
  });
}

}  // namespace

extern "C" bool fuseopt_takes_qkv_attention(DecodeLinear layer, DecodeAttention attention) {
  if (layer.weight_dtype == kFloat16) return takes<__half>(layer, attention);
  return layer.weight_dtype == kBFloat16 && takes<__nv_bfloat16>(layer, attention);
}

extern "C" cudaError_t fuseopt_decode_qkv_attention(DecodeLinear layer, DecodeAttention attention,
                                                    cudaStream_t stream) {
  attention.score_scale = static_cast<float>(attention.scale) * kLog2E;
  if (layer.weight_dtype == kFloat16) return launch<__half>(layer, attention, stream);
  return launch<__nv_bfloat16>(layer, attention, stream);
}

}  // namespace fuseopt::decode_qkv_attention
