// How decode_linear's kernel for float32 reads its weight: each warp has a ring of stages in shared memory, which its lanes
// fill by copies that they do not wait for.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/decode/linear/params.cuh"
#include "cuda/decode/select/score_candidate.cuh"

namespace fuseopt {

constexpr int kFmaThreads = 256, kFmaWarps = kFmaThreads / kWarpSize;
constexpr int kFmaMostRows = 16;
// Columns, and values of k, that a thread multiplies at a time: one 16-byte access each in either layout.
constexpr int kFmaTile = 4;
// TUNED: GPT-2 124M's linear layers with 1, 8 and 16 rows, H200: 242, 428 and 668 us a step; with 4 stages 268, 418 and
// 647 (71030c3).
constexpr int kFmaStages = 6;
constexpr int kFmaStageBytes = kFmaThreads * kFmaTile * kAccessBytes;

// What happens to the input's rows before the product.
enum class FmaInput { kStored, kNormalised, kSoftmax };

struct FmaLayer : MmaLayer<float> {
  int stages;       // of K, in a strip
  int slots;        // of the ring: stages that it holds
  int copy_groups;  // of a stage, for those of all slots to be kFmaStages
  int held_k;       // of each row in shared memory: whole stages
  int parts;        // of K: the blocks of a cluster
  int share;        // of K, of each part
  bool is_gated;
  Candidate<float>* best;  // of each row, for each block: its highest output; or null
  TokenRules rules;        // by which outputs are compared
  const int64_t* sequence_length;
};

// How lanes share a stage of the weight. kColumnLanes: neighbouring lanes have neighbouring columns, the others K.
template <int kColumnLanes>
struct FmaShape {
  static constexpr int kColumns = kColumnLanes * kFmaTile;  // of a strip, half of them each weight's if gated
  static constexpr int kWarpK = kWarpSize / kColumnLanes * kFmaTile;
  static constexpr int kStageK = kFmaWarps * kWarpK;
};

// A warp's way through a weight: its part of each stage, of one strip after another. Lanes copy neighbouring pieces of
// memory, and multiply others (`load`).
template <Layout kLayout, int kColumnLanes>
class FmaStream {
  using Shape = FmaShape<kColumnLanes>;
  static constexpr bool kIsKN = kLayout == Layout::kColMajorKN;
  // 16-byte pieces of a line, which is of k of a weight [K, N], else a column; and lines that a warp copies at a time.
  static constexpr int kLinePieces = kIsKN ? kColumnLanes : kWarpSize / kColumnLanes, kLines = kWarpSize / kLinePieces;

 public:
  // `outputs`: columns of the weight; `columns`: of K, from `first_k` on; `step`: from a strip to the next.
  __device__ FmaStream(const FmaLayer& layer, int strip, int step, int outputs, int first_k, int columns)
      : layer_(layer), outputs_(outputs), columns_(columns), width_(layer.is_gated ? Shape::kColumns / 2 : Shape::kColumns) {
    step_ = step * width_;
    const int place = kIsKN ? piece() * kFmaTile : line(0);  // of the strip
    const bool is_gate = place >= width_;
    k_ = warp() * Shape::kWarpK + (kIsKN ? line(0) : piece() * kFmaTile);
    first_column_ = strip * width_;
    column_ = first_column_ + (is_gate ? place - width_ : place);
    from_ = layer.weights[is_gate ? 1 : blockIdx.y] + (kIsKN ? column_ : offset(column_)) + along_k(first_k + k_);
    to_gate_ = layer.is_gated && !kIsKN ? layer.weights[1] - layer.weights[0] - offset(width_) : 0;
  }

  // Starts the copies of the next stage; groups of none at the end.
  __device__ void fetch(char* stage) {
    if (first_column_ < outputs_) {
#pragma unroll
      for (int i = 0; i < kFmaTile; ++i) {
        const int further = i * kLines;
        const bool is_gate = !kIsKN && layer_.is_gated && i >= kFmaTile / 2;
        const int column = column_ + (kIsKN ? 0 : further) - (is_gate ? width_ : 0), k = k_ + (kIsKN ? further : 0);
        const float* const from = from_ + offset(further) + (is_gate ? to_gate_ : 0);
        copy_async(stage + place_of(line(i), piece()), from, column < outputs_ && k < columns_);
      }
      k_ += Shape::kStageK;
      from_ += along_k(Shape::kStageK);
      if (++stage_ == layer_.stages) {
        const int back = layer_.stages * Shape::kStageK;
        stage_ = 0;
        k_ -= back;
        first_column_ += step_, column_ += step_;
        from_ += (kIsKN ? static_cast<int64_t>(step_) : offset(step_)) - along_k(back);
      }
    }
#pragma unroll 1
    for (int g = 0; g < layer_.copy_groups; ++g) end_copy_group();
  }

  // The lane's part of a stage: lines of k of a weight [K, N], else columns.
  static __device__ void load(const char* stage, float4 (&lines)[kFmaTile]) {
    const int lane = threadIdx.x % kWarpSize, column_lane = lane % kColumnLanes, k_lane = lane / kColumnLanes;
#pragma unroll
    for (int i = 0; i < kFmaTile; ++i) {
      const int line = (kIsKN ? k_lane : column_lane) * kFmaTile + i, piece = kIsKN ? column_lane : k_lane;
      lines[i] = *reinterpret_cast<const float4*>(stage + place_of(line, piece));
    }
  }

 private:
  static __device__ int warp() { return threadIdx.x / kWarpSize; }
  static __device__ int piece() { return threadIdx.x % kWarpSize % kLinePieces; }
  static __device__ int line(int i) { return threadIdx.x % kWarpSize / kLinePieces + i * kLines; }
  // Swizzled: 8 neighbouring lanes, whose pieces are accessed together, meet no bank twice, in copies or in `load`.
  static __device__ int place_of(int line, int piece) {
    constexpr int kTogether = 8 / kColumnLanes;  // pieces of a column, or lines, that `load` reads at a time
    const int tile = line / kFmaTile;
    const int place = kIsKN ? (line ^ tile % kTogether) * kLinePieces + piece
                            : line * kLinePieces + (piece ^ tile % kColumnLanes * kTogether);
    return (warp() * kFmaTile * kWarpSize + place) * kAccessBytes;
  }
  __device__ int64_t offset(int lines) const { return static_cast<int64_t>(lines) * layer_.weight_stride; }
  __device__ int64_t along_k(int k) const { return kIsKN ? offset(k) : k; }

  const FmaLayer& layer_;
  const int outputs_, columns_, width_;
  int k_, first_column_, column_, step_, stage_ = 0;
  const float* from_;
  int64_t to_gate_;  // of the same place in the strip
};

}  // namespace fuseopt
