// Rows of decode_linear's kernel for float32: their norm, and sums over lanes.
#pragma once

#include "cuda/decode/linear/fma_stream.cuh"

namespace fuseopt {

// Adds up kCount values over lanes kDistance and further apart. Each lane keeps the sums of a part of the values: those
// from `first` on, in the place of the first ones. Where lanes outnumber values, `is_owner` is left to one of each.
template <int kCount, int kDistance>
__device__ inline void sum_over_lanes(float* values, int& first, bool& is_owner) {
  if constexpr (kDistance < kWarpSize) {
    const bool is_upper = (threadIdx.x & kDistance) != 0;
    if constexpr (kCount > 1) {
      constexpr int kHalf = kCount / 2;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float given = is_upper ? values[i] : values[i + kHalf], kept = is_upper ? values[i + kHalf] : values[i];
        values[i] = kept + __shfl_xor_sync(kFullWarp, given, kDistance);
      }
      if (is_upper) first += kHalf;
      sum_over_lanes<kHalf, 2 * kDistance>(values, first, is_owner);
    } else {
      values[0] += __shfl_xor_sync(kFullWarp, values[0], kDistance);
      is_owner = is_owner && !is_upper;
      sum_over_lanes<1, 2 * kDistance>(values, first, is_owner);
    }
  }
}

// A row's sums of values and of their squares; or, for a norm, what is subtracted from values and the factor after it.
struct RowSums {
  float sum = 0.f, squares = 0.f;

  __device__ void add(const float4& x) {
    sum += (x.x + x.y) + (x.z + x.w);
    squares = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, fmaf(x.w, x.w, squares))));
  }
  __device__ void add(const RowSums& others) { sum += others.sum, squares += others.squares; }
  __device__ void add_lanes() {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      add(RowSums{__shfl_xor_sync(kFullWarp, sum, distance), __shfl_xor_sync(kFullWarp, squares, distance)});
    }
  }
};

// Mean and 1 / deviation of a row of `columns` values, four of which `row(k)` gives; an RMS norm subtracts no mean. By all
// lanes of a warp.
template <typename Row>
__device__ inline RowSums normalisation_of(const RowSums& all, Row row, int columns, const FmaLayer& layer) {
  const float mean = layer.is_layer_norm ? all.sum * layer.reciprocal : 0.f;
  float variance = all.squares * layer.reciprocal - mean * mean;
  // The difference loses precision if the mean exceeds the deviation; then squared deviations are added up.
  if (!(variance >= mean * mean)) {
    RowSums deviations;
#pragma unroll 1
    for (int k = threadIdx.x % kWarpSize * kFmaTile; k < columns; k += kWarpSize * kFmaTile) {
      const float4 x = row(k);
      deviations.add(float4{x.x - mean, x.y - mean, x.z - mean, x.w - mean});
    }
    deviations.add_lanes();
    variance = deviations.squares * layer.reciprocal;
  }
  return {mean, rsqrtf(variance + layer.eps)};
}

__device__ inline float4 normalised(const float4& x, const RowSums& norm, const float4& scale, const float4& shift) {
  const auto of = [&](float x, float scale, float shift) { return fmaf((x - norm.sum) * norm.squares, scale, shift); };
  return {of(x.x, scale.x, shift.x), of(x.y, scale.y, shift.y), of(x.z, scale.z, shift.z), of(x.w, scale.w, shift.w)};
}

constexpr int kSoftmaxGroup = 128;  // scores

// Softmax of a group's scores, four of which each lane has.
__device__ inline float4 softmax_of_warp(const float4& x) {
  const float highest = warp_reduce<Max>(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
  const float4 powers = {expf(x.x - highest), expf(x.y - highest), expf(x.z - highest), expf(x.w - highest)};
  const float factor = 1.f / warp_reduce<Sum>((powers.x + powers.y) + (powers.z + powers.w));
  return {powers.x * factor, powers.y * factor, powers.z * factor, powers.w * factor};
}

}  // namespace fuseopt
