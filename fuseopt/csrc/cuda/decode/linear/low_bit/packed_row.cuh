// decode_linear of one row for packed weights of 8 and 4 bits. A block computes a few lines of 16 outputs over the whole K,
// and requests all of their weight before it waits for the previous kernel. Several blocks fit on a multiprocessor, including
// blocks of the next kernels, so memory stays busy while a block waits. Each warp has a part of K: it loads that part of the
// weight by a separate bulk copy, and that part of the row. So the block has only one barrier, before the sums of its warps
// are added.
//
// A LayerNorm is part of the products, as in gemv_strip.cuh: with xhat = (x - mean) * rstd and g, b its weight and bias,
//   sum_k w * (xhat * g + b) = rstd * (sum_k w * (x * g) - mean * sum_k w * g) + sum_k w * b.
// A tensor core product has eight rows. With weights converted to 16 bits, x * g (as two numbers), g and b use four of them.
//
// kByDigits: weights are multiplied as the integers that they are stored as, and the row as rows of 8-bit digits. 512 weights
// take 7 (8 bits) or 12 (4 bits) instructions in place of 36, but a row takes 80 more.
#pragma once

#include "cuda/common/arrivals.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/decode/linear/input_rows.cuh"
#include "cuda/decode/linear/low_bit/digit_sums.cuh"
#include "cuda/decode/linear/low_bit/packed_kernel.cuh"
#include "cuda/decode/linear/row_moments.cuh"

namespace fuseopt {

template <typename T>
struct PackedRowLayer : MmaLayer<T> {
  int strips[MmaLayer<T>::kMaxWeights];  // strips of each weight
  int part_blocks;                       // blocks of K for each warp
  int stage_blocks, stages;              // a warp's ring: one stage if that holds the whole part
  bool is_gated;
};

// TUNED: with the kernel: 3 and 4 stages are no faster (docs/lab-notes/2026-11-30-one-row-of-packed-weights.md).
constexpr int kRingStages = 2;

// How the calling lane multiplies a row with units of a line.
template <typename T, int kBits>
struct PackedRowUnits {
  static constexpr int kUnitChunks = kBlockChunks<kBits> / kBlockUnits;

  // The integers of the `u`-th chunk of a unit, of the lane's outputs, as 16-bit values.
  static __device__ void unpack(const PackedShape& shape, const uint4& unit, int u, const char* scales, uint4& low, uint4& high) {
    unsigned zeros = kMagic<T> + 0x00080008u;
    if (kBits == 4 && shape.has_zeros) zeros = *reinterpret_cast<const unsigned*>(scales + kGroupBytes);
    unpack_chunk<T, kBits>(unit, u, __byte_perm(zeros, 0, kFirstHalf), __byte_perm(zeros, 0, kSecondHalf), low, high);
  }

  // Adds products with `row`, the lane's operand of the chunk, to one of two sums of each output.
  static __device__ void multiply_add(const uint4& low, const uint4& high, int u, const char* scales, const uint4& row,
                                      float (&first)[4], float (&second)[4]) {
    if constexpr (kBits == 8) {
      multiply<T>(first, {low.x, low.y}, {high.x, high.y}, row.x, row.y);
      multiply<T>(second, {low.z, low.w}, {high.z, high.w}, row.z, row.w);
    } else {
      float of_chunk[4] = {};
      multiply<T>(of_chunk, {low.x, low.y}, {high.x, high.y}, row.x, row.y);
      multiply<T>(of_chunk, {low.z, low.w}, {high.z, high.w}, row.z, row.w);
      const auto factors = *reinterpret_cast<const Vector<T, 2>*>(scales);
      float(&sum)[4] = u == 0 ? first : second;
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = fmaf(of_chunk[i], factors[i / 2], sum[i]);
    }
  }

  static __device__ uint4 load(const char* block, int unit) {
    return *reinterpret_cast<const uint4*>(block + unit * kUnitBytes + threadIdx.x % kWarpSize * kAccessBytes);
  }

