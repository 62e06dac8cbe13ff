// Causal attention of prompts on the tensor cores, which also writes their keys and values to a cache: flash attention
// (Dao et al. 2022, arXiv 2205.14135) for prompts so short that the time of a single block counts.
//
// A block has a few strips of 16 queries of a head. It goes through the keys up to them in tiles, beginning with the
// last tile. Two tiles are in flight at a time, which covers 128 tokens. The last tile contains the keys and values of
// the block's own tokens; each thread writes those that it has copied to the cache.
#include "cuda/attention/query_strip.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/dependent_launch.cuh"
#include "cuda/common/vector.cuh"

namespace fuseopt::prompt_attention {
namespace {

// TUNED: measurement not recorded (f282897); `fuseopt bench kernels --model gpt2` measures it again.
constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
constexpr int kTileKeys = 64;
constexpr int kStages = 2;
constexpr int kFewBlocks = 2;  // per multiprocessor; with no more, two warps share the keys of a strip

// Shared memory of a block, in 16-byte pieces.
template <int kDims, int kQueries>
struct Memory {
  struct Tile {
    uint4 keys[kTileKeys * kDims / 8], values[kTileKeys * kDims / 8];
  };
  uint4 queries[kQueries * kDims / 8];  // later the result
  Tile tiles[kStages];                  // later the result of the second of two warps
};

// kGroups: warps that share the keys of a strip.
template <int kGroups>
constexpr int kBlockQueries = kWarps / kGroups * kStripQueries;

// Per multiprocessor, as registers allow.
template <int kDims, int kGroups>
constexpr int kResidentBlocks = kGroups == 1 && kDims == 64 ? 4 : kFewBlocks;

template <typename T, int kDims, int kGroups>
__global__ void __launch_bounds__(kThreads, kResidentBlocks<kDims, kGroups>)
    prompt_attention_kernel(const __grid_constant__ PromptAttention attention) {
  constexpr int kPieces = kDims / 8, kCopyRows = kThreads / kPieces;
  constexpr int kQueries = kBlockQueries<kGroups>, kStrips = kWarps / kGroups;
  constexpr int kKeys = kTileKeys / kGroups;  // per warp, of a tile
  let_successor_start();
  extern __shared__ __align__(kRingAlignment) char shared[];
  auto& memory = *reinterpret_cast<Memory<kDims, kQueries>*>(shared);
  const int length = static_cast<int>(attention.length), heads = static_cast<int>(attention.heads);
  const int head_dim = static_cast<int>(attention.head_dim), width = heads * head_dim;
  const int row = blockIdx.x / heads, head = blockIdx.x % heads;
  // The last queries see the most keys, so their blocks start first.
  const int first = (gridDim.y - 1 - blockIdx.y) * kQueries, end = min(first + kQueries, length);
  const int last_tile = first / kTileKeys;

  const int own_row = threadIdx.x / kPieces, own_piece = threadIdx.x % kPieces;
  const bool has_piece = own_piece * 8 < head_dim;
  const int64_t first_token = static_cast<int64_t>(row) * length;
  const T* const qkv = static_cast<const T*>(attention.qkv) + first_token * 3 * width + head * head_dim + own_piece * 8;
  // Copies queries (part 0), keys (1) or values (2) of so many tokens; zeros for tokens that no query of the block
  // sees.
  const auto copy = [&](auto tokens, uint4* to, int part, int begin) {
#pragma unroll
    for (int r = 0; r < tokens; r += kCopyRows) {
      const int token = begin + r + own_row;
      copy_async(&to[piece_index<kPieces>(r + own_row, own_piece)],
                 qkv + part * width + static_cast<int64_t>(token) * (3 * width), has_piece && token < end);
    }
  };
  const auto fetch = [&](int tile) {
    if (tile >= 0) {
      copy(IntTag<kTileKeys>{}, memory.tiles[tile % kStages].keys, 1, tile * kTileKeys);
      copy(IntTag<kTileKeys>{}, memory.tiles[tile % kStages].values, 2, tile * kTileKeys);
    }
    end_copy_group();
  };
  const auto cache_of = [&](const PromptAttention::Cache& cache) {
    return static_cast<T*>(cache.data) + row * cache.row_stride + head * cache.head_stride + own_piece * 8;
  };
  T* const key_cache = cache_of(attention.key_cache);
  T* const value_cache = cache_of(attention.value_cache);
  // Writes what this thread has copied of the block's own tokens; returns whether any value is infinite or NaN.
  const auto store = [&] {
    const auto& tile = memory.tiles[last_tile % kStages];
    unsigned products_with_zero = 0;
#pragma unroll
    for (int r = 0; r < kQueries; r += kCopyRows) {
      const int64_t token = first + r + own_row;
      const int index = piece_index<kPieces>(first % kTileKeys + r + own_row, own_piece);
      const uint4 key = tile.keys[index], value = tile.values[index];
      if (has_piece && token < length) {
        *reinterpret_cast<uint4*>(key_cache + token * attention.key_cache.slot_stride) = key;
        *reinterpret_cast<uint4*>(value_cache + token * attention.value_cache.slot_stride) = value;
      }
      products_with_zero |= multiply_pair<T>(value.x, 0) | multiply_pair<T>(value.y, 0) |
                            multiply_pair<T>(value.z, 0) | multiply_pair<T>(value.w, 0);
    }
    return (products_with_zero & 0x7fff7fff) != 0;
  };

  const int lane = threadIdx.x % kWarpSize, line = lane / 4, place = lane % 4;
  const int strip = threadIdx.x / kWarpSize % kStrips, group = threadIdx.x / kWarpSize / kStrips;
  const int strip_first = first + strip * kStripQueries;
  const int lines_index = strip_lines_index<kPieces>();
  const float scale = attention.score_scale;
  wait_for_predecessor();

  copy(IntTag<kQueries>{}, memory.queries, 0, first);
  fetch(last_tile);
  fetch(last_tile - 1);
  uint4 query[kPieces / 2];
  StripAttended<kDims> attended;
#pragma unroll 1
  for (int tile = last_tile; tile >= 0; --tile) {
    const bool is_last = tile == last_tile;
    const int first_key = tile * kTileKeys + group * kKeys;
    const uint4* const keys = memory.tiles[tile % kStages].keys + group * kKeys * kPieces;
    const uint4* const values = memory.tiles[tile % kStages].values + group * kKeys * kPieces;
    await_copy_groups<kStages - 1>();
    const bool is_spoilt = __syncthreads_or(is_last && store());
    if (is_last) {
#pragma unroll
      for (int i = 0; i < kPieces; i += 2) {
        query[i / 2] = load_lines(&memory.queries[strip * kStripQueries * kPieces + (lines_index ^ i)]);
      }
    }

    float score[kKeys / 8][4] = {};
    multiply_strip_keys<T, kDims, kKeys>(score, keys, [&](int i) { return query[i / 2]; });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The last key that the query sees, counted from the lane's first key.
      const int last_seen = is_last ? strip_first + line + half * 8 - first_key - place * 2 : kTileKeys;
      attended.weigh(score, half, scale, [&](int key) { return key <= last_seen; });
    }

    // is_for_one: only for query `chosen` of the strip, if the strip has it.
    const auto add_values = [&](auto is_for_one, int chosen) {
      const auto add = [&](float (&sums)[4], uint2 low, uint2 high, unsigned low_keys, unsigned high_keys) {
        const float before[4] = {sums[0], sums[1], sums[2], sums[3]};
        multiply<T>(sums, low, high, low_keys, high_keys);
        if constexpr (is_for_one) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[j] = line + j / 2 * 8 == chosen ? sums[j] : before[j];
        }
      };
      attended.template add_values<T>(score, values, add);
    };
    if (!is_spoilt) {
      add_values(std::false_type{}, 0);
    } else {
      // A weight of 0 times NaN or infinity is NaN. So values are zeroed from the last one on, before earlier queries
      // add them.
#pragma unroll 1
      for (int chosen = kQueries - 1; chosen >= 0; --chosen) {
        add_values(std::true_type{}, chosen - strip * kStripQueries);
        __syncthreads();
        if (threadIdx.x < kPieces) {
          memory.tiles[tile % kStages].values[(first % kTileKeys + chosen) * kPieces + threadIdx.x] = uint4{};
        }
        __syncthreads();
      }
    }

