// A row in the hands of a team of threads: a warp for narrow rows, a block for wide ones, a cluster of blocks (sm_90
// and later) for those that are too wide for one. Reductions over the team give every thread the result, in a fixed
// order of operations, so results repeat to the bit.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace fuseopt {

constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

struct Sum {
  template <typename Acc>
  __device__ static Acc combine(Acc a, Acc b) {
    return a + b;
  }
  template <typename Acc>
  __device__ static Acc identity() {
    return Acc(0);
  }
};

// A NaN does not win: a caller meets it again in the sum that follows.
struct Max {
  template <typename Acc>
  __device__ static Acc combine(Acc a, Acc b) {
    return fmax(a, b);
  }
  template <typename Acc>
  __device__ static Acc identity() {
    return Acc(-INFINITY);
  }
};

template <typename Op, typename Acc>
__device__ inline Acc warp_reduce(Acc value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = Op::combine(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

enum class Team { kWarp, kBlock, kCluster };

constexpr int kWarpTeamBlock = 128;  // threads a block where each warp has a row
constexpr int kMaxBlockTeam = 512;   // threads a row at most where a block has it: leaves 128 registers a thread

// How many elements of a row a thread of the team holds: compile-time, so that they stay in registers.
template <int kElementsPerThread, Team kTeamKind>
struct RowShape {
  static constexpr int kElements = kElementsPerThread;
  static constexpr Team kTeam = kTeamKind;
  static constexpr bool kWarpPerRow = kTeam == Team::kWarp;
  static constexpr int kMaxThreads = kWarpPerRow ? kWarpTeamBlock : kMaxBlockTeam;
  static constexpr int kMaxRow = kElements * (kWarpPerRow ? kWarpSize : kMaxBlockTeam);

  static int threads(int64_t columns) {
    if (kWarpPerRow) return kWarpTeamBlock;
    constexpr int kWarpElements = kElements * kWarpSize;
    return static_cast<int>((columns + kWarpElements - 1) / kWarpElements) * kWarpSize;
  }
};

// Calls `launch(RowShape, threads)` with the smallest shape that holds a row of `columns` elements, `kBlockElements` of
// them a thread where that takes a block; false when none does.
template <int kBlockElements, typename Launch>
bool dispatch_row_shape(int64_t columns, Launch launch) {
  bool launched = false;
  const auto consider = [&](auto shape) {
    if (launched || columns == 0 || columns > shape.kMaxRow) return;
    launch(shape, shape.threads(columns));
    launched = true;
  };
  consider(RowShape<8, Team::kWarp>{});
  consider(RowShape<16, Team::kWarp>{});
  consider(RowShape<24, Team::kWarp>{});
  consider(RowShape<kBlockElements, Team::kBlock>{});
  return launched;
}

// A thread's view of its team. Teams walk the rows in a grid-stride loop.
template <Team kTeam, typename Acc = float>
class RowTeam {
 public:
  int lane;       // of this thread within the team
  int size;       // threads in the team
  int64_t index;  // of the team in the grid
  int64_t count;  // teams in the grid

  __device__ RowTeam() {
    if constexpr (kTeam == Team::kWarp) {
      const int teams_per_block = blockDim.x / kWarpSize;
      lane = threadIdx.x % kWarpSize;
      size = kWarpSize;
      index = static_cast<int64_t>(blockIdx.x) * teams_per_block + threadIdx.x / kWarpSize;
      count = static_cast<int64_t>(gridDim.x) * teams_per_block;
    } else if constexpr (kTeam == Team::kCluster) {
      lane = cluster_rank() * blockDim.x + threadIdx.x;
      size = cluster_blocks() * blockDim.x;
      index = blockIdx.x / cluster_blocks();
      count = gridDim.x / cluster_blocks();
    } else {
      lane = threadIdx.x;
      size = blockDim.x;
      index = blockIdx.x;
      count = gridDim.x;
    }
  }

  template <typename Op>
  __device__ Acc reduce(Acc value) {
    Acc values[1] = {value};
    reduce<Op>(values);
    return values[0];
  }

  // Several reductions for the price of one barrier. All threads of the team must call.
  template <typename Op, int kValues>
  __device__ void reduce(Acc (&values)[kValues]) {
    static_assert(kValues <= kMaxValues, "too many values");
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = warp_reduce<Op>(values[i]);
    if constexpr (kTeam != Team::kWarp) {
      // Two buffers in turn: a warp can be at most one reduction ahead of another, so one barrier each is enough.
      __shared__ Acc warp_results[2][kMaxValues][kMaxWarps];
      const int warps = blockDim.x / kWarpSize;
      const int warp_lane = threadIdx.x % kWarpSize;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        if (warp_lane == 0) warp_results[buffer_][i][threadIdx.x / kWarpSize] = values[i];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        values[i] =
            warp_reduce<Op>(warp_lane < warps ? warp_results[buffer_][i][warp_lane] : Op::template identity<Acc>());
      }
      if constexpr (kTeam == Team::kCluster) reduce_blocks<Op>(values);
      buffer_ ^= 1;
    }
  }

  // To be called by every thread of a cluster before it leaves the kernel: others may still be reading from its block.
  __device__ static void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().sync();
#endif
  }

 private:
  // From the block's result to the cluster's; the two buffers serve here as they do within a block.
  template <typename Op, int kValues>
  __device__ void reduce_blocks(Acc (&values)[kValues]) {
#if __CUDA_ARCH__ >= 900
    __shared__ Acc block_results[2][kMaxValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (threadIdx.x == 0) block_results[buffer_][i] = values[i];
    }
    cluster_sync();
    const int warp_lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      Acc value = Op::template identity<Acc>();
      if (warp_lane < cluster_blocks()) {
        value = *cooperative_groups::this_cluster().map_shared_rank(&block_results[buffer_][i], warp_lane);
      }
      values[i] = warp_reduce<Op>(value);
    }
#endif
  }

  __device__ static int cluster_rank() {
#if __CUDA_ARCH__ >= 900
    return cooperative_groups::this_cluster().block_rank();
#else
    return 0;
#endif
  }

  __device__ static int cluster_blocks() {
#if __CUDA_ARCH__ >= 900
    return cooperative_groups::this_cluster().num_blocks();
#else
    return 1;
#endif
  }

  static constexpr int kMaxValues = 2;
  int buffer_ = 0;
};

}  // namespace fuseopt
