// decode_linear for 16-bit weights, on the tensor cores. A step of decoding has 1 to 16 rows, so a product is all
// latency and reading: each block has its part of the weight in registers before it waits for the kernel ahead, and what
// is left to do after the wait is short. Short in instructions too: a block runs each of them once, so fetching them
// takes longer than running them, and whatever differs from launch to launch is a template argument rather than a branch.
//
// A block takes a strip of output columns; its warps share out K. Products are m16n8k16 with 16 output columns as M and
// 8 rows of the input as N, so that nothing is padded. A lane loads 16 bytes of a weight [N, K], or kTiles neighbours in
// each of 8 lines of a weight [K, N], and 8 neighbouring inputs: the order of k within a chunk is the same for both, so
// it does not matter, and neither does the order of columns until the sums are written.
//
// A norm takes no step of its own. With xhat = (x - mean) * rstd and g, b the norm's weight and bias,
//   sum_k w * (xhat * g + b) = rstd * (sum_k (w * g) * x - mean * sum_k w * g) + sum_k w * b,
// where all but the sum over x is there before the wait, and mean and rstd are found along with that sum. w * g is
// rounded to the weight's dtype, once for all that is done with it, as upstream rounds xhat * g + b.
#pragma once

#include "decode_linear_many_columns.cuh"

namespace fuseopt {

enum class Layout { kRows, kLines };  // of a weight: [N, K], [K, N]

// Of a block, by the registers that its lanes need.
template <typename T, typename X, int kTiles, int kChunks, int kHalves>
constexpr int kMaxLinearWarps = kTiles == 8 || kChunks == 8 || (kHalves == 2 && !std::is_same_v<T, X>) ? 12 : 16;

// A lane's part of the weight: tiles of 8 columns, of which tile t has column `g` (lane / 4), or of a weight [K, N]
// columns kTiles * g to kTiles * (g + 1). Words hold neighbouring k.
template <typename T, Layout kLayout, bool kGated, int kTiles, int kChunks>
struct WeightPart {
  uint4 words[kChunks][kTiles];

  // From column `column` of the output and the lane's k on. Of a weight [K, N], `pair_lines` must follow: until then
  // words hold neighbouring columns.
  __device__ void load(const MmaLayer<T>& layer, int column, int k) {
    const int g = threadIdx.x % kWarpSize / 4, stride = layer.weight_stride;
    if constexpr (kLayout == Layout::kRows) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int n = column + (kGated ? t / 2 : t) * kTileColumns + g;
        const T* const weight = layer.weights[kGated ? t % 2 : blockIdx.y] + static_cast<int64_t>(n) * stride + k;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          words[c][t] = {};
          if (n < layer.outputs && k + c * kChunk < layer.columns) words[c][t] = load_once<uint4>(weight + c * kChunk);
        }
      }
    } else {
      using Access = std::conditional_t<kTiles == 2, unsigned, std::conditional_t<kTiles == 4, uint2, uint4>>;
      const int n = column + g * kTiles;
      const T* const weight = layer.weights[blockIdx.y] + static_cast<int64_t>(k) * stride + n;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int i = 0; i < kLaneValues; ++i) {
          Access access = {};
          if (n < layer.outputs && k + c * kChunk < layer.columns) {
            access = load_once<Access>(weight + (c * kChunk + i) * stride);
          }
          const auto& parts = reinterpret_cast<const unsigned(&)[kTiles / 2]>(access);
#pragma unroll
          for (int j = 0; j < kTiles / 2; ++j) reinterpret_cast<unsigned(&)[4]>(words[c][2 * j + i / 4])[i % 4] = parts[j];
        }
      }
    }
  }

  __device__ void pair_lines() {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        const uint4 a = words[c][j], b = words[c][j + 1];  // lines 0 to 3 and 4 to 7 of two columns
        constexpr unsigned kLow = 0x5410, kHigh = 0x7632;
        words[c][j] = {__byte_perm(a.x, a.y, kLow), __byte_perm(a.z, a.w, kLow), __byte_perm(b.x, b.y, kLow),
                       __byte_perm(b.z, b.w, kLow)};
        words[c][j + 1] = {__byte_perm(a.x, a.y, kHigh), __byte_perm(a.z, a.w, kHigh), __byte_perm(b.x, b.y, kHigh),
                           __byte_perm(b.z, b.w, kHigh)};
      }
    }
  }

  // Multiplies all columns of chunk c with 8 values of k.
  __device__ void scale(int c, const uint4& by) {
#pragma unroll
    for (uint4& w : words[c]) {
      w = {multiply_pair<T>(w.x, by.x), multiply_pair<T>(w.y, by.y), multiply_pair<T>(w.z, by.z),
           multiply_pair<T>(w.w, by.w)};
    }
  }

  // sums[tile pair] += columns of chunk c x 8 rows of 8 values a lane.
  __device__ void multiply_add(float (&sums)[kTiles / 2][4], int c, const uint4& x) const {
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      const uint4 &low = words[c][2 * j], &high = words[c][2 * j + 1];
      multiply<T>(sums[j], {low.x, low.y}, {high.x, high.y}, x.x, x.y);
      multiply<T>(sums[j], {low.z, low.w}, {high.z, high.w}, x.z, x.w);
    }
  }

  // Keeps the compiler from using the words ahead of what stands before this call, and so from waiting for them there.
  __device__ void not_before_here() {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (uint4& w : words[c]) asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));
    }
  }
};

