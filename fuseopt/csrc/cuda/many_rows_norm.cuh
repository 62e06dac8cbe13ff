// The norm of decode_linear's kernel of many rows.
#pragma once

#include "decode_linear_rows.cuh"

namespace fuseopt {

// Mean and 1 / deviation of rows, from sums of each warp's part of them and of its squares: of row r warp w has
// moments[w * stride + r].
template <typename T>
__device__ inline void find_norms(const MmaLayer<T>& layer, int first_row, int rows, const float2* moments, int stride,
                                  float2* norms) {
  constexpr int kLanes = 8, kRows = kWarpSize / kLanes;  // that share a row; of a warp
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int columns = layer.columns;
  const auto add_lanes = [](float sum) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(kFullWarp, sum, distance);
    return sum;
  };
  for (int first = warp * kRows; first < rows; first += warps * kRows) {
    const int r = first + lane / kLanes;
    float2 total = {0.f, 0.f};
    for (int w = lane % kLanes; w < warps; w += kLanes) {
      const float2 own = moments[w * stride + r];
      total.x += own.x, total.y += own.y;
    }
    const float mean = layer.is_layer_norm ? __fdividef(add_lanes(total.x), columns) : 0.f;
    float variance = __fdividef(add_lanes(total.y), columns) - mean * mean;
    // Where the squares are little more than the mean's, their difference is lost.
    if (__any_sync(kFullWarp, mean * mean > 16.f * variance)) {
      const T* const input = static_cast<const T*>(layer.input) + (first_row + r) * columns;
      float squares = 0.f;
      for (int k = lane % kLanes * kLaneValues; k < columns && r < rows; k += kLanes * kLaneValues) {
        const auto values = *reinterpret_cast<const Vector<T, kLaneValues>*>(input + k);
#pragma unroll
        for (int i = 0; i < kLaneValues; ++i) squares += (values[i] - mean) * (values[i] - mean);
      }
      variance = __fdividef(add_lanes(squares), columns);
    }
    if (lane % kLanes == 0) norms[r] = {mean, rsqrtf(variance + layer.eps)};
  }
}

}  // namespace fuseopt
