// How a packed weight's products with many rows are shared out, and their launches.
#pragma once

#include "cuda/decode/linear/dispatch.cuh"
#include "cuda/decode/linear/low_bit/packed_tiles.cuh"

namespace fuseopt {

struct PackedTilePlan {
  int lines, halves, parts = 1, part_blocks, stages, strips[DecodeLinear::kMaxWeights] = {};
  int64_t tiles = 0, row_tiles;
  size_t shared_bytes;

  PackedTilePlan(const DecodeLinear& layer, const PackedShape& shape, int bits) {
    for (halves = 2; halves < 8 && layer.rows > halves * kHalfRows;) halves *= 2;
    row_tiles = ceil_div(layer.rows, halves * kHalfRows);
    // TUNED: H200, 16 to 64 rows: tiles of 128 outputs, but where 256 leave no multiprocessor two and 128 do; at most two
    // blocks a multiprocessor for each (a1d415c7).
    const int64_t processors = multiprocessor_count();
    lines = share(layer, 2) > processors && share(layer, 4) <= processors ? 4 : 2;
    tiles = share(layer, lines);
    const int most_parts = static_cast<int>(std::min<int64_t>(is_sm90_or_newer() ? 8 : 1, shape.blocks));
    while (2 * parts <= most_parts && tiles * 2 * parts <= 2 * processors) parts *= 2;
    part_blocks = static_cast<int>(ceil_div(shape.blocks, parts));
    const int chunks = bits == 4 ? kBlockChunks<4> : kBlockChunks<8>;
    for (stages = kTileStages;; stages = kFewTileStages) {
      const PackedTile tile{lines, halves};
      shared_bytes = static_cast<size_t>(std::max(stages * tile.stage_bytes(shape.block_bytes, chunks), tile.sum_bytes()));
      if (fits() || stages == kFewTileStages) break;
    }
  }

  bool fits() const { return shared_bytes + 1024 <= shared_bytes_of_block(); }

 private:
  int64_t share(const DecodeLinear& layer, int of_warp) {
    const int64_t width = PackedTile{of_warp}.outputs() / (layer.gated ? 2 : 1);
    int64_t all = 0;
    for (int i = 0; i < (layer.gated ? 1 : layer.weight_count); ++i) {
      strips[i] = static_cast<int>(ceil_div(layer.widths[i], width));
      all += strips[i];
    }
    return all * row_tiles;
  }
};

template <typename T, int kBits, int kLines, int kHalves>
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
  return launch_dependent(decode_packed_tiles_kernel<T, kBits, kLines, kHalves>, of, grid, layer.pdl, stream);
}

// `layer`: weights are packed ones. Returns cudaErrorNotSupported where the kernel does not take it.
template <typename T, int kBits>
cudaError_t launch_packed_tiles(const DecodeLinear& layer, const PackedShape& shape, cudaStream_t stream) {
  const bool suits = layer.norm == kNoNorm && suits_mma<T>(layer, INT32_MAX) && compute_capability_major() >= 8 &&
                     layer.rows * std::max(layer.in_features, output_columns(layer)) <= INT32_MAX;
  if (!suits) return cudaErrorNotSupported;
  const PackedTilePlan plan(layer, shape, kBits);
  if (!plan.fits()) return cudaErrorNotSupported;
  const auto launch = [&]<int kLines>() {
    if (plan.halves == 2) return launch_packed_tiles_as<T, kBits, kLines, 2>(layer, shape, plan, stream);
    return plan.halves == 4 ? launch_packed_tiles_as<T, kBits, kLines, 4>(layer, shape, plan, stream)
                            : launch_packed_tiles_as<T, kBits, kLines, 8>(layer, shape, plan, stream);
  };
  return plan.lines == 2 ? launch.template operator()<2>() : launch.template operator()<4>();
}

}  // namespace fuseopt
