// One row with packed weights as integer products: the row's digits in shared memory, and the sums.
#pragma once

#include "cuda/decode/linear/low_bit/packed_weight.cuh"
#include "cuda/decode/linear/low_bit/row_digits.cuh"
#include "cuda/decode/linear/row_moments.cuh"

namespace fuseopt {

enum class RowNorm { kNone, kRms, kLayer };

// Products of a row's digits with the lane's outputs of a line of 8-bit weights.
template <typename T, int kBits>
class DigitSums {
 public:
  // Adds the products of a block of K. `row`: the lane's digits of the first chunk; the next chunk's are `stride` bytes further.
  template <int kLines>
  static __device__ void add(DigitSums (&lines)[kLines], const PackedShape&, const char* block, int apart, const char* row,
                             int stride) {
    constexpr int kChunks = kBlockChunks<kBits>;
    uint2 digits[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) digits[c] = *reinterpret_cast<const uint2*>(row + c * stride);
#pragma unroll
    for (int j = 0; j < kLines; ++j) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint4 unit = load_unit(block + j * apart + c * kUnitBytes);
        multiply_bytes(lines[j].of_chunk_[c], {unit.x, unit.z, unit.y, unit.w}, digits[c]);
      }
    }
  }

  // Of two neighbouring digits and the lane's outputs: [0] and [1] of the first output.
  __device__ float operator[](int i) const { return static_cast<float>(of_chunk_[0][i] + of_chunk_[1][i]); }

  static __device__ uint4 load_unit(const char* unit) {
    return *reinterpret_cast<const uint4*>(unit + threadIdx.x % kWarpSize * kAccessBytes);
  }

 private:
  int of_chunk_[kBlockChunks<kBits>][4] = {};
};

// The same of 4-bit weights, times 16. Sums of a group are integers.
template <typename T>
class DigitSums<T, 4> {
 public:
  template <int kLines>
  static __device__ void add(DigitSums (&lines)[kLines], const PackedShape& shape, const char* block, int apart,
                             const char* row, int stride) {
    constexpr int kChunks = kBlockChunks<4>, kChains = kLines < 4 ? 2 : 1;  // sums of every other chunk: products overlap
    const char* scales = scales_of(block);
    uint4 units[kLines];
    int of_chunk[kChains][kLines][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint2 digits = *reinterpret_cast<const uint2*>(row + c * stride);
#pragma unroll
      for (int j = 0; j < kLines; ++j) {
        if (c % 2 == 0) units[j] = DigitSums<T, 8>::load_unit(block + j * apart + c / 2 * kUnitBytes);
        const unsigned low = c % 2 == 0 ? units[j].x : units[j].z, high = c % 2 == 0 ? units[j].y : units[j].w;
        multiply_bytes(of_chunk[c % kChains][j],
                       {signed_bytes(low << 4), signed_bytes(high << 4), signed_bytes(low), signed_bytes(high)}, digits);
      }
      if (c < kChunks - 1 && (shape.group_ends >> c & 1) == 0) continue;
#pragma unroll
      for (int j = 0; j < kLines; ++j) {
        const auto factors = *reinterpret_cast<const Vector<T, 2>*>(scales + j * apart);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int sum = kChains == 1 ? of_chunk[0][j][i] : of_chunk[0][j][i] + of_chunk[kChains - 1][j][i];
          lines[j].sums_[i] = fmaf(static_cast<float>(sum), factors[i / 2], lines[j].sums_[i]);
          of_chunk[0][j][i] = of_chunk[kChains - 1][j][i] = 0;
        }
      }
      scales += shape.has_zeros ? 2 * kGroupBytes : kGroupBytes;
    }
    if (shape.has_zeros) add_zeros(lines, shape, scales_of(block), apart, row, stride);
  }

  __device__ float operator[](int i) const { return sums_[i]; }

 private:
  // Adds (8 - zero point) * scale * the row's sum of each group.
  template <int kLines>
  static __device__ void add_zeros(DigitSums (&lines)[kLines], const PackedShape& shape, const char* scales, int apart,
                                   const char* row, int stride) {
    constexpr float kEight = std::is_same_v<T, __half> ? 1024.f + 8.f : 128.f + 8.f;  // zero points are stored as numbers
    constexpr uint4 kSixteens = {0x10101010u, 0x10101010u, 0x10101010u, 0x10101010u};
    int of_row[4] = {};
#pragma unroll 1
    for (int c = 0; c < kBlockChunks<4>; ++c) {
      multiply_bytes(of_row, kSixteens, *reinterpret_cast<const uint2*>(row + c * stride));
      if ((shape.group_ends >> c & 1) == 0) continue;
#pragma unroll
      for (int j = 0; j < kLines; ++j) {
        const auto factors = *reinterpret_cast<const Vector<T, 2>*>(scales + j * apart);
        const auto zeros = *reinterpret_cast<const Vector<T, 2>*>(scales + j * apart + kGroupBytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          lines[j].sums_[i] = fmaf((kEight - zeros[i / 2]) * factors[i / 2], static_cast<float>(of_row[i]), lines[j].sums_[i]);
        }
      }
      scales += 2 * kGroupBytes;
#pragma unroll
      for (int& sum : of_row) sum = 0;
    }
  }

  // The lane's scales of the first group.
  static __device__ const char* scales_of(const char* block) {
    return block + kBlockUnits * kUnitBytes + threadIdx.x % kWarpSize / 4 * 4;
  }

  // 16 * (n - 8) for the integer n in the upper half of each byte.
  static __device__ unsigned signed_bytes(unsigned word) { return and_xor<0xf0f0f0f0u, 0x80808080u>(word); }

  float sums_[4] = {};
};

