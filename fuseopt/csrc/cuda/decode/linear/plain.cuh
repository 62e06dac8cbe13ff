// decode_linear for weights of any dtype, layout and alignment in plain multiply-adds. A block has a strip of 8 output
// columns. The input goes through shared memory, normalised, in pieces of K; the weight goes straight to registers, and
// into the L2 cache before that. How a weight is stored is known to `Weights` alone.
#pragma once

#include "cuda/decode/linear/decode_linear.cuh"

namespace fuseopt::decode_linear {

constexpr int kPlainThreads = 256;
constexpr int kPlainWarps = kPlainThreads / kWarpSize;
constexpr int kPiece = 1024;  // values of k in shared memory at a time

template <typename W>
using AccFor = std::conditional_t<std::is_same_v<W, double>, double, float>;

__host__ __device__ inline int strip_count(int64_t width) {
  return static_cast<int>((width + kTileColumns - 1) / kTileColumns);
}

// The kTileColumns outputs from `column` on of weight `weight` (and of the gate beside it), which a block computes.
struct Strip {
  int weight = 0;
  int column;

  __device__ Strip(const DecodeLinear& layer, int index) {
    for (; index >= strip_count(layer.widths[weight]); ++weight) index -= strip_count(layer.widths[weight]);
    column = index * kTileColumns;
  }

  // The weight's first output. Computed where it is used, as registers are short before.
  __device__ int64_t first_output(const DecodeLinear& layer) const {
    int64_t first = 0;
    for (int i = 0; i < weight; ++i) first += layer.widths[i];
    return first;
  }
};

struct PlainLayer {
  DecodeLinear layer;
  int64_t first_row;  // of the rows that this launch takes
  int64_t output_columns;

  explicit PlainLayer(const DecodeLinear& of) : layer(of), first_row(0), output_columns(fuseopt::output_columns(of)) {}
};

// 16 bytes of a weight from `element` on; zeros past the first `valid` elements.
template <typename W, typename Acc, int kWidth>
__device__ inline void load_weights(const W* weight, int64_t element, int64_t valid, bool aligned, Acc (&out)[kWidth]) {
  if (aligned && valid >= kWidth) {
    const auto vector = *reinterpret_cast<const Vector<W>*>(weight + element);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if constexpr (std::is_same_v<W, double>) out[i] = vector.values[i];
      else out[i] = vector[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      out[i] = i < valid ? load_as<Acc>({const_cast<W*>(weight), kDType<W>}, element + i) : Acc(0);
    }
  }
}

// Floating point weights.
template <typename W>
struct DenseWeights : PlainLayer {
  using Value = W;
  static constexpr int kWidth = kVectorWidth<W>;
  static constexpr bool kMayBeTransposed = true;
  bool aligned;

  explicit DenseWeights(const DecodeLinear& of) : PlainLayer(of), aligned(of.weight_stride * sizeof(W) % kAccessBytes == 0) {
    for (int i = 0; i < of.weight_count; ++i) aligned &= is_aligned(of.weights[i]);
  }

  // Of output `column`, from `k` on.
  template <typename Acc>
  __device__ void load(int weight, int column, int64_t k, int64_t valid, Acc (&out)[kWidth]) const {
    load_weights(of(weight), column * layer.weight_stride + k, valid, aligned, out);
  }

  // Of `k`, from output `column` on.
  template <typename Acc>
  __device__ void load_transposed(int weight, int column, int64_t k, int64_t valid, Acc (&out)[kWidth]) const {
    load_weights(of(weight), k * layer.weight_stride + column, valid, aligned, out);
  }

  __device__ void prefetch(int weight, int column, int width) const {
    constexpr int kLine = 128 / sizeof(W);
    const int64_t outer = layer.weights_are_transposed ? layer.in_features : min(width - column, kTileColumns);
    const int64_t lines = layer.weights_are_transposed ? 1 : (layer.in_features + kLine - 1) / kLine;
    for (int64_t i = threadIdx.x; i < outer * lines; i += kPlainThreads) {
      const int64_t element = layer.weights_are_transposed ? i * layer.weight_stride + column
                                                           : (column + i / lines) * layer.weight_stride + i % lines * kLine;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(of(weight) + element));
    }
  }