// Calls write(place, row, sum) for the lane's sums; places of neighbouring lanes are neighbours.
template <int kTiles, typename Write>
__device__ inline void for_sums(const float (&sums)[kTiles / 2][4], Write write) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int j = 0; j < kTiles / 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) write((2 * j + i / 2) * kTileColumns + lane / 4, lane % 4 * 2 + i % 2, sums[j][i]);
  }
}

// The place of a column of the strip, of the first weight if gated.
template <Layout kLayout, bool kGated, int kTiles>
__device__ inline int place_of(int column) {
  if constexpr (kLayout == Layout::kLines) return column % kTiles * kTileColumns + column / kTiles;
  return kGated ? column / kTileColumns * 2 * kTileColumns + column % kTileColumns : column;
}

// kTiles: of 8 columns, in a strip; kChunks: of K, for each warp in one pass; kHalves: of 16 rows; kLoops: whether there
// may be more than one pass.
template <typename T, typename X, Layout kLayout, bool kNorm, bool kGated, int kTiles, int kChunks, int kHalves,
          bool kLoops>
__global__ void __launch_bounds__(kMaxLinearWarps<T, X, kTiles, kChunks, kHalves>* kWarpSize)
    decode_linear_mma_kernel(const __grid_constant__ MmaLayer<T> layer) {
  constexpr int kColumns = kTiles * kTileColumns, kWidth = kGated ? kColumns / 2 : kColumns;
  constexpr int kStride = kColumns + 4;  // 4: rows of sums start in different banks
  constexpr int kPart = kChunks * kChunk;
  constexpr bool kWide = !std::is_same_v<T, X>;  // has to be normalised before it can be multiplied
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int rows = layer.rows, columns = layer.columns, strip = blockIdx.x * kWidth;
  const int passes = kLoops ? layer.passes : 1, sum_rows = kNorm ? max(rows, 2) : rows;
  const auto first_k = [&](int pass) { return (pass * warps + warp) * kPart; };
  const int own = lane % 4 * kLaneValues;

  // Sums of each warp [warps][sum_rows][kStride]; of a norm, moments of each part [passes * warps][rows], and sums that
  // do not depend on the input [2][kColumns].
  extern __shared__ __align__(16) char shared[];
  float* const sums_of = reinterpret_cast<float*>(shared);
  Moments* const moments = reinterpret_cast<Moments*>(sums_of + warps * sum_rows * kStride);
  float* const constants = reinterpret_cast<float*>(moments + passes * warps * rows);

  let_successor_start();
  WeightPart<T, kLayout, kGated, kTiles, kChunks> weight;
  weight.load(layer, strip, first_k(0) + own);
  prefetch_ahead(layer);

  // What the thread finishes first of the strip's outputs.
  int row = threadIdx.x / kWidth, column = threadIdx.x % kWidth;
  float bias = 0.f, gate_bias = 0.f, residual = 0.f;
  const auto load_biases = [&] {
    if (layer.biases[0] == nullptr || strip + column >= layer.outputs) return;
    bias = to_float(layer.biases[kGated ? 0 : blockIdx.y][strip + column]);
    if (kGated) gate_bias = to_float(layer.biases[1][strip + column]);
  };
  const auto output_index = [&] { return row * layer.output_stride + blockIdx.y * layer.outputs + strip + column; };
  const auto load_residual = [&] {
    if (row < rows && strip + column < layer.outputs) residual = layer.load_residual(output_index());
  };
  load_biases();

  // Of a norm: sums of w * g and w * b as two rows of products, and w scaled by g.
  float constant_sums[kTiles / 2][4] = {};
  const auto fold_norm = [&](int pass) {
    constexpr unsigned kOnes = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
    const unsigned ones = lane / 4 == 0 ? kOnes : 0u;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int k = first_k(pass) + c * kChunk + own;
      if (layer.norm_bias != nullptr) {
        uint4 shift = {};
        if (lane / 4 == 1 && k < columns) shift = load_once<uint4>(layer.norm_bias + k);
        weight.multiply_add(constant_sums, c, shift);
      }
      if (layer.norm_weight != nullptr && k < columns) weight.scale(c, load_once<uint4>(layer.norm_weight + k));
      if (layer.is_layer_norm) weight.multiply_add(constant_sums, c, {ones, ones, ones, ones});
    }
  };
  const auto share_constants = [&] {
    for_sums<kTiles>(constant_sums, [&](int place, int r, float sum) {
      if (r < 2) sums_of[(warp * sum_rows + r) * kStride + place] = sum;
    });
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * kColumns; i += blockDim.x) {
      float sum = 0.f;
#pragma unroll 4
      for (int w = 0; w < warps; ++w) sum += sums_of[(w * sum_rows + i / kColumns) * kStride + i % kColumns];
      constants[i] = sum;
    }
    __syncthreads();
  };
  if constexpr (kNorm && !kLoops) {
    if constexpr (kLayout == Layout::kLines) weight.pair_lines();
    fold_norm(0);
    if (layer.is_layer_norm) share_constants();
  }
  wait_for_predecessor();

  Vector<X, kLaneValues> x[kHalves][kChunks];
  const auto load_inputs = [&](int pass) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int r = lane / 4 + h * kHalfRows, k = first_k(pass) + own;
      const X* const input = static_cast<const X*>(layer.input) + r * columns + k;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        x[h][c] = {};
        if (r < rows && k + c * kChunk < columns) {
          x[h][c] = *reinterpret_cast<const Vector<X, kLaneValues>*>(input + c * kChunk);
        }
      }
    }
  };
  const auto take_moments = [&](int pass) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const Moments part = moments_of<X, kChunks>(x[h], min(max(columns - first_k(pass), 0), kPart));
      const int r = lane / 4 + h * kHalfRows;
      if (lane % 4 == 0 && r < rows) moments[(pass * warps + warp) * rows + r] = part;
    }
  };
  const auto normalisation_of = [&](int r) {
    return normalisation(moments + r, rows, passes * warps, kPart, columns, layer.is_layer_norm, layer.eps);
  };
  float2 wide_norm[kHalves];
  if constexpr (kWide) {
    for (int pass = 0; pass < passes; ++pass) load_inputs(pass), take_moments(pass);
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kHalves; ++h) wide_norm[h] = normalisation_of(min(lane / 4 + h * kHalfRows, rows - 1));
  }

  float sums[kHalves][kTiles / 2][4] = {};
  for (int pass = 0; pass < passes; ++pass) {
    if (kLoops && pass > 0) weight.load(layer, strip, first_k(pass) + own);
    load_inputs(pass);
    if (pass == 0) load_residual();
    if constexpr (!kNorm || kLoops) {
      weight.not_before_here();
      if constexpr (kLayout == Layout::kLines) weight.pair_lines();
    }
    if constexpr (kNorm && kLoops) fold_norm(pass);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if constexpr (kWide) {
          float values[kLaneValues];
#pragma unroll
          for (int i = 0; i < kLaneValues; ++i) values[i] = (x[h][c][i] - wide_norm[h].x) * wide_norm[h].y;
          uint4 words;
          store_floats_as<T>(&words, 0, values);
          weight.multiply_add(sums[h], c, words);
        } else {
          weight.multiply_add(sums[h], c, reinterpret_cast<const uint4&>(x[h][c]));
        }
      }
    }
    if constexpr (kNorm && !kWide) take_moments(pass);
  }
  if constexpr (kNorm && kLoops) {
    if (layer.is_layer_norm) share_constants();
  }

