// Products of a tile's warps (tiles.cuh): of 16-bit values, and of float32 as the sum of three products of TF32.
#pragma once

#include "cuda/common/tensor_core.cuh"
#include "cuda/decode/linear/params.cuh"

namespace fuseopt {

// A warp's sums of a stage. For 16-bit values those of all stages; for float32, which the tensor cores would add up with
// less than its precision, each stage's are added to those by themselves.
template <typename T, int kHalf>
struct TileSums {
  using Sums = float[kHalf][2 * kHalf][4];
  Sums& sums;

  __device__ explicit TileSums(Sums& of_all) : sums(of_all) {}
  __device__ void add(const uint4 (&x)[kHalf], const uint4 (&w)[kHalf]) {
#pragma unroll
    for (int h = 0; h < kHalf; ++h) {
#pragma unroll
      for (int j = 0; j < kHalf; ++j) {
        multiply<T>(sums[h][2 * j], {x[h].x, x[h].z}, {x[h].y, x[h].w}, w[j].x, w[j].y);
        multiply<T>(sums[h][2 * j + 1], {x[h].x, x[h].z}, {x[h].y, x[h].w}, w[j].z, w[j].w);
      }
    }
  }
  __device__ void end(Sums&) const {}
};

template <int kHalf>
struct TileSums<float, kHalf> {
  using Sums = float[kHalf][2 * kHalf][4];
  Sums sums = {};

  __device__ explicit TileSums(const Sums&) {}
  __device__ void add(const uint4 (&x)[kHalf], const uint4 (&w)[kHalf]) {
    unsigned w_high[kHalf][4], w_low[kHalf][4];
#pragma unroll
    for (int j = 0; j < kHalf; ++j) split(w[j], w_high[j], w_low[j]);
#pragma unroll
    for (int h = 0; h < kHalf; ++h) {
      unsigned high[4], low[4];
      split(x[h], high, low);
      // The smaller products first, and neighbours independent of each other.
#pragma unroll
      for (int p = 0; p < 3; ++p) {
#pragma unroll
        for (int j = 0; j < 2 * kHalf; ++j) {
          const auto& of_w = p == 1 ? w_low[j / 2] : w_high[j / 2];
          multiply_tf32(sums[h][j], p == 0 ? low : high, of_w[j % 2 * 2], of_w[j % 2 * 2 + 1]);
        }
      }
    }
  }
  __device__ void end(Sums& all) const {
#pragma unroll
    for (int h = 0; h < kHalf; ++h) {
#pragma unroll
      for (int j = 0; j < 2 * kHalf; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) all[h][j][i] += sums[h][j][i];
      }
    }
  }

 private:
  static __device__ void split(const uint4& words, unsigned (&high)[4], unsigned (&low)[4]) {
    const Tf32Parts parts[] = {Tf32Parts(words.x), Tf32Parts(words.y), Tf32Parts(words.z), Tf32Parts(words.w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) high[i] = parts[i].high, low[i] = parts[i].low;
  }
};

// Sums of squares of 16 rows, lane / 4 and the one 8 below, of which `TileRing::rows` gives parts.
template <typename T>
struct TileSquares {
  float products[2][4] = {};  // of the rows with one another: the diagonal counts

  __device__ void add(const uint4& x) {
    multiply<T>(products[0], {x.x, x.z}, {x.y, x.w}, x.x, x.z);
    multiply<T>(products[1], {x.x, x.z}, {x.y, x.w}, x.y, x.w);
  }
  __device__ void leave(float* at) const {
    const int lane = threadIdx.x % kWarpSize;
    if (lane / 8 != lane % 4) return;
    const bool is_odd = lane / 4 % 2;
    at[0] = is_odd ? products[0][1] : products[0][0];
    at[8] = is_odd ? products[1][3] : products[1][2];
  }
};

template <>
struct TileSquares<float> {
  float low = 0.f, high = 0.f;

  __device__ void add(const uint4& x) {
    const auto& values = reinterpret_cast<const float4&>(x);
    low = fmaf(values.x, values.x, fmaf(values.z, values.z, low));
    high = fmaf(values.y, values.y, fmaf(values.w, values.w, high));
  }
  __device__ void leave(float* at) {
    low = warp_reduce<Sum, 4>(low), high = warp_reduce<Sum, 4>(high);
    if (threadIdx.x % 4 == 0) at[0] = low, at[8] = high;
  }
};

// Multiplies a product's part of 16 columns with the norm's weight, which begins at `scale`, or with one more.
template <typename T>
__device__ inline void scale_product(uint4& w, const T* scale, bool adds_one) {
  if constexpr (std::is_same_v<T, float>) {
    const float more = adds_one ? 1.f : 0.f;
    const float low = scale[threadIdx.x % 4] + more, high = scale[threadIdx.x % 4 + 4] + more;
    auto& values = reinterpret_cast<float4&>(w);
    values = {values.x * low, values.y * high, values.z * low, values.w * high};
  } else {
    const unsigned low = *reinterpret_cast<const unsigned*>(scale + threadIdx.x % 4 * 2);
    const unsigned high = *reinterpret_cast<const unsigned*>(scale + threadIdx.x % 4 * 2 + 8);
    const auto scaled = [&](unsigned pair, unsigned by) {
      return adds_one ? fma_pair<T>(pair, by, pair) : multiply_pair<T>(pair, by);
    };
    w = {scaled(w.x, low), scaled(w.y, high), scaled(w.z, low), scaled(w.w, high)};
  }
}

// The sum of an output by multiply-adds. For float32 that is infinite or NaN, of which products of parts say nothing.
template <Layout kLayout>
__device__ __noinline__ float slow_product(const MmaLayer<float>& layer, int row, int column) {
  const bool is_kn = kLayout == Layout::kColMajorKN;
  const float* const x = static_cast<const float*>(layer.input) + static_cast<int64_t>(row) * layer.in_features;
  const float* const w = layer.weights[blockIdx.y] + (is_kn ? column : static_cast<int64_t>(column) * layer.weight_stride);
  float sum = 0.f;
#pragma unroll 1
  for (int k = 0; k < layer.in_features; ++k) {
    const float scale = layer.norm_weight != nullptr ? layer.norm_weight[k] + (layer.adds_one ? 1.f : 0.f) : 1.f;
    sum = fmaf(x[k], w[static_cast<int64_t>(k) * (is_kn ? layer.weight_stride : 1)] * scale, sum);
  }
  return sum;
}

}  // namespace fuseopt