    if (tile >= kStages) __syncthreads();
    fetch(tile - kStages);
  }

  if constexpr (kGroups > 1) {
    static_assert(kGroups == 2 && sizeof(StripAttended<kDims>) * kStrips * kWarpSize <= sizeof(memory.tiles));
    auto& other = reinterpret_cast<StripAttended<kDims>*>(memory.tiles)[strip * kWarpSize + lane];
    __syncthreads();
    if (group > 0) other = attended;
    __syncthreads();
    if (group > 0) return;
    attended.add(other);
  }
  uint4* const result = memory.queries + strip * kStripQueries * kPieces;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float reciprocal = 1 / attended.total(half);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const auto& weighted = attended.weighted[i];
      reinterpret_cast<unsigned*>(&result[piece_index<kPieces>(line + half * 8, i)])[place] =
          packed<T>(weighted[half * 2] * reciprocal, weighted[half * 2 + 1] * reciprocal);
    }
  }
  __syncwarp();
  T* const output = static_cast<T*>(attention.output) + first_token * width + head * head_dim + own_piece * 8;
#pragma unroll
  for (int r = 0; r < kStripQueries; r += kWarpSize / kPieces) {
    const int own = r + lane / kPieces;
    const int64_t token = strip_first + own;
    if (has_piece && token < length) {
      *reinterpret_cast<uint4*>(output + token * width) = result[piece_index<kPieces>(own, own_piece)];
    }
  }
}

