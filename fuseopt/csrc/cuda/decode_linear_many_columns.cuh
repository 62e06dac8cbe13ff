// decode_linear for weights [N, K] of so many columns that each warp has 16 of its own, a vocabulary's say: no sums are
// shared, and a norm is applied once a block, to the input, which all its warps read from shared memory.
#pragma once

#include "decode_linear_rows.cuh"

namespace fuseopt {

constexpr int kManyColumnsWarps = 8;
constexpr int kTilePair = 2 * kTileColumns;
constexpr int kDepth = 4;  // chunks of the weight on the way, for each warp
constexpr int kHeld = 4;   // chunks of the input in a lane's registers

// Elements from one row in shared memory to the next: neighbouring rows start 16 banks apart.
__host__ __device__ inline int row_stride(int64_t columns) { return static_cast<int>((columns + 63) / 64 * 64 + 32); }

__device__ inline void copy_16_bytes(void* to, const void* from) {
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
}

template <typename T, int kHalves>
__global__ void __launch_bounds__(kManyColumnsWarps* kWarpSize, kHalves == 1 ? 3 : 2)
    decode_linear_many_columns_kernel(const __grid_constant__ MmaLayer<T> layer) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, own = lane % 4 * kLaneValues;
  const int rows = layer.rows, columns = layer.columns, stride = row_stride(columns);
  extern __shared__ __align__(16) char shared[];
  T* const input = reinterpret_cast<T*>(shared);  // [rows][stride]
  T *const scale = input + rows * stride, *const shift = scale + stride;  // the norm's parameters
  __shared__ Moments moments[kManyColumnsWarps][kHalves * kHalfRows];

  let_successor_start();
  const int column = (blockIdx.x * kManyColumnsWarps + warp) * kTilePair + lane / 4;
  const bool has_low = column < layer.outputs, has_high = column + kTileColumns < layer.outputs;
  const T* weight = layer.weights[blockIdx.y] + static_cast<int64_t>(column) * layer.weight_stride + own;
  const int64_t to_high = static_cast<int64_t>(kTileColumns) * layer.weight_stride;
  uint4 low[kDepth] = {}, high[kDepth] = {};
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    const bool is_inside = d * kChunk + own < columns;
    if (has_low && is_inside) low[d] = load_once<uint4>(weight + d * kChunk);
    if (has_high && is_inside) high[d] = load_once<uint4>(weight + to_high + d * kChunk);
  }
  for (int k = threadIdx.x * kLaneValues; k < columns; k += blockDim.x * kLaneValues) {
    if (layer.norm_weight != nullptr) copy_16_bytes(scale + k, layer.norm_weight + k);
    if (layer.norm_bias != nullptr) copy_16_bytes(shift + k, layer.norm_bias + k);
  }
  prefetch_ahead(layer);
  wait_for_predecessor();

  // Warps share out the chunks of the input; a lane has rows lane / 4 (+ 8).
  const int chunks = (columns + kChunk - 1) / kChunk;
  const int part_columns = (chunks + kManyColumnsWarps - 1) / kManyColumnsWarps * kChunk, first_k = warp * part_columns;
  const bool has_norm = layer.is_rms_norm || layer.is_layer_norm;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int row = lane / 4 + h * kHalfRows;
    Vector<T, kLaneValues> x[kHeld];
    const auto load = [&](int first) {
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        const int k = first_k + first + c * kChunk + own;
        x[c] = {};
        if (row < rows && first + c * kChunk < part_columns && k < columns) {
          x[c] = *reinterpret_cast<const Vector<T, kLaneValues>*>(static_cast<const T*>(layer.input) + row * columns + k);
        }
      }
    };
    load(0);
    float2 norm = {0.f, 1.f};
    if (has_norm) {
      Moments total = {};
      float taken = 0.f;
#pragma unroll 1
      for (int first = 0; first < part_columns; first += kHeld * kChunk) {
        if (first > 0) load(first);
        const int count = max(min(columns - first_k, part_columns) - first, 0);
        add_moments(total, taken, moments_of<T, kHeld>(x, min(count, kHeld * kChunk)), min(count, kHeld * kChunk));
      }
      if (lane % 4 == 0) moments[warp][row] = total;
      __syncthreads();
      norm = normalisation(&moments[0][row], kHalves * kHalfRows, kManyColumnsWarps, part_columns, columns,
                           layer.is_layer_norm, layer.eps);
    }