#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    for_sums<kTiles>(sums[h], [&](int place, int r, float sum) {
      if (r + h * kHalfRows < rows) sums_of[(warp * sum_rows + r + h * kHalfRows) * kStride + place] = sum;
    });
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * kWidth; i += blockDim.x) {
    if (i != threadIdx.x) {
      row = i / kWidth, column = i % kWidth;
      load_biases();
      load_residual();
    }
    if (strip + column >= layer.outputs) continue;
    float2 norm = {0.f, 1.f};
    if constexpr (kNorm && !kWide) norm = normalisation_of(row);
    const auto product = [&](int place) {
      float sum = 0.f;
#pragma unroll 4
      for (int w = 0; w < warps; ++w) sum += sums_of[(w * sum_rows + row) * kStride + place];
      if constexpr (kNorm) {
        if (layer.is_layer_norm) return norm.y * (sum - norm.x * constants[place]) + constants[kColumns + place];
      }
      return norm.y * sum;
    };
    const int place = place_of<kLayout, kGated, kTiles>(column);
    float value = activate_quickly(layer.activation, product(place) + bias);
    if constexpr (kGated) value *= product(place + kTileColumns) + gate_bias;
    layer.store(output_index(), value + residual);
  }
}

template <typename T, typename X, Layout kLayout, bool kNorm, bool kGated, int kTiles, int kChunks, int kHalves,
          bool kLoops>
