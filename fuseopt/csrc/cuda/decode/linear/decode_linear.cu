// decode_linear for weights of any dtype, layout and alignment in plain multiply-adds, and the choice between this
// kernel and the one of the tensor cores. A block has a strip of 8 output columns. The input goes through shared
// memory, normalised, in pieces of K; the weight goes straight to registers, and into the L2 cache before that.
#include "cuda/decode/linear/decode_linear.cuh"

namespace fuseopt::decode_linear {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
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
  bool weights_aligned;
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

template <typename W, int kRows>
__global__ void __launch_bounds__(kThreads) decode_linear_plain_kernel(const __grid_constant__ PlainLayer plain) {
  using Acc = AccFor<W>;
  constexpr int kWidth = kVectorWidth<W>;
  constexpr int kGroups = kTileColumns / kWidth;  // of columns, in a transposed weight
  static_assert(kGroups >= 1 && kTileColumns == kWarps);
  const DecodeLinear& layer = plain.layer;
  const int64_t rows = layer.rows - plain.first_row < kRows ? layer.rows - plain.first_row : kRows;
  const Strip strip(layer, blockIdx.x);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t stride = layer.weight_stride;
  const int width = static_cast<int>(layer.widths[strip.weight]);

  __shared__ Acc input[kRows][kPiece];
  __shared__ Acc shift[kRows], rstd[kRows];
  __shared__ Acc parts[2][kWarps][kRows][kTileColumns];

  let_successor_start();
  constexpr int kLine = 128 / sizeof(W);
  for (int g = 0; g < (layer.gated ? 2 : 1); ++g) {
    const W* const weight = static_cast<const W*>(layer.weights[layer.gated ? g : strip.weight]);
    const int64_t outer = layer.weights_are_transposed ? layer.in_features : min(width - strip.column, kTileColumns);
    const int64_t lines = layer.weights_are_transposed ? 1 : (layer.in_features + kLine - 1) / kLine;
    for (int64_t i = threadIdx.x; i < outer * lines; i += kThreads) {
      const int64_t element = layer.weights_are_transposed ? i * stride + strip.column
                                                           : (strip.column + i / lines) * stride + i % lines * kLine;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(weight + element));
    }
  }
  wait_for_predecessor();

  for (int64_t row = warp; row < rows; row += kWarps) {
    Acc row_shift = 0, row_rstd = 1;
    if (layer.norm != kNoNorm) normalisation(layer, plain.first_row + row, row_shift, row_rstd);
    if (lane == 0) shift[row] = row_shift, rstd[row] = row_rstd;
  }

