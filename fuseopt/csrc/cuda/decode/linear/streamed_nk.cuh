// decode_linear for 16-bit weights [N, K] that exceed the registers (exceeds_registers). A block loads the weight through a
// ring of shared memory, small enough for a block of the next kernel to fit beside it and load meanwhile, so that memory is
// never idle between kernels. A block computes one strip of output columns after another, and its warps split K, so the
// device reads neighbouring addresses at a time. With few strips, the blocks of a cluster split K. The code is in loops, as
// each block has to fetch its instructions.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/stream_rows.cuh"
#include "cuda/decode/linear/low_rank.cuh"
#include "cuda/decode/linear/streamed_nk_plan.cuh"
#include "cuda/decode/linear/row_moments.cuh"
#include "cuda/decode/select/token_rules.cuh"

namespace fuseopt {

// kSums: whether the input is a sum. kLowRank: whether weights have updates. kHeld: whether the rows are in registers.
template <typename T, typename X, bool kNorm, int kHalves, int kStages, bool kSums, bool kLowRank, bool kHeld>
__global__ void __launch_bounds__(kStreamWarps* kWarpSize, kHalves == 1 && kStages == 2 && !kLowRank ? 3 : 2)
    decode_linear_streamed_nk_kernel(const __grid_constant__ StreamLayer<T> layer) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kHeld) return __trap();  // StreamedNKPlan holds rows on sm_90 only
#endif
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int rows = layer.rows, columns = layer.in_features;
  const int rank = kHeld ? 0 : cluster_rank(), blocks = kHeld ? 1 : cluster_size();
  const int part = rank * kStreamWarps + warp, parts = blocks * kStreamWarps;
  const int part_columns = layer.part_stages * kStageK;
  const int own_stages = WeightStream<T>::stages_of(layer, part);
  const int held_stages = blocks > 1 ? layer.part_stages : own_stages;

  // Stages [ring_warps][kStages]; the block's rows [kHalves], unless in registers; of a norm, parameters [2][block_columns],
  // or its weight beside rows in registers; sums [warps][rows][kSumsStride], of the cluster's other blocks [blocks - 1][rows]
  // [kSumsStride]; of a norm, moments [parts][rows]. The weight of rows that are scaled as they are loaded is where these
  // will be.
  extern __shared__ __align__(kRingAlignment) char rings[];
  __shared__ Mailbox mailbox;
  const int half_bytes = kHeld ? 0 : StreamRows<T, X>::bytes(layer.slot_bits, layer.block_columns);
  char* const stages = rings + warp * kStages * kStageBytes;
  char* const rows_at = rings + layer.ring_warps * kStages * kStageBytes;
  T* const params = reinterpret_cast<T*>(rows_at + kHalves * half_bytes);
  T *const scale = params + warp * part_columns, *const shift = scale + layer.block_columns;
  constexpr bool kCanScale = kNorm && std::is_same_v<T, __nv_bfloat16> && std::is_same_v<X, T>;
  const bool scales_rows = kCanScale && (kHeld || layer.scales_rows);
  const int parameters = !kNorm ? 0 : kHeld ? layer.block_columns : scales_rows ? 0 : 2 * layer.block_columns;
  float* const sums_of = reinterpret_cast<float*>(params + parameters);
  float* const inbox = sums_of + kStreamWarps * rows * kSumsStride;
  Moments* const moments = reinterpret_cast<Moments*>(inbox + (blocks - 1) * rows * kSumsStride);

  let_successor_start();
  const StreamedWeight own(layer);
  int strip = own.strip;
  const int out_features = layer.widths[own.index];
  WeightStream<T> weight(layer, own, part);
  const auto rows_of = [&](int half) {
    char* const at = rows_at + half * half_bytes + StreamRows<T, X>::bytes(layer.slot_bits, warp * part_columns);
    return StreamRows<T, X>(at, layer, held_stages * kStageK, half * kHalfRows);
  };
  if constexpr (kCanScale && !kHeld) {
    for (int h = 0; scales_rows && layer.norm_weight != nullptr && h < kHalves; ++h) {
      rows_of(h).fetch_scale(layer, part * part_columns);
    }
  }