cudaError_t launch_mma_as(const DecodeLinear& layer, cudaStream_t stream) {
  constexpr int kColumns = kTiles * kTileColumns, kWidth = kGated ? kColumns / 2 : kColumns;
  const int64_t chunks = ceil_div(layer.columns, kChunk);
  MmaLayer<T> mma = mma_layer<T>(layer);
  mma.passes = static_cast<int>(ceil_div(chunks, kChunks * kMaxLinearWarps<T, X, kTiles, kChunks, kHalves>));
  const int64_t warps = ceil_div(chunks, kChunks * mma.passes), sum_rows = kNorm ? std::max(mma.rows, 2) : mma.rows;
  size_t shared_bytes = sizeof(float) * warps * sum_rows * (kColumns + 4);
  if (kNorm) shared_bytes += sizeof(Moments) * mma.passes * warps * mma.rows + sizeof(float) * 2 * kColumns;
  const LaunchShape shape{static_cast<unsigned>(ceil_div(layer.outputs, kWidth)),
                          static_cast<unsigned>(warps * kWarpSize), shared_bytes, 1,
                          kGated ? 1u : static_cast<unsigned>(layer.weight_count)};
  mma.share_ahead(shape);
  const auto kernel = decode_linear_mma_kernel<T, X, kLayout, kNorm, kGated, kTiles, kChunks, kHalves, kLoops>;
  return launch_dependent(kernel, mma, shape, layer.overlap, stream);
}

