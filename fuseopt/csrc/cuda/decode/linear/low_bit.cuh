// decode_low_bit_linear for 1 to 16 rows of 16-bit values, on the tensor cores. A warp has its part of a strip of outputs
// in registers, loaded before the wait for the previous kernel. Each chunk that it has multiplied is replaced by the same
// chunk of the next strip, so memory is not idle while it multiplies. Blocks are small enough for one of the next kernel
// to load beside them. The warps of a block split K.
//
// Weights become 16-bit values exactly; a scale multiplies float32 sums: over a group of K (4 bits) or all of it (8 bits).
#pragma once

#include "cuda/common/stream_rows.cuh"
#include "cuda/decode/linear/low_bit_suits.cuh"
#include "cuda/decode/linear/low_bit_weights.cuh"

namespace fuseopt {

constexpr int kLowBitSumsStride = kLowBitStrip + 4;  // 4: rows of sums start in different banks

// Of a block with up to 8 rows, else with up to 16; twice as many fit on a multiprocessor.
// TUNED: with the kernel: 8 warps of 128 registers each leave too few to hide what a warp waits for (f1c4c4db: down of
// Llama-3.2-1B, int4, 1 row, 9.0 us, 2.1 us of which are its bytes).
template <int kHalves>
constexpr int kLowBitWarps = kHalves == 1 ? 16 : 8;
template <int kHalves>
constexpr int kLowBitChunks = kHalves == 1 ? 4 : 8;  // of K that a warp has in registers

template <typename T, int kBits, int kPieces, bool kNorm, int kHalves>
__global__ void __launch_bounds__(kLowBitWarps<kHalves>* kWarpSize, 2)
    decode_low_bit_linear_kernel(const __grid_constant__ LowBitLayer<T> layer) {
  constexpr int kChunks = kLowBitChunks<kHalves>, kStride = kLowBitSumsStride;
  using Part = LowBitPart<T, kBits, kPieces, kChunks>;
  using Rows = StreamRows<T, T, kPieces, 2>;
  constexpr bool kCanScale = kNorm && std::is_same_v<T, __nv_bfloat16>;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int rows = layer.rows, columns = layer.in_features;
  const int part_columns = layer.chunks * Part::kChunkK, first_k = warp * part_columns;
  const bool scales_rows = kCanScale && layer.scales_rows;

  // Rows [kHalves]; sums [warps][rows][kStride]; of 4 bits, scales [2][kLowBitStrip][groups] and zero points likewise, of a
  // strip and the next one; of a norm, moments [warps][rows] and its parameters [2][block_columns].
  extern __shared__ __align__(kRingAlignment) char shared[];
  const int half_bytes = Rows::bytes(layer.slot_bits, layer.block_columns);
  float* const sums_of = reinterpret_cast<float*>(shared + kHalves * half_bytes);
  T* const scales_of = reinterpret_cast<T*>(sums_of + warps * rows * kStride);
  const int strip_scales = kBits == 4 ? kLowBitStrip * layer.groups : 0;
  uint8_t* const zeros_of = reinterpret_cast<uint8_t*>(scales_of + 2 * strip_scales);
  Moments* const moments = reinterpret_cast<Moments*>(zeros_of + (layer.zeros[0] == nullptr ? 0 : 2 * strip_scales));
  T* const params = reinterpret_cast<T*>(moments + (kNorm ? (warps * rows + 1) / 2 * 2 : 0));
  T *const norm_scale = params + first_k, *const norm_shift = norm_scale + layer.block_columns;

  let_successor_start();
  const StreamedWeight own(layer);
  int strip = own.strip;
  const int out_features = layer.widths[own.index];
  Part weight;
  weight.find(layer, own.index, strip, warp * layer.chunks);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) weight.load(layer, c, c < layer.chunks);

