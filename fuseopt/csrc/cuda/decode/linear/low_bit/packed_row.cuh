// decode_linear of one row for packed weights of 8 and 4 bits. A block computes a few lines of 16 outputs over the whole K,
// and requests all of their weight before it waits for the previous kernel. Several blocks fit on a multiprocessor, those
// of the next kernels too, so memory stays busy while a block waits. Each warp has a part of K: of the weight, which a bulk
// copy of its own brings, and of the row. So the only barrier of the block is the one before the sums of its warps are
// added up.
//
// A LayerNorm is part of the products, as in gemv_strip.cuh: with xhat = (x - mean) * rstd and g, b its weight and bias,
//   sum_k w * (xhat * g + b) = rstd * (sum_k w * (x * g) - mean * sum_k w * g) + sum_k w * b.
// A tensor core product takes eight rows, so x * g (as two numbers), g and b are four of them.
#pragma once

#include "cuda/common/arrivals.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/decode/linear/input_rows.cuh"
#include "cuda/decode/linear/low_bit/packed_kernel.cuh"
#include "cuda/decode/linear/row_moments.cuh"

namespace fuseopt {

// TUNED: GPT-2 XL and Llama-3.1-8B, H200, 1 row, 2026-11-30: rings of 2 to 4 stages were as fast.
constexpr int kMostRowStages = 8;

enum class RowNorm { kNone, kRms, kLayer };

template <typename T>
struct PackedRowLayer : MmaLayer<T> {
  int strips[MmaLayer<T>::kMaxWeights];  // of each weight
  int part_blocks;                       // of K, for each warp
  int stage_blocks, stages;              // of a warp's ring: one stage if it holds all of the part
  bool is_gated;
};

// Rows of factors that a block keeps of the input, and sums of an output. Of a LayerNorm: x * g in two parts, g, b.
template <RowNorm kNorm>
constexpr int kRowFactors = kNorm == RowNorm::kLayer ? 4 : 1;

// The first blocks of a warp's part, made into 16-bit values in registers before the wait. Times the scales of 4 bits,
// rounded once: exactly dequantize(weight, T).
template <typename T, int kBits, int kLines, int kBlocks>
struct PackedHeld {
  static constexpr int kChunks = kBlocks * kBlockChunks<kBits>, kUnitChunks = kBlockChunks<kBits> / kBlockUnits;
  uint4 low[kLines][kChunks], high[kLines][kChunks];

  // Of `count` blocks from `block` on, zeros after them; those of the next line are `apart` bytes on.
  __device__ void load(const PackedShape& shape, const char* block, int apart, int count) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < kLines; ++j) {
        const char* const at = block + b * shape.block_bytes + j * apart;
#pragma unroll
        for (int i = 0; i < kBlockUnits; ++i) {
          uint4 unit = {};
          if (b < count) unit = *reinterpret_cast<const uint4*>(at + i * kUnitBytes + lane * kAccessBytes);
#pragma unroll
          for (int u = 0; u < kUnitChunks; ++u) {
            const int of_block = i * kUnitChunks + u, c = b * kBlockChunks<kBits> + of_block;
            unsigned scales = 0, zeros = kMagic<T> + 0x00080008u;
            if (kBits == 4 && b < count) {
              const char* const group = at + kBlockUnits * kUnitBytes + lane / 4 * 4 +
                                        (of_block >> shape.group_bits) * (kGroupBytes << (shape.has_zeros ? 1 : 0));
              scales = *reinterpret_cast<const unsigned*>(group);
              if (shape.has_zeros) zeros = *reinterpret_cast<const unsigned*>(group + kGroupBytes);
            }
            unpack_chunk<T, kBits>(unit, of_block, __byte_perm(zeros, 0, kFirstHalf), __byte_perm(zeros, 0, kSecondHalf),
                                   low[j][c], high[j][c]);
            if constexpr (kBits == 4) {
              multiply_by(low[j][c], __byte_perm(scales, 0, kFirstHalf));
              multiply_by(high[j][c], __byte_perm(scales, 0, kSecondHalf));
            }
          }
        }
      }
    }
  }

  // Keeps the values in the registers that products read, so that nothing is moved after the wait.
  __device__ void settle(unsigned zero) {
#pragma unroll
    for (int j = 0; j < kLines; ++j) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        for (uint4* w : {&low[j][c], &high[j][c]}) w->x |= zero, w->y |= zero, w->z |= zero, w->w |= zero;
      }
    }
  }

  __device__ void multiply_add(float (&sums)[kLines][1][4], const char* x, int x_stride, int count) const {
    float others[kLines][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c / kBlockChunks<kBits> >= count) break;
      const uint4 row = *reinterpret_cast<const uint4*>(x + c * x_stride);
#pragma unroll
      for (int j = 0; j < kLines; ++j) {
        const uint4 &l = low[j][c], &h = high[j][c];
        multiply<T>(sums[j][0], {l.x, l.y}, {h.x, h.y}, row.x, row.y);
        multiply<T>(others[j], {l.z, l.w}, {h.z, h.w}, row.z, row.w);
      }
    }
