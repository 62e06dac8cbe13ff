// decode_linear for packed weights of 8 and 4 bits, 1 to 16 rows. Blocks request their weights into shared memory before they
// wait for the previous kernel: all of the weight if it fits on the chip, else as much as a ring holds. Blocks of the next
// kernel fit beside this kernel's, so memory is not idle between kernels.
//
// A group of 1 to 8 warps computes a strip of outputs and splits K; groups do not wait for one another. All warps of a group
// hold the sums of an output in the same lane, so sums are added without a transposition.
#pragma once

#include "cuda/common/block_barrier.cuh"
#include "cuda/common/stream_rows.cuh"
#include "cuda/decode/linear/low_bit/packed_stream.cuh"

namespace fuseopt {

template <typename T, int kBits, int kUnits, int kHalves>
struct PackedSums {
  float all[kUnits][kHalves][4] = {};

  // Adds the products of a block of K. `block`: units and scales of the first line; the next line is `apart` bytes further.
  // `x`: the lane's operands of the first chunk for each half of the rows; the next chunk is `x_stride` bytes further.
  __device__ void add(const PackedShape& shape, const char* block, int apart, const char* const (&x)[kHalves], int x_stride) {
    constexpr int kChunks = kBlockChunks<kBits>, kUnitChunks = kChunks / kBlockUnits;
    constexpr int kChains = kBits == 4 && kUnits * kHalves == 1 ? 2 : 1;
    const int lane = threadIdx.x % kWarpSize;
    uint4 units[kUnits][kBlockUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < kBlockUnits; ++i) {
        units[u][i] = *reinterpret_cast<const uint4*>(block + u * apart + i * kUnitBytes + lane * kAccessBytes);
      }
    }
    const char* scales = block + kBlockUnits * kUnitBytes + lane / 4 * 4;
    unsigned zeros[kUnits][2] = {};
    const auto load_zeros = [&] {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        unsigned pair = kMagic<T> + 0x00080008u;
        if (shape.has_zeros) pair = *reinterpret_cast<const unsigned*>(scales + u * apart + kGroupBytes);
        zeros[u][0] = __byte_perm(pair, 0, kFirstHalf), zeros[u][1] = __byte_perm(pair, 0, kSecondHalf);
      }
    };
    if constexpr (kBits == 4) load_zeros();
    float of_group[kChains][kUnits][kHalves][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint4 rows[kHalves];
#pragma unroll
      for (int h = 0; h < kHalves; ++h) rows[h] = *reinterpret_cast<const uint4*>(x[h] + c * x_stride);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        uint4 low, high;
        unpack_chunk<T, kBits>(units[u][c / kUnitChunks], c, zeros[u][0], zeros[u][1], low, high);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          auto& first = kBits == 4 ? of_group[0][u][h] : all[u][h];
          auto& second = kBits == 4 ? of_group[kChains - 1][u][h] : all[u][h];
          multiply<T>(first, {low.x, low.y}, {high.x, high.y}, rows[h].x, rows[h].y);
          multiply<T>(second, {low.z, low.w}, {high.z, high.w}, rows[h].z, rows[h].w);
        }
      }
      if (kBits == 4 && (c == kChunks - 1 || (shape.group_ends >> c & 1) != 0)) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          const auto pair = *reinterpret_cast<const Vector<T, 2>*>(scales + u * apart);
#pragma unroll
          for (int h = 0; h < kHalves; ++h) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float sum = of_group[0][u][h][i];
              if constexpr (kChains == 2) sum += of_group[1][u][h][i], of_group[1][u][h][i] = 0.f;
              all[u][h][i] = fmaf(sum, pair[i / 2], all[u][h][i]);
              of_group[0][u][h][i] = 0.f;
            }
          }
        }
        scales += shape.has_zeros ? 2 * kGroupBytes : kGroupBytes;
        if (c < kChunks - 1 && shape.has_zeros) load_zeros();
      }
    }
  }
};

