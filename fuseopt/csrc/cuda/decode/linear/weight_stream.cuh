// How decode_linear's streaming kernel reads its weights [N, K]: each warp has a ring of stages in shared memory, which
// its lanes fill by copies that they do not wait for.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/decode/linear/params.cuh"
#include "cuda/decode/select/score_candidate.cuh"

namespace fuseopt {

// TUNED: with the kernel: whole cache lines of 128 bytes, not 256; strips of 48 columns take 10% longer (e15abea).
constexpr int kStreamWarps = 8;
constexpr int kStreamTiles = 4;
constexpr int kStreamColumns = kStreamTiles * kTileColumns;  // of a strip, half of them each weight's if gated
constexpr int kStageChunks = 2;  // of K: whole cache lines of a weight [N, K]
constexpr int kStageK = kStageChunks * kChunk;
constexpr int kStageBytes = kStreamColumns * kStageK * 2;

template <typename T>
struct StreamLayer : MmaLayer<T> {
  static constexpr int kMaxWeights = MmaLayer<T>::kMaxWeights;
  int strips[kMaxWeights];    // of each weight
  int clusters[kMaxWeights];  // of blocks for each weight: from one strip of a block to the next
  int part_stages;    // of K, for each warp
  int ring_warps;     // that K suffices for: the first ones of a block
  int block_columns;  // of K, for each block
  int slot_bits;      // 2 to the power of this: rows, up to 8, with room in shared memory
  bool is_gated;
  bool scales_rows;  // by an RMS norm's weight as they are loaded, and sums by 1 / deviation
  Candidate<float>* best;  // of each row, for each strip's block: its highest output, up to a row a warp; or null
  TokenRules rules;        // by which outputs are compared
  const int64_t* sequence_length;
};

// Which weight a block multiplies, and its first strip of that.
struct StreamedWeight {
  int index = 0, strip = static_cast<int>(cluster_index()), strips, step;

  template <typename T>
  __device__ explicit StreamedWeight(const StreamLayer<T>& layer) {
    while (strip >= layer.clusters[index]) strip -= layer.clusters[index++];
    strips = layer.strips[index], step = layer.clusters[index];
  }
};

// A warp's way through a weight: the stages of its part of K, of one strip after another. A stage lies in lines of k,
// as in memory, swizzled so that `load` has no bank conflicts.
template <typename T>
class WeightStream {
  static constexpr int kLineParts = kStageK / kLaneValues;  // of 16 bytes
  static constexpr int kLines = kWarpSize / kLineParts;     // copied at a time
  static constexpr int kCopies = kStageBytes / (kWarpSize * kAccessBytes);

 public:
  __device__ WeightStream(const StreamLayer<T>& layer, const StreamedWeight& weight, int part)
      : layer_(layer), of_(weight), stages_(stages_of(layer, part)) {
    const int width = layer.is_gated ? kStreamColumns / 2 : kStreamColumns;
    k_ = part * layer.part_stages * kStageK + line_part() * kLaneValues;
    column_ = of_.strip * width + line();
    from_ = layer.weights[of_.index] + offset(column_) + k_;
    to_gate_ = layer.is_gated ? layer.weights[1] - layer.weights[0] - offset(width) : 0;
    if (stages_ == 0) of_.strip = of_.strips;
  }

  // In one strip.
  static __device__ int stages_of(const StreamLayer<T>& layer, int part) {
    const int all = (layer.in_features + kStageK - 1) / kStageK;
    return max(min(all - part * layer.part_stages, layer.part_stages), 0);
  }

  // Starts the next stage's copies; a group of none at the end.
  __device__ void fetch(char* stage) {
    if (of_.strip < of_.strips) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int further = i * kLines;
        const bool is_second = layer_.is_gated && i >= kCopies / 2;
        const int column = column_ + further - (is_second ? kStreamColumns / 2 : 0);
        const bool is_inside = column < layer_.widths[of_.index] && k_ < layer_.in_features;
        const T* const from = from_ + offset(further) + (is_second ? to_gate_ : 0);
        copy_async(stage + place(further + line(), line_part()), from, is_inside);
      }
      k_ += kStageK;
      from_ += kStageK;
      if (++stage_ == stages_) {
        stage_ = 0;
        of_.strip += of_.step;
        const int width = layer_.is_gated ? kStreamColumns / 2 : kStreamColumns, back = stages_ * kStageK;
        k_ -= back;
        column_ += of_.step * width;
        from_ += offset(of_.step * width) - back;
      }
    }
    end_copy_group();
  }

  // The lane's part of a chunk as `multiply` takes it together with 8 neighbouring inputs.
  static __device__ void load(const char* stage, int chunk, uint4 (&words)[kStreamTiles]) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int j = 0; j < kStreamTiles; ++j) {
      words[j] = *reinterpret_cast<const uint4*>(stage + place(j * kTileColumns + lane / 4, chunk * 4 + lane % 4));
    }
  }

 private:
  static __device__ int line() { return threadIdx.x % kWarpSize / kLineParts; }
  static __device__ int line_part() { return threadIdx.x % kLineParts; }
  static __device__ int place(int line, int part) {
    return (line * kLineParts + (part ^ line % 2 * 4)) * kAccessBytes;
  }
  __device__ int64_t offset(int columns) const { return static_cast<int64_t>(columns) * layer_.weight_stride; }

  const StreamLayer<T>& layer_;
  StreamedWeight of_;
  int stages_, k_, column_, stage_ = 0;
  const T* from_;
  int64_t to_gate_;  // of the same place in the strip
};

}  // namespace fuseopt
