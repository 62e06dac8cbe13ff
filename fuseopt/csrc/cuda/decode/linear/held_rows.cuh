// The input rows of decode_linear's streaming kernel in registers, for 9 to 16 rows of a K that 8 warps share out. Rows in
// shared memory would take so much of it that no block of the next kernel could load its weights beside this one's.
#pragma once

#include "cuda/decode/linear/row_moments.cuh"
#include "cuda/decode/linear/weight_stream.cuh"

namespace fuseopt {

// Of K, that a warp has at most.
// TUNED: layers of Llama-3.2-1B, 16 rows, by a script, of which q, k, v, the output projection, up and gate hold rows:
// 923 -> 867 us; 887 with a ring of 3 stages and one block on a multiprocessor.
constexpr int kHeldStages = 4;

// A warp's part of the rows as products take it: of row lane / 4 and of the one 8 below, 8 values of each chunk.
template <typename T, int kHalves>
class HeldRows {
 public:
  // Zeros where there is no row or value.
  __device__ void load(const StreamLayer<T>& layer, int first_k) {
    const int own_k = first_k + threadIdx.x % 4 * kLaneValues, own_row = threadIdx.x % kWarpSize / 4;
    const int end = min(layer.in_features, first_k + layer.part_stages * kStageK);
#pragma unroll
    for (int c = 0; c < kHeldStages * kStageChunks; ++c) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int row = own_row + h * kHalfRows, k = own_k + c * kChunk;
        words_[h][c] = {};
        if (row >= layer.rows || k >= end) continue;
        const T* const values = static_cast<const T*>(layer.input) + static_cast<int64_t>(row) * layer.in_features + k;
        words_[h][c] = *reinterpret_cast<const uint4*>(values);
      }
    }
  }

  // The sum of the squares of row lane / 4 + kHalfRows * half.
  __device__ float squares(int half) const {
    float sum = 0.f;
#pragma unroll
    for (const uint4& words : words_[half]) {
      const auto& values = reinterpret_cast<const Vector<T, kLaneValues>&>(words);
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) sum = fmaf(values[i], values[i], sum);
    }
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    return sum + __shfl_xor_sync(kFullWarp, sum, 2);
  }

  __device__ const uint4& operand(int half, int chunk) const { return words_[half][chunk]; }

  // The same times an RMS norm's weight, of which `scale` has the lane's 8 values; rounded once.
  __device__ uint4 scaled_operand(int half, int chunk, const uint4& scale) const {
    const uint4& x = words_[half][chunk];
    return {multiply_pair<T>(x.x, scale.x), multiply_pair<T>(x.y, scale.y), multiply_pair<T>(x.z, scale.z),
            multiply_pair<T>(x.w, scale.w)};
  }

 private:
  uint4 words_[kHalves][kHeldStages * kStageChunks];
};

}  // namespace fuseopt
