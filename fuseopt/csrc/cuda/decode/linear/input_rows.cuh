// The rows of decode_linear's input as the tensor core kernels read them: stored, a sum with split-K partial sums, or a
// sum of two embeddings.
#pragma once

#include <cassert>

#include "cuda/decode/linear/params.cuh"

namespace fuseopt {

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
}  // namespace fuseopt
