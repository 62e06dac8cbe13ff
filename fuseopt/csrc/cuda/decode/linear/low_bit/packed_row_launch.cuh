// How the kernel for one row divides a layer among blocks and warps, and its launch.
#pragma once

#include "cuda/decode/linear/low_bit/packed_row.cuh"

namespace fuseopt {

// How many lines a block has, how many warps split K, and where a warp's part of the weight is held: all in shared memory,
// with its first blocks also in registers (is_held), or in a ring. by_digits: as the kernel's kByDigits.
struct PackedRowPlan {
  int lines = 1, warps = 8, stages = 1;
  bool is_held = false, by_digits;
  int part_blocks, loads, stage_blocks, strips[DecodeLinear::kMaxWeights] = {}, all_strips = 0;
  size_t shared_bytes;

  PackedRowPlan(const DecodeLinear& layer, const PackedShape& shape, int bits) {
    const int64_t columns = layer.in_features, share = bytes_of_multiprocessor(layer, shape);
    const bool is_large = share > kLarge, has_norm = layer.norm != kNoNorm;
    by_digits = share >= kDigitsFrom && share <= (layer.gated && has_norm ? 2 * kLarge : kLarge);
    int ring_blocks = 2;
    if (layer.gated) {
      lines = is_large ? 2 : 4, ring_blocks = 1;
    } else if (!has_norm) {
      is_held = share <= kHeldShare;
      if (is_held || columns > kLongK) warps = 16;
    } else if (columns > kLongK) {
      warps = 16;
    } else if (columns > kHeldK) {
      lines = is_large ? 2 : 1;
    } else {
      lines = is_large ? 1 : 2;
    }
    share_out(layer);
    if (has_norm && lines == 2 && columns <= kHeldK) is_held = !is_large && all_strips <= 2 * multiprocessor_count();
    is_held &= !by_digits;
    part_blocks = static_cast<int>(ceil_div(shape.blocks, warps));
    stage_blocks = part_blocks;
    const bool has_kernel = lines == 2 || (warps == 16 && !has_norm);  // a kernel with a ring
    if (is_large && has_kernel) stage_blocks = std::min(ring_blocks, part_blocks);
    if (stage_blocks < part_blocks) stages = kRingStages;
    const int block_k = bits == 4 ? kBlockK<4> : kBlockK<8>;
    loads = static_cast<int>(ceil_div(part_blocks * block_k, kWarpSize * kLaneValues));
    shared_bytes = static_cast<size_t>(lines) * warps * stages * stage_blocks * shape.block_bytes +
                   static_cast<size_t>(warps) * part_blocks * block_k *
                       (by_digits ? layer.norm == kLayerNorm ? 8 : 4 : layer.norm == kLayerNorm ? 8 : 2);
  }

  // TUNED: GPT-2 XL, Llama-3.2-1B, Llama-3.1-8B and T5-large, int8 and int4, chains of each layer, H200, 2026-11-30
  // (docs/lab-notes/2026-11-30-one-row-of-packed-weights.md). skinny_mma runs smaller layers. The ring kernel runs larger
  // layers of 4 bits, this kernel those of 8 bits. Bytes are those for each multiprocessor.
  static bool is_faster(const DecodeLinear& layer, const PackedShape& shape, int bits) {
    constexpr int64_t kLeast = 8 * 1024;
    const int64_t share = bytes_of_multiprocessor(layer, shape);
    return share > kLeast && (bits == 8 || share <= kLarge);
  }

  bool fits() const {
    constexpr size_t kDeclared = 13 * 1024;  // most bytes that the kernel declares
    return shared_bytes + kDeclared <= shared_bytes_of_block();
  }

 private:
  static constexpr int64_t kLarge = 144 * 1024, kHeldShare = 96 * 1024, kLongK = 4096, kHeldK = 2048;
  // TUNED: chains of the layers of four models, H200, 2026-11-30 (docs/lab-notes/2026-11-30-one-row-by-digits.md).
  static constexpr int64_t kDigitsFrom = 40 * 1024;

  static int64_t bytes_of_multiprocessor(const DecodeLinear& layer, const PackedShape& shape) {
    const int64_t outputs = output_columns(layer) * (layer.gated ? 2 : 1);
    return ceil_div(outputs, kLineOutputs) * shape.line_bytes / multiprocessor_count();
  }