  const auto copy_scales = [&](int of_strip, int buffer) {
    if constexpr (kBits == 4) {
      if (of_strip < own.strips) {
        copy_strip<T>(scales_of + buffer * strip_scales, layer, layer.scales, own.index, of_strip);
        if (layer.zeros[0] != nullptr) {
          copy_strip<uint8_t>(zeros_of + buffer * strip_scales, layer, layer.zeros, own.index, of_strip);
        }
      }
    }
    end_copy_group();
  };
  copy_scales(strip, 0);
  const auto rows_of = [&](int half) {
    return Rows(shared + half * half_bytes + Rows::bytes(layer.slot_bits, first_k), layer, part_columns, half * kHalfRows);
  };
  if constexpr (kCanScale) {
    for (int h = 0; scales_rows && layer.norm_weight != nullptr && h < kHalves; ++h) rows_of(h).place_scale(layer, first_k);
  }
#pragma unroll 1
  for (int k = lane * kLaneValues; kNorm && !scales_rows && k < part_columns; k += kWarpSize * kLaneValues) {
    const int at = first_k + k;
    const auto copy = [&](T* to, const T* from) {
      if (at < columns && from != nullptr) *reinterpret_cast<uint4*>(to + k) = __ldg(reinterpret_cast<const uint4*>(from + at));
    };
    copy(norm_scale, layer.norm_weight);
    copy(norm_shift, layer.norm_bias);
  }
  prefetch_next_weights(layer);

  // What the thread finishes first of a strip's outputs.
  static_assert(kLowBitStrip == 16);
  const int width_bits = layer.is_gated ? 3 : 4, width = 1 << width_bits;
  const auto column_of = [&](int i) { return (strip << width_bits) + (i & width - 1); };
  const auto output_index = [&](int i) {
    return static_cast<int64_t>(i >> width_bits) * layer.output_stride + layer.first_outputs[own.index] + column_of(i);
  };
  T biases[2];
  float output_scales[2];
  unsigned residual;
  const auto load_biases = [&](int i) {
    const int column = column_of(i);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      biases[w] = from_acc<T>(0.f), output_scales[w] = 1.f;
      if (i >= rows * width || column >= out_features || (w == 1 && !layer.is_gated)) continue;
      if (layer.biases[0] != nullptr) biases[w] = layer.biases[own.index + w][column];
      if constexpr (kBits == 8) output_scales[w] = static_cast<const float*>(layer.scales[own.index + w])[column];
    }
  };
  const auto load_residual = [&](int i) {
    const bool is_there = i < rows * width && column_of(i) < out_features;
    residual = is_there ? layer.load_residual_bits(output_index(i)) : 0;
  };
  load_biases(threadIdx.x);
  await_copy_groups<0>();
  __syncthreads();
  wait_for_predecessor();
  load_residual(threadIdx.x);

  const bool is_first_of_row = lane % 4 == 0 && lane < 4 << layer.slot_bits;
#pragma unroll 1
  for (int h = 0; h < kHalves; ++h) {
    Rows x = rows_of(h);
    if constexpr (kCanScale) {
      if (scales_rows) {
        const float squares = x.template load_scaled<false>(layer, first_k, false);
        if (is_first_of_row && x.row() < rows) moments[warp * rows + x.row()] = {0.f, squares};
        continue;
      }
    }
    x.template load<false>(layer, first_k, false, [](auto&, const auto&) {});
    if constexpr (kNorm) {
      const Moments of_row = x.moments(max(min(columns - first_k, part_columns), 0));
      if (is_first_of_row && x.row() < rows) moments[warp * rows + x.row()] = of_row;
    }
  }
  if (kNorm && !scales_rows) {
    __syncthreads();
#pragma unroll 1
    for (int h = 0; h < kHalves; ++h) {
      Rows x = rows_of(h);
      if (x.row() >= rows) continue;
      const float2 norm =
          normalisation(moments + x.row(), rows, warps, part_columns, columns, layer.is_layer_norm, layer.eps);
      x.normalise(layer, norm, norm_scale, norm_shift, columns - first_k);
    }
  }
  __syncwarp();

  int buffer = 0;
