// The rows of decode_linear's input as the tensor core kernels hold them, and their norm's statistics.
#pragma once

#include <cassert>

#include "cuda/decode/linear/decode_linear.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/tensor_core.cuh"

namespace fuseopt {

constexpr int kChunk = 32;  // values of k that a warp multiplies at a time: 8 a lane, in two instructions
constexpr int kLaneValues = 8;
constexpr int kHalfRows = 8;

// What the input is: a tensor, or a sum of one and partials, or of embeddings.
enum class Input { kStored, kSummed, kEmbedded };

// Bytes of weights that blocks, one a multiprocessor, hold in registers before they wait. Layers with more skip prefetch.
inline int64_t most_held_bytes() { return tuning().decode_linear_held_bytes * multiprocessor_count(); }

inline int64_t weight_bytes(const DecodeLinear& layer) { return layer.out_features * layer.in_features * layer.weight_count * 2; }

// Whether the streaming kernels take a layer: it has more bytes, or a longer K, than blocks hold in registers.
inline bool exceeds_registers(const DecodeLinear& layer) {
  const int64_t bytes = weight_bytes(layer);
  return bytes >= most_held_bytes() || (layer.in_features > tuning().decode_linear_long_k &&
                                        bytes >= tuning().decode_linear_long_k_held_bytes * multiprocessor_count());
}

// DecodeLinear, in fewer words: each that a kernel touches may be a miss of the constant cache.
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
  int prefetch_bytes, prefetch_share_bytes;  // from each, of each block
  int rows, in_features, out_features, weight_stride;
  int output_stride;  // from row to row
  int passes;         // over K
  int activation;
  int finishing;     // threads of a block, whole warps, of kernels that ask
  float eps, reciprocal;  // the latter of `in_features`
  bool is_layer_norm, is_rms_norm, is_wide;  // if is_wide, residual and output are float
  const float* split_k_partials;  // [kSplitK, rows, columns], of kernels that ask
  const int64_t *tokens, *positions;  // [rows] each, of kernels that ask; then `input` is the tokens' table
  const T* position_weight;
  unsigned token_count, position_count;  // in the tables
  T* sum;
  bool pdl;  // the previous kernel

  void share_prefetch(const LaunchShape& shape) {
    constexpr int64_t kLine = 128;
    prefetch_share_bytes = static_cast<int>(ceil_div(prefetch_bytes, shape.blocks * shape.blocks_y * kLine) * kLine);
  }

  // As it lies in memory: what is converted where it is loaded is waited for there.
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
  for (const void* prefetch : layer.prefetch) prefetch_bytes += prefetch != nullptr ? layer.prefetch_bytes : 0;
  for (int i = 0; i < DecodeLinear::kMaxWeights && prefetch_bytes < most_held_bytes(); ++i) {
    mma.prefetch[i] = static_cast<const char*>(layer.prefetch[i]);
  }
  mma.prefetch_bytes = static_cast<int>(layer.prefetch_bytes);
  mma.input = layer.input.data;
  mma.norm_weight = static_cast<const T*>(layer.norm_weight.data);
  mma.norm_bias = static_cast<const T*>(layer.norm_bias.data);
  mma.residual = layer.residual.data;
  mma.output = layer.output.data;
  mma.rows = static_cast<int>(layer.rows);
  mma.in_features = static_cast<int>(layer.in_features);
  mma.out_features = static_cast<int>(layer.out_features);
  mma.weight_stride = static_cast<int>(layer.weight_stride);
  mma.output_stride = mma.out_features * (layer.gated ? 1 : layer.weight_count);
  mma.activation = layer.activation;
  mma.eps = static_cast<float>(layer.eps);
  mma.reciprocal = 1.f / static_cast<float>(layer.in_features);
  mma.is_layer_norm = layer.norm == kLayerNorm;
  mma.is_rms_norm = layer.norm == kT5RmsNorm;
  mma.is_wide = layer.output.dtype == kFloat32;
  mma.split_k_partials = layer.split_k_partials;
  if (layer.tokens.weight != nullptr) {
    mma.input = layer.tokens.weight;
    mma.position_weight = static_cast<const T*>(layer.positions.weight);
    mma.tokens = static_cast<const int64_t*>(layer.tokens.indices);
    mma.positions = static_cast<const int64_t*>(layer.positions.indices);
    mma.token_count = static_cast<unsigned>(layer.tokens.rows);
    mma.position_count = static_cast<unsigned>(layer.positions.rows);
  }
  mma.sum = static_cast<T*>(layer.sum);
  mma.pdl = layer.pdl;
  return mma;
}

