// How packed weights are divided among blocks, and launches of both kernels that read them.
#pragma once

#include "cuda/decode/linear/dispatch.cuh"
#include "cuda/decode/linear/low_bit/packed_kernel.cuh"
#include "cuda/decode/linear/low_bit/packed_row_launch.cuh"
#include "cuda/decode/linear/low_bit/packed_tiles_launch.cuh"

namespace fuseopt {

struct PackedPlan {
  int halves, slot_bits = 0, units, split, part_blocks, part_columns, blocks, stages;
  int strips[DecodeLinear::kMaxWeights] = {}, all_strips = 0;
  bool scales_rows;
  size_t shared_bytes;

  PackedPlan(const DecodeLinear& layer, const PackedShape& shape, int bits, Ring ring)
      : halves(layer.rows > kHalfRows ? 2 : 1) {
    while (1 << slot_bits < std::min<int64_t>(layer.rows, kHalfRows)) ++slot_bits;
    const int64_t all_warps = static_cast<int64_t>(kPackedWarps) * multiprocessor_count();
    units = layer.gated || output_columns(layer) >= 4 * kLineOutputs * all_warps ? 2 : 1;
    const int width = kLineOutputs * (layer.gated ? 1 : units);
    for (int i = 0; i < (layer.gated ? 1 : layer.weight_count); ++i) {
      strips[i] = static_cast<int>(ceil_div(layer.widths[i], width));
      all_strips += strips[i];
    }
    // With few strips, more warps share each, so that all warps have work. A layer that streams through rings gets two blocks
    // a multiprocessor. Other layers get one block, which leaves space for a block of the next kernel.
    constexpr int64_t kStreamsFrom = 128 * 1024;
    const int64_t lines = static_cast<int64_t>(all_strips) * units;
    const bool is_streamed = lines * shape.line_bytes > kStreamsFrom * multiprocessor_count();
    const int64_t wanted_warps = is_streamed ? 2 * all_warps : all_warps;
    for (split = 1; split < kPackedWarps && 4 * split * all_strips < 3 * wanted_warps;) split *= 2;
    part_blocks = static_cast<int>(ceil_div(shape.blocks, split));
    const int block_k = bits == 4 ? kBlockK<4> : kBlockK<8>;
    part_columns = static_cast<int>(ceil_div(shape.blocks * block_k, kPackedWarps * kChunk) * kChunk);
    scales_rows = layer.weight_dtype == kBFloat16 && (layer.norm == kRmsNorm || layer.norm == kGemmaRmsNorm);
    const auto share = [&](int of_ring) {
      stages = of_ring;
      shared_bytes = bytes_of(layer, shape);
      constexpr size_t kReserved = 2048;  // for each block: reserved by the system or declared by the kernel
      const int64_t fit = static_cast<int64_t>(shared_bytes_of_multiprocessor() / (shared_bytes + kReserved));
      const int64_t wanted = ceil_div(all_strips, kPackedWarps / split);
      const int64_t room = std::max<int64_t>(std::min<int64_t>(fit, 2), 1) * multiprocessor_count();
      const int64_t rounds = ceil_div(wanted, room);
      blocks = static_cast<int>(ceil_div(wanted, rounds));
      return rounds * ceil_div(part_blocks, kStageBlocks);
    };
    const int of_strip = static_cast<int>(std::min<int64_t>(ceil_div(part_blocks, kStageBlocks), kPackedStages));
    int64_t needed = share(of_strip);
    if (needed > of_strip) needed = share(kPackedStages);
    // One block with a long ring is faster if the ring holds everything; two blocks are faster if the weight streams.
    if (units == 2 && needed > kPackedStages) needed = share(kFewStages);
    // No more stages than are filled. Copies by lanes are counted in commit groups, for one of two numbers of stages.
    if (ring == Ring::kBulk) stages = static_cast<int>(std::min<int64_t>(stages, needed));
    else stages = needed <= kFewStages || stages <= kFewStages ? kFewStages : kPackedStages;
    shared_bytes = bytes_of(layer, shape);
  }

