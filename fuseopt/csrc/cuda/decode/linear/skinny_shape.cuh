// The shape of a skinny_mma block, for the kernel (skinny_mma.cuh) and its launch (dispatch.cuh).
#pragma once

#include "cuda/decode/linear/params.cuh"

namespace fuseopt {

// Warps of a block, limited by the registers of its lanes.
template <typename T, typename X, int kTiles, int kChunks, int kHalves, bool kLowRank = false>
constexpr int kMaxLinearWarps =
    kTiles == 8 || kChunks == 8 || kLowRank || (kHalves == 2 && (kTiles == 4 || !std::is_same_v<T, X>)) ? 12 : 16;

constexpr int kRowGap = 4;  // floats in shared memory, for rows of sums to start in different banks
// TUNED: measurement not recorded (66635f1); `fuseopt bench kernels --model gpt2-xl` measures it again.
constexpr int kMostWarps = 16;
constexpr int kSummedWarps = 6;  // at a time

// A thread finishes a pair of neighbouring columns, of one row or of two rows that are 8 apart.
__host__ __device__ inline int finished_pairs(int rows, int strip_width) {
  return (rows < kHalfRows ? rows : kHalfRows) * strip_width / 2;
}

// How blocks cover K. kAtOnce: one pass. kInPasses: several. kTogether: split over the blocks of a cluster, which send their
// sums to the first block. kApart: split over blocks that store partial sums, which the next layer adds up as it reads its
// input; the y-th block of the grid stores them as the outputs of weight y. That needs no cluster, and a cluster would not
// start before the previous kernel has ended.
enum class Along { kAtOnce, kInPasses, kTogether, kApart };

}  // namespace fuseopt