#pragma unroll 1
  for (int k = lane * kLaneValues; parameters > 0 && k < held_stages * kStageK; k += kWarpSize * kLaneValues) {
    const int64_t at = part * part_columns + k;
    if (layer.norm_weight != nullptr) copy_async(scale + k, layer.norm_weight + at, at < columns);
    if (at < columns && layer.norm_bias != nullptr) copy_async(shift + k, layer.norm_bias + at, true);
  }
  end_copy_group();
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) weight.fetch(stages + s * kStageBytes);
  if (blocks > 1) {
    if (rank == 0) mailbox.open((blocks - 1) * rows * kStreamColumns * sizeof(float));
    arrive_relaxed_at_cluster_barrier();
  }
  // A head reads more than the L2 cache holds, and memory rests behind it.
  const bool has_several_strips = own.strips > own.step;
  if (!has_several_strips) prefetch_next_weights(layer);

  // Of a head, behind a norm: when outputs are stored, a warp has a row of them.
  constexpr bool kGivesBest = kNorm && kHalves == 1;
  static_assert(kHalfRows <= kStreamWarps && kStreamColumns == kWarpSize);
  // What the thread finishes first of a strip's outputs.
  const int width_bits = layer.is_gated ? 4 : 5, width = 1 << width_bits;
  static_assert(kStreamColumns == 32);
  const auto column_of = [&](int i) { return strip * width + (i & width - 1); };
  const auto output_index = [&](int i) {
    return static_cast<int64_t>(i >> width_bits) * layer.output_stride + layer.first_outputs[own.index] + column_of(i);
  };
  // Converted where they are used: not waited for before.
  T bias, gate_bias, residual;
  float wide_residual;
  unsigned rules_of_column = 0;
  const auto load_biases = [&](int i) {
    const int column = column_of(i);
    bias = gate_bias = from_acc<T>(0.f);
    if (kGivesBest && layer.rules.of_tokens != nullptr && column < out_features) {
      rules_of_column = layer.rules.of_tokens[column];
    }
    if (layer.biases[0] == nullptr || i >= rows * width || column >= out_features) return;
    bias = layer.biases[own.index][column];
    if (layer.is_gated) gate_bias = layer.biases[1][column];
  };
  const auto load_residual = [&](int i) {
    residual = from_acc<T>(0.f), wide_residual = 0.f;
    if (layer.residual == nullptr || i >= rows * width || column_of(i) >= out_features) return;
    if (layer.is_wide) wide_residual = static_cast<const float*>(layer.residual)[output_index(i)];
    else residual = static_cast<const T*>(layer.residual)[output_index(i)];
  };
  load_biases(threadIdx.x);
  BlockUpdates<T, kNorm, kNorm ? 2 : 4, kStreamColumns> updates;
  const auto updated_column = [&](int place) -> OutputColumn {
    const int column = strip * width + (place & width - 1);
    const bool is_there = rank == 0 && strip < own.strips && column < out_features;
    return {layer.is_gated ? place >> width_bits : own.index, column, is_there};
  };
  const auto sums_at = [&](int r, int w) { return sums_of + (w * rows + r) * kSumsStride; };
  if constexpr (kLowRank) updates.load(layer, blockIdx.x, updated_column);
  if (scales_rows) await_copy_groups<kStages>();
  wait_for_predecessor();
  load_residual(threadIdx.x);
  if constexpr (kLowRank) updates.fetch(layer);
  RulesInForce rules;
  if (kGivesBest && layer.rules.of_tokens != nullptr) rules = RulesInForce(layer.rules, *layer.sequence_length);

  const bool is_first_of_row = lane % 4 == 0 && lane < 4 << layer.slot_bits;
  HeldRows<T, kHeld ? kHalves : 1> held;
  if constexpr (kHeld) {
    held.load(layer, part * part_columns);
#pragma unroll
    for (int h = 0; kNorm && h < kHalves; ++h) {
      const float squares = held.squares(h);
      const int row = lane / 4 + h * kHalfRows;
      if (lane % 4 == 0 && row < rows) moments[part * rows + row] = {0.f, squares};
    }
  } else if constexpr (kCanScale) {
#pragma unroll 1
    for (int h = 0; scales_rows && h < kHalves; ++h) {
      StreamRows<T, X> x = rows_of(h);
      const float squares =
          x.template load_scaled<kSums>(layer, part * part_columns, kSums && layer.sum != nullptr && blockIdx.x == 0);
      if (is_first_of_row && x.row() < rows) moments[part * rows + x.row()] = {0.f, squares};
    }
  }
  // Each block of a cluster takes the moments of whole rows, of its own part at last.
#pragma unroll 1
  for (int other = kHeld || scales_rows ? -1 : kNorm ? parts - kStreamWarps : 0; other >= 0; other -= kStreamWarps) {
    const int of_part = part + other < parts ? part + other : part + other - parts, first_k = of_part * part_columns;
#pragma unroll 1
    for (int h = 0; h < kHalves; ++h) {
      StreamRows<T, X> x = rows_of(h);
      x.template load<kSums>(layer, first_k, kSums && layer.sum != nullptr && blockIdx.x == 0, [](auto&, const auto&) {});
      if constexpr (kNorm) {
        const Moments of_row = x.moments(max(min(columns - first_k, part_columns), 0));
        if (is_first_of_row && x.row() < rows) moments[of_part * rows + x.row()] = of_row;
      }
    }
  }
  if constexpr (kLowRank) updates.leave_products(layer, scales_rows, sums_at);
  if (kNorm && !scales_rows) {
    await_copy_groups<kStages>();
    __syncthreads();
#pragma unroll 1
    for (int h = 0; h < kHalves; ++h) {
      StreamRows<T, X> x = rows_of(h);
      if (x.row() >= rows) continue;
      const float2 norm =
          normalisation(moments + x.row(), rows, parts, part_columns, columns, layer.is_layer_norm, layer.eps);
      x.normalise(layer, norm, scale, shift, columns - part * part_columns);
    }
  }
  __syncwarp();

  int stage = 0;
  Candidate<float> best;