template <typename T>
__device__ inline void prefetch_next_weights(const MmaLayer<T>& layer) {
  if (threadIdx.x >= MmaLayer<T>::kMaxWeights) return;
  const char* const prefetch = layer.prefetch[threadIdx.x];
  if (prefetch != nullptr) prefetch_share(prefetch, prefetch + layer.prefetch_bytes, layer.prefetch_share_bytes);
}

// Warps that have a place for their sums in shared memory, as these are added up by `together` at a time.
__host__ __device__ inline int summed_warps(int warps, int together) {
  return (warps + together - 1) / together * together;
}

// Words of two ones.
template <typename T>
constexpr unsigned kOnes = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;

// What another multiprocessor has written a moment ago.
template <typename X>
__device__ inline Vector<X, kLaneValues> load_fresh(const X* values) {
  Vector<X, kLaneValues> vector;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(vector) / sizeof(uint4)); ++i) {
    reinterpret_cast<uint4*>(&vector)[i] = __ldcg(reinterpret_cast<const uint4*>(values) + i);
  }
  return vector;
}

__device__ inline int64_t load_fresh_index(const int64_t* index) {
  return __ldcg(reinterpret_cast<const long long*>(index));
}

// 16-bit values, or zeros in place of them.
template <typename T>
__device__ inline Vector<T, kLaneValues> masked(Vector<T, kLaneValues> values, unsigned mask) {
  auto& words = reinterpret_cast<uint4&>(values);
  words = {words.x & mask, words.y & mask, words.z & mask, words.w & mask};
  return values;
}

template <typename T>
__device__ inline Vector<T, kLaneValues> rounded_sum(const Vector<T, kLaneValues>& a, const Vector<T, kLaneValues>& b) {
  float sums[kLaneValues];
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) sums[i] = a[i] + b[i];
  Vector<T, kLaneValues> sum;
  store_floats_as<T>(&sum, 0, sums);
  return sum;
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

constexpr int kSplitK = DecodeLinear::kSplitK;

// A row as it lies in memory.
template <typename X>
struct StoredRow {
  const X* values;

  __device__ Vector<X, kLaneValues> operator()(int k) const { return load_fresh(values + k); }
};

// A row, and where the partials of its columns begin, so far apart.
template <typename X>
struct SummedRow {
  const X* values;
  const float* partials;
  int apart;

  __device__ Vector<X, kLaneValues> operator()(int k) const {
    const Vector<X, kLaneValues> x = load_fresh(values + k);
    Vector<float, kLaneValues> of[kSplitK];
#pragma unroll
    for (int a = 0; a < kSplitK; ++a) of[a] = load_fresh(partials + a * apart + k);
    return rounded_sum(x, of);
  }
};

// What a row of the input has of a table. An index outside the table fails an assertion, as in PyTorch.
template <typename T>
struct Embedding {
  const T* table;
  unsigned count;
  int columns;
  const int64_t* index;

  struct Row {
    const T* values;
    unsigned mask;

    __device__ Vector<T, kLaneValues> operator()(int k) const { return masked(load_fresh(values + k), mask); }
  };

  __device__ Row row_of(int64_t i) const {
    const bool has_row = static_cast<uint64_t>(i) < count;
    assert((has_row || count == 0) && "index out of range of an embedding");
    return {table + (has_row ? static_cast<int>(i) * columns : 0), has_row ? ~0u : 0u};
  }

  // Its rows from column `k` on; if not `has_values`, a table without rows, which gives zeros.
  __device__ Embedding from(int k, bool has_values) const {
    return {table + (has_values ? k : 0), has_values ? count : 0, columns, index};
  }

  __device__ void settle() { fuseopt::settle(table), fuseopt::settle(count), fuseopt::settle(index); }
};

template <typename T>
__device__ Embedding<T> token_embedding(const MmaLayer<T>& layer, int row) {
  return {static_cast<const T*>(layer.input), layer.token_count, layer.in_features, layer.tokens + row};
}

template <typename T>
__device__ Embedding<T> position_embedding(const MmaLayer<T>& layer, int row) {
  return {layer.position_weight, layer.position_count, layer.in_features, layer.positions + row};
}

// A row that is the sum of two embeddings.
template <typename T>
struct EmbeddedRow {
  typename Embedding<T>::Row token, position;

  __device__ EmbeddedRow(const Embedding<T>& tokens, const Embedding<T>& positions) {
    const int64_t of_token = load_fresh_index(tokens.index), of_position = load_fresh_index(positions.index);
    token = tokens.row_of(of_token), position = positions.row_of(of_position);
  }

