// A row in the registers of a team of threads: a warp for narrow rows, a block for wide ones. Reductions over the team
// give every thread the result, in a fixed order of operations, so results repeat to the bit.
#pragma once

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

enum class Team { kWarp, kBlock };

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
    if constexpr (kTeam == Team::kBlock) {
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
      buffer_ ^= 1;
    }
  }

 private:
  static constexpr int kMaxValues = 2;
  int buffer_ = 0;
};

}  // namespace fuseopt
