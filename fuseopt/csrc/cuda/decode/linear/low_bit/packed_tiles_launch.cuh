// How a packed weight's products with many rows are divided among blocks, and their launches.
#pragma once

#include "cuda/decode/linear/dispatch.cuh"
#include "cuda/decode/linear/low_bit/packed_tiles.cuh"

namespace fuseopt {

struct PackedTilePlan {
  int halves, parts, part_blocks, stages, strips[DecodeLinear::kMaxWeights] = {};
  int64_t tiles = 0, row_tiles;
  size_t shared_bytes;

  PackedTilePlan(const DecodeLinear& layer, const PackedShape& shape, int bits) : halves(layer.rows > 2 * kHalfRows ? 4 : 2) {
    const PackedTile tile{halves};
    row_tiles = ceil_div(layer.rows, tile.rows());
    const int64_t width = PackedTile::kOutputs / (layer.gated ? 2 : 1), processors = multiprocessor_count();
    for (int i = 0; i < (layer.gated ? 1 : layer.weight_count); ++i) {
      strips[i] = static_cast<int>(ceil_div(layer.widths[i], width));
      tiles += strips[i] * row_tiles;
    }
    // TUNED: H200, 16 and 32 rows, 13 layers: on average 4% slower than the best of 1 to 8 parts of each (a1d415c7).
    const int64_t wanted = std::max<int64_t>(3 * processors / 2 / tiles, tiles <= processors ? 2 : 1);
    parts = is_sm90_or_newer() ? static_cast<int>(std::min<int64_t>({wanted, 8, shape.blocks})) : 1;
    part_blocks = static_cast<int>(ceil_div(shape.blocks, parts));
    const size_t of_stage = kTileGroups * tile.part_bytes(shape.block_bytes, bits == 4 ? kBlockChunks<4> : kBlockChunks<8>);
    const size_t of_sums = sizeof(float) * (kTileGroups * tile.rows() * PackedTile::kStride +
                                            (parts - 1) * ceil_div(tile.rows(), parts) * PackedTile::kOutputs);
    // Leaves space for one block of the next kernel, not for two: they would gather on multiprocessors whose blocks end first.
    constexpr size_t kReserved = 2048;
    const size_t of_all = shared_bytes_of_multiprocessor();
    stages = std::clamp(static_cast<int>((of_all / 2 - kReserved) / of_stage), kFewTileStages, kMostTileStages);
    shared_bytes = std::max({stages * of_stage, of_sums, of_all / 3});
  }

  bool fits() const { return shared_bytes + 1024 <= shared_bytes_of_block(); }
};

template <typename T, int kBits, int kHalves>
cudaError_t launch_packed_tiles_as(const DecodeLinear& layer, const PackedShape& shape, const PackedTilePlan& plan, cudaStream_t stream) {
  PackedTileLayer<T> of{mma_layer<T>(layer)};
  of.packed = shape;
  for (int i = 0; i < DecodeLinear::kMaxWeights; ++i) of.strips[i] = plan.strips[i];
  of.row_tiles = static_cast<int>(plan.row_tiles);
  of.parts = plan.parts;
  of.part_blocks = plan.part_blocks;
  of.stages = plan.stages;
  of.is_gated = layer.gated;
  const LaunchShape grid{static_cast<unsigned>(plan.tiles * plan.parts), kPackedTileThreads, plan.shared_bytes,
                         static_cast<unsigned>(plan.parts)};
  of.share_prefetch(grid);
  return launch_dependent(decode_packed_tiles_kernel<T, kBits, kHalves>, of, grid, layer.pdl, stream);
}

// `layer`: its weights are packed. Returns cudaErrorNotSupported if the kernel does not support it.
template <typename T, int kBits>
cudaError_t launch_packed_tiles(const DecodeLinear& layer, const PackedShape& shape, cudaStream_t stream) {
  const bool suits = layer.norm == kNoNorm && suits_mma<T>(layer, INT32_MAX) && compute_capability_major() >= 8 &&
                     layer.rows * std::max(layer.in_features, output_columns(layer)) <= INT32_MAX;
  if (!suits) return cudaErrorNotSupported;
  const PackedTilePlan plan(layer, shape, kBits);
  if (!plan.fits()) return cudaErrorNotSupported;
  return plan.halves == 2 ? launch_packed_tiles_as<T, kBits, 2>(layer, shape, plan, stream)
                          : launch_packed_tiles_as<T, kBits, 4>(layer, shape, plan, stream);
}

}  // namespace fuseopt
