// The norm of one row as a part of the products with it. With xhat = (x - mean) * rstd and g, b the norm's weight and bias,
//   sum_k w * (xhat * g + b) = rstd * (sum_k w * (x * g) - mean * sum_k w * g) + sum_k w * b.
// A product on the tensor cores has room for eight rows of factors, so all three sums are made at once. x * g goes in as two
// numbers of T, the second what the first has lost in rounding: of a mean that is many deviations from zero little is lost.
#pragma once

#include "decode_linear_rows.cuh"

namespace fuseopt {

constexpr int kFoldedRowBits = 2;  // 2 to the power of this: rows of factors

template <typename T>
class FoldedNorm {
 public:
  static constexpr int kSums = 3;  // of each output column, over a warp's part of K

  // `rows`: in shared memory, `stride` apart. The warp has K from `first_k` on, up to `end_k` with zeros from
  // `layer.columns` on.
  __device__ FoldedNorm(const MmaLayer<T>& layer, T* rows, int stride, int first_k, int end_k)
      : layer_(layer), rows_(rows), stride_(stride), first_k_(first_k + lane() * kLaneValues), end_k_(end_k) {}

  // The rows of g and b, ahead of the wait.
  __device__ void load_parameters() const {
#pragma unroll 1
    for (int k = first_k_; k < end_k_; k += kStep) {
      uint4 scale = {kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>}, shift = {};
      if (layer_.norm_weight != nullptr && k < layer_.columns) scale = load_once<uint4>(layer_.norm_weight + k);
      if (layer_.norm_bias != nullptr && k < layer_.columns) shift = load_once<uint4>(layer_.norm_bias + k);
      *reinterpret_cast<uint4*>(row(kScales) + k) = scale;
      *reinterpret_cast<uint4*>(row(kShifts) + k) = shift;
    }
  }

  // The rows of x * g; in all lanes, the deviations of the warp's part of x from `pivot`.
  __device__ Deviations load_input(float pivot) const {
    Deviations deviations;
#pragma unroll 1
    for (int k = first_k_; k < end_k_; k += kStep) {
      const Piece scale = *reinterpret_cast<const Piece*>(row(kScales) + k);
      Piece x = {}, high, low;
      if (k < layer_.columns) {
        x = load_fresh(static_cast<const T*>(layer_.input) + k);
        deviations.add(x, pivot);
      }
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        const float scaled = x[i] * scale[i] * kRoom;
        high.values[i] = from_acc<T>(scaled);
        low.values[i] = from_acc<T>(scaled - to_float(high.values[i]));
      }
      *reinterpret_cast<Piece*>(row(kHigh) + k) = high;
      *reinterpret_cast<Piece*>(row(kLow) + k) = low;
    }
    deviations.add_lanes<kWarpSize>();
    return deviations;
  }

  // Of two tiles of columns, what `multiply` makes of these rows, to sums [kSums][sums_stride].
  static __device__ void store_sums(const float (&of_tiles)[4], float* sums, int sums_stride, int column) {
    const int pair = lane() % 4 * 2;  // the two rows of factors that the lane has sums with
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = column + i * kTileColumns + lane() / 4;
      const float first = of_tiles[2 * i], second = of_tiles[2 * i + 1];
      if (pair == kHigh) sums[at] = first + second;
      if (pair != kScales) continue;
      sums[sums_stride + at] = first;
      sums[2 * sums_stride + at] = second;
    }
  }

  // Of one column, from its sums over all of K and the whole row's deviations from `pivot`.
  __device__ float output(const float (&sums)[kSums], const Deviations& deviations, float pivot) const {
    const float reciprocal = __fdividef(1.f, layer_.columns);
    const float2 norm = deviations.normalisation(pivot, reciprocal, layer_.is_layer_norm, layer_.eps);
    return norm.y * (sums[0] * (1 / kRoom) - norm.x * sums[1]) + sums[2];
  }

 private:
  using Piece = Vector<T, kLaneValues>;
  enum Row { kHigh, kLow, kScales, kShifts };
  static constexpr int kStep = kWarpSize * kLaneValues;
  static constexpr float kRoom = std::is_same_v<T, __half> ? 1 / 256.f : 1.f;  // keeps x * g in the range of T

  static __device__ int lane() { return threadIdx.x % kWarpSize; }
  __device__ T* row(Row which) const { return rows_ + which * stride_; }

  const MmaLayer<T>& layer_;
  T* const rows_;
  const int stride_, first_k_, end_k_;
};

}  // namespace fuseopt