#pragma unroll
    for (int j = 0; j < kLines; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][0][i] += others[j][i];
    }
  }

 private:
  static __device__ void multiply_by(uint4& w, unsigned scale) {
    w = {multiply_pair<T>(w.x, scale), multiply_pair<T>(w.y, scale), multiply_pair<T>(w.z, scale),
         multiply_pair<T>(w.w, scale)};
  }
};

// kHeld: blocks of K that each warp holds in registers.
template <typename T, int kBits, int kLines, int kWarps, RowNorm kNorm, int kHeld>
__global__ void __launch_bounds__(kWarps* kWarpSize, kWarps == 16 || kLines == 4 || kHeld > 0 ? 2 : 3)
    decode_packed_row_kernel(const __grid_constant__ PackedRowLayer<T> layer) {
  constexpr int kFactors = kRowFactors<kNorm>, kSlotBits = kFactors == 4 ? 2 : 0, kPlaces = kLines * kLineOutputs;
  // TUNED: with the kernel, H200, 2026-11-30: a lane's part of the row is loaded at once up to 16 warps x 1024 values.
  constexpr int kLoads = kNorm == RowNorm::kNone ? 4 : 2;
  using Piece = Vector<T, kLaneValues>;
  using Sum = std::conditional_t<kNorm == RowNorm::kLayer, float4, float>;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, columns = layer.in_features;
  const PackedShape& shape = layer.packed;
  const int first = warp * layer.part_blocks, count = max(min(shape.blocks - first, layer.part_blocks), 0);

  // Weights [kWarps][stages][kLines][stage_blocks]; factors [chunks][kFactors][4] pieces; sums [kWarps][kPlaces].
  extern __shared__ __align__(kRingAlignment) char shared[];
  __shared__ Arrivals arrivals[kWarps][kMostRowStages];
  __shared__ Deviations deviations_of[kWarps];
  const int of_line = layer.stage_blocks * shape.block_bytes, stage_bytes = kLines * of_line;
  char* const ring = shared + warp * layer.stages * stage_bytes;
  char* const factors_at = shared + kWarps * layer.stages * stage_bytes;
  Piece* const factors = reinterpret_cast<Piece*>(factors_at) + first * (kBlockK<kBits> / kLaneValues * kFactors);
  Sum* const sums_of =
      reinterpret_cast<Sum*>(factors_at + shape.blocks * kBlockK<kBits> * static_cast<int>(sizeof(T)) * kFactors);

  let_successor_start();
  int strip = blockIdx.x, index = 0;
  while (index + 1 < MmaLayer<T>::kMaxWeights && strip >= layer.strips[index]) strip -= layer.strips[index++];
  const int weights_of_strip = layer.is_gated ? 2 : 1, width = layer.widths[index];
  const int first_line = strip * kLines / weights_of_strip;
  // A place is an output of a line; of gated ones, the lines of the first weight come first.
  const auto line_at = [&](int line) -> const char* {
    const bool is_second = layer.is_gated && line >= kLines / 2;
    const int of_weight = min(first_line + (is_second ? line - kLines / 2 : line), (width - 1) / kLineOutputs);
    return reinterpret_cast<const char*>(layer.weights[is_second ? 1 : index]) + static_cast<int64_t>(of_weight) * shape.line_bytes;
  };
  const char* from[kLines];
#pragma unroll
  for (int j = 0; j < kLines; ++j) from[j] = line_at(j) + kLineHeader<kBits> + static_cast<int64_t>(first) * shape.block_bytes;
  int requested = 0;  // blocks of the part
  const auto request = [&](int stage) {  // by one lane
    const int bytes = min(count - requested, layer.stage_blocks) * shape.block_bytes;
    if (bytes <= 0) return;
    arrivals[warp][stage].expect(kLines * bytes);
#pragma unroll
    for (int j = 0; j < kLines; ++j) {
      copy_bulk(ring + stage * stage_bytes + j * of_line, from[j], bytes, arrivals[warp][stage]);
      from[j] += bytes;
    }
    requested += layer.stage_blocks;
  };
  if (lane == 0) {
    for (int s = 0; s < layer.stages; ++s) arrivals[warp][s].open();
    Arrivals::publish();
#pragma unroll 1
    for (int s = 0; s < layer.stages; ++s) request(s);
  }
  __syncwarp();

  // Pieces of the warp's part of the row: lanes take them in turn.
  const int pieces = count * (kBlockK<kBits> / kLaneValues), first_k = first * kBlockK<kBits>;
  const auto factor_at = [&](int piece, int row) -> uint4& {
    return reinterpret_cast<uint4&>(factors[((piece / 4 << kSlotBits) + row) * 4 + piece % 4]);
  };
  const auto k_of = [&](int piece) { return first_k + piece * kLaneValues; };
  constexpr uint4 kAllOnes = {kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>};
  uint4 scales[kLoads];
  const auto load_scales = [&](int from) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int piece = from + i * kWarpSize;
      scales[i] = kAllOnes;
      if (piece < pieces && k_of(piece) < columns && layer.norm_weight != nullptr) {
        scales[i] = load_once<uint4>(layer.norm_weight + k_of(piece));
      }
    }
  };
  if constexpr (kNorm != RowNorm::kNone) load_scales(lane);
  if constexpr (kNorm == RowNorm::kLayer) {
#pragma unroll 1
    for (int piece = lane; piece < pieces; piece += kWarpSize) {
      uint4 scale = kAllOnes, shift = {};
      const bool is_there = k_of(piece) < columns;
      if (is_there && layer.norm_weight != nullptr) scale = load_once<uint4>(layer.norm_weight + k_of(piece));
      if (is_there && layer.norm_bias != nullptr) shift = load_once<uint4>(layer.norm_bias + k_of(piece));
      factor_at(piece, 2) = scale, factor_at(piece, 3) = shift;
    }
  }
  prefetch_next_weights(layer);

  // Of the output that the thread finishes: what is known before the wait.
  constexpr int kFinishing = kPlaces < kWarpSize ? kWarpSize : kPlaces;
  const int outputs = layer.is_gated ? kPlaces / 2 : kPlaces, place = threadIdx.x % kPlaces;
  const int column = first_line * kLineOutputs + place;
  const bool finishes = threadIdx.x < outputs && column < width;
  const int64_t at = layer.first_outputs[index] + column;
  float bias = 0.f, gate_bias = 0.f, scale = 1.f, gate_scale = 1.f;
  if (finishes) {
    if (layer.biases[0] != nullptr) bias = to_float(layer.biases[index][column]);
    if (layer.is_gated && layer.biases[0] != nullptr) gate_bias = to_float(layer.biases[1][column]);
    if constexpr (kBits == 8) {
      const auto scale_of = [&](int of_place) {
        return __ldg(reinterpret_cast<const float*>(line_at(of_place / kLineOutputs)) + of_place % kLineOutputs);
      };
      scale = scale_of(place);
      if (layer.is_gated) gate_scale = scale_of(place + outputs);
    }
  }
  const T* input = static_cast<const T*>(layer.input) + k_of(lane);
  settle(input);
  PackedHeld<T, kBits, kLines, kHeld == 0 ? 1 : kHeld> held;
  if constexpr (kHeld > 0) {
    if (count > 0) arrivals[warp][0].template wait<false>(0);
    held.load(shape, ring, of_line, count);
    held.settle(columns < 0 ? 1 : 0);
  }
  wait_for_predecessor_settled(columns < 0);

  const unsigned residual = finishes ? layer.load_residual_bits(at) : 0;
  Deviations deviations;