  bool fits() const { return shared_bytes + 1024 <= shared_bytes_of_block(); }

 private:
  size_t bytes_of(const DecodeLinear& layer, const PackedShape& shape) const {
    const size_t columns = static_cast<size_t>(kPackedWarps) * part_columns;
    size_t bytes = static_cast<size_t>(kPackedWarps) * stages * units * kStageBlocks * shape.block_bytes +
                   (halves * columns << slot_bits) * sizeof(uint16_t);
    if (split > 1) bytes += sizeof(float) * kPackedWarps * kWarpSize * units * halves * 4;
    if (layer.norm == kNoNorm) return bytes;
    return bytes + sizeof(Moments) * kPackedWarps * layer.rows + (scales_rows ? 0 : 2 * columns * sizeof(uint16_t));
  }
};

template <typename T, int kBits, int kUnits, int kHalves, Ring kRing>
cudaError_t launch_packed_as(const DecodeLinear& layer, const PackedShape& shape, const PackedPlan& plan, cudaStream_t stream) {
  PackedLayer<T> of{{mma_layer<T>(layer)}};
  of.packed = shape;
  of.is_gated = layer.gated;
  for (int i = 0; i < DecodeLinear::kMaxWeights; ++i) of.strips[i] = plan.strips[i];
  of.all_strips = plan.all_strips;
  of.slot_bits = plan.slot_bits;
  of.scales_rows = plan.scales_rows;
  of.has_norm = layer.norm != kNoNorm;
  of.part_blocks = plan.part_blocks;
  of.part_columns = plan.part_columns;
  of.stages = plan.stages;
  of.groups_bits = plan.split == 8 ? 0 : plan.split == 4 ? 1 : plan.split == 2 ? 2 : 3;
  const LaunchShape grid{static_cast<unsigned>(plan.blocks), kPackedWarps * kWarpSize, plan.shared_bytes, 1};
  of.share_prefetch(grid);
  return launch_dependent(decode_packed_linear_kernel<T, kBits, kUnits, kHalves, kRing>, of, grid, layer.pdl, stream);
}

template <typename T, int kBits, Ring kRing>
cudaError_t launch_packed(const DecodeLinear& layer, const PackedShape& shape, const PackedPlan& plan, cudaStream_t stream) {
  if (plan.units == 2) {
    return plan.halves == 2 ? launch_packed_as<T, kBits, 2, 2, kRing>(layer, shape, plan, stream)
                            : launch_packed_as<T, kBits, 2, 1, kRing>(layer, shape, plan, stream);
  }
  return plan.halves == 2 ? launch_packed_as<T, kBits, 1, 2, kRing>(layer, shape, plan, stream)
                          : launch_packed_as<T, kBits, 1, 1, kRing>(layer, shape, plan, stream);
}

// skinny_mma with a packed weight, if its registers hold the layer.
template <typename T, int kBits, int kHalves>
bool launch_held(const DecodeLinear& layer, const PackedShape& shape, cudaStream_t stream, cudaError_t& error) {
  const int64_t columns = layer.in_features, few = multiprocessor_count() / tuning().decode_linear_few_blocks_divisor;
  const bool has_norm = layer.norm != kNoNorm;
  const auto launch = [&]<bool kNorm, bool kGated, int kTiles, int kChunks, Along kAlong>() {
    constexpr int kParts = kAlong == Along::kTogether ? kMostTogether : 1;
    if (columns > kParts * kMostColumns<T, T, kTiles, kChunks, kHalves>) return false;
    constexpr auto kNK = Layout::kRowMajorNK;
    error = launch_skinny_mma_as<T, T, kNK, kNorm, kGated, kTiles, kChunks, kHalves, kAlong, kNorm, false, false, kBits>(
        layer, stream, shape);
    return true;
  };
  if (layer.gated) return has_norm && launch.template operator()<true, true, 4, 4, Along::kAtOnce>();
  if (!has_norm && layer.activation != kIdentity) return false;
  const bool is_wide = tiles_of(layer) >= (has_norm ? 4 : 2) * few;
  if (has_norm) {
    return (is_wide && launch.template operator()<true, false, 4, 4, Along::kAtOnce>()) ||
           launch.template operator()<true, false, 2, 4, Along::kAtOnce>();
  }
  if (is_wide && launch.template operator()<false, false, 4, 4, Along::kAtOnce>()) return true;
  if (launch.template operator()<false, false, 2, 4, Along::kAtOnce>()) return true;
  return is_sm90_or_newer() && launch.template operator()<false, false, 4, 4, Along::kTogether>();
}

// Up to 16 rows. `layer`: its weights are packed. Returns cudaErrorNotSupported if no kernel supports the layer.
template <typename T, int kBits>
cudaError_t launch_packed_linear(const DecodeLinear& layer, const PackedShape& shape, cudaStream_t stream) {
  cudaError_t error = cudaErrorNotSupported;
  if (!suits_mma<T>(layer) || compute_capability_major() < 8) return error;
  if (launch_packed_row<T, kBits>(layer, shape, stream, error)) return error;
  if (!exceeds_registers(layer)) {
    const bool is_launched = layer.rows > kHalfRows ? launch_held<T, kBits, 2>(layer, shape, stream, error)
                                                    : launch_held<T, kBits, 1>(layer, shape, stream, error);
    if (is_launched) return error;
  }
  const bool is_bulk = is_sm90_or_newer();
  const PackedPlan plan(layer, shape, kBits, is_bulk ? Ring::kBulk : Ring::kAsync);
  if (!plan.fits()) return cudaErrorNotSupported;
  return is_bulk ? launch_packed<T, kBits, Ring::kBulk>(layer, shape, plan, stream)
                 : launch_packed<T, kBits, Ring::kAsync>(layer, shape, plan, stream);
}

// Any number of rows. Without a norm, the tiles kernel runs more than 16 rows, and more than 8 or 4 rows of a large layer.
// Otherwise each launch runs as many rows as fit, up to 16; only the first overlaps with the previous kernel.
template <typename T, int kBits>
cudaError_t launch_packed_rows(const DecodeLinear& layer, const PackedShape& shape, cudaStream_t stream) {
  DecodeLinear part = layer;
  int64_t most = 2 * kHalfRows;
  const auto rows_of = [](TypedPointer rows, int64_t element) {
    if (rows.data != nullptr) rows.data = static_cast<char*>(rows.data) + element * (rows.dtype == kFloat32 ? 4 : 2);
    return rows;
  };
  cudaError_t error = cudaSuccess;
  // TUNED: H200, us of these kernels and of rings, int8: K = 14336, 8 rows 19 and 48; K = 8192, 8 rows 10.2 and 11.0, 16 rows
  // 10.8 and 22.3; 16 rows that registers hold, 4.8 and 3.0 (a1d415c7).
  const int64_t few = layer.in_features > 8192 ? kHalfRows / 2 : kHalfRows;
  if (layer.rows > most || (layer.rows > few && exceeds_registers(layer))) {
    error = launch_packed_tiles<T, kBits>(layer, shape, stream);
    if (error != cudaErrorNotSupported) return error;
  }
  for (int64_t first = 0; first < layer.rows;) {
    part.rows = std::min(most, layer.rows - first);
    part.input = rows_of(layer.input, first * layer.in_features);
    part.output = rows_of(layer.output, first * output_columns(layer));
    part.residual = rows_of(layer.residual, first * output_columns(layer));
    part.pdl = layer.pdl && first == 0;
    error = launch_packed_linear<T, kBits>(part, shape, stream);
    if (error == cudaErrorNotSupported && most > 1) {
      most /= 2;
      continue;
    }
    if (error != cudaSuccess) return error;
    first += part.rows;
  }
  return error;
}

}  // namespace fuseopt