#pragma unroll 1
    for (int first = 0; first < part_columns; first += kHeld * kChunk) {
      if (part_columns > kHeld * kChunk) load(first);
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        const int k = first_k + first + c * kChunk + own;
        if (row >= rows || first + c * kChunk >= part_columns || k >= columns) continue;
        float values[kLaneValues];
#pragma unroll
        for (int i = 0; i < kLaneValues; ++i) values[i] = (x[c][i] - norm.x) * norm.y;
        if (layer.is_rms_norm) round_floats_as<T>(values);
        if (layer.norm_weight != nullptr) {
          const auto factors = *reinterpret_cast<const Vector<T, kLaneValues>*>(scale + k);
#pragma unroll
          for (int i = 0; i < kLaneValues; ++i) values[i] *= factors[i];
        }
        if (layer.norm_bias != nullptr) {
          const auto terms = *reinterpret_cast<const Vector<T, kLaneValues>*>(shift + k);
#pragma unroll
          for (int i = 0; i < kLaneValues; ++i) values[i] += terms[i];
        }
        store_floats_as<T>(input + row * stride + k, 0, values);
      }
    }
  }
  __syncthreads();

  // A product takes all lanes, those too whose k has come to its end.
  float sums[kHalves][4] = {};
#pragma unroll 1
  for (int first = 0; first < columns; first += kDepth * kChunk, weight += kDepth * kChunk) {
    const int k = first + own;
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int row = lane / 4 + h * kHalfRows;
        uint4 x = {};
        if (row < rows && k + d * kChunk < columns) {
          x = *reinterpret_cast<const uint4*>(input + row * stride + k + d * kChunk);
        }
        multiply<T>(sums[h], {low[d].x, low[d].y}, {high[d].x, high[d].y}, x.x, x.y);
        multiply<T>(sums[h], {low[d].z, low[d].w}, {high[d].z, high[d].w}, x.z, x.w);
      }
      const bool is_inside = k + (d + kDepth) * kChunk < columns;
      if (has_low && is_inside) low[d] = load_once<uint4>(weight + (d + kDepth) * kChunk);
      if (has_high && is_inside) high[d] = load_once<uint4>(weight + to_high + (d + kDepth) * kChunk);
    }
  }

#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane % 4 * 2 + i % 2 + h * kHalfRows, n = column + i / 2 * kTileColumns;
      if (row >= rows || n >= layer.outputs) continue;
      const float bias = layer.biases[0] == nullptr ? 0.f : to_float(layer.biases[blockIdx.y][n]);
      const int64_t at = static_cast<int64_t>(row) * layer.output_stride + blockIdx.y * layer.outputs + n;
      layer.store(at, activate_quickly(layer.activation, sums[h][i] + bias) + layer.load_residual(at));
    }
  }
}

inline size_t many_columns_shared_bytes(const DecodeLinear& layer) {
  return (layer.rows + 2) * row_stride(layer.columns) * sizeof(uint16_t);
}

// Whether there are columns for about every warp of the device, and room for the input beside other blocks.
inline bool has_many_columns(const DecodeLinear& layer) {
  constexpr size_t kMostSharedBytes = 64 * 1024;
  return !layer.weights_are_transposed && !layer.gated && many_columns_shared_bytes(layer) <= kMostSharedBytes &&
         layer.outputs * layer.weight_count >= kTilePair * kManyColumnsWarps * multiprocessor_count();
}

template <typename T>
cudaError_t launch_many_columns(const DecodeLinear& layer, cudaStream_t stream) {
  MmaLayer<T> mma = mma_layer<T>(layer);
  const LaunchShape shape{static_cast<unsigned>(ceil_div(layer.outputs, kTilePair * kManyColumnsWarps)),
                          kManyColumnsWarps * kWarpSize, many_columns_shared_bytes(layer), 1,
                          static_cast<unsigned>(layer.weight_count)};
  mma.share_ahead(shape);
  const auto kernel = layer.rows <= kHalfRows ? decode_linear_many_columns_kernel<T, 1>
                                              : decode_linear_many_columns_kernel<T, 2>;
  return launch_dependent(kernel, mma, shape, layer.overlap, stream);
}

}  // namespace fuseopt