// Wide strips read a weight [K, N] in longer pieces, and few blocks leave multiprocessors to the kernels that wait
// behind; narrow strips share out more work.
template <typename T, typename X, Layout kLayout, bool kNorm, bool kGated>
cudaError_t launch_mma(const DecodeLinear& layer, cudaStream_t stream) {
  const int64_t tiles = ceil_div(layer.outputs, kTileColumns) * layer.weight_count, few_blocks = multiprocessor_count() / 4;
  const auto fits = [&](int chunks, int warps) { return layer.columns <= chunks * warps * kChunk; };
  if constexpr (std::is_same_v<T, X>) {
    if (layer.rows <= kHalfRows) {
      if constexpr (kNorm && !kGated) {
        if (layer.rows <= 2 && fits(2, kMaxLinearWarps<T, X, 8, 2, 1>) && tiles >= 8 * few_blocks) {
          return launch_mma_as<T, X, kLayout, true, false, 8, 2, 1, false>(layer, stream);
        }
      }
      if constexpr (kNorm) {
        if (fits(4, 16) && (kGated || tiles >= 4 * few_blocks)) {
          return launch_mma_as<T, X, kLayout, true, kGated, 4, 4, 1, false>(layer, stream);
        }
      }
      if constexpr (!kGated) {
        if (fits(4, 16)) return launch_mma_as<T, X, kLayout, kNorm, false, 2, 4, 1, false>(layer, stream);
      }
      if constexpr (!kNorm) return launch_mma_as<T, X, kLayout, false, false, 2, 8, 1, true>(layer, stream);
    }
  }
  return launch_mma_as<T, X, kLayout, kNorm, kGated, 2, 4, 2, true>(layer, stream);
}

// Whether the kernels' accesses of 16 bytes reach all of what they read, and rows and dtypes are those they are compiled
// for.
template <typename T>
bool suits_mma(const DecodeLinear& layer, int64_t most_rows = 2 * kHalfRows) {
  bool suits = layer.rows <= most_rows && layer.columns > 0 && layer.columns % kLaneValues == 0 &&
               layer.weight_stride % kLaneValues == 0 && is_aligned(layer.input.data) &&
               (layer.input.dtype == kDType<T> || (layer.input.dtype == kFloat32 && layer.norm != kNoNorm));
  suits &= std::max(layer.outputs, layer.columns) * layer.weight_stride <= INT32_MAX;
  for (int i = 0; i < layer.weight_count; ++i) suits &= is_aligned(layer.weights[i]);
  const auto is_kept = [&](const TypedPointer& parameter) {
    return parameter.data == nullptr || parameter.dtype == kDType<T>;
  };
  for (const TypedPointer& bias : layer.biases) suits &= is_kept(bias);
  for (const TypedPointer& parameter : {layer.norm_weight, layer.norm_bias}) {
    suits &= is_kept(parameter) && is_aligned(parameter.data);
  }
  suits &= layer.residual.data == nullptr || layer.residual.dtype == layer.output.dtype;
  if (layer.gated) suits &= layer.norm != kNoNorm && !layer.weights_are_transposed;
  return suits && (!layer.weights_are_transposed || layer.outputs % kLaneValues == 0);
}

template <typename T>
bool launch_decode_linear_mma(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error) {
  if (compute_capability_major() < 8 || !suits_mma<T>(layer)) return false;
  const bool is_wide = layer.input.dtype != kDType<T>, has_norm = layer.norm != kNoNorm;
  if (layer.weights_are_transposed) {
    if (is_wide) return false;
    error = has_norm ? launch_mma<T, T, Layout::kLines, true, false>(layer, stream)
                     : launch_mma<T, T, Layout::kLines, false, false>(layer, stream);
  } else if (is_wide) {  // T5 in float16 has a residual stream in float32
    error = layer.gated ? launch_mma<T, float, Layout::kRows, true, true>(layer, stream)
                        : launch_mma<T, float, Layout::kRows, true, false>(layer, stream);
  } else if (has_many_columns(layer)) {
    error = launch_many_columns<T>(layer, stream);
  } else if (layer.gated) {
    error = launch_mma<T, T, Layout::kRows, true, true>(layer, stream);
  } else {
    error = has_norm ? launch_mma<T, T, Layout::kRows, true, false>(layer, stream)
                     : launch_mma<T, T, Layout::kRows, false, false>(layer, stream);
  }
  return true;
}

}  // namespace fuseopt
