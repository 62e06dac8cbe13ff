// Arguments of decode_linear's tensor core kernels, and what these kernels have in common: loads, activation, prefetch.
#pragma once

#include "cuda/decode/linear/decode_linear.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/tensor_core.cuh"
#include "cuda/decode/linear/low_bit/packed_weight.cuh"

namespace fuseopt {

constexpr int kChunk = 32;  // values of k that a warp multiplies at a time: 8 a lane, in two instructions
constexpr int kLaneValues = 8;
constexpr int kHalfRows = 8;

// Bytes of weights that blocks, one a multiprocessor, hold in registers before they wait. Layers with more skip prefetch.
inline int64_t most_held_bytes(bool weights_are_transposed) {
  const int64_t of_one = weights_are_transposed ? tuning().decode_linear_held_bytes : tuning().decode_linear_nk_held_bytes;
  return of_one * multiprocessor_count();
}

inline int64_t weight_bytes(const DecodeLinear& layer) { 
  return output_columns(layer) * layer.in_features * (layer.gated ? 2 : 1) * 2;
}

// Whether a layer has more bytes than blocks hold in registers, a lower limit if K is long. Streaming kernels take it.
inline bool exceeds_registers(const DecodeLinear& layer) {
  const int64_t bytes = weight_bytes(layer);
  return bytes >= most_held_bytes(layer.weights_are_transposed) ||
         (layer.in_features > tuning().decode_linear_long_k &&
          bytes >= tuning().decode_linear_long_k_held_bytes * multiprocessor_count());
}

// DecodeLinear in fewer 32-bit words: each one that a kernel reads may miss the constant cache.
template <typename T>
struct MmaLayer {
  static constexpr int kMaxWeights = DecodeLinear::kMaxWeights;
  const T* weights[kMaxWeights];
  const T* biases[kMaxWeights];
  const void* input;  // X
  const T* norm_weight;
  const T* norm_bias;
  const void* residual;  // T, or float where `output` is
  void* output;
  const char* prefetch[kMaxWeights];
  int prefetch_bytes[kMaxWeights], prefetch_share_bytes[kMaxWeights];  // the latter of each block
  int rows, in_features, out_features, weight_stride;
  int widths[kMaxWeights], first_outputs[kMaxWeights];  // of each weight, and of the grid's y-th blocks
  int output_stride;  // from row to row
  int passes;         // over K
  int activation;
  int finishing;     // threads of a block, whole warps, of kernels that ask
  float eps, reciprocal;  // the latter of `in_features`
  bool is_layer_norm, is_rms_norm, is_wide;  // if is_wide, residual and output are float
  bool adds_one;                             // to the norm's weight
  const float* split_k_partials;  // [kSplitK, rows, columns], of kernels that ask
  T* sum;  // [rows, columns] of input and partials, of kernels that ask
  // Low-rank updates, of kernels that ask: see DecodeLinear.
  const T* low_rank_a;
  const T* low_rank_b[kMaxWeights];
  int low_ranks[kMaxWeights], first_ranks[kMaxWeights], ranks;  // of each weight, before it, of all
  int rank_blocks;  // that multiply rows of `low_rank_a`
  uint64_t* exchange;
  PackedShape packed;  // of kernels for weights of 8 and 4 bits

  // Of a grid whose first `blocks` read the input as others do. So many run at once even in clusters.
  void share_ranks(int64_t blocks) {
    rank_blocks = static_cast<int>(std::min<int64_t>(blocks, std::max(multiprocessor_count() / 2, 1)));
  }

  void share_prefetch(const LaunchShape& shape) {
    constexpr int64_t kLine = 128;
    for (int i = 0; i < kMaxWeights; ++i) {
      const int64_t lines_of_all = ceil_div(prefetch_bytes[i], shape.blocks * shape.blocks_y * kLine);
      prefetch_share_bytes[i] = static_cast<int>(lines_of_all * kLine);
    }
  }

  // Not converted: a conversion would wait for the load.
  __device__ unsigned load_residual_bits(int64_t i) const {
    if (residual == nullptr) return 0;
    return is_wide ? static_cast<const unsigned*>(residual)[i] : static_cast<const uint16_t*>(residual)[i];
  }

  __device__ float residual_from(unsigned bits) const {
    const auto half = static_cast<uint16_t>(bits);
    return is_wide ? __uint_as_float(bits) : to_float(reinterpret_cast<const T&>(half));
  }

  __device__ float load_residual(int64_t i) const { return residual_from(load_residual_bits(i)); }

