// A team of threads that has a row: a warp or part of one for narrow rows, a block for wide ones, and a cluster of
// blocks (sm_90 and later) for still wider ones. A reduction gives every thread of the team the result, in a fixed
// order of operations, so results are bitwise repeatable.
#pragma once

#include <cstdint>

#include "cuda/common/cluster.cuh"

namespace fuseopt {

constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;
constexpr int kMaxClusterSize = 16;
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

// Ignores NaN; callers get it again in the sum that follows.
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

// Reduces over every kLanes neighbouring lanes of a warp; kLanes is a power of two. All threads of the warp that have
// not exited must call. A mask of fewer lanes, known only at run time, would cost more instructions than the exchange.
template <typename Op, int kLanes = kWarpSize, typename Acc>
__device__ inline Acc warp_reduce(Acc value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = Op::combine(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

// Several reductions, whose exchanges are in flight together.
template <typename Op, int kLanes = kWarpSize, typename Acc, int kValues>
__device__ inline void warp_reduce(Acc (&values)[kValues]) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] = Op::combine(values[i], __shfl_xor_sync(kFullWarp, values[i], distance));
    }
  }
}

enum class Team { kQuarterWarp, kHalfWarp, kWarp, kBlock, kCluster };

constexpr bool is_within_warp(Team team) { return team <= Team::kWarp; }

// The lanes of a warp that belong to one team.
template <Team kTeam>
constexpr int kTeamLanes = kTeam == Team::kQuarterWarp ? kWarpSize / 4
                           : kTeam == Team::kHalfWarp  ? kWarpSize / 2
                                                       : kWarpSize;

// TUNED: 128: measurement not recorded (67a7ceb); `fuseopt bench ops --op rms_norm` measures it again. 256: 16-bit
// norms of short rows, as a multiprocessor starts blocks at a limited rate; float32 and softmax gain nothing (64347c2).
constexpr int kWarpTeamBlock = 128;     // threads per block, if a warp or part of one has a row
constexpr int kMaxWarpTeamBlock = 256;  // and their maximum
constexpr int kMaxBlockTeam = 512;      // most threads per row if a block has it: leaves 128 registers per thread

// How many elements of a row each thread of the team holds. It is a compile-time constant, so that they stay in
// registers.
template <int kElementsPerThread, Team kTeamKind>
struct RowShape {
  static constexpr int kElements = kElementsPerThread;
  static constexpr Team kTeam = kTeamKind;
  static constexpr bool kWithinWarp = is_within_warp(kTeam);
  static constexpr int kMaxThreads = kWithinWarp ? kMaxWarpTeamBlock : kMaxBlockTeam;
  static constexpr int kMaxRow = kElements * (kWithinWarp ? kTeamLanes<kTeam> : kMaxBlockTeam);

  // Threads of a block.
  static int threads(int64_t columns) {
    if (kWithinWarp) return kWarpTeamBlock;
    constexpr int kWarpElements = kElements * kWarpSize;
    return static_cast<int>((columns + kWarpElements - 1) / kWarpElements) * kWarpSize;
  }

  static int rows_per_block(int threads) { return kWithinWarp ? threads / kTeamLanes<kTeam> : 1; }
};

// A thread's view of its team. If teams walk the rows in a grid-stride loop, the teams of a warp walk together.
template <Team kTeam, typename Acc = float>
class RowTeam {
 public:
  int lane;       // of this thread within the team
  int size;       // threads in the team
  int64_t index;  // of the team in the grid
  int64_t count;  // teams in the grid