#pragma unroll 1
  for (int from = lane; from < pieces; from += kLoads * kWarpSize) {
    Piece x[kLoads];
    if constexpr (kNorm != RowNorm::kNone) {
      if (from != lane) load_scales(from);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      x[i] = {};
      const int piece = from + i * kWarpSize;
      if (piece < pieces && k_of(piece) < columns) x[i] = load_fresh(input + i * kWarpSize * kLaneValues);
    }
    input += kLoads * kWarpSize * kLaneValues;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int piece = from + i * kWarpSize;
      if (piece >= pieces) break;
      if constexpr (kNorm != RowNorm::kNone) {
        const auto& by = reinterpret_cast<const Piece&>(scales[i]);
        const float one = layer.adds_one ? 1.f : 0.f;
        float values[kLaneValues];
        deviations.add(x[i], 0.f);
#pragma unroll
        for (int j = 0; j < kLaneValues; ++j) values[j] = x[i][j] * (by[j] + one);
        Piece high;
        store_floats_as<T>(&high, 0, values);
        factor_at(piece, 0) = reinterpret_cast<const uint4&>(high);
        if constexpr (kNorm == RowNorm::kLayer) {
          Piece low;
#pragma unroll
          for (int j = 0; j < kLaneValues; ++j) values[j] -= high[j];
          store_floats_as<T>(&low, 0, values);
          factor_at(piece, 1) = reinterpret_cast<const uint4&>(low);
        }
      } else {
        factor_at(piece, 0) = reinterpret_cast<const uint4&>(x[i]);
      }
    }
  }
  __syncwarp();

  PackedSums<T, kBits, kLines, 1, false> sums;
  if (count > 0) {
    const int x_stride = 4 * kAccessBytes << kSlotBits, slot = lane / 4 % kFactors;
    const char* x[1] = {reinterpret_cast<const char*>(factors + slot * 4 + lane % 4)};
    if constexpr (kHeld > 0) {
      held.multiply_add(sums.all, x[0], x_stride, count);
      x[0] += kHeld * kBlockChunks<kBits> * x_stride;
    }
    int stage = 0;
    unsigned parity = 0;
#pragma unroll 1
    for (int done = kHeld; done < count;) {
      if constexpr (kHeld == 0) arrivals[warp][stage].template wait<false>(parity);
      const char* block = ring + stage * stage_bytes + kHeld * shape.block_bytes;
#pragma unroll 1
      for (const int end = min(count, done + layer.stage_blocks); done < end; ++done) {
        sums.add(shape, block, of_line, x, x_stride);
        block += shape.block_bytes, x[0] += kBlockChunks<kBits> * x_stride;
      }
      __syncwarp();
      if (lane == 0) request(stage);
      if (++stage == layer.stages) stage = 0, parity ^= 1;
    }
  }