  __device__ void store(int64_t i, float value) const {
    if (is_wide) static_cast<float*>(output)[i] = value;
    else static_cast<T*>(output)[i] = from_acc<T>(value);
  }
};

template <typename T>
MmaLayer<T> mma_layer(const DecodeLinear& layer) {
  MmaLayer<T> mma = {};
  for (int i = 0; i < layer.weight_count; ++i) {
    mma.weights[i] = static_cast<const T*>(layer.weights[i]);
    mma.biases[i] = static_cast<const T*>(layer.biases[i].data);
  }
  int64_t prefetch_bytes = 0;
  for (int64_t bytes : layer.prefetch_bytes) prefetch_bytes += bytes;
  for (int i = 0; i < DecodeLinear::kMaxWeights && prefetch_bytes < most_held_bytes(layer.weights_are_transposed); ++i) {
    mma.prefetch[i] = static_cast<const char*>(layer.prefetch[i]);
    mma.prefetch_bytes[i] = static_cast<int>(layer.prefetch_bytes[i]);
  }
  mma.input = layer.input.data;
  mma.norm_weight = static_cast<const T*>(layer.norm_weight.data);
  mma.norm_bias = static_cast<const T*>(layer.norm_bias.data);
  mma.residual = layer.residual.data;
  mma.output = layer.output.data;
  mma.rows = static_cast<int>(layer.rows);
  mma.in_features = static_cast<int>(layer.in_features);
  mma.out_features = static_cast<int>(layer.out_features);
  mma.weight_stride = static_cast<int>(layer.weight_stride);
  for (int i = 0, first = 0; i < DecodeLinear::kMaxWeights; first += mma.widths[i++]) {
    mma.widths[i] = static_cast<int>(layer.is_split_k ? layer.out_features : layer.widths[i]);
    mma.first_outputs[i] = first;
  }
  mma.output_stride = static_cast<int>(output_columns(layer));
  mma.activation = layer.activation;
  mma.eps = static_cast<float>(layer.eps);
  mma.reciprocal = 1.f / static_cast<float>(layer.in_features);
  mma.is_layer_norm = layer.norm == kLayerNorm;
  mma.is_rms_norm = layer.norm == kRmsNorm;
  mma.adds_one = layer.norm == kGemmaRmsNorm;
  mma.is_wide = layer.output.dtype == kFloat32;
  mma.split_k_partials = layer.split_k_partials;
  mma.sum = static_cast<T*>(layer.sum);
  mma.low_rank_a = static_cast<const T*>(layer.low_rank_a);
  for (int i = 0; i < DecodeLinear::kMaxWeights; ++i) {
    mma.low_rank_b[i] = static_cast<const T*>(layer.low_rank_b[i]);
    mma.low_ranks[i] = static_cast<int>(layer.low_ranks[i]);
    mma.first_ranks[i] = mma.ranks;
    mma.ranks += mma.low_ranks[i];
  }
  mma.exchange = layer.exchange;
  return mma;
}

template <typename T>
__device__ inline void prefetch_next_weights(const MmaLayer<T>& layer) {
  if (threadIdx.x >= MmaLayer<T>::kMaxWeights) return;
  const char* const prefetch = layer.prefetch[threadIdx.x];
  if (prefetch == nullptr) return;
  prefetch_share(prefetch, prefetch + layer.prefetch_bytes[threadIdx.x], layer.prefetch_share_bytes[threadIdx.x]);
}

// Number of warps rounded up to a multiple of `together`: sums of so many warps are added up at a time.
__host__ __device__ inline int summed_warps(int warps, int together) {
  return (warps + together - 1) / together * together;
}

// Words of two ones, or of one in float32.
template <typename T>
constexpr unsigned kOnes = std::is_same_v<T, float> ? 0x3f800000u : std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;

// Loads through the L2 cache what another multiprocessor has just written.
template <typename X>
__device__ inline Vector<X, kLaneValues> load_fresh(const X* values) {
  Vector<X, kLaneValues> vector;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(vector) / sizeof(uint4)); ++i) {
    reinterpret_cast<uint4*>(&vector)[i] = __ldcg(reinterpret_cast<const uint4*>(values) + i);
  }
  return vector;
}

// 16-bit values, or zeros in place of them.
template <typename T>
__device__ inline Vector<T, kLaneValues> masked(Vector<T, kLaneValues> values, unsigned mask) {
  auto& words = reinterpret_cast<uint4&>(values);
  words = {words.x & mask, words.y & mask, words.z & mask, words.w & mask};
  return values;
}

// A row's values and two partials of each, rounded to the row's dtype.
template <typename X, int kCount>
__device__ inline Vector<X, kLaneValues> rounded_sum(const Vector<X, kLaneValues>& x,
                                                     const Vector<float, kLaneValues> (&partials)[kCount]) {
  float sums[kLaneValues];
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    sums[i] = partials[0][i];
#pragma unroll
    for (int a = 1; a < kCount; ++a) sums[i] += partials[a][i];
    sums[i] += x[i];
  }
  Vector<X, kLaneValues> sum;
  store_floats_as<X>(&sum, 0, sums);
  return sum;
}

constexpr int kSplitK = DecodeLinear::kSplitK;

// Not inlined: it is long, and would stand between what is run.
__device__ __noinline__ inline float activate_slowly(int activation, float x) { return activate(activation, x); }

// For results of 16 bits: tanh by exp, whose error is that of float32.
template <int kCount>
__device__ inline void activate_quickly(int activation, float (&values)[kCount]) {
  if (activation == kGeluTanh) {
    constexpr float kScale = -2.f * 0.79788456080286536f * kLog2E;  // x * sigmoid(2 * inner), by powers of two
#pragma unroll
    for (float& x : values) x = __fdividef(x, 1.f + exp2_approx(x * fmaf(kScale * 0.044715f, x * x, kScale)));
  } else if (activation == kRelu) {
#pragma unroll
    for (float& x : values) x = x < 0.f ? 0.f : x;
  } else if (activation == kSilu) {
#pragma unroll
    for (float& x : values) x = __fdividef(x, 1.f + exp2_approx(x * -kLog2E));
  } else if (activation != kIdentity) {
#pragma unroll
    for (float& x : values) x = activate_slowly(activation, x);
  }
}

__device__ inline float activate_quickly(int activation, float x) {
  float values[] = {x};
  activate_quickly(activation, values);
  return values[0];
}

}  // namespace fuseopt