  __device__ RowTeam() {
    if constexpr (is_within_warp(kTeam)) {
      size = kTeamLanes<kTeam>;
      const int teams_per_block = blockDim.x / size;
      lane = threadIdx.x % size;
      index = static_cast<int64_t>(blockIdx.x) * teams_per_block + threadIdx.x / size;
      count = static_cast<int64_t>(gridDim.x) * teams_per_block;
    } else if constexpr (kTeam == Team::kCluster) {
      lane = cluster_rank() * blockDim.x + threadIdx.x;
      size = cluster_size() * blockDim.x;
      index = blockIdx.x / cluster_size();
      count = gridDim.x / cluster_size();
      for (Mailbox& mailbox : mailboxes()) mailbox.open();
      arrive_relaxed_at_cluster_barrier();
    } else {
      lane = threadIdx.x;
      size = blockDim.x;
      index = blockIdx.x;
      count = gridDim.x;
    }
  }

  // Whether `row`, this team's next one, or that of another team of its warp, is less than `rows`.
  __device__ bool walks(int64_t row, int64_t rows) const {
    return row - (is_within_warp(kTeam) ? threadIdx.x % kWarpSize / kTeamLanes<kTeam> : 0) < rows;
  }

  // The `value` of the team's first thread, for teams within a warp.
  __device__ Acc of_first_lane(Acc value) const {
    static_assert(is_within_warp(kTeam));
    return __shfl_sync(kFullWarp, value, 0, kTeamLanes<kTeam>);
  }

  template <typename Op>
  __device__ Acc reduce(Acc value) {
    Acc values[1] = {value};
    reduce<Op>(values);
    return values[0];
  }

  // Several reductions with one barrier, if any. All threads of the team, and of its warp, must call.
  template <typename Op, int kValues>
  __device__ void reduce(Acc (&values)[kValues]) {
    static_assert(is_within_warp(kTeam) || kValues <= kMaxValues, "too many values");
    warp_reduce<Op, kTeamLanes<kTeam>>(values);
    if constexpr (!is_within_warp(kTeam)) {
      // Two buffers alternate. A warp can be at most one reduction before another, so one barrier per reduction is
      // enough.
      __shared__ Acc warp_results[2][kMaxValues][kMaxWarps];
      const int buffer = round_ % 2;
      if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) warp_results[buffer][i][threadIdx.x / kWarpSize] = values[i];
      }
      __syncthreads();
      reduce_parts<Op>(warp_results[buffer], blockDim.x / kWarpSize, values);
      if constexpr (kTeam == Team::kCluster) {
        if (round_ == 0) wait_at_cluster_barrier();  // all blocks are running
        __shared__ Acc block_results[2][kMaxValues][kMaxClusterSize];
        Mailbox& mailbox = mailboxes()[buffer];
        mailbox.expect(kValues * cluster_size() * sizeof(Acc));
        if (threadIdx.x < cluster_size()) {
#pragma unroll
          for (int i = 0; i < kValues; ++i) {
            mailbox.send(&block_results[buffer][i][cluster_rank()], values[i], threadIdx.x);
          }
        }
        mailbox.wait(round_ / 2);
        reduce_parts<Op>(block_results[buffer], cluster_size(), values);
      }
      ++round_;
    }
  }

 private:
  static constexpr int kMaxValues = 2;

  // Reduces the results of `count` parts of the team. Only as many lanes exchange values as there are parts, because
  // the whole team waits during these steps.
  template <typename Op, int kValues, int kMaxParts>
  __device__ static void reduce_parts(const Acc (&parts)[kMaxValues][kMaxParts], int count, Acc (&values)[kValues]) {
    const int lanes = 1 << (kWarpSize - __clz(count - 1));
    const int part = threadIdx.x % lanes;
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = part < count ? parts[i][part] : Op::template identity<Acc>();
    for (int distance = 1; distance < lanes; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        values[i] = Op::combine(values[i], __shfl_xor_sync(kFullWarp, values[i], distance));
      }
    }
  }

  // The mailboxes of a cluster's team, one per buffer.
  __device__ static Mailbox (&mailboxes())[2] {
    __shared__ Mailbox boxes[2];
    return boxes;
  }

  unsigned round_ = 0;  // the number of reductions so far
};

}  // namespace fuseopt
