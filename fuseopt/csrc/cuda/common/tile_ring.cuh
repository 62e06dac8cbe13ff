// How decode_linear's tile kernel reads its input and weight: a block has a ring of stages of K in shared memory, which
// its threads fill by asynchronous copies.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/decode/linear/weight_fragments.cuh"

namespace fuseopt {

// TUNED: T5-base's query, key and value, 256 rows, with the shape below (1094896).
constexpr int kTileThreads = 256;
constexpr int kProductBytes = 32;  // of a row, in one product on the tensor cores

// 8 warps, each with 32 rows and 32 columns of a block's tile. If a tile has fewer than 8 such parts, several warps
// share one and divide a stage's K.
// TUNED: T5-base's query, key and value, 256 rows (1094896).
template <typename T, int kRowWarps>
struct TileShape {
  static constexpr int kColumnWarps = 2, kPartWarps = kTileThreads / kWarpSize / (kRowWarps * kColumnWarps);
  static constexpr int kWarpTile = 32, kRows = kRowWarps * kWarpTile, kColumns = kColumnWarps * kWarpTile;
  static constexpr int kLineBytes = 128;  // bytes of a stage's row, column or k
  static constexpr int kValueBytes = static_cast<int>(sizeof(T));
  static constexpr int kLineValues = kLineBytes / kValueBytes, kStageK = kLineValues;
  static constexpr int kProductK = kProductBytes / kValueBytes;
  static constexpr int kStageBytes = (kRows + kColumns) * kLineBytes;
  // Two blocks with low tiles fit on a multiprocessor. High tiles are too few for that, so each has more stages in
  // flight.
  static constexpr int kBlocks = kRowWarps <= 2 ? 2 : 1;
  static constexpr int kStages = (kBlocks == 2 ? 96 : 168) * 1024 / kStageBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static_assert(kColumns % kLineValues == 0 && kPartWarps * kRowWarps * kColumnWarps * kWarpSize == kTileThreads);
};

// The lines of a stage are swizzled so that neither copies nor loads have bank conflicts. A line of k of a weight [K, N] has
// all columns of a strip in 16 bits, or half of them in 32: lines of the second half follow those of the first.
template <typename T, Layout kLayout, typename Shape>
class TileRing {
  static constexpr int kLineParts = Shape::kLineBytes / kAccessBytes, kCopiedLines = kTileThreads / kLineParts;
  static constexpr int kPartValues = kVectorWidth<T>;
  static constexpr bool kHalvesLines = kLayout == Layout::kColMajorKN && Shape::kLineValues < Shape::kColumns;
  static_assert(!kHalvesLines || (kCopiedLines == Shape::kStageK && 2 * Shape::kLineValues == Shape::kColumns));

 public:
  // For rows from `first_row` on, columns from `strip` on and k in [first_k, end_k).
  __device__ TileRing(const MmaLayer<T>& layer, char* stages, int first_row, int strip, int first_k, int end_k)
      : layer_(layer), stages_(stages), end_k_(end_k) {
    const int first_part = part() * kPartValues;
    row_ = first_row + line();
    row_k_ = first_k + first_part;
    input_ = static_cast<const T*>(layer.input) + row_ * layer.in_features + row_k_;
    column_ = strip + (kLayout == Layout::kRowMajorNK ? line() : first_part);
    weight_k_ = first_k + (kLayout == Layout::kRowMajorNK ? first_part : line());
    const int outer = kLayout == Layout::kRowMajorNK ? column_ : weight_k_;
    const int inner = kLayout == Layout::kRowMajorNK ? weight_k_ : column_;
    weight_ = layer.weights[blockIdx.y] + outer * layer.weight_stride + inner;
  }

  // Starts the copies of the next stage, into the given place of the ring.
  __device__ void fetch_rows(int place) {
    char* const to = stages_ + place * Shape::kStageBytes + at(line(), part());
#pragma unroll
    for (int i = 0; i < Shape::kRows / kCopiedLines; ++i) {
      const int further = i * kCopiedLines;
      copy_async(to + further * Shape::kLineBytes, input_ + further * layer_.in_features,
                 row_ + further < layer_.rows && row_k_ < end_k_);
    }
    row_k_ += Shape::kStageK;
    input_ += Shape::kStageK;
  }

  __device__ void fetch_weight(int place) {
    char* const to = weight_stage(place) + weight_at(line(), part());
    constexpr bool kAlongColumns = kLayout == Layout::kRowMajorNK || kHalvesLines;
#pragma unroll
    for (int i = 0; i < Shape::kColumns / kCopiedLines; ++i) {
      const int further = i * kCopiedLines;
      const bool is_column = column_ + (kAlongColumns ? further : 0) < layer_.out_features;
      const bool is_k = weight_k_ + (kAlongColumns ? 0 : further) < end_k_;
      const T* const from = weight_ + further * (kHalvesLines ? 1 : layer_.weight_stride);
      copy_async(to + further * Shape::kLineBytes, from, is_column && is_k);
    }
    weight_k_ += Shape::kStageK;
    weight_ += kLayout == Layout::kRowMajorNK ? Shape::kStageK : Shape::kStageK * layer_.weight_stride;
  }

  // 16 rows from `row` of the tile on, in the order of `multiply`: low {x, z} and high {y, w}.
  __device__ uint4 rows(int place, int row, int product) const {
    const int lane = threadIdx.x % kWarpSize;
    return load_lines(stages_ + place * Shape::kStageBytes + at(row + lane % 16, product * 2 + lane / 16));
  }

  // 16 columns from `column` of the tile on, 8 of them {x, y} and 8 {z, w}.
  __device__ uint4 columns(int place, int column, int product) const {
    const int lane = threadIdx.x % kWarpSize;
    const char* const stage = weight_stage(place);
    if constexpr (kLayout == Layout::kRowMajorNK) {
      return load_lines(stage + at(column + lane % 8 + lane / 16 * 8, product * 2 + lane / 8 % 2));
    } else if constexpr (kHalvesLines) {
      const int line = column / Shape::kLineValues * Shape::kStageK + product * Shape::kProductK + lane % 4;
      const int of_line = column % Shape::kLineValues + lane / 4;
      const auto word = [&](int k, int further) {
        const int value = of_line + further;
        const char* const piece = stage + weight_at(line + k, value / kPartValues);
        return reinterpret_cast<const unsigned*>(piece)[value % kPartValues];
      };
      return {word(0, 0), word(4, 0), word(0, 8), word(4, 8)};
    } else {
      return load_transposed(stage + at(product * Shape::kProductK + lane % 16, column / kLaneValues + lane / 16));
    }
  }

 private:
  static __device__ int line() { return threadIdx.x / kLineParts; }
  static __device__ int part() { return threadIdx.x % kLineParts; }
  static __device__ int at(int line, int part) { return line * Shape::kLineBytes + (part ^ line % 8) * kAccessBytes; }
  // Of 32-bit values that are read by themselves, from four lines and two pieces of each at a time.
  static __device__ int weight_at(int line, int part) {
    return kHalvesLines ? line * Shape::kLineBytes + (part ^ line % 4 * 2) * kAccessBytes : at(line, part);
  }
  __device__ char* weight_stage(int place) const {
    return stages_ + place * Shape::kStageBytes + Shape::kRows * Shape::kLineBytes;
  }

  const MmaLayer<T>& layer_;
  char* const stages_;
  const int end_k_;
  int row_, row_k_, column_, weight_k_;
  const T *input_, *weight_;
};

}  // namespace fuseopt
