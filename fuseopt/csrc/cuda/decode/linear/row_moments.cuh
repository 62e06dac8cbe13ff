// Mean and deviation of the input's rows, for the norm that decode_linear's tensor core kernels apply.
//
// A norm needs no pass of its own. With xhat = (x - mean) * rstd and g, b the norm's weight and bias,
//   sum_k w * (xhat * g + b) = rstd * (sum_k (w * g) * x - mean * sum_k w * g) + sum_k w * b.
// All but the sum over x is computed before the wait. Sums of x and of its squares are two more products. w * g is rounded
// once to the weight's dtype, as upstream rounds xhat * g + b.
#pragma once

#include "cuda/decode/linear/params.cuh"

namespace fuseopt {

// Mean of a part of a row, and sum of its squared deviations.
struct Moments {
  float mean, squares;
};

// Sums over a part of a row of what its values are above a pivot, and of the squares.
struct Deviations {
  float sum = 0.f, squares = 0.f;

  __device__ void add(const Deviations& others) { sum += others.sum, squares += others.squares; }

  template <typename X>
  __device__ void add(const Vector<X, kLaneValues>& x, float pivot) {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const float deviation = x[i] - pivot;
      sum += deviation;
      squares = fmaf(deviation, deviation, squares);
    }
  }

  __device__ void add_other_lane(int distance) {
    sum += __shfl_xor_sync(kFullWarp, sum, distance);
    squares += __shfl_xor_sync(kFullWarp, squares, distance);
  }

  // Of the lanes that share a row.
  template <int kLanes>
  __device__ void add_lanes() {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) add_other_lane(distance);
  }

  __device__ Moments moments(float pivot, float reciprocal_of_count) const {
    const float above = sum * reciprocal_of_count;
    return {pivot + above, squares - sum * above};
  }

  // Mean and 1 / deviation of a whole row; an RMSNorm has no mean.
  __device__ float2 normalisation(float pivot, float reciprocal_of_count, bool is_layer_norm, float eps) const {
    const Moments of_row = moments(pivot, reciprocal_of_count);
    const float square = is_layer_norm ? 0.f : of_row.mean * of_row.mean;
    return {is_layer_norm ? of_row.mean : 0.f, rsqrtf(of_row.squares * reciprocal_of_count + square + eps)};
  }
};
// Of a row's deviations from `mean`, over every `step`-th piece of 8 values. Not inlined: it is hardly ever called.
template <typename Row>
__device__ __noinline__ float sum_of_squares(Row row, int columns, int piece, int step, float mean) {
  float squares = 0.f;
#pragma unroll 1
  for (int k = piece * kLaneValues; k < columns; k += step * kLaneValues) {
    Deviations deviations;
    deviations.add(row(k), mean);
    squares += deviations.squares;
  }
  return squares;
}

// Sums of a part of 8 rows and of its squares, by products of the rows with one another, of which the diagonal counts, and
// with ones. Lane / 4 is the row of what a lane adds.
template <typename T>
struct RowPowers {
  float products[4] = {};

  __device__ void add(const uint4& x) {
    multiply<T>(products, {x.x, x.y}, {kOnes<T>, kOnes<T>}, x.x, x.y);
    multiply<T>(products, {x.z, x.w}, {kOnes<T>, kOnes<T>}, x.z, x.w);
  }

  // Whether the lane has the sums of row lane / 4.
  static __device__ bool has_row() { return threadIdx.x % kWarpSize / 8 == threadIdx.x % 4; }
  __device__ Deviations of_row() const {
    const bool is_odd = threadIdx.x / 4 % 2 == 1;
    return is_odd ? Deviations{products[3], products[1]} : Deviations{products[2], products[0]};
  }
};