#pragma unroll 1
  while (true) {
    float sums[kHalves][kStreamTiles / 2][4] = {};
    const auto multiply_stage = [&](int s) {
      await_copy_groups<kStages - 1>();
      __syncwarp();
#pragma unroll
      for (int c = 0; c < kStageChunks; ++c) {
        uint4 words[kStreamTiles];
        weight.load(stages + stage, c, words);
        uint4 factors;  // of the norm
        if constexpr (kHeld && kNorm) {
          factors = *reinterpret_cast<const uint4*>(scale + s * kStageK + c * kChunk + lane % 4 * kLaneValues);
        }
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const int chunk = s * kStageChunks + c;
          uint4 x;
          if constexpr (kHeld && kNorm) x = held.scaled_operand(h, chunk, factors);
          else if constexpr (kHeld) x = held.operand(h, chunk);
          else x = rows_of(h)[chunk];
#pragma unroll
          for (int j = 0; j < kStreamTiles; j += 2) {
            const uint4 &low = words[j], &high = words[j + 1];
            multiply<T>(sums[h][j / 2], {low.x, low.y}, {high.x, high.y}, x.x, x.y);
            multiply<T>(sums[h][j / 2], {low.z, low.w}, {high.z, high.w}, x.z, x.w);
          }
        }
      }
      __syncwarp();
      weight.fetch(stages + stage);
      stage = stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes;
    };
    if constexpr (kHeld) {
#pragma unroll
      for (int s = 0; s < kHeldStages; ++s) {
        if (s < own_stages) multiply_stage(s);
      }
    } else {
#pragma unroll 1
      for (int s = 0; s < own_stages; ++s) multiply_stage(s);
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int j = 0; j < kStreamTiles / 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = lane % 4 * 2 + i % 2 + h * kHalfRows, place = (2 * j + i / 2) * kTileColumns + lane / 4;
          if (row < rows) sums_of[(warp * rows + row) * kSumsStride + place] = sums[h][j][i];
        }
      }
    }
    if constexpr (kLowRank) updates.add(layer, own.index, layer.is_gated, updated_column, sums_at);
    __syncthreads();

    if (blocks > 1) {
      wait_at_cluster_barrier();  // the first block has started
      if (rank > 0) {
        constexpr int kVectors = kStreamColumns / 4;
#pragma unroll 1
        for (int i = threadIdx.x; i < rows * kVectors; i += blockDim.x) {
          float4 sum = {};
#pragma unroll
          for (int w = 0; w < kStreamWarps; ++w) {
            const float* const of_warp = sums_of + (w * rows + i / kVectors) * kSumsStride + i % kVectors * 4;
            const float4 of_part = *reinterpret_cast<const float4*>(of_warp);
            sum = {sum.x + of_part.x, sum.y + of_part.y, sum.z + of_part.z, sum.w + of_part.w};
          }
          float* const row_at = inbox + ((rank - 1) * rows + i / kVectors) * kSumsStride;
          mailbox.send(reinterpret_cast<float4*>(row_at) + i % kVectors, sum);
        }
        return;
      }
      mailbox.wait();
    }
    bool is_done = false;
#pragma unroll 1
    for (int i = threadIdx.x; !is_done;) {
      if (i < rows * width && column_of(i) < out_features) {
        float value = 0.f, factor = 1.f;
        if (scales_rows) factor = rstd_of(moments + (i >> width_bits), rows, parts, layer.reciprocal, layer.eps);
#pragma unroll 1
        for (int place = i & width - 1; place < kStreamColumns; place += width) {
          const int at = (i >> width_bits) * kSumsStride + place;
          float sum = 0.f;
#pragma unroll
          for (int w = 0; w < kStreamWarps; ++w) sum += sums_of[w * rows * kSumsStride + at];
#pragma unroll 1
          for (int b = 0; b < blocks - 1; ++b) sum += inbox[b * rows * kSumsStride + at];
          sum = fmaf(sum, factor, to_float(place < width ? bias : gate_bias));
          value = place < width ? activate_quickly(layer.activation, sum) : value * sum;
        }
        value += to_float(residual) + wide_residual;
        layer.store(output_index(i), value);
        if (kGivesBest && layer.best != nullptr) {
          best.consider(rules.edited(to_float(from_acc<T>(value)), rules_of_column), column_of(i));
        }
      }
      i += blockDim.x;
      is_done = i >= rows * width;
      if (is_done) i = threadIdx.x, strip += own.step;
      load_biases(i);
      load_residual(i);
    }
    if (strip >= own.strips) break;
    if constexpr (kLowRank) updates.load_columns(layer, updated_column);
    __syncthreads();
  }
  if (has_several_strips) prefetch_next_weights(layer);
  if (!kGivesBest || layer.best == nullptr) return;
  best.reduce();
  if (lane == 0 && warp < rows) layer.best[warp * own.step + own.strip] = best;
}