#pragma unroll 1
  while (true) {
    const int next_strip = strip + own.step;
    copy_scales(next_strip, buffer ^ 1);
    const T* const strip_scale = scales_of + buffer * strip_scales + lane / 4 * layer.groups;
    const uint8_t* const strip_zero = zeros_of + buffer * strip_scales + lane / 4 * layer.groups;
    float sums[kHalves][4] = {};
#pragma unroll 1
    for (int pass = 0; pass < layer.passes; ++pass) {
      const bool is_last = pass + 1 == layer.passes;
      const int first = pass * kChunks, next = is_last ? 0 : first + kChunks;
      const bool has_next = !is_last || next_strip < own.strips;
      weight.find(layer, own.index, is_last ? next_strip : strip, warp * layer.chunks + next);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (first + c >= layer.chunks) break;
        const int chunk = warp * layer.chunks + first + c;
        const int group = min(chunk, layer.groups - 1);
        const int scale_at[2] = {group, kTileColumns * layer.groups + group};
        unsigned zeros[2] = {kMagic<T> + 0x00080008u, kMagic<T> + 0x00080008u};
        if (kBits == 4 && layer.zeros[0] != nullptr) {
#pragma unroll
          for (int i = 0; i < 2; ++i) zeros[i] = kMagic<T> + strip_zero[scale_at[i]] * 0x00010001u;
        }
        float group_sums[kHalves][4] = {};
        auto& products = kBits == 4 ? group_sums : sums;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          uint4 x[kHalves];
#pragma unroll
          for (int h = 0; h < kHalves; ++h) x[h] = rows_of(h)[(first + c) * kPieces + piece];
          weight.multiply_add(products, c, piece, zeros, x);
        }
        if constexpr (kBits == 4) {
          const float scales[2] = {to_float(strip_scale[scale_at[0]]), to_float(strip_scale[scale_at[1]])};
#pragma unroll
          for (int h = 0; h < kHalves; ++h) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[h][i] = fmaf(group_sums[h][i], scales[i / 2], sums[h][i]);
          }
        }
        weight.load(layer, c, has_next && next + c < layer.chunks);
      }
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane % 4 * 2 + i % 2 + h * kHalfRows;
        if (row < rows) sums_of[(warp * rows + row) * kStride + i / 2 * kTileColumns + lane / 4] = sums[h][i];
      }
    }
    __syncthreads();

    bool is_done = false;
#pragma unroll 1
    for (int i = threadIdx.x; !is_done;) {
      if (i < rows * width && column_of(i) < out_features) {
        const int row = i >> width_bits;
        float value = 0.f, factor = 1.f;
        if (scales_rows) factor = rstd_of(moments + row, rows, warps, layer.reciprocal, layer.eps);
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          if (w == 1 && !layer.is_gated) break;
          const float* const at = sums_of + row * kStride + (i & width - 1) + (w << width_bits);
          float sum = 0.f;
#pragma unroll 4
          for (int of_warp = 0; of_warp < warps; ++of_warp) sum += at[of_warp * rows * kStride];
          sum = fmaf(sum, factor * output_scales[w], to_float(biases[w]));
          value = w == 0 ? activate_quickly(layer.activation, sum) : value * sum;
        }
        layer.store(output_index(i), value + layer.residual_from(residual));
      }
      i += blockDim.x;
      is_done = i >= rows * width;
      if (is_done) i = threadIdx.x, strip = next_strip;
      load_biases(i);
      load_residual(i);
    }
    if (strip >= own.strips) return;
    await_copy_groups<0>();
    __syncthreads();
    buffer ^= 1;
  }
}