template <typename T, int kBits, int kUnits, int kHalves, Ring kRing>
__global__ void __launch_bounds__(kPackedWarps* kWarpSize, 2)
    decode_packed_linear_kernel(const __grid_constant__ PackedLayer<T> layer) {
  constexpr bool kBulk = kRing == Ring::kBulk;
  constexpr int kLaneSums = kUnits * kHalves * 4;
  constexpr bool kCanScale = std::is_same_v<T, __nv_bfloat16>;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int rows = layer.rows, columns = layer.in_features, part_columns = layer.part_columns;
  const int split_bits = 3 - layer.groups_bits, split = 1 << split_bits;
  const int group = warp >> split_bits, part = warp & split - 1;
  const bool has_norm = layer.has_norm, scales_rows = kCanScale && layer.scales_rows;
  static_assert(kPackedWarps == 8);

  // Stages [warps][stages]; rows [kHalves][kPackedWarps * part_columns]; a norm's parameters [2][likewise], unless
  // rows are scaled; sums [warps][kLaneSums][lanes] if warps split K; of a norm, moments [warps][rows].
  extern __shared__ __align__(kRingAlignment) char rings[];
  __shared__ Arrivals arrivals[kPackedWarps][kPackedStages];
  const int stage_bytes = kUnits * kStageBlocks * layer.packed.block_bytes;
  char* const rows_at = rings + kPackedWarps * layer.stages * stage_bytes;
  const int half_bytes = StreamRows<T, T>::bytes(layer.slot_bits, kPackedWarps * part_columns);
  T* const params = reinterpret_cast<T*>(rows_at + kHalves * half_bytes);
  T *const scale = params + warp * part_columns, *const shift = scale + kPackedWarps * part_columns;
  float* const sums_of = reinterpret_cast<float*>(params + (has_norm && !scales_rows ? 2 * kPackedWarps * part_columns : 0));
  Moments* const moments = reinterpret_cast<Moments*>(sums_of + (split > 1 ? kPackedWarps * kLaneSums * kWarpSize : 0));

  let_successor_start();
  const int step = gridDim.x << layer.groups_bits, first_k = warp * part_columns;
  int id = (blockIdx.x << layer.groups_bits) + group;
  const auto rows_of = [&](int half) {
    char* const at = rows_at + half * half_bytes + StreamRows<T, T>::bytes(layer.slot_bits, first_k);
    return StreamRows<T, T>(at, layer, part_columns, half * kHalfRows);
  };
  const auto copy_norm = [&] {
    if (!has_norm) return;
#pragma unroll 1
    for (int h = 0; scales_rows && layer.norm_weight != nullptr && h < kHalves; ++h) rows_of(h).fetch_scale(layer, first_k);
#pragma unroll 1
    for (int k = lane * kLaneValues; !scales_rows && k < part_columns; k += kWarpSize * kLaneValues) {
      if (first_k + k >= columns) break;
      if (layer.norm_weight != nullptr) copy_async(scale + k, layer.norm_weight + first_k + k, true);
      if (layer.norm_bias != nullptr) copy_async(shift + k, layer.norm_bias + first_k + k, true);
    }
    end_copy_group();
  };
  if constexpr (!kBulk) copy_norm();  // its copies are the first commit group
  PackedStream<T, kBits, kUnits, kBulk> weight(layer, rings + warp * layer.stages * stage_bytes, arrivals[warp], id, step, part);
  if constexpr (kBulk) copy_norm();
  prefetch_next_weights(layer);

  // What the epilogue of the current strip can load before the wait, if this warp finishes the strip.
  T biases[kUnits][2];
  float output_scales[kUnits][2];
  const auto column_of = [&](const PackedStrip& strip, int u, int i) {
    return (layer.is_gated ? strip.strip : strip.strip * kUnits + u) * kLineOutputs + lane / 4 + i * kTileColumns;
  };
  const auto load_constants = [&] {
    const PackedStrip strip(layer, id);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int index = layer.is_gated ? u : strip.index;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = column_of(strip, u, i);
        biases[u][i] = from_acc<T>(0.f), output_scales[u][i] = 1.f;
        if (part > 0 || id >= layer.all_strips || column >= layer.widths[index]) continue;
        if (layer.biases[0] != nullptr) biases[u][i] = layer.biases[index][column];
        if constexpr (kBits == 8) {
          const char* const line = reinterpret_cast<const char*>(layer.weights[index]) +
                                   static_cast<int64_t>(column / kLineOutputs) * layer.packed.line_bytes;
          output_scales[u][i] = __ldg(reinterpret_cast<const float*>(line) + column % kLineOutputs);
        }
      }
    }
  };
  unsigned residuals[kUnits][kHalves][4];
  const auto row_of = [&](int h, int i) { return lane % 4 * 2 + i % 2 + h * kHalfRows; };
  const auto output_at = [&](const PackedStrip& strip, int u, int h, int i) {
    return static_cast<int64_t>(row_of(h, i)) * layer.output_stride + layer.first_outputs[strip.index] + column_of(strip, u, i / 2);
  };
  const auto load_residuals = [&] {
    const PackedStrip strip(layer, id);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool is_there = part == 0 && id < layer.all_strips && row_of(h, i) < rows && !(layer.is_gated && u > 0) &&
                                column_of(strip, u, i / 2) < layer.widths[strip.index];
          residuals[u][h][i] = is_there ? layer.load_residual_bits(output_at(strip, u, h, i)) : 0;
        }
      }
    }
  };
  constexpr bool kHasResidualsEarly = kLaneSums < 16;  // else there are too few registers
  load_constants();
  if (kBulk) await_copy_groups<0>();
  else if (layer.stages == kPackedStages) await_copy_groups<kPackedStages>();
  else await_copy_groups<kFewStages>();
  __syncwarp();
  wait_for_predecessor();
  if constexpr (kHasResidualsEarly) load_residuals();

  const bool is_first_of_row = lane % 4 == 0 && lane < 4 << layer.slot_bits;
