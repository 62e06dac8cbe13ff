// How decode_linear's kernel for float32 shares out a layer, and which layers it takes.
#pragma once

#include "cuda/decode/linear/fma_stream.cuh"

namespace fuseopt {

// How a layer's work is shared out, for up to `most_rows` rows at a time.
struct FmaPlan {
  int kernel_rows = 1;  // that the kernel is compiled for
  int column_lanes, strips, stages, slots, copy_groups = 1, held_k, blocks;
  int parts = 1;        // of K, in the blocks of a cluster
  int share;            // of K, in each of them
  size_t shared_bytes;

  FmaPlan(const DecodeLinear& layer, int64_t most_rows)
      : share(static_cast<int>(layer.in_features)) {
    for (const int fewer : {4, 8, 16}) {
      if (kernel_rows < std::min(layer.rows, most_rows)) kernel_rows = fewer;
    }
    cover(layer, 4);
    if (split_over_cluster(layer)) return;
    if (!layer.gated && 2 * strips * grid_rows(layer) < multiprocessor_count()) cover(layer, 2);
    // All that a block reads, if it is little; else a ring, and strips enough to share out evenly.
    const auto fit = [&](int most_slots) {
      slots = std::min(most_slots, stages);
      hold(layer);
      blocks = most_blocks(layer) > 0 ? strips : 0;
      if (blocks <= most_blocks(layer) && stages <= most_slots) return;
      slots = most_slots;
      copy_groups = kFmaStages / slots;
      hold(layer);
      const int64_t most = most_blocks(layer);
      blocks = most == 0 ? 0 : static_cast<int>(ceil_div(strips, ceil_div(strips, most)));
    };
    fit(kFmaStages);
    if (blocks == 0) fit(kFmaStages / 2);
  }

  bool fits() const { return blocks > 0; }

  static int grid_rows(const DecodeLinear& layer) { return layer.gated ? 1 : layer.weight_count; }

 private:
  // A K that does not fit into a ring, if all blocks are resident.
  // TUNED: GPT-2 124M's linear layers, H200, with 1, 8 and 16 rows: 204 -> 193, 304 -> 287 and 550 -> 518 us a step. One row
  // of T5-base, whose weights are [N, K]: 221 -> 235 (04e8b8d).
  bool split_over_cluster(const DecodeLinear& layer) {
    constexpr int kMostParts = 4;
    const bool has_one_row_of_nk = layer.rows == 1 && !layer.weights_are_transposed;
    if (!is_sm90_or_newer() || stages <= kFmaStages || layer.gated || layer.norm != kNoNorm || has_one_row_of_nk) return false;
    const int whole = share;
    while (parts < kMostParts && stages > kFmaStages / 2) {
      parts *= 2;
      share = static_cast<int>(ceil_div(ceil_div(whole, parts), FmaShape<4>::kStageK) * FmaShape<4>::kStageK);
      cover(layer, 4);
    }
    slots = std::min(kFmaStages, stages);
    hold(layer);
    blocks = strips * parts;
    if (stages <= kFmaStages && blocks <= most_blocks(layer)) return true;
    parts = 1, share = whole;
    cover(layer, 4);
    return false;
  }
  void cover(const DecodeLinear& layer, int lanes) {
    column_lanes = lanes;
    const int columns = lanes * kFmaTile, stage_k = kFmaWarps * kWarpSize / lanes * kFmaTile;
    strips = static_cast<int>(ceil_div(layer.out_features, layer.gated ? columns / 2 : columns));
    stages = static_cast<int>(ceil_div(share, stage_k));
    held_k = stages * stage_k;
  }
  void hold(const DecodeLinear& layer) {
    const int64_t floats = held_k * (kernel_rows + (layer.norm != kNoNorm ? 2 : 0)) +
                           2 * kFmaWarps * (kernel_rows * column_lanes * kFmaTile + 1) +
                           (parts - 1) * kernel_rows * column_lanes * kFmaTile;
    shared_bytes = slots * kFmaStageBytes + floats * sizeof(float);
  }
  // Blocks that are resident on the device at a time.
  int64_t most_blocks(const DecodeLinear& layer) const {
    constexpr size_t kReserved = 1024 + kRingAlignment;  // for each block, by the system
    if (shared_bytes + kReserved > shared_bytes_of_block()) return 0;
    const auto of_multiprocessor = static_cast<int64_t>(shared_bytes_of_multiprocessor() / (shared_bytes + kReserved));
    return std::max<int64_t>(multiprocessor_count() * std::min<int64_t>(of_multiprocessor, 2) / grid_rows(layer), 1);
  }
};

// The plan with as many rows at a time as a block has room for.
inline FmaPlan fma_plan(const DecodeLinear& layer) {
  FmaPlan plan(layer, kFmaMostRows);
  while (!plan.fits() && plan.kernel_rows > 1) plan = FmaPlan(layer, plan.kernel_rows > 4 ? plan.kernel_rows / 2 : 1);
  return plan;
}

// Whether the layer is in float32 and 16-byte accesses reach all that the kernel reads of weight and input.
inline bool suits_fma(const DecodeLinear& layer) {
  if (compute_capability_major() < 8 || layer.weight_dtype != kFloat32 || layer.rows > kFmaMostRows) return false;
  bool suits = layer.input.dtype == kFloat32 && layer.output.dtype == kFloat32 && is_aligned(layer.input.data) &&
               layer.in_features > 0 && layer.in_features % kFmaTile == 0 && layer.weight_stride % kFmaTile == 0 &&
               layer.weight_stride <= INT32_MAX && output_columns(layer) <= INT32_MAX;
  for (int i = 0; i < layer.weight_count; ++i) {
    suits &= is_aligned(layer.weights[i]) && (!layer.weights_are_transposed || layer.widths[i] % kFmaTile == 0);
  }
  const auto is_float = [](const TypedPointer& tensor) { return tensor.data == nullptr || tensor.dtype == kFloat32; };
  for (const TypedPointer& bias : layer.biases) suits &= is_float(bias);
  for (const TypedPointer& norm : {layer.norm_weight, layer.norm_bias}) suits &= is_float(norm) && is_aligned(norm.data);
  return suits && is_float(layer.residual);
}

inline bool takes_fma(const DecodeLinear& layer) { return suits_fma(layer) && fma_plan(layer).fits(); }

}  // namespace fuseopt
