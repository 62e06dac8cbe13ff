// The rows of decode_linear's input as the tensor core kernels read them: stored, or a sum with split-K partial sums.
#pragma once

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

// Sums of a row and its partials: the 8 values of each chunk that a lane multiplies, where they go, and which of them there
// are. All is loaded without a condition, or the assembler has some of it wait for the rest: lanes that have no row or
// column take another's.
template <typename T, int kChunks>
class SummedInputs {
 public:
  // Of row lane / 4, from column `k` on. `leaves`: whether the block hands on the sums.
  __device__ void find(const MmaLayer<T>& layer, int k, bool leaves) {
    const int own_row = threadIdx.x % kWarpSize / 4, row = min(own_row, layer.rows - 1);
    const int apart = layer.rows * layer.in_features;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = k + c * kChunk;
      const int at = row * layer.in_features + min(column, layer.in_features - kLaneValues);
      mask_[c] = column < layer.in_features ? ~0u : 0u;
      leaves_[c] = leaves && own_row < layer.rows && column < layer.in_features;
      sums_[c] = layer.sum + at;
      inputs_[c] = static_cast<const T*>(layer.input) + at;
#pragma unroll
      for (int a = 0; a < kSplitK; ++a) partials_[c][a] = layer.split_k_partials + a * apart + at;
    }
  }

  // To be called before the wait.
  __device__ void settle() {
    fuseopt::settle(sums_), fuseopt::settle(mask_), fuseopt::settle(leaves_), fuseopt::settle(inputs_);
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
      const auto sum = masked(rounded_sum(inputs[c], partials[c]), mask_[c]);
      words[c] = reinterpret_cast<const uint4&>(sum);
    }
  }

  __device__ void leave(const uint4 (&words)[kChunks]) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (leaves_[c]) *reinterpret_cast<uint4*>(sums_[c]) = words[c];
    }
  }

 private:
  T* sums_[kChunks];
  unsigned mask_[kChunks], leaves_[kChunks];
  const T* inputs_[kChunks];
  const float* partials_[kChunks][kSplitK];
};

}  // namespace fuseopt