// Mean and 1 / deviation of a row, of which `all` has the sums above 0; an RMSNorm's mean is not asked for. By all lanes
// of a warp, of which kLanes neighbours share a row, of which `row(k)` gives 8 values.
template <int kLanes, typename Row>
__device__ inline float2 normalisation_of(const Deviations& all, Row row, int columns, float reciprocal,
                                          bool is_layer_norm, float eps) {
  // Sums of squares say little of the deviations of a row whose mean is many of them from zero: those are summed then.
  constexpr float kSafe = 1 / 128.f;
  Moments moments = all.moments(0.f, reciprocal);
  const bool is_safe = moments.squares * reciprocal >= kSafe * moments.mean * moments.mean;
  if (is_layer_norm && __any_sync(kFullWarp, !is_safe)) {
    float squares = sum_of_squares(row, columns, threadIdx.x % kLanes, kLanes, moments.mean);
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) squares += __shfl_xor_sync(kFullWarp, squares, distance);
    if (!is_safe) moments.squares = squares;
  }
  const float variance = moments.squares * reciprocal + (is_layer_norm ? 0.f : moments.mean * moments.mean);
  return {moments.mean, rsqrtf(variance + eps)};
}

// Mean and 1 / deviation of rows lane / 4 and, with two halves, 8 below it, all of whose values are loaded for that: by
// all threads of a block. `load(pass)` fills `x`, of which `is_there(pass, chunk)` tells which chunks there are.
template <typename T, typename X, int kHalves, int kChunks, typename Load, typename IsThere>
__device__ inline void normalise_in_passes(const MmaLayer<T>& layer, int passes,
                                           const Vector<X, kLaneValues> (&x)[kHalves][kChunks], Load load,
                                           IsThere is_there, Deviations* deviations_of, float2 (&norms)[kHalves]) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  float pivots[kHalves];
  Deviations deviations[kHalves];
  const auto own_row = [&](int h) { return min(lane / 4 + h * kHalfRows, layer.rows - 1); };
#pragma unroll
  for (int h = 0; h < kHalves; ++h) pivots[h] = static_cast<const X*>(layer.input)[own_row(h) * layer.in_features];
  for (int pass = 0; pass < passes; ++pass) {
    load(pass);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (is_there(pass, c)) deviations[h].add(x[h][c], pivots[h]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int r = lane / 4 + h * kHalfRows;
    deviations[h].template add_lanes<4>();
    if (lane % 4 == 0 && r < layer.rows) deviations_of[r * warps + warp] = deviations[h];
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    Deviations all;
#pragma unroll 4
    for (int w = 0; w < warps; ++w) all.add(deviations_of[own_row(h) * warps + w]);
    norms[h] = all.normalisation(pivots[h], layer.reciprocal, layer.is_layer_norm, layer.eps);
  }
}

// Mean and 1 / deviation of a row from the moments of `parts` parts of `part_columns` values, the last one shorter;
// an RMSNorm has no mean.
__device__ inline float2 normalisation(const Moments* moments, int stride, int parts, int part_columns, int columns,
                                       bool is_layer_norm, float eps) {
  const float reciprocal = __fdividef(1.f, columns);
  const auto count = [&](int part) { return static_cast<float>(max(min(columns - part * part_columns, part_columns), 0)); };
  float mean = 0.f, squares = 0.f;
#pragma unroll 4
  for (int part = 0; part < parts; ++part) mean = fmaf(moments[part * stride].mean, count(part), mean);
  mean *= reciprocal;
#pragma unroll 4
  for (int part = 0; part < parts; ++part) {
    const float difference = moments[part * stride].mean - mean;
    squares += fmaf(difference * difference, count(part), moments[part * stride].squares);
  }
  const float variance = squares * reciprocal + (is_layer_norm ? 0.f : mean * mean);
  return {is_layer_norm ? mean : 0.f, rsqrtf(variance + eps)};
}

// 1 / deviation of a row without a mean, from the sums of its parts' squares.
__device__ inline float rstd_of(const Moments* moments, int stride, int parts, float reciprocal_of_count, float eps) {
  float squares = 0.f;
#pragma unroll 4
  for (int part = 0; part < parts; ++part) squares += moments[part * stride].squares;
  return rsqrtf(fmaf(squares, reciprocal_of_count, eps));
}

}  // namespace fuseopt