 private:
  __device__ const W* of(int weight) const { return static_cast<const W*>(layer.weights[weight]); }
};

// The mean to subtract and the factor to multiply a row with.
template <typename Acc>
__device__ inline void normalisation(const DecodeLinear& layer, int64_t row, Acc& shift, Acc& rstd) {
  const int lane = threadIdx.x % kWarpSize;
  shift = 0;
  if (layer.norm == kLayerNorm) {
    Acc sum = 0;
    for (int64_t k = lane; k < layer.in_features; k += kWarpSize) sum += load_as<Acc>(layer.input, row * layer.in_features + k);
    shift = warp_reduce<Sum>(sum) / layer.in_features;
  }
  Acc squares = 0;
  for (int64_t k = lane; k < layer.in_features; k += kWarpSize) {
    const Acc deviation = load_as<Acc>(layer.input, row * layer.in_features + k) - shift;
    squares += deviation * deviation;
  }
  rstd = 1 / sqrt(warp_reduce<Sum>(squares) / layer.in_features + static_cast<Acc>(layer.eps));
}

template <typename Weights, int kRows>
__global__ void __launch_bounds__(kPlainThreads) decode_linear_plain_kernel(const __grid_constant__ Weights plain) {
  using W = typename Weights::Value;
  using Acc = AccFor<W>;
  constexpr int kWidth = Weights::kWidth;
  constexpr int kGroups = kTileColumns / kWidth;  // of columns, in a transposed weight
  static_assert(kGroups >= 1 && kTileColumns == kPlainWarps);
  const DecodeLinear& layer = plain.layer;
  const int64_t rows = layer.rows - plain.first_row < kRows ? layer.rows - plain.first_row : kRows;
  const Strip strip(layer, blockIdx.x);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int width = static_cast<int>(layer.widths[strip.weight]);

  __shared__ Acc input[kRows][kPiece];
  __shared__ Acc shift[kRows], rstd[kRows];
  __shared__ Acc parts[2][kPlainWarps][kRows][kTileColumns];

  let_successor_start();
  for (int g = 0; g < (layer.gated ? 2 : 1); ++g) plain.prefetch(layer.gated ? g : strip.weight, strip.column, width);
  wait_for_predecessor();

  for (int64_t row = warp; row < rows; row += kPlainWarps) {
    Acc row_shift = 0, row_rstd = 1;
    if (layer.norm != kNoNorm) normalisation(layer, plain.first_row + row, row_shift, row_rstd);
    if (lane == 0) shift[row] = row_shift, rstd[row] = row_rstd;
  }

  for (int g = 0; g < (layer.gated ? 2 : 1); ++g) {
    const int weight = layer.gated ? g : strip.weight;
    // Of one column (weight [N, K]: its warp's), or of kWidth neighbours (weight [K, N]).
    Acc sums[kRows][kWidth] = {};
    for (int64_t begin = 0; begin < layer.in_features; begin += kPiece) {
      const int piece = static_cast<int>(min(layer.in_features - begin, int64_t(kPiece)));
      __syncthreads();
      for (int i = threadIdx.x; i < kRows * kPiece; i += kPlainThreads) {
        const int row = i / kPiece, k = i % kPiece;
        Acc x = 0;
        if (row < rows && k < piece) {
          x = load_as<Acc>(layer.input, (plain.first_row + row) * layer.in_features + begin + k);
          if (layer.norm != kNoNorm) {
            x = (x - shift[row]) * rstd[row];
            if (layer.norm == kRmsNorm) x = round_to(kDType<W>, x);
            if (layer.norm_weight.data != nullptr) {
              x *= load_as<Acc>(layer.norm_weight, begin + k) + (layer.norm == kGemmaRmsNorm ? 1 : 0);
            }
            if (layer.norm_bias.data != nullptr) x += load_as<Acc>(layer.norm_bias, begin + k);
          }
          x = round_to(kDType<W>, x);
        }
        input[row][k] = x;
      }
      __syncthreads();
      Acc w[kWidth];
      if (layer.weights_are_transposed) {
        if constexpr (Weights::kMayBeTransposed) {
          const int64_t column = strip.column + threadIdx.x % kGroups * kWidth;
#pragma unroll 4
          for (int k = threadIdx.x / kGroups; k < piece; k += kPlainThreads / kGroups) {
            plain.load_transposed(weight, column, begin + k, width - column, w);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
#pragma unroll
              for (int j = 0; j < kWidth; ++j) sums[r][j] += input[r][k] * w[j];
            }
          }
        }
      } else if (strip.column + warp < width) {
#pragma unroll 4
        for (int k = lane * kWidth; k < piece; k += kWarpSize * kWidth) {
          plain.load(weight, strip.column + warp, begin + k, piece - k, w);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) sums[r][0] += input[r][k + j] * w[j];
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (layer.weights_are_transposed) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          for (int distance = kGroups; distance < kWarpSize; distance *= 2) {
            sums[r][j] += __shfl_xor_sync(kFullWarp, sums[r][j], distance);
          }
          if (lane < kGroups) parts[g][warp][r][lane * kWidth + j] = sums[r][j];
        }
      } else {
        const Acc sum = warp_reduce<Sum>(sums[r][0]);
        if (lane < kTileColumns) parts[g][warp][r][lane] = lane == warp ? sum : Acc(0);
      }
    }
  }
  __syncthreads();
  const int64_t first_output = strip.first_output(layer);
  for (int index = threadIdx.x; index < rows * kTileColumns; index += kPlainThreads) {
    const int row = index / kTileColumns, column = index % kTileColumns;
    Acc products[2] = {};
    for (int g = 0; g < (layer.gated ? 2 : 1); ++g) {
      for (int w = 0; w < kPlainWarps; ++w) products[g] += parts[g][w][row][column];
    }
    if (strip.column + column >= width) continue;
    const auto biased = [&](int g, int weight) {
      if (layer.biases[0].data == nullptr) return products[g];
      return products[g] + load_as<Acc>(layer.biases[weight], strip.column + column);
    };
    Acc value = activate(layer.activation, biased(0, strip.weight));
    if (layer.gated) value *= biased(1, 1);
    const int64_t element = (plain.first_row + row) * plain.output_columns + first_output + strip.column + column;
    if (layer.output.dtype == kFloat64) {  // the weight's, or the residual's alone
      const double added = layer.residual.data == nullptr ? 0 : load_as<double>(layer.residual, element);
      store_as<double>(layer.output, element, value + added);
      continue;
    }
    if (layer.residual.data != nullptr) value += load_as<Acc>(layer.residual, element);
    store_as(layer.output, element, value);
  }
}

template <typename Weights>
cudaError_t launch_plain(Weights plain, cudaStream_t stream) {
  constexpr int kMostRows = 8 / (sizeof(AccFor<typename Weights::Value>) / sizeof(float));  // 32 KB of shared memory
  const DecodeLinear& layer = plain.layer;
  unsigned strips = 0;
  for (int i = 0; i < (layer.gated ? 1 : layer.weight_count); ++i) strips += strip_count(layer.widths[i]);
  const LaunchShape shape{strips, kPlainThreads, 0, 1};
  cudaError_t error = cudaSuccess;
  for (; plain.first_row < layer.rows && error == cudaSuccess; plain.first_row += kMostRows) {
    // Launches for further rows share no data with the first, but write beside it: only that one overlaps.
    const bool pdl = layer.pdl && plain.first_row == 0;
    const auto kernel = layer.rows == 1 ? decode_linear_plain_kernel<Weights, 1>
                                        : decode_linear_plain_kernel<Weights, kMostRows>;
    error = launch_dependent(kernel, plain, shape, pdl, stream);
  }
  return error;
}

}  // namespace fuseopt::decode_linear