  // The scales of a chunk in a block, if it has any.
  static __device__ const char* scales_of(const PackedShape& shape, const char* block, int chunk) {
    const int of_group = shape.has_zeros ? 2 * kGroupBytes : kGroupBytes;
    return block + kBlockUnits * kUnitBytes + threadIdx.x % kWarpSize / 4 * 4 + (chunk >> shape.group_bits) * of_group;
  }
};

// x * g, or x * g + x if `ones` is all ones. Unless `low` is null, it gets the rounding error of the result.
template <typename T>
__device__ inline void scale_piece(const uint4& x, const uint4& g, unsigned ones, uint4& high, uint4* low) {
  constexpr unsigned kSigns = 0x80008000u;
  high = {fma_pair<T>(x.x, g.x, x.x & ones), fma_pair<T>(x.y, g.y, x.y & ones), fma_pair<T>(x.z, g.z, x.z & ones),
          fma_pair<T>(x.w, g.w, x.w & ones)};
  if (low == nullptr) return;
  *low = {fma_pair<T>(x.x, g.x, high.x ^ kSigns), fma_pair<T>(x.y, g.y, high.y ^ kSigns),
          fma_pair<T>(x.z, g.z, high.z ^ kSigns), fma_pair<T>(x.w, g.w, high.w ^ kSigns)};
}

// kLoads: most pieces of the row that a lane loads. kHeld: blocks of K that each warp holds in registers before the wait.
// kRing: a warp's part of the weight passes through a ring; otherwise shared memory holds the whole part.
template <typename T, int kBits, int kLines, int kWarps, RowNorm kNorm, int kLoads, int kHeld, bool kRing, bool kByDigits>
__global__ void __launch_bounds__(kWarps* kWarpSize, kByDigits ? (kWarps == 16 ? 2 : kLines == 4 ? 3 : 4)
                                                               : (kWarps == 16 || kLines == 4 || kHeld > 0 ? 2 : 3))
    decode_packed_row_kernel(const __grid_constant__ PackedRowLayer<T> layer) {
  constexpr bool kIsLayer = kNorm == RowNorm::kLayer, kHasNorm = kNorm != RowNorm::kNone;
  constexpr int kFactors = kIsLayer ? 4 : 1, kSlotBits = kIsLayer ? 2 : 0, kPlaces = kLines * kLineOutputs;
  constexpr int kPieceBytes = kByDigits ? kDigitBytes * (kIsLayer ? 8 : 4) : kAccessBytes * kFactors;
  constexpr int kXStride = 4 * kPieceBytes, kBlockPieces = kBlockK<kBits> / kLaneValues;
  static_assert(!kByDigits || kHeld == 0);
  using Sum = std::conditional_t<kIsLayer, float4, float>;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, columns = layer.in_features;
  const PackedShape& shape = layer.packed;
  const int first = warp * layer.part_blocks, count = max(min(shape.blocks - first, layer.part_blocks), 0);

  // Factors [chunks][kFactors][4] pieces, of a LayerNorm x * g in two parts, g and b; or digits [pieces][digits], four of x
  // or x * g, then of a LayerNorm two of g and two of b. Weights [kWarps][stages][kLines][stage_blocks]. Sums
  // [kWarps][kPlaces]; of a norm, each lane's deviations.
  extern __shared__ __align__(kRingAlignment) char row_shared[];
  __shared__ Arrivals arrivals[kWarps][kRing ? kRingStages : 1];
  __shared__ __align__(16) Sum sums_of[kWarps * kPlaces];
  __shared__ Deviations deviations_of[kHasNorm ? kWarps * kWarpSize : 1];
  const int of_line = layer.stage_blocks * shape.block_bytes, stage_bytes = kLines * of_line;
  char* const row_of_warp = row_shared + first * kBlockPieces * kPieceBytes;
  uint4* const factors = reinterpret_cast<uint4*>(row_of_warp);
  char* const ring = row_shared + kWarps * layer.part_blocks * kBlockPieces * kPieceBytes +
                     warp * (kRing ? layer.stages : 1) * stage_bytes;

  let_successor_start();
  int strip = blockIdx.x, index = 0;
  while (index + 1 < MmaLayer<T>::kMaxWeights && strip >= layer.strips[index]) strip -= layer.strips[index++];
  const int width = layer.widths[index], first_line = layer.is_gated ? strip * (kLines / 2) : strip * kLines;
  // Of gated weights, the lines of the first one come first. After the last line comes that once more, not stored.
  const auto line_at = [&](int line) {
    const bool is_second = layer.is_gated && line >= kLines / 2;
    const int of_weight = min(first_line + (is_second ? line - kLines / 2 : line), (width - 1) / kLineOutputs);
    return reinterpret_cast<const char*>(layer.weights[is_second ? 1 : index]) + static_cast<int64_t>(of_weight) * shape.line_bytes;
  };
  int requested = 0;  // blocks of the part requested so far
  const auto request = [&](int stage) {  // called by one lane
    const int bytes = min(count - requested, layer.stage_blocks) * shape.block_bytes;
    if (bytes <= 0) return;
    Arrivals& arrival = arrivals[warp][stage];
    arrival.expect(kLines * bytes);
    const int64_t from = kLineHeader<kBits> + static_cast<int64_t>(first + requested) * shape.block_bytes;
#pragma unroll
    for (int j = 0; j < kLines; ++j) copy_bulk(ring + stage * stage_bytes + j * of_line, line_at(j) + from, bytes, arrival);
    requested += layer.stage_blocks;
  };
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < (kRing ? layer.stages : 1); ++s) arrivals[warp][s].open();
    Arrivals::publish();
#pragma unroll 1
    for (int s = 0; s < (kRing ? layer.stages : 1); ++s) request(s);
  }
  __syncwarp();

  // Lanes take the pieces of the warp's part of the row in turn.
  const int pieces = count * kBlockPieces, first_k = (first * kBlockPieces + lane) * kLaneValues;
  const auto is_piece = [&](int i) { return lane + i * kWarpSize < pieces; };
  const auto is_input = [&](int i) { return is_piece(i) && first_k + i * kWarpSize * kLaneValues < columns; };
  uint4* const own_factors = factors + (lane / 4 << kSlotBits) * 4 + lane % 4;
  const auto factor_of = [&](int i, int row) -> uint4& { return own_factors[(i * kWarpSize << kSlotBits) + row * 4]; };
  uint4 scales[kLoads];
  DigitRow<T, kBits, kNorm, kLoads> digits(row_of_warp);
  if constexpr (kByDigits && kHasNorm) {
    digits.load_norm(layer, first_k, is_input, is_piece);
  } else if constexpr (kHasNorm) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      scales[i] = {kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>};
      uint4 shift = {};
      const int64_t at = first_k + i * kWarpSize * kLaneValues;
      if (is_input(i) && layer.norm_weight != nullptr) scales[i] = load_once<uint4>(layer.norm_weight + at);
      if (kIsLayer && is_input(i) && layer.norm_bias != nullptr) shift = load_once<uint4>(layer.norm_bias + at);
      if (kIsLayer && is_piece(i)) factor_of(i, 2) = scales[i], factor_of(i, 3) = shift;
    }
  }
  prefetch_next_weights(layer);

  // What the epilogue of the thread's output can load before the wait.
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
  unsigned takes[kLoads], puts[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) takes[i] = is_input(i), puts[i] = is_piece(i);
  const T* const input = settled(static_cast<const T*>(layer.input) + first_k);
  const unsigned ones = layer.adds_one ? ~0u : 0u;
  settle(takes), settle(puts);
  using Units = PackedRowUnits<T, kBits>;
  constexpr int kBlockChunks = fuseopt::kBlockChunks<kBits>, kUnitChunks = Units::kUnitChunks;
  uint4 held[kHeld == 0 ? 1 : kHeld * kBlockChunks][kLines][2];
  if constexpr (kHeld > 0) {
    if (count > 0) arrivals[warp][0].template wait<false>(0);
#pragma unroll
    for (int c = 0; c < kHeld * kBlockChunks; ++c) {
#pragma unroll
      for (int j = 0; j < kLines; ++j) {
        const char* const block = ring + c / kBlockChunks * shape.block_bytes + j * of_line;
        uint4(&values)[2] = held[c][j];
        values[0] = values[1] = {};
        if (c / kBlockChunks < count) {
          Units::unpack(shape, Units::load(block, c % kBlockChunks / kUnitChunks), c % kUnitChunks,
                        Units::scales_of(shape, block, c % kBlockChunks), values[0], values[1]);
        }
        const unsigned zero = columns < 0 ? 1 : 0;  // opaque to the compiler: the values stay in the registers of operands
        for (uint4& w : values) w.x |= zero, w.y |= zero, w.z |= zero, w.w |= zero;
      }
    }
  }
  wait_for_predecessor_settled(columns < 0);

  uint4 x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    x[i] = {};
    if (takes[i]) x[i] = __ldcg(reinterpret_cast<const uint4*>(input + i * kWarpSize * kLaneValues));
  }
  const unsigned residual = finishes ? layer.load_residual_bits(at) : 0;
  Deviations deviations;
  if constexpr (kByDigits) deviations = digits.store(x, puts);
