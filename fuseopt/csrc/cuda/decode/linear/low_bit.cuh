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

constexpr int kSumsGap = 4;  // rows of sums start in different banks

template <typename T, int kBits, int kPieces, int kTiles, int kChunks, bool kNorm, int kHalves>
__global__ void __launch_bounds__(kStreamWarps* kWarpSize, 2)
    decode_low_bit_linear_kernel(const __grid_constant__ LowBitLayer<T> layer) {
  using Part = LowBitPart<T, kBits, kPieces, kTiles, kChunks>;
  using Rows = StreamRows<T, T, kPieces>;
  constexpr int kPlaces = Part::kPlaces, kStride = kPlaces + kSumsGap;
  constexpr bool kCanScale = kNorm && std::is_same_v<T, __nv_bfloat16>;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int rows = layer.rows, columns = layer.in_features;
  const int part_columns = layer.chunks * Part::kChunkK, first_k = warp * part_columns;
  const bool scales_rows = kCanScale && layer.scales_rows;

  // Rows [kHalves]; sums [warps][rows][kStride]; of 4 bits, scales [2][kPlaces][groups] and zero points likewise, of a
  // strip and the next one; of a norm, moments [warps][rows] and its parameters [2][block_columns].
  extern __shared__ __align__(kRingAlignment) char shared[];
  const int half_bytes = Rows::bytes(layer.slot_bits, layer.block_columns);
  float* const sums_of = reinterpret_cast<float*>(shared + kHalves * half_bytes);
  T* const scales_of = reinterpret_cast<T*>(sums_of + warps * rows * kStride);
  const int strip_scales = kBits == 4 ? kPlaces * layer.groups : 0;
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
        copy_strip<T, kPlaces>(scales_of + buffer * strip_scales, layer, layer.scales, own.index, of_strip);
        if (layer.zeros[0] != nullptr) {
          copy_strip<uint8_t, kPlaces>(zeros_of + buffer * strip_scales, layer, layer.zeros, own.index, of_strip);
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
    for (int h = 0; scales_rows && layer.norm_weight != nullptr && h < kHalves; ++h) rows_of(h).fetch_scale(layer, first_k);
  }
#pragma unroll 1
  for (int k = lane * kLaneValues; kNorm && !scales_rows && k < part_columns; k += kWarpSize * kLaneValues) {
    const int at = first_k + k;
    if (at < columns && layer.norm_weight != nullptr) copy_async(norm_scale + k, layer.norm_weight + at, true);
    if (at < columns && layer.norm_bias != nullptr) copy_async(norm_shift + k, layer.norm_bias + at, true);
  }
  end_copy_group();
  prefetch_next_weights(layer);

  // What the thread finishes first of a strip's outputs.
  static_assert(kTiles == 1 || kTiles == 4);
  const int width_bits = (kTiles == 1 ? 4 : 6) - (layer.is_gated ? 1 : 0), width = 1 << width_bits;
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
    float sums[kTiles][kHalves][4] = {};
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
        const int group = kBits == 4 ? min(chunk / layer.chunks_of_group, layer.groups - 1) : 0;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const auto place_of = [&](int i) {  // of the tile's outputs, in the strip
            return (layer.is_gated ? t + i * kTiles : 2 * t + i) * kTileColumns * layer.groups + group;
          };
          unsigned zeros[2] = {kMagic<T> + 0x00080008u, kMagic<T> + 0x00080008u};
          if (kBits == 4 && layer.zeros[0] != nullptr) {
#pragma unroll
            for (int i = 0; i < 2; ++i) zeros[i] = kMagic<T> + strip_zero[place_of(i)] * 0x00010001u;
          }
          float group_sums[kHalves][4] = {};
          auto& products = kBits == 4 ? group_sums : sums[t];
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece) {
            uint4 x[kHalves];
#pragma unroll
            for (int h = 0; h < kHalves; ++h) x[h] = rows_of(h)[(first + c) * kPieces + piece];
            weight.multiply_add(products, c, t, piece, zeros, x);
          }
          if constexpr (kBits == 4) {
            const float low = to_float(strip_scale[place_of(0)]), high = to_float(strip_scale[place_of(1)]);
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
#pragma unroll
              for (int i = 0; i < 4; ++i) sums[t][h][i] = fmaf(group_sums[h][i], i < 2 ? low : high, sums[t][h][i]);
            }
          }
        }
        weight.load(layer, c, has_next && next + c < layer.chunks);
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = lane % 4 * 2 + i % 2 + h * kHalfRows;
          const int place = (layer.is_gated ? t + i / 2 * kTiles : 2 * t + i / 2) * kTileColumns + lane / 4;
          if (row < rows) sums_of[(warp * rows + row) * kStride + place] = sums[t][h][i];
        }
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
  int tiles, most_chunks;  // which kernel
  int pieces, halves, slot_bits = 0;
  int warps, chunks, passes;
  int blocks_of_multiprocessor = 2;
  int strips[DecodeLinear::kMaxWeights] = {}, all_strips = 0;
  size_t shared_bytes;

  LowBitPlan(const LowBitLinear& low_bit, int64_t rows, int narrow) : tiles(narrow ? 1 : 4), most_chunks(narrow ? 8 : 2) {
    const DecodeLinear& layer = low_bit.layer;
    halves = rows > kHalfRows ? 2 : 1;
    pieces = low_bit.bits == 8 ? 2 : static_cast<int>(std::min<int64_t>(low_bit.group / kChunk, 4));
    while (1 << slot_bits < std::min<int64_t>(rows, kHalfRows)) ++slot_bits;
    const int places = tiles * 2 * kTileColumns;
    for (int i = 0; i < (layer.gated ? 1 : layer.weight_count); ++i) {
      strips[i] = static_cast<int>(ceil_div(layer.widths[i], layer.gated ? places / 2 : places));
      all_strips += strips[i];
    }
    const int64_t all_chunks = ceil_div(layer.in_features, pieces * kChunk);
    chunks = static_cast<int>(ceil_div(all_chunks, kStreamWarps));
    passes = static_cast<int>(ceil_div(chunks, most_chunks));
    warps = static_cast<int>(ceil_div(all_chunks, chunks));
    shared_bytes = (halves * block_columns() << slot_bits) * sizeof(uint16_t) + sizeof(float) * warps * rows * (places + kSumsGap);
    if (low_bit.bits == 4) {
      shared_bytes += 2 * places * groups(low_bit) * (sizeof(uint16_t) + (low_bit.zeros[0] == nullptr ? 0 : 1));
    }
    if (layer.norm != kNoNorm) {
      shared_bytes += sizeof(Moments) * (warps * rows + 1) + (scales_rows(layer) ? 0 : 2 * block_columns() * sizeof(uint16_t));
    }
  }

  int block_columns() const { return warps * chunks * pieces * kChunk; }
  static int64_t groups(const LowBitLinear& low_bit) { return low_bit.layer.in_features / low_bit.group; }
  // bfloat16 has float32's range: rows can be multiplied by the norm's weight before they are by 1 / deviation.
  static bool scales_rows(const DecodeLinear& layer) {
    return layer.weight_dtype == kBFloat16 && (layer.norm == kRmsNorm || layer.norm == kGemmaRmsNorm);
  }
  // Outputs of the multiprocessor that has most, in strips of 16.
  int64_t longest() const { return ceil_div(all_strips, multiprocessor_count()) * tiles; }
  int clusters(int weight) const {
    const int64_t room = multiprocessor_count() * blocks_of_multiprocessor;
    return static_cast<int>(ceil_div(strips[weight], ceil_div(all_strips, room)));
  }
};