// The digits of a warp's part of the row, in shared memory [pieces][digits]: four of x or, with a norm of weight g and bias b,
// of x * g; then of a LayerNorm two of g and two of b. A lane has every 32nd piece, at most kLoads.
template <typename T, int kBits, RowNorm kNorm, int kLoads>
class DigitRow {
  static constexpr bool kIsLayer = kNorm == RowNorm::kLayer, kHasNorm = kNorm != RowNorm::kNone;
  static constexpr int kPieceBytes = kDigitBytes * (kIsLayer ? 8 : 4);
  using Values = float[kPieceValues];

 public:
  explicit __device__ DigitRow(char* row) : own_(row + threadIdx.x % kWarpSize * kPieceBytes) {}

  // Before the wait. `k`: the first of the lane's first piece.
  template <typename Layer, typename IsInput, typename IsPiece>
  __device__ void load_norm(const Layer& layer, int k, IsInput is_input, IsPiece is_piece) {
    const auto load = [&](const T* values, float absent, Values (&to)[kLoads]) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        Vector<T, kPieceValues> of_piece = {};
        if (values != nullptr && is_input(i)) of_piece = load_vector<T>(values + k, i * kWarpSize);
#pragma unroll
        for (int j = 0; j < kPieceValues; ++j) {
          to[i][j] = values == nullptr ? absent : of_piece[j] + (layer.adds_one ? 1.f : 0.f);
        }
      }
    };
    load(layer.norm_weight, 1.f, scales_);
    if constexpr (kIsLayer) {
      const auto store = [&](const Values (&values)[kLoads], int digit) {
        float largest = 0.f;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
#pragma unroll
          for (float value : values[i]) largest = largest_of(largest, value);
        }
        const DigitUnit unit(largest, 2);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          char* const of_piece = own_ + i * kWarpSize * kPieceBytes;
          if (is_piece(i)) store_digits<kBits, 2>(values[i], unit.factor, of_piece + digit * kDigitBytes);
        }
        return unit.unit;
      };
      weight_unit_ = store(scales_, 4);
      Values shifts[kLoads];
      load(layer.norm_bias, 0.f, shifts);
      bias_unit_ = store(shifts, 6);
    }
  }

  // After the wait. Returns the lane's share of the row's sum and squares; an RMSNorm has no sum.
  __device__ Deviations store(const uint4 (&x)[kLoads], const unsigned (&is_piece)[kLoads]) {
    Deviations deviations;
    Values values[kLoads];
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const auto& of_piece = reinterpret_cast<const Vector<T, kPieceValues>&>(x[i]);
#pragma unroll
      for (int j = 0; j < kPieceValues; ++j) {
        float& value = values[i][j];
        value = of_piece[j];
        if constexpr (kIsLayer) deviations.sum += value;
        if constexpr (kHasNorm) {
          deviations.squares = fmaf(value, value, deviations.squares);
          value *= scales_[i][j];
        }
        largest = largest_of(largest, value);
      }
    }
    const DigitUnit unit(largest, 4);
    unit_ = unit.unit;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (is_piece[i]) store_digits<kBits, 4>(values[i], unit.factor, own_ + i * kWarpSize * kPieceBytes);
    }
    return deviations;
  }

  // The sum for the lane's `i`-th output; of a LayerNorm, lanes 0 and 1 of four have x * g in two parts, 2 and 3 have g and b.
  template <typename Sums>
  __device__ float value_of(const Sums& sums, int i) const {
    constexpr float kStored = kBits == 4 ? 1.f / 16 : 1.f;
    const int place = threadIdx.x % 4;
    float unit = unit_ * (place % 2 == 0 ? kStored : kStored * 65536.f);
    if (kIsLayer && place > 1) unit = kStored * (place == 2 ? weight_unit_ : bias_unit_);
    const float sum = unit * fmaf(256.f, sums[2 * i + 1], sums[2 * i]);
    return kIsLayer ? sum : sum + __shfl_xor_sync(kFullWarp, sum, 1);
  }

 private:
  char* own_;  // the lane's first piece
  Values scales_[kHasNorm ? kLoads : 1];
  float unit_ = 0.f, weight_unit_ = 0.f, bias_unit_ = 0.f;
};

}  // namespace fuseopt