#pragma unroll
  for (int i = 0; i < kLoads && !kByDigits; ++i) {
    uint4 high = x[i], low;
    if constexpr (kHasNorm) {
      scale_piece<T>(x[i], scales[i], ones, high, kIsLayer ? &low : nullptr);
      const auto& values = reinterpret_cast<const Vector<T, kLaneValues>&>(x[i]);
#pragma unroll
      for (int j = 0; j < kLaneValues; ++j) {
        const float value = values[j];
        if constexpr (kIsLayer) deviations.sum += value;
        deviations.squares = fmaf(value, value, deviations.squares);
      }
    }
    if (!puts[i]) continue;
    factor_of(i, 0) = high;
    if constexpr (kIsLayer) factor_of(i, 1) = low;
  }
  if constexpr (kHasNorm) deviations_of[threadIdx.x] = deviations;
  __syncwarp();

  float sums[2][kLines][4] = {};
  DigitSums<T, kBits> digit_sums[kLines];
  const char* operand = kByDigits ? row_of_warp + lane % 4 * kPieceBytes + lane / 4 % (kPieceBytes / kDigitBytes) * kDigitBytes
                                  : reinterpret_cast<const char*>(factors + lane / 4 % kFactors * 4 + lane % 4);
#pragma unroll
  for (int c = 0; c < kHeld * kBlockChunks; ++c) {
    if (c / kBlockChunks >= count) break;
    const uint4 row = *reinterpret_cast<const uint4*>(operand + c * kXStride);
#pragma unroll
    for (int j = 0; j < kLines; ++j) {
      const char* const block = ring + c / kBlockChunks * shape.block_bytes + j * of_line;
      Units::multiply_add(held[c][j][0], held[c][j][1], c % kUnitChunks, Units::scales_of(shape, block, c % kBlockChunks), row,
                          sums[0][j], sums[1][j]);
    }
  }
  operand += kHeld * kBlockChunks * kXStride;
  int stage = 0;
  unsigned parity = 0;
