// decode_linear for 16-bit weights [N, K] that exceed the registers (exceeds_registers). A block loads the weight through a
// ring of shared memory, small enough for a block of the next kernel to fit beside it and load meanwhile, so that memory is
// never idle between kernels. A block computes one strip of output columns after another, and its warps split K, so the
// device reads neighbouring addresses at a time. With few strips, the blocks of a cluster split K. The code is in loops, as
// each block has to fetch its instructions.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/stream_rows.cuh"
#include "cuda/decode/linear/low_rank.cuh"
#include "cuda/decode/linear/row_moments.cuh"
#include "cuda/decode/select/token_rules.cuh"

namespace fuseopt {

// TUNED: measurement not recorded (e15abea); `fuseopt bench kernels --model gpt2-xl` measures it again.
constexpr int kMaxStreamedNKCluster = 8;
constexpr int kSumsStride = kStreamColumns + 4;  // 4: rows of sums start in different banks

// kSums: whether the input is a sum. kLowRank: whether weights have updates.
template <typename T, typename X, bool kNorm, int kHalves, int kStages, bool kSums, bool kLowRank>
__global__ void __launch_bounds__(kStreamWarps* kWarpSize, kHalves == 1 && kStages == 2 && !kLowRank ? 3 : 2)
    decode_linear_streamed_nk_kernel(const __grid_constant__ StreamLayer<T> layer) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int rows = layer.rows, columns = layer.in_features;
  const int rank = cluster_rank(), blocks = cluster_size();
  const int part = rank * kStreamWarps + warp, parts = blocks * kStreamWarps;
  const int part_columns = layer.part_stages * kStageK;
  const int own_stages = WeightStream<T>::stages_of(layer, part);
  const int held_stages = blocks > 1 ? layer.part_stages : own_stages;

  // Stages [ring_warps][kStages]; the block's rows [kHalves]; of a norm, parameters [2][block_columns]; sums
  // [warps][rows][kSumsStride], of the cluster's other blocks [blocks - 1][rows][kSumsStride]; of a norm, moments
  // [parts][rows]. The weight of rows that are scaled as they are loaded is where these will be.
  extern __shared__ __align__(kRingAlignment) char rings[];
  __shared__ Mailbox mailbox;
  const int half_bytes = StreamRows<T, X>::bytes(layer.slot_bits, layer.block_columns);
  char* const stages = rings + warp * kStages * kStageBytes;
  char* const rows_at = rings + layer.ring_warps * kStages * kStageBytes;
  T* const params = reinterpret_cast<T*>(rows_at + kHalves * half_bytes);
  T *const scale = params + warp * part_columns, *const shift = scale + layer.block_columns;
  constexpr bool kCanScale = kNorm && std::is_same_v<T, __nv_bfloat16> && std::is_same_v<X, T>;
  const bool scales_rows = kCanScale && layer.scales_rows;
  float* const sums_of = reinterpret_cast<float*>(params + (kNorm && !scales_rows ? 2 * layer.block_columns : 0));
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
  if constexpr (kCanScale) {
    for (int h = 0; scales_rows && layer.norm_weight != nullptr && h < kHalves; ++h) {
      rows_of(h).fetch_scale(layer, part * part_columns);
    }
  }
#pragma unroll 1
  for (int k = lane * kLaneValues; kNorm && !scales_rows && k < held_stages * kStageK; k += kWarpSize * kLaneValues) {
    const int64_t at = part * part_columns + k;
    if (at < columns && layer.norm_weight != nullptr) copy_async(scale + k, layer.norm_weight + at, true);
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
  if constexpr (kCanScale) {
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
  for (int other = scales_rows ? -1 : kNorm ? parts - kStreamWarps : 0; other >= 0; other -= kStreamWarps) {
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
#pragma unroll 1
    for (int s = 0; s < own_stages; ++s) {
      await_copy_groups<kStages - 1>();
      __syncwarp();
#pragma unroll
      for (int c = 0; c < kStageChunks; ++c) {
        uint4 words[kStreamTiles];
        weight.load(stages + stage, c, words);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const uint4 x = rows_of(h)[s * kStageChunks + c];
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

// How a layer's work is shared out, if it is for these kernels.
struct StreamedNKPlan {
  int strips[DecodeLinear::kMaxWeights] = {}, all_strips = 0;  // of each weight
  int slot_bits, halves;
  int blocks = 1;       // that share out K
  int stages = 3;
  int part_stages, ring_warps, block_columns;
  bool scales_rows;
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
    // With more rows no second block fits, so a block has as long a ring as fits.
    const int most = halves == 1 ? 3 : layer.input.dtype == layer.weight_dtype ? 4 : 2;
    const int wanted = halves == 2 ? 1 : 2;
    for (stages = most, split(layer); stages > 2 && per_multiprocessor() < wanted;) {
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

  void split(const DecodeLinear& layer) {
    const int all_stages = static_cast<int>(ceil_div(layer.in_features, kStageK)), parts = blocks * kStreamWarps;
    const size_t x_bytes = layer.input.dtype == kFloat32 ? sizeof(float) : sizeof(uint16_t);
    part_stages = static_cast<int>(ceil_div(all_stages, parts));
    ring_warps = blocks == 1 ? static_cast<int>(ceil_div(all_stages, part_stages)) : kStreamWarps;
    block_columns = (blocks == 1 ? all_stages : part_stages * kStreamWarps) * kStageK;
    shared_bytes = ring_warps * stages * kStageBytes + halves * (block_columns << slot_bits) * x_bytes +
                   sizeof(float) * layer.rows * (kStreamWarps + blocks - 1) * kSumsStride;
    // bfloat16 has float32's range: rows can be multiplied by the norm's weight before they are by 1 / deviation.
    scales_rows = layer.weight_dtype == kBFloat16 && layer.input.dtype == kBFloat16 && blocks == 1 &&
                  (layer.norm == kRmsNorm || layer.norm == kGemmaRmsNorm);
    if (layer.norm != kNoNorm) {
      shared_bytes += (scales_rows ? 0 : 2 * block_columns * sizeof(uint16_t)) + parts * layer.rows * sizeof(Moments);
    }
  }
};

template <typename T, typename X, bool kNorm, int kHalves, int kStages, bool kSums = false, bool kLowRank = false>
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
  return launch_dependent(decode_linear_streamed_nk_kernel<T, X, kNorm, kHalves, kStages, kSums, kLowRank>, of, shape,
                          layer.pdl, stream);
}

template <typename T, typename X, bool kNorm>
cudaError_t launch_streamed_nk(const DecodeLinear& layer, cudaStream_t stream) {
  const StreamedNKPlan plan(layer);
  if constexpr (kNorm && std::is_same_v<T, X>) {
    if (layer.split_k_partials != nullptr) return launch_streamed_nk_as<T, T, true, 1, 3, true>(layer, plan, stream);
  }
  if (plan.halves == 2) {
    if constexpr (std::is_same_v<T, X>) {
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
