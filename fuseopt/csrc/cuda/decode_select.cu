// The end of a greedy decoding step. One cluster of blocks shares out the vocabulary; the first block collects what each
// found and finishes all rows, so that `going` needs neither atomics nor a second launch.
#include "cluster.cuh"
#include "dependent_launch.cuh"
#include "vector.cuh"

namespace fuseopt {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxBlocks = 8;

struct SplitSelect {
  DecodeSelect select;
  unsigned blocks;
};

// A score and where it stands. NaN is above everything, and of equals the first wins, as in torch.argmax.
template <typename Acc>
struct Candidate {
  Acc score = -INFINITY;
  int token = INT32_MAX;

  __device__ void consider(Acc other, int other_token) {
    const bool above = isnan(other) ? !isnan(score) : other > score;
    const bool equal = isnan(other) ? isnan(score) : other == score;
    if (above || (equal && other_token < token)) score = other, token = other_token;
  }

  __device__ void reduce_over_warp() {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      const Acc other = __shfl_xor_sync(kFullWarp, score, distance);
      consider(other, __shfl_xor_sync(kFullWarp, token, distance));
    }
  }
};

template <typename T, typename Acc>
__device__ Candidate<Acc> best_of(const T* scores, int first, int last, bool aligned) {
  constexpr int kWidth = kVectorWidth<T>;
  Candidate<Acc> best;
  if (aligned) {
#pragma unroll 4
    for (int i = first + threadIdx.x * kWidth; i < last; i += kThreads * kWidth) {
      const auto vector = *reinterpret_cast<const Vector<T>*>(scores + i);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if constexpr (std::is_same_v<T, double>) best.consider(vector.values[j], i + j);
        else best.consider(vector[j], i + j);
      }
    }
    return best;
  }
  for (int i = first + threadIdx.x; i < last; i += kThreads) {
    best.consider(load_as<Acc>({const_cast<T*>(scores), kDType<T>}, i), i);
  }
  return best;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) decode_select_kernel(const __grid_constant__ SplitSelect split) {
  using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const DecodeSelect& select = split.select;
  const int rows = static_cast<int>(select.rows), vocabulary = static_cast<int>(select.vocabulary);
  const int rank = static_cast<int>(blockIdx.x), warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  extern __shared__ __align__(16) char shared[];
  // Of each row and block, in the first block: [rows][blocks].
  Acc* const scores_found = reinterpret_cast<Acc*>(shared);
  int* const tokens_found = reinterpret_cast<int*>(scores_found + rows * split.blocks);
  __shared__ Candidate<Acc> of_warps[kWarps];

  let_successor_start();
  if (split.blocks > 1) arrive_at_cluster_barrier();
  wait_for_predecessor();
  if (split.blocks > 1) wait_at_cluster_barrier();  // the first block has started

  constexpr int kWidth = kVectorWidth<T>;
  const int vectors = (vocabulary + kWidth - 1) / kWidth;
  const int each = (vectors + static_cast<int>(split.blocks) - 1) / static_cast<int>(split.blocks) * kWidth;
  const int first = min(rank * each, vocabulary), last = min(first + each, vocabulary);
  for (int row = 0; row < rows; ++row) {
    const T* const scores = static_cast<const T*>(select.scores) + row * select.row_stride;
    const bool aligned = reinterpret_cast<uintptr_t>(scores + first) % kAccessBytes == 0;
    const int whole = aligned ? first + (last - first) / kWidth * kWidth : first;
    Candidate<Acc> best;
    if (aligned) best = best_of<T, Acc>(scores, first, whole, true);
    const Candidate<Acc> rest = best_of<T, Acc>(scores, whole, last, false);
    best.consider(rest.score, rest.token);
    best.reduce_over_warp();
    if (lane == 0) of_warps[warp] = best;
    __syncthreads();
    if (warp == 0) {
      best = lane < kWarps ? of_warps[lane] : Candidate<Acc>();
      best.reduce_over_warp();
      if (lane == 0) {
        store_to_block(scores_found + row * split.blocks + rank, 0, best.score);
        store_to_block(tokens_found + row * split.blocks + rank, 0, best.token);
      }
    }
    __syncthreads();
  }
  if (split.blocks > 1) {
    arrive_at_cluster_barrier();
    wait_at_cluster_barrier();
    if (rank != 0) return;
  }

  const int64_t column = *select.length;
  bool going = false;
  for (int row = threadIdx.x; row < rows; row += kThreads) {
    Candidate<Acc> best;
    for (unsigned b = 0; b < split.blocks; ++b) {
      best.consider(scores_found[row * split.blocks + b], tokens_found[row * split.blocks + b]);
    }
    bool unfinished = select.unfinished[row];
    const int64_t token = unfinished ? best.token : *select.pad;
    for (int64_t i = 0; i < select.eos_count; ++i) unfinished = unfinished && token != select.eos[i];
    select.tokens[row] = token;
    select.unfinished[row] = unfinished;
    if (column >= 0 && column < select.ids_columns) {
      select.ids[row * select.ids_row_stride + column * select.ids_column_stride] = token;
    }
    going = going || unfinished;
  }
  going = __syncthreads_or(going);
  if (threadIdx.x == 0) {
    *select.going = going;
    *select.length = column + 1;
  }
  for (int c = 0; c < select.counter_count; ++c) {
    for (int64_t i = threadIdx.x; i < select.counter_sizes[c]; i += kThreads) ++select.counters[c][i];
  }
}

template <typename T>
cudaError_t launch_as(const DecodeSelect& select, cudaStream_t stream) {
  const unsigned blocks = is_sm90_or_newer() ? kMaxBlocks : 1;
  const size_t shared_bytes = select.rows * blocks * (sizeof(double) + sizeof(int));
  return launch_dependent(decode_select_kernel<T>, SplitSelect{select, blocks}, {blocks, kThreads, shared_bytes, blocks},
                          select.overlap, stream);
}

}  // namespace

extern "C" cudaError_t fuseopt_decode_select(DecodeSelect select, cudaStream_t stream) {
  switch (select.dtype) {
    case kFloat16: return launch_as<__half>(select, stream);
    case kBFloat16: return launch_as<__nv_bfloat16>(select, stream);
    case kFloat64: return launch_as<double>(select, stream);
    default: return launch_as<float>(select, stream);
  }
}

}  // namespace fuseopt