#pragma unroll 1
  for (int done = kHeld; done < count;) {
    if constexpr (kHeld == 0) arrivals[warp][stage].template wait<false>(parity);
    const char* block = ring + stage * stage_bytes + kHeld * shape.block_bytes;
    const int end = kRing ? min(count, done + layer.stage_blocks) : count;
    if constexpr (kByDigits) {
#pragma unroll 1
      for (; done < end; ++done) {
        DigitSums<T, kBits>::add(digit_sums, shape, block, of_line, operand, kXStride);
        operand += kBlockChunks * kXStride, block += shape.block_bytes;
      }
    }
#pragma unroll 1
    for (; !kByDigits && done < end; ++done) {
      uint4 units[kLines][kBlockUnits];
#pragma unroll
      for (int j = 0; j < kLines; ++j) {
#pragma unroll
        for (int i = 0; i < kBlockUnits; ++i) units[j][i] = Units::load(block + j * of_line, i);
      }
#pragma unroll
      for (int c = 0; c < kBlockChunks; ++c) {
        const uint4 row = *reinterpret_cast<const uint4*>(operand + c * kXStride);
#pragma unroll
        for (int j = 0; j < kLines; ++j) {
          const char* const scales = Units::scales_of(shape, block + j * of_line, c);
          uint4 low, high;
          Units::unpack(shape, units[j][c / kUnitChunks], c % kUnitChunks, scales, low, high);
          Units::multiply_add(low, high, c % kUnitChunks, scales, row, sums[0][j], sums[1][j]);
        }
      }
      operand += kBlockChunks * kXStride, block += shape.block_bytes;
    }
    if constexpr (kRing) {
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
      if constexpr (kByDigits) {
        const float sum = digits.value_of(digit_sums[j], i);
        if constexpr (kIsLayer) reinterpret_cast<float*>(to)[lane % 4] = sum;
        else if (lane % 4 == 0) *to = sum;
        continue;
      }
      const float even = sums[0][j][2 * i] + sums[1][j][2 * i], odd = sums[0][j][2 * i + 1] + sums[1][j][2 * i + 1];
      if constexpr (kIsLayer) {
        if (lane % 4 < 2) reinterpret_cast<float2*>(to)[lane % 4] = {even, odd};
      } else {
        if (lane % 4 == 0) *to = even;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x >= kFinishing) return;

  float2 norm = {0.f, 1.f};
  if constexpr (kHasNorm) {
    Deviations all;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const Deviations of_lane = deviations_of[w * kWarpSize + lane];
      if constexpr (kIsLayer) all.sum += of_lane.sum;
      all.squares += of_lane.squares;
    }
    if constexpr (kIsLayer) {
      all.template add_lanes<kWarpSize>();
      const StoredRow<T> row{static_cast<const T*>(layer.input)};
      norm = normalisation_of<kWarpSize>(all, row, columns, layer.reciprocal, true, layer.eps);
    } else {
#pragma unroll
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        all.squares += __shfl_xor_sync(kFullWarp, all.squares, distance);
      }
      norm.y = rsqrtf(fmaf(all.squares, layer.reciprocal, layer.eps));
    }
  }
  const auto total = [&](int of_place, float of_scale, float of_bias) {
    Sum sum = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) add(sum, sums_of[w * kPlaces + of_place]);
    float value;
    if constexpr (kIsLayer) value = norm.y * fmaf(-norm.x, sum.z, sum.x + sum.y) + sum.w;
    else value = norm.y * sum;
    return fmaf(value, of_scale, of_bias);
  };
  float value = activate_quickly(layer.activation, total(place, scale, bias));
  if (layer.is_gated) value *= total(place % outputs + outputs, gate_scale, gate_bias);
  if (finishes) layer.store(at, value + layer.residual_from(residual));
}

}  // namespace fuseopt