template <typename T, int kDims, int kGroups>
cudaError_t launch_as(const PromptAttention& attention, cudaStream_t stream) {
  constexpr int kQueries = kBlockQueries<kGroups>;
  static_assert(sizeof(Memory<kDims, kQueries>) <= kLeastSharedBytesOfSm80);
  const LaunchShape shape{.blocks = static_cast<unsigned>(attention.rows * attention.heads),
                          .threads = kThreads,
                          .shared_bytes = sizeof(Memory<kDims, kQueries>),
                          .cluster_blocks = 1,
                          .blocks_y = static_cast<unsigned>(ceil_div(attention.length, kQueries))};
  return launch_dependent(prompt_attention_kernel<T, kDims, kGroups>, attention, shape, attention.pdl, stream);
}

// With few blocks the time of one counts; with many, how often they read the keys.
template <typename T, int kDims>
cudaError_t launch_as(const PromptAttention& attention, cudaStream_t stream) {
  const int64_t blocks = attention.rows * attention.heads * ceil_div(attention.length, kBlockQueries<2>);
  return blocks <= kFewBlocks * multiprocessor_count() ? launch_as<T, kDims, 2>(attention, stream)
                                                       : launch_as<T, kDims, 1>(attention, stream);
}

template <typename T>
cudaError_t launch(const PromptAttention& attention, cudaStream_t stream) {
  return attention.head_dim <= 64 ? launch_as<T, 64>(attention, stream) : launch_as<T, 128>(attention, stream);
}

}  // namespace

extern "C" cudaError_t fuseopt_prompt_attention(PromptAttention attention, cudaStream_t stream) {
  if (attention.rows * attention.length * attention.heads * attention.head_dim == 0) return cudaSuccess;
  if (compute_capability_major() < 8) return cudaErrorNotSupported;
  attention.score_scale = static_cast<float>(attention.scale * kLog2E);
  return attention.dtype == kFloat16 ? launch<__half>(attention, stream) : launch<__nv_bfloat16>(attention, stream);
}

}  // namespace fuseopt::prompt_attention