#pragma unroll 1
  for (int h = 0; h < kHalves; ++h) {
    StreamRows<T, T> x = rows_of(h);
    if constexpr (kCanScale) {
      if (scales_rows) {
        const float squares = x.template load_scaled<false>(layer, first_k, false);
        if (is_first_of_row && x.row() < rows) moments[warp * rows + x.row()] = {0.f, squares};
        continue;
      }
    }
    x.template load<false>(layer, first_k, false, [](auto&, const auto&) {});
    if (has_norm) {
      const Moments of_row = x.moments(max(min(columns - first_k, part_columns), 0));
      if (is_first_of_row && x.row() < rows) moments[warp * rows + x.row()] = of_row;
    }
  }
  __syncthreads();
  if (has_norm && !scales_rows) {
#pragma unroll 1
    for (int h = 0; h < kHalves; ++h) {
      StreamRows<T, T> x = rows_of(h);
      if (x.row() >= rows) continue;
      const float2 norm =
          normalisation(moments + x.row(), rows, kPackedWarps, part_columns, columns, layer.is_layer_norm, layer.eps);
      x.normalise(layer, norm, scale, shift, columns - first_k);
    }
    __syncthreads();
  }

  const int x_stride = 4 * kAccessBytes << layer.slot_bits, slot = lane / 4 & (1 << layer.slot_bits) - 1;
  const char* x_first[kHalves];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    x_first[h] = rows_at + h * half_bytes + (slot * 4 + lane % 4) * kAccessBytes +
                 weight.first() * kBlockChunks<kBits> * x_stride;
  }
  float factors[kHalves][2];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(lane % 4 * 2 + i + h * kHalfRows, rows - 1);
      factors[h][i] = 1.f;
      if (scales_rows && part == 0) factors[h][i] = rstd_of(moments + row, rows, kPackedWarps, layer.reciprocal, layer.eps);
    }
  }

  float* const lane_sums = sums_of + warp * kLaneSums * kWarpSize + lane;
  const int sent = 1 + 2 * group, taken = sent + 1, group_threads = split * kWarpSize;
  bool is_first = true;
#pragma unroll 1
  for (; id < layer.all_strips; id += step) {
    if (!is_first) {
      load_constants();
      if constexpr (kHasResidualsEarly) load_residuals();
    }
    PackedSums<T, kBits, kUnits, kHalves> sums;
    const char* x[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) x[h] = x_first[h];
#pragma unroll 1
    for (int block = 0; block < weight.count(); block += kStageBlocks) {
      const char* at = weight.wait();
#pragma unroll 1
      for (int b = min(kStageBlocks, weight.count() - block); b > 0; --b) {
        sums.add(layer.packed, at, weight.unit_bytes(), x, x_stride);
        at += layer.packed.block_bytes;
#pragma unroll
        for (int h = 0; h < kHalves; ++h) x[h] += kBlockChunks<kBits> * x_stride;
      }
      weight.next();
    }
    if constexpr (!kHasResidualsEarly) load_residuals();
    float(&of_lane)[kLaneSums] = reinterpret_cast<float(&)[kLaneSums]>(sums.all);
    if (split > 1) {
      if (part > 0) {
        if (!is_first) wait_at_barrier(taken, group_threads);
#pragma unroll
        for (int i = 0; i < kLaneSums; ++i) lane_sums[i * kWarpSize] = of_lane[i];
        arrive_at_barrier(sent, group_threads);
        is_first = false;
        continue;
      }
      wait_at_barrier(sent, group_threads);
#pragma unroll 1
      for (int p = 1; p < split; ++p) {
#pragma unroll
        for (int i = 0; i < kLaneSums; ++i) of_lane[i] += lane_sums[(p * kLaneSums + i) * kWarpSize];
      }
      if (id + step < layer.all_strips) arrive_at_barrier(taken, group_threads);
    }
    is_first = false;
    const PackedStrip strip(layer, id);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row_of(h, i) >= rows) continue;
        float values[kUnits];
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          values[u] = fmaf(sums.all[u][h][i], factors[h][i % 2] * output_scales[u][i / 2], to_float(biases[u][i / 2]));
        }
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          if (column_of(strip, u, i / 2) >= layer.widths[strip.index] || (layer.is_gated && u > 0)) continue;
          float value = layer.activation == kIdentity ? values[u] : activate_quickly(layer.activation, values[u]);
          if (kUnits == 2 && layer.is_gated) value *= values[kUnits - 1];
          layer.store(output_at(strip, u, h, i), value + layer.residual_from(residuals[u][h][i]));
        }
      }
    }
  }
}

}  // namespace fuseopt