#pragma unroll
  for (int j = 0; j < kLines; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Sum* const to = sums_of + warp * kPlaces + j * kLineOutputs + i * kTileColumns + lane / 4;
      const float(&of_lane)[4] = sums.all[j][0];
      if constexpr (kNorm == RowNorm::kLayer) {
        if (lane % 4 < 2) reinterpret_cast<float2*>(to)[lane % 4] = {of_lane[2 * i], of_lane[2 * i + 1]};
      } else {
        if (lane % 4 == 0) *to = of_lane[2 * i];
      }
    }
  }
  if constexpr (kNorm != RowNorm::kNone) {
    deviations.add_lanes<kWarpSize>();
    if (lane == 0) deviations_of[warp] = deviations;
  }
  __syncthreads();
  if (threadIdx.x >= kFinishing) return;

  float2 norm = {0.f, 1.f};
  if constexpr (kNorm != RowNorm::kNone) {
    Deviations all;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all.add(deviations_of[w]);
    const StoredRow<T> row{static_cast<const T*>(layer.input)};
    norm = normalisation_of<kWarpSize>(all, row, columns, layer.reciprocal, kNorm == RowNorm::kLayer, layer.eps);
  }
  const auto total = [&](int of_place, float of_scale, float of_bias) {
    Sum sum = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) add(sum, sums_of[w * kPlaces + of_place]);
    float value;
    if constexpr (kNorm == RowNorm::kLayer) value = norm.y * fmaf(-norm.x, sum.z, sum.x + sum.y) + sum.w;
    else value = norm.y * sum;
    return fmaf(value, of_scale, of_bias);
  };
  float value = activate_quickly(layer.activation, total(place, scale, bias));
  if (layer.is_gated) value *= total(place % outputs + outputs, gate_scale, gate_bias);
  if (finishes) layer.store(at, value + layer.residual_from(residual));
}

// How many lines a block has, how many warps share K, and how much of a warp's part its ring holds. Zeros leave a number to
// the plan.
struct PackedRowPlan {
  int lines, warps, part_blocks, stage_blocks, stages, strips[DecodeLinear::kMaxWeights] = {}, all_strips = 0;
  bool is_held;  // some of the weight, in registers
  size_t shared_bytes;