  for (int g = 0; g < (layer.gated ? 2 : 1); ++g) {
    const W* const weight = static_cast<const W*>(layer.weights[layer.gated ? g : strip.weight]);
    // Of one column (weight [N, K]: its warp's), or of kWidth neighbours (weight [K, N]).
    Acc sums[kRows][kWidth] = {};
    for (int64_t begin = 0; begin < layer.in_features; begin += kPiece) {
      const int piece = static_cast<int>(min(layer.in_features - begin, int64_t(kPiece)));
      __syncthreads();
      for (int i = threadIdx.x; i < kRows * kPiece; i += kThreads) {
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
        const int64_t column = strip.column + threadIdx.x % kGroups * kWidth;
#pragma unroll 4
        for (int k = threadIdx.x / kGroups; k < piece; k += kThreads / kGroups) {
          load_weights(weight, (begin + k) * stride + column, width - column, plain.weights_aligned, w);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) sums[r][j] += input[r][k] * w[j];
          }
        }
      } else if (strip.column + warp < width) {
#pragma unroll 4
        for (int k = lane * kWidth; k < piece; k += kWarpSize * kWidth) {
          load_weights(weight, (strip.column + warp) * stride + begin + k, piece - k, plain.weights_aligned, w);
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
  for (int index = threadIdx.x; index < rows * kTileColumns; index += kThreads) {
    const int row = index / kTileColumns, column = index % kTileColumns;
    Acc products[2] = {};
    for (int g = 0; g < (layer.gated ? 2 : 1); ++g) {
      for (int w = 0; w < kWarps; ++w) products[g] += parts[g][w][row][column];
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

template <typename W>
cudaError_t launch_as(const DecodeLinear& layer, cudaStream_t stream) {
  constexpr int kMostRows = 8 / (sizeof(AccFor<W>) / sizeof(float));  // 32 KB of shared memory
  PlainLayer plain{layer, 0, output_columns(layer), layer.weight_stride * sizeof(W) % kAccessBytes == 0};
  for (int i = 0; i < layer.weight_count; ++i) plain.weights_aligned &= is_aligned(layer.weights[i]);
  unsigned strips = 0;
  for (int i = 0; i < (layer.gated ? 1 : layer.weight_count); ++i) strips += strip_count(layer.widths[i]);
  const LaunchShape shape{strips, kThreads, 0, 1};
  cudaError_t error = cudaSuccess;
  for (; plain.first_row < layer.rows && error == cudaSuccess; plain.first_row += kMostRows) {
    // Launches for further rows share no data with the first, but write beside it: only that one overlaps.
    const bool pdl = layer.pdl && plain.first_row == 0;
    const auto kernel = layer.rows == 1 ? decode_linear_plain_kernel<W, 1> : decode_linear_plain_kernel<W, kMostRows>;
    error = launch_dependent(kernel, plain, shape, pdl, stream);
  }
  return error;
}

// Launches a kernel for T; false if none takes the arguments.
template <typename T>
bool launch_fast(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error) {
  if (launch_decode_linear_few_rows<T>(layer, stream, error) || launch_decode_linear_tiles<T>(layer, stream, error)) return true;
  if constexpr (sizeof(T) == sizeof(uint16_t)) return launch_decode_linear_many_rows<T>(layer, stream, error);
  else return false;
}

}  // namespace

extern "C" int64_t fuseopt_decode_linear_parts(DecodeLinear layer) {
  if (layer.weight_dtype == kFloat32) return decode_linear_parts<float>(layer);
  if (layer.weight_dtype == kFloat16) return decode_linear_parts<__half>(layer);
  return layer.weight_dtype == kBFloat16 ? decode_linear_parts<__nv_bfloat16>(layer) : 0;
}

extern "C" bool fuseopt_emits_partials(DecodeLinear layer) {
  if (layer.weight_dtype == kFloat16) return emits_partials<__half>(layer);
  return layer.weight_dtype == kBFloat16 && emits_partials<__nv_bfloat16>(layer);
}

extern "C" bool fuseopt_accepts_partials(DecodeLinear layer) {
  if (layer.weight_dtype == kFloat16) return accepts_partials<__half>(layer);
  return layer.weight_dtype == kBFloat16 && accepts_partials<__nv_bfloat16>(layer);
}

extern "C" bool fuseopt_takes_low_rank(DecodeLinear layer) {
  if (layer.rows == 0 || layer.exchange == nullptr) return false;
  if (layer.weight_dtype == kFloat16) return takes_low_rank<__half>(layer);
  return layer.weight_dtype == kBFloat16 && takes_low_rank<__nv_bfloat16>(layer);
}

extern "C" cudaError_t fuseopt_decode_linear(DecodeLinear layer, cudaStream_t stream) {
  if (layer.rows == 0 || layer.out_features == 0) return cudaSuccess;
  if (layer.low_rank_a != nullptr) {
    return layer.weight_dtype == kFloat16 ? launch_low_rank<__half>(layer, stream)
                                          : launch_low_rank<__nv_bfloat16>(layer, stream);
  }
  cudaError_t error = cudaSuccess;
  if (layer.weight_dtype == kFloat16 && launch_fast<__half>(layer, stream, error)) return error;
  if (layer.weight_dtype == kBFloat16 && launch_fast<__nv_bfloat16>(layer, stream, error)) return error;
  if (layer.weight_dtype == kFloat32 && launch_fast<float>(layer, stream, error)) return error;
  switch (static_cast<DType>(layer.weight_dtype)) {
    case kFloat16: return launch_as<__half>(layer, stream);
    case kBFloat16: return launch_as<__nv_bfloat16>(layer, stream);
    case kFloat64: return launch_as<double>(layer, stream);
    case kFloat32: return launch_as<float>(layer, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fuseopt::decode_linear