// How a layer's work is shared out.
struct LowBitPlan {
  int pieces, halves, slot_bits = 0;
  int warps, chunks, passes;
  int strips[DecodeLinear::kMaxWeights] = {}, all_strips = 0;
  size_t shared_bytes;
  int64_t per_multiprocessor;  // blocks that fit

  // `most_warps`: of a block.
  LowBitPlan(const LowBitLinear& low_bit, int64_t rows, int64_t most_warps) {
    const DecodeLinear& layer = low_bit.layer;
    halves = rows > kHalfRows ? 2 : 1;
    pieces = low_bit.bits == 8 ? 2 : static_cast<int>(low_bit.group / kChunk);
    while (1 << slot_bits < std::min<int64_t>(rows, kHalfRows)) ++slot_bits;
    for (int i = 0; i < (layer.gated ? 1 : layer.weight_count); ++i) {
      strips[i] = static_cast<int>(ceil_div(layer.widths[i], layer.gated ? kLowBitStrip / 2 : kLowBitStrip));
      all_strips += strips[i];
    }
    const int64_t all_chunks = ceil_div(layer.in_features, pieces * kChunk);
    chunks = static_cast<int>(ceil_div(all_chunks, most_warps));
    passes = static_cast<int>(ceil_div(chunks, halves == 1 ? kLowBitChunks<1> : kLowBitChunks<2>));
    warps = static_cast<int>(ceil_div(all_chunks, chunks));
    shared_bytes = (halves * block_columns() << slot_bits) * sizeof(uint16_t) + sizeof(float) * warps * rows * kLowBitSumsStride;
    if (low_bit.bits == 4) {
      shared_bytes += 2 * kLowBitStrip * groups(low_bit) * (sizeof(uint16_t) + (low_bit.zeros[0] == nullptr ? 0 : 1));
    }
    if (layer.norm != kNoNorm) {
      shared_bytes += sizeof(Moments) * (warps * rows + 1) + (scales_rows(layer) ? 0 : 2 * block_columns() * sizeof(uint16_t));
    }
    constexpr int64_t kReserved = 1024;  // for each block, by the system
    const int64_t by_registers = 2 * (halves == 1 ? kLowBitWarps<1> : kLowBitWarps<2>) / warps;
    const int64_t by_memory = shared_bytes_of_multiprocessor() / (shared_bytes + kReserved);
    per_multiprocessor = std::max<int64_t>(std::min(by_registers, by_memory), 1);
  }

  int block_columns() const { return warps * chunks * pieces * kChunk; }
  static int64_t groups(const LowBitLinear& low_bit) { return low_bit.layer.in_features / low_bit.group; }
  // bfloat16 has float32's range: rows can be multiplied by the norm's weight before they are by 1 / deviation.
  static bool scales_rows(const DecodeLinear& layer) {
    return layer.weight_dtype == kBFloat16 && (layer.norm == kRmsNorm || layer.norm == kGemmaRmsNorm);
  }
  // Of a weight: blocks with as many strips each.
  int clusters(int weight) const {
    const int64_t room = multiprocessor_count() * per_multiprocessor;
    return static_cast<int>(ceil_div(strips[weight], ceil_div(all_strips, room)));
  }
};

// Where there are few strips, a block has as many warps as its registers suffice for. Where there are many, blocks of 8
// warps are at different places of theirs.
inline LowBitPlan low_bit_plan(const LowBitLinear& low_bit, int64_t rows) {
  const int64_t most = rows > kHalfRows ? kLowBitWarps<2> : kLowBitWarps<1>;
  const LowBitPlan plan(low_bit, rows, most);
  return plan.all_strips > 2 * multiprocessor_count() ? LowBitPlan(low_bit, rows, std::min<int64_t>(most, 8)) : plan;
}