  PackedRowPlan(const DecodeLinear& layer, const PackedShape& shape, int bits, int wanted_lines, int wanted_warps,
                int wanted_stages, int wanted_blocks)
      : lines(wanted_lines), warps(wanted_warps) {
    const int block_k = bits == 4 ? kBlockK<4> : kBlockK<8>;
    const int64_t all_lines = ceil_div(output_columns(layer) * (layer.gated ? 2 : 1), kLineOutputs);
    if (warps == 0) warps = layer.in_features > kLongK ? 16 : 8;
    if (lines == 0) lines = all_lines > multiprocessor_count() && warps == 8 && shape.line_bytes <= kWideLineBytes ? 2 : 1;
    if (layer.gated && lines == 1) lines = 2;
    part_blocks = static_cast<int>(ceil_div(shape.blocks, warps));
    stage_blocks = wanted_stages == 0 ? part_blocks : wanted_blocks;
    stages = wanted_stages == 0 ? 1 : static_cast<int>(std::min<int64_t>(wanted_stages, ceil_div(part_blocks, stage_blocks)));
    const int width = kLineOutputs * lines / (layer.gated ? 2 : 1);
    for (int i = 0; i < (layer.gated ? 1 : layer.weight_count); ++i) {
      strips[i] = static_cast<int>(ceil_div(layer.widths[i], width));
      all_strips += strips[i];
    }
    is_held = warps == 8 && layer.in_features <= kHeldK && all_strips <= 2 * multiprocessor_count();
    const size_t factors = layer.norm == kLayerNorm ? 4 : 1;
    shared_bytes = static_cast<size_t>(lines) * warps * stages * stage_blocks * shape.block_bytes +
                   static_cast<size_t>(shape.blocks) * block_k * sizeof(uint16_t) * factors +
                   sizeof(float) * factors * warps * lines * kLineOutputs;
  }

  bool fits() const { return shared_bytes + 2048 <= shared_bytes_of_block(); }

 private:
  // TUNED: GPT-2 XL, Llama-3.2-1B, Llama-3.1-8B and T5-large, int8 and int4, H200, chains of one layer (v4 of 2026-11-30).
  static constexpr int kLongK = 4096, kHeldK = 2048, kWideLineBytes = 40 * 1024;
};

// Whether the kernel is the fastest for a layer: one whose weight fits on the chip, but is not so small that skinny_mma's
// registers hold it beside the next one.
inline bool prefers_packed_row(const DecodeLinear& layer, const PackedShape& shape) {
  constexpr int64_t kLeast = 17 * 1024, kMost = 192 * 1024;  // TUNED: as above; bytes of a multiprocessor
  const int64_t bytes = ceil_div(output_columns(layer) * (layer.gated ? 2 : 1), kLineOutputs) * shape.line_bytes;
  return bytes >= kLeast * multiprocessor_count() && bytes <= kMost * multiprocessor_count();
}

template <typename T, int kBits, int kLines, int kWarps, RowNorm kNorm, int kHeld>
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
  return launch_dependent(decode_packed_row_kernel<T, kBits, kLines, kWarps, kNorm, kHeld>, of, grid, layer.pdl, stream);
}

// Norms of float16 would exceed its range.
template <typename T>
bool takes_packed_row(const DecodeLinear& layer) {
  return is_sm90_or_newer() && layer.rows == 1 && (layer.norm == kNoNorm || std::is_same_v<T, __nv_bfloat16>);
}

template <typename T, int kBits>
cudaError_t launch_packed_row(const DecodeLinear& layer, const PackedShape& shape, const PackedRowPlan& plan, cudaStream_t stream) {
  const auto with_norm = [&]<int kLines, int kWarps, int kHeld>() {
    if (layer.norm == kNoNorm) return launch_packed_row_as<T, kBits, kLines, kWarps, RowNorm::kNone, kHeld>(layer, shape, plan, stream);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      if (layer.norm == kLayerNorm) return launch_packed_row_as<T, kBits, kLines, kWarps, RowNorm::kLayer, kHeld>(layer, shape, plan, stream);
      return launch_packed_row_as<T, kBits, kLines, kWarps, RowNorm::kRms, kHeld>(layer, shape, plan, stream);
    }
    return cudaErrorNotSupported;
  };
  constexpr int kHeldChunks = 8 / kBlockChunks<kBits>;
  if (plan.is_held) {
    if (plan.warps == 16 && (plan.lines > 1 || layer.norm != kNoNorm)) return cudaErrorNotSupported;
    if (plan.warps == 16) return launch_packed_row_as<T, kBits, 1, 16, RowNorm::kNone, kHeldChunks / 2>(layer, shape, plan, stream);
    return plan.lines == 1   ? with_norm.template operator()<1, 8, kHeldChunks>()
           : plan.lines == 2 ? with_norm.template operator()<2, 8, kHeldChunks / 2>()
                             : cudaErrorNotSupported;
  }
  if (plan.warps == 16) return plan.lines == 1 ? with_norm.template operator()<1, 16, 0>() : with_norm.template operator()<2, 16, 0>();
  return plan.lines == 1   ? with_norm.template operator()<1, 8, 0>()
         : plan.lines == 2 ? with_norm.template operator()<2, 8, 0>()
                           : with_norm.template operator()<4, 8, 0>();
}

}  // namespace fuseopt