  void share_out(const DecodeLinear& layer) {
    const int width = kLineOutputs * lines / (layer.gated ? 2 : 1);
    for (int i = 0; i < (layer.gated ? 1 : layer.weight_count); ++i) {
      strips[i] = static_cast<int>(ceil_div(layer.widths[i], width));
      all_strips += strips[i];
    }
  }
};

template <typename T, int kBits, int kLines, int kWarps, RowNorm kNorm, int kLoads, int kHeld, bool kRing, bool kByDigits>
cudaError_t launch_packed_row_as(const DecodeLinear& layer, const PackedShape& shape, const PackedRowPlan& plan, cudaStream_t stream) {
  PackedRowLayer<T> of{mma_layer<T>(layer)};
  of.packed = shape;
  of.is_gated = layer.gated;
  of.part_blocks = plan.part_blocks;
  of.stage_blocks = plan.stage_blocks;
  of.stages = plan.stages;
  for (int i = 0; i < DecodeLinear::kMaxWeights; ++i) of.strips[i] = plan.strips[i];
  const LaunchShape grid{static_cast<unsigned>(plan.all_strips), kWarps * kWarpSize, plan.shared_bytes, 1};
  of.share_prefetch(grid);
  constexpr auto kKernel = decode_packed_row_kernel<T, kBits, kLines, kWarps, kNorm, kLoads, kHeld, kRing, kByDigits>;
  return launch_dependent(kKernel, of, grid, layer.pdl, stream);
}

// Launches the kernel if it supports the layer and is the fastest. Norms in float16 would overflow.
template <typename T, int kBits>
bool launch_packed_row(const DecodeLinear& layer, const PackedShape& shape, cudaStream_t stream, cudaError_t& error) {
  constexpr bool kHasNorms = std::is_same_v<T, __nv_bfloat16>;
  const bool has_norm = layer.norm != kNoNorm;
  if (!is_sm90_or_newer() || layer.rows != 1 || (has_norm && !kHasNorms)) return false;
  if (!PackedRowPlan::is_faster(layer, shape, kBits)) return false;
  const PackedRowPlan plan(layer, shape, kBits);
  if (!plan.fits()) return false;
  const auto with_loads = [&]<int kLines, int kWarps, RowNorm kNorm, int kHeld, bool kRing, int kLoadLimit, bool kByDigits>() {
    const auto launch = [&]<int kLoads>() {
      if constexpr (kLoads <= kLoadLimit) {
        error = launch_packed_row_as<T, kBits, kLines, kWarps, kNorm, kLoads, kHeld, kRing, kByDigits>(layer, shape, plan, stream);
      }
      return kLoads <= kLoadLimit;
    };
    return plan.loads == 1 ? launch.template operator()<1>()
           : plan.loads == 2 ? launch.template operator()<2>()
                             : plan.loads <= 4 && launch.template operator()<4>();
  };
  const auto with_norm = [&]<int kLines, int kWarps, int kHeld, bool kRing, bool kByDigits = false>() {
    constexpr int kLoadLimit = kHeld > 0 ? 1 : 2;
    if constexpr (kHasNorms) {
      if (layer.norm == kLayerNorm) {
        return with_loads.template operator()<kLines, kWarps, RowNorm::kLayer, kHeld, kRing, kLoadLimit, kByDigits>();
      }
      return with_loads.template operator()<kLines, kWarps, RowNorm::kRms, kHeld, kRing, kLoadLimit, kByDigits>();
    }
    return false;
  };
  constexpr int kFewBlocks = 4 / kBlockChunks<kBits>;
  constexpr auto kNone = RowNorm::kNone;
  if (plan.by_digits && has_norm) {
    if (plan.warps == 16) return plan.lines == 1 && with_norm.template operator()<1, 16, 0, false, true>();
    if (plan.stages > 1) return with_norm.template operator()<2, 8, 0, true, true>();
    return plan.lines == 1   ? with_norm.template operator()<1, 8, 0, false, true>()
           : plan.lines == 2 ? with_norm.template operator()<2, 8, 0, false, true>()
                             : with_norm.template operator()<4, 8, 0, false, true>();
  }
  if (plan.by_digits) {
    if (plan.lines == 4) return with_loads.template operator()<4, 8, kNone, 0, false, 2, true>();
    return plan.warps == 8 ? with_loads.template operator()<1, 8, kNone, 0, false, 2, true>()
                           : with_loads.template operator()<1, 16, kNone, 0, false, 2, true>();
  }
  if (has_norm) {
    if (plan.warps == 16) return plan.lines == 1 && with_norm.template operator()<1, 16, 0, false>();
    if (plan.stages > 1) return with_norm.template operator()<2, 8, 0, true>();
    if (plan.is_held) return with_norm.template operator()<2, 8, kFewBlocks, false>();
    return plan.lines == 1   ? with_norm.template operator()<1, 8, 0, false>()
           : plan.lines == 2 ? with_norm.template operator()<2, 8, 0, false>()
                             : with_norm.template operator()<4, 8, 0, false>();
  }
  if (plan.lines == 2) return plan.stages > 1 && with_loads.template operator()<2, 8, kNone, 0, true, 2, false>();
  if (plan.lines == 4) return with_loads.template operator()<4, 8, kNone, 0, false, 2, false>();
  if (plan.warps == 8) return with_loads.template operator()<1, 8, kNone, 0, false, 2, false>();
  if (plan.stages > 1) return with_loads.template operator()<1, 16, kNone, 0, true, 4, false>();
  return plan.is_held ? with_loads.template operator()<1, 16, kNone, kFewBlocks, false, 4, false>()
                      : with_loads.template operator()<1, 16, kNone, 0, false, 4, false>();
}

}  // namespace fuseopt