// Narrow strips share the work among more blocks. Wide ones read less of the input and load more at a time, so they may
// leave a multiprocessor a fourth more to do.
inline LowBitPlan low_bit_plan(const LowBitLinear& low_bit, int64_t rows) {
  const LowBitPlan narrow(low_bit, rows, true), wide(low_bit, rows, false);
  return wide.halves == 1 && 4 * wide.longest() <= 5 * narrow.longest() ? wide : narrow;
}

template <typename T, int kBits, int kPieces, int kTiles, int kChunks, bool kNorm, int kHalves>
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
  of.chunks_of_group = static_cast<int>(std::max<int64_t>(low_bit.group / (plan.pieces * kChunk), 1));
  of.chunks = plan.chunks;
  of.passes = plan.passes;
  const LaunchShape shape{static_cast<unsigned>(clusters), static_cast<unsigned>(plan.warps * kWarpSize), plan.shared_bytes, 1};
  of.share_prefetch(shape);
  return launch_dependent(decode_low_bit_linear_kernel<T, kBits, kPieces, kTiles, kChunks, kNorm, kHalves>, of, shape, pdl,
                          stream);
}

template <typename T, int kBits>
cudaError_t launch_low_bit(const LowBitLinear& low_bit, const LowBitPlan& plan, bool pdl, cudaStream_t stream) {
  const auto with_pieces = [&]<int kPieces>() {
    const auto with_norm = [&]<bool kNorm>() {
      const auto launch = [&]<int kTiles, int kChunks, int kHalves>() {
        return launch_low_bit_as<T, kBits, kPieces, kTiles, kChunks, kNorm, kHalves>(low_bit, plan, pdl, stream);
      };
      if (plan.halves == 2) return launch.template operator()<1, 8, 2>();
      return plan.tiles == 4 ? launch.template operator()<4, 2, 1>() : launch.template operator()<1, 8, 1>();
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
