// How decode_linear's streaming kernel for weights [N, K] shares out a layer: blocks that split K, stages of the ring.
#pragma once

#include <cstdlib>

#include "cuda/decode/linear/held_rows.cuh"

namespace fuseopt {

// TUNED: measurement not recorded (e15abea); `fuseopt bench kernels --model gpt2-xl` measures it again.
constexpr int kMaxStreamedNKCluster = 8;
constexpr int kSumsStride = kStreamColumns + 4;  // 4: rows of sums start in different banks

// How a layer's work is shared out, if it is for these kernels.
struct StreamedNKPlan {
  int strips[DecodeLinear::kMaxWeights] = {}, all_strips = 0;  // of each weight
  int slot_bits, halves;
  int blocks = 1;       // that share out K
  int stages = 3;
  int part_stages, ring_warps, block_columns;
  bool scales_rows;         // by a norm's weight, as they are loaded
  bool holds_rows = false;  // in registers
  size_t shared_bytes;

  explicit StreamedNKPlan(const DecodeLinear& layer)
      : slot_bits(0), halves(layer.rows > kHalfRows ? 2 : 1) {
    for (int i = 0; i < (layer.gated ? 1 : layer.weight_count); ++i) {
      strips[i] = static_cast<int>(ceil_div(layer.widths[i], layer.gated ? kStreamColumns / 2 : kStreamColumns));
      all_strips += strips[i];
    }
    while (1 << slot_bits < std::min<int64_t>(layer.rows, kHalfRows)) ++slot_bits;
    // A few blocks for a strip, where there are few strips. With more than 8 rows a multiprocessor has room for one.
    if (halves == 2) stages = 2;
    split(layer);
    while (is_sm90_or_newer() && blocks < kMaxStreamedNKCluster &&
           (2 * all_strips * blocks <= multiprocessor_count() ||
            (halves == 1 && all_strips * blocks < multiprocessor_count() && part_stages > kLongPart) ||
            (halves == 2 && per_multiprocessor() < 1))) {
      blocks *= 2;
      split(layer);
    }
    // With more rows in shared memory no second block fits, so a block has as long a ring as fits.
    const int most = halves == 1 ? 3 : layer.input.dtype == layer.weight_dtype ? 4 : 2;
    const int wanted = halves == 2 ? 1 : 2;
    holds_rows = can_hold_rows(layer);
    for (stages = holds_rows ? 2 : most, split(layer); stages > 2 && per_multiprocessor() < wanted;) {
      --stages;
      split(layer);
    }
  }

  int per_multiprocessor() const {
    constexpr size_t kReserved = 1024 + kRingAlignment;  // for each block, by the system and what the kernel declares
    return static_cast<int>(shared_bytes_of_multiprocessor() / (shared_bytes + kReserved));
  }
  // Of a weight: as many as there is room for, with as many strips each; a cluster adds up one strip only.
  int clusters(int weight = 0) const {
    if (blocks > 1) return strips[weight];
    const int64_t room = multiprocessor_count() * std::min(per_multiprocessor(), 2);
    return static_cast<int>(ceil_div(strips[weight], ceil_div(all_strips, room)));
  }

 private:
  static constexpr int kLongPart = 4;

  bool can_hold_rows(const DecodeLinear& layer) const {
    const bool has_norm_weight = layer.norm == kRmsNorm && scales_rows && layer.norm_weight.data != nullptr;
    const char* const wanted = std::getenv("FUSEOPT_ROWS_IN_REGISTERS");
    if (wanted != nullptr && *wanted == '0') return false;
    return is_sm90_or_newer() && halves == 2 && blocks == 1 && part_stages <= kHeldStages &&
           layer.input.dtype == layer.weight_dtype && (layer.norm == kNoNorm || has_norm_weight);
  }

  void split(const DecodeLinear& layer) {
    const int all_stages = static_cast<int>(ceil_div(layer.in_features, kStageK)), parts = blocks * kStreamWarps;
    const size_t x_bytes = layer.input.dtype == kFloat32 ? sizeof(float) : sizeof(uint16_t);
    part_stages = static_cast<int>(ceil_div(all_stages, parts));
    ring_warps = blocks == 1 ? static_cast<int>(ceil_div(all_stages, part_stages)) : kStreamWarps;
    block_columns = (blocks == 1 ? all_stages : part_stages * kStreamWarps) * kStageK;
    const size_t row_bytes = holds_rows ? 0 : halves * (block_columns << slot_bits) * x_bytes;
    shared_bytes = ring_warps * stages * kStageBytes + row_bytes +
                   sizeof(float) * layer.rows * (kStreamWarps + blocks - 1) * kSumsStride;
    // bfloat16 has float32's range: rows can be multiplied by the norm's weight before they are by 1 / deviation.
    scales_rows = layer.weight_dtype == kBFloat16 && layer.input.dtype == kBFloat16 && blocks == 1 &&
                  (layer.norm == kRmsNorm || layer.norm == kGemmaRmsNorm);
    if (layer.norm != kNoNorm) {
      const int parameters = holds_rows ? block_columns : scales_rows ? 0 : 2 * block_columns;
      shared_bytes += parameters * sizeof(uint16_t) + parts * layer.rows * sizeof(Moments);
    }
  }
};

}  // namespace fuseopt