template <typename T, typename X, bool kNorm, int kHalves, int kStages, bool kSums = false, bool kLowRank = false,
          bool kHeld = false>
cudaError_t launch_streamed_nk_as(const DecodeLinear& layer, const StreamedNKPlan& plan, cudaStream_t stream) {
  StreamLayer<T> of{mma_layer<T>(layer)};
  of.is_gated = layer.gated;
  int clusters = 0;
  for (int i = 0; i < DecodeLinear::kMaxWeights; ++i) {
    of.strips[i] = plan.strips[i];
    clusters += of.clusters[i] = plan.clusters(i);
  }
  of.part_stages = plan.part_stages;
  of.ring_warps = plan.ring_warps;
  of.block_columns = plan.block_columns;
  of.slot_bits = plan.slot_bits;
  of.scales_rows = plan.scales_rows;
  of.best = static_cast<Candidate<float>*>(layer.best);
  of.rules = layer.rules;
  of.sequence_length = layer.sequence_length;
  const LaunchShape shape{static_cast<unsigned>(clusters * plan.blocks), kStreamWarps * kWarpSize, plan.shared_bytes,
                          static_cast<unsigned>(plan.blocks)};
  of.share_prefetch(shape);
  if (kLowRank) of.share_ranks(shape.blocks);
  return launch_dependent(decode_linear_streamed_nk_kernel<T, X, kNorm, kHalves, kStages, kSums, kLowRank, kHeld>, of,
                          shape, layer.pdl, stream);
}

template <typename T, typename X, bool kNorm>
cudaError_t launch_streamed_nk(const DecodeLinear& layer, cudaStream_t stream) {
  const StreamedNKPlan plan(layer);
  if constexpr (kNorm && std::is_same_v<T, X>) {
    if (layer.split_k_partials != nullptr) return launch_streamed_nk_as<T, T, true, 1, 3, true>(layer, plan, stream);
  }
  if (plan.halves == 2) {
    if constexpr (std::is_same_v<T, X>) {
      if constexpr (!kNorm || std::is_same_v<T, __nv_bfloat16>) {
        if (plan.holds_rows) return launch_streamed_nk_as<T, T, kNorm, 2, 2, false, false, true>(layer, plan, stream);
      }
      if (plan.stages == 4) return launch_streamed_nk_as<T, T, kNorm, 2, 4>(layer, plan, stream);
      if (plan.stages == 3) return launch_streamed_nk_as<T, T, kNorm, 2, 3>(layer, plan, stream);
    }
    return launch_streamed_nk_as<T, X, kNorm, 2, 2>(layer, plan, stream);
  }
  return plan.stages == 2 ? launch_streamed_nk_as<T, X, kNorm, 1, 2>(layer, plan, stream)
                          : launch_streamed_nk_as<T, X, kNorm, 1, 3>(layer, plan, stream);
}

template <typename T>
cudaError_t launch_streamed_nk(const DecodeLinear& layer, cudaStream_t stream) {
  if (layer.input.dtype != kDType<T>) return launch_streamed_nk<T, float, true>(layer, stream);
  return layer.norm == kNoNorm ? launch_streamed_nk<T, T, false>(layer, stream) : launch_streamed_nk<T, T, true>(layer, stream);
}

template <typename T>
cudaError_t launch_streamed_nk_low_rank(const DecodeLinear& layer, cudaStream_t stream) {
  const StreamedNKPlan plan(layer);
  const auto launch = [&]<bool kNorm>() {
    return plan.stages == 2 ? launch_streamed_nk_as<T, T, kNorm, 1, 2, false, true>(layer, plan, stream)
                            : launch_streamed_nk_as<T, T, kNorm, 1, 3, false, true>(layer, plan, stream);
  };
  return layer.norm == kNoNorm ? launch.template operator()<false>() : launch.template operator()<true>();
}

extern template cudaError_t launch_streamed_nk<__half>(const DecodeLinear&, cudaStream_t);
extern template cudaError_t launch_streamed_nk<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);

}  // namespace fuseopt