template <typename T, int kBits, int kPieces, bool kNorm, int kHalves>
cudaError_t launch_low_bit_as(const LowBitLinear& low_bit, const LowBitPlan& plan, bool pdl, cudaStream_t stream) {
  LowBitLayer<T> of{{mma_layer<T>(low_bit.layer)}};
  of.is_gated = low_bit.layer.gated;
  int clusters = 0;
  for (int i = 0; i < DecodeLinear::kMaxWeights; ++i) {
    of.strips[i] = plan.strips[i];
    clusters += of.clusters[i] = plan.clusters(i);
    of.values[i] = static_cast<const char*>(low_bit.layer.weights[i]);
    of.scales[i] = low_bit.scales[i];
    of.zeros[i] = low_bit.zeros[i];
  }
  of.block_columns = plan.block_columns();
  of.slot_bits = plan.slot_bits;
  of.scales_rows = plan.scales_rows(low_bit.layer);
  of.row_bytes = static_cast<int>(low_bit.layer.in_features * kBits / 8);
  of.groups = static_cast<int>(plan.groups(low_bit));
  of.chunks = plan.chunks;
  of.passes = plan.passes;
  const LaunchShape shape{static_cast<unsigned>(clusters), static_cast<unsigned>(plan.warps * kWarpSize), plan.shared_bytes, 1};
  of.share_prefetch(shape);
  return launch_dependent(decode_low_bit_linear_kernel<T, kBits, kPieces, kNorm, kHalves>, of, shape, pdl, stream);
}

template <typename T, int kBits>
cudaError_t launch_low_bit(const LowBitLinear& low_bit, const LowBitPlan& plan, bool pdl, cudaStream_t stream) {
  const auto with_pieces = [&]<int kPieces>() {
    const auto with_norm = [&]<bool kNorm>() {
      return plan.halves == 2 ? launch_low_bit_as<T, kBits, kPieces, kNorm, 2>(low_bit, plan, pdl, stream)
                              : launch_low_bit_as<T, kBits, kPieces, kNorm, 1>(low_bit, plan, pdl, stream);
    };
    return low_bit.layer.norm == kNoNorm ? with_norm.template operator()<false>() : with_norm.template operator()<true>();
  };
  if constexpr (kBits == 8) return with_pieces.template operator()<2>();
  else if (plan.pieces == 4) return with_pieces.template operator()<4>();
  else return plan.pieces == 2 ? with_pieces.template operator()<2>() : with_pieces.template operator()<1>();
}

// What a block may have, beside what the kernel declares.
inline size_t most_shared_bytes() { return shared_bytes_of_block() - 1024; }

inline TypedPointer row_of(const TypedPointer& rows, int64_t element) {
  if (rows.data == nullptr) return rows;
  return {static_cast<char*>(rows.data) + element * element_size(static_cast<DType>(rows.dtype)), rows.dtype};
}

// Launches for as many rows at a time, a power of two, as fit in a block's shared memory.
template <typename T>
cudaError_t launch_low_bit(const LowBitLinear& low_bit, cudaStream_t stream) {
  LowBitLinear part = low_bit;
  DecodeLinear& layer = part.layer;
  int64_t most = 2 * kHalfRows;
  while (most > 1 && low_bit_plan(low_bit, most).shared_bytes > most_shared_bytes()) most /= 2;
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; first < low_bit.layer.rows && error == cudaSuccess; first += most) {
    layer.rows = std::min(most, low_bit.layer.rows - first);
    layer.input = row_of(low_bit.layer.input, first * layer.in_features);
    layer.output = row_of(low_bit.layer.output, first * output_columns(layer));
    layer.residual = row_of(low_bit.layer.residual, first * output_columns(layer));
    // Launches for further rows share no data with the first, but write beside it: only that one overlaps.
    const LowBitPlan plan = low_bit_plan(part, layer.rows);
    const bool pdl = layer.pdl && first == 0;
    error = part.bits == 8 ? launch_low_bit<T, 8>(part, plan, pdl, stream) : launch_low_bit<T, 4>(part, plan, pdl, stream);
  }
  return error;
}

}  // namespace fuseopt