  __device__ Vector<T, kLaneValues> operator()(int k) const { return rounded_sum(token(k), position(k)); }
};

// The same, looked up where it is read: who hardly ever reads it is not to wait for its tokens.
template <typename T>
struct LazyEmbeddedRow {
  Embedding<T> tokens, positions;

  __device__ Vector<T, kLaneValues> operator()(int k) const { return EmbeddedRow<T>(tokens, positions)(k); }
};

// Of rows that are sums, the 8 values of each chunk that a lane multiplies: where they go, and which of them there are.
// All is loaded without a condition, or the assembler has some of it wait for the rest: lanes that have no row or column
// take another's.
template <typename T, int kChunks>
class SumPlaces {
 public:
  // Of row lane / 4, from column `k` on. `leaves`: whether the block hands on the sums.
  __device__ void find(const MmaLayer<T>& layer, int k, bool leaves) {
    const int own_row = threadIdx.x % kWarpSize / 4;
    row_ = min(own_row, layer.rows - 1);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = k + c * kChunk;
      columns_[c] = min(column, layer.in_features - kLaneValues);
      mask_[c] = column < layer.in_features ? ~0u : 0u;
      leaves_[c] = leaves && own_row < layer.rows && column < layer.in_features;
      sums_[c] = layer.sum + row_ * layer.in_features + columns_[c];
    }
  }

  // To be called before the wait.
  __device__ void settle() {
    fuseopt::settle(sums_), fuseopt::settle(mask_), fuseopt::settle(leaves_);
  }

  __device__ void leave(const uint4 (&words)[kChunks]) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (leaves_[c]) *reinterpret_cast<uint4*>(sums_[c]) = words[c];
    }
  }

 protected:
  T* sums_[kChunks];
  unsigned mask_[kChunks], leaves_[kChunks];
  int row_, columns_[kChunks];
};

// Sums of a row and its partials.
template <typename T, int kChunks>
class SummedInputs : public SumPlaces<T, kChunks> {
 public:
  __device__ void find(const MmaLayer<T>& layer, int k, bool leaves) {
    SumPlaces<T, kChunks>::find(layer, k, leaves);
    const int apart = layer.rows * layer.in_features;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int at = this->row_ * layer.in_features + this->columns_[c];
      inputs_[c] = static_cast<const T*>(layer.input) + at;
#pragma unroll
      for (int a = 0; a < kSplitK; ++a) partials_[c][a] = layer.split_k_partials + a * apart + at;
    }
  }

  __device__ void settle() {
    SumPlaces<T, kChunks>::settle();
    fuseopt::settle(inputs_);
#pragma unroll
    for (auto& of_chunk : partials_) fuseopt::settle(of_chunk);
  }

  __device__ void load(uint4 (&words)[kChunks]) const {
    Vector<T, kLaneValues> inputs[kChunks];
    Vector<float, kLaneValues> partials[kChunks][kSplitK];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      inputs[c] = load_fresh(inputs_[c]);
#pragma unroll
      for (int a = 0; a < kSplitK; ++a) partials[c][a] = load_fresh(partials_[c][a]);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const auto sum = masked(rounded_sum(inputs[c], partials[c]), this->mask_[c]);
      words[c] = reinterpret_cast<const uint4&>(sum);
    }
  }

 private:
  const T* inputs_[kChunks];
  const float* partials_[kChunks][kSplitK];
};

// Sums of a token's embedding and its position's.
template <typename T, int kChunks>
class EmbeddedInputs : public SumPlaces<T, kChunks> {
 public:
  __device__ void find(const MmaLayer<T>& layer, int k, bool leaves) {
    SumPlaces<T, kChunks>::find(layer, k, leaves);
    tokens_ = token_embedding(layer, this->row_), positions_ = position_embedding(layer, this->row_);
  }

  __device__ void settle() {
    SumPlaces<T, kChunks>::settle();
    fuseopt::settle(this->columns_), tokens_.settle(), positions_.settle();
  }

  __device__ void load(uint4 (&words)[kChunks]) const {
    const EmbeddedRow<T> row(tokens_, positions_);
    Vector<T, kLaneValues> of_token[kChunks], of_position[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      of_token[c] = row.token(this->columns_[c]), of_position[c] = row.position(this->columns_[c]);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const auto sum = masked(rounded_sum(of_token[c], of_position[c]), this->mask_[c]);
      words[c] = reinterpret_cast<const uint4&>(sum);
    }
  }

 private:
  Embedding<T> tokens_, positions_;
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
