// How decode_linear reads a large weight [K, N]: each warp has a ring of stages in shared memory, which its lanes fill
// by copies that they do not wait for. A stage is whole cache lines, of a few k: memory is slower at parts of them.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/decode/linear/params.cuh"

namespace fuseopt {

constexpr int kMaxLineCluster = 8;  // blocks that share out K
// TUNED: with the kernel; whole cache lines, as memory is slower at parts of them (9be0fc3).
constexpr int kLineWarps = 8;
constexpr int kLineThreads = kLineWarps * kWarpSize;
constexpr int kLineTiles = 8;
constexpr int kLineColumns = kLineTiles * kTileColumns;  // of a strip
constexpr int kLineK = 16;                               // of a stage, and of a product
constexpr int kLineBytes = kLineK * kLineColumns * 2;    // of a stage

template <typename T>
struct LineLayer : MmaLayer<T> {
  int slot_bits;     // 2 to the power of this: rows, up to 8, with room in shared memory
  int held_columns;  // of K, for each block: whole stages
  int blocks_of_k;   // that share out K, in one cluster
};

// A warp's way through its part of K, in one strip of columns. A stage is as in memory, but swizzled so that `load` has
// no bank conflicts. In a product lane % 4 has four neighbouring k, 4 (lane % 4) and the next.
template <typename T>
class LineStream {
  static constexpr int kCopies = kLineBytes / (kWarpSize * kAccessBytes);
  static constexpr int kCopiedLines = kLineK / kCopies;  // at a time

 public:
  __device__ LineStream(const LineLayer<T>& layer, int strip, int first_stage, int stages)
      : layer_(layer), left_(stages), k_(first_stage * kLineK + line()) {
    const int column = strip * kLineColumns + part() * kLaneValues;
    is_column_ = column < layer.out_features;
    from_ = layer.weights[blockIdx.y] + static_cast<int64_t>(k_) * layer.weight_stride + column;
  }

  // Starts the next stage's copies; a group of none at the end.
  __device__ void fetch(char* stage) {
    if (left_ > 0) fetch_or_clear(stage);
    else end_copy_group();
  }

  // The same; zeros at the end.
  __device__ void fetch_or_clear(char* stage) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int further = i * kCopiedLines;
      const T* const from = from_ + static_cast<int64_t>(further) * layer_.weight_stride;
      const bool is_there = left_ > 0 && is_column_ && k_ + further < layer_.in_features;
      copy_async(stage + place(further + line(), part()), from, is_there);
    }
    --left_;
    k_ += kLineK;
    from_ += static_cast<int64_t>(kLineK) * layer_.weight_stride;
    end_copy_group();
  }

  // 16 columns a word, as `multiply` takes them: low {x, z} and high {y, w}.
  static __device__ void load(const char* stage, uint4 (&words)[kLineTiles / 2]) {
    const int lane = threadIdx.x % kWarpSize, tile = lane / 8;
#pragma unroll
    for (int j = 0; j < kLineTiles / 2; ++j) {
      words[j] = load_transposed(stage + place(lane % 8 / 2 * 4 + tile / 2 * 2 + lane % 2, 2 * j + tile % 2));
    }
  }

 private:
  static __device__ int line() { return threadIdx.x % kWarpSize / kLineTiles; }
  static __device__ int part() { return threadIdx.x % kLineTiles; }
  static __device__ int place(int line, int part) { return (line * kLineTiles + (part ^ (line / 4 * 2 + line % 2))) * kAccessBytes; }

  const LineLayer<T>& layer_;
  int left_, k_;
  bool is_column_;
  const T* from_;
};

}  // namespace fuseopt
