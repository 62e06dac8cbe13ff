// Addresses of a thread's residuals and outputs in decode_linear's tensor core kernels. Computed before the wait, so that a
// load or store after it is one instruction.
#pragma once

#include "cuda/decode/linear/params.cuh"
#include "cuda/common/sum_quad.cuh"

namespace fuseopt {

// Two columns of a row, and of the one 8 rows below.
template <typename T, int kHalves>
class OutputPlaces {
 public:
  // Of the columns `column` and, `next` columns further on, another one, from row `row` on, all of them `further` on.
  __device__ void find(const MmaLayer<T>& layer, int row, int column, int next, int further = 0) {
    const int shift = layer.is_wide ? 2 : 1;
    next_ = next << shift;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int r = row + h * kHalfRows;
      const int place = r * layer.output_stride + layer.first_outputs[blockIdx.y] + column + further;
      const int64_t at = static_cast<int64_t>(place) << shift;
      residuals_[h] = static_cast<const char*>(layer.residual) + at;
      outputs_[h] = static_cast<char*>(layer.output) + at;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool is_inside = r < layer.rows && column + i * next < layer.widths[blockIdx.y];
        const unsigned is_there = !is_inside ? 0 : layer.residual == nullptr ? 1 : 2;
        wide_[h][i] = layer.is_wide ? is_there : 0u;
        narrow_[h][i] = layer.is_wide ? 0u : is_there;
        narrow_added_[h][i] = 0, wide_added_[h][i] = 0.f;
      }
    }
  }

  // Called before the wait.
  __device__ void settle() {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      fuseopt::settle(residuals_[h]), fuseopt::settle(outputs_[h]);
#pragma unroll
      for (int i = 0; i < 2; ++i) fuseopt::settle(wide_[h][i]), fuseopt::settle(narrow_[h][i]);
    }
  }

  // As they lie in memory: what is converted where it is loaded is waited for there.
  __device__ void load_residuals() {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const char* const at = residuals_[h] + i * next_;
        if (narrow_[h][i] > 1) narrow_added_[h][i] = __ldcg(reinterpret_cast<const unsigned short*>(at));
        if (wide_[h][i] > 1) wide_added_[h][i] = __ldcg(reinterpret_cast<const float*>(at));
      }
    }
  }

  __device__ void store(int h, int i, float value) const {
    char* const at = outputs_[h] + i * next_;
    const T rounded = from_acc<T>(value + to_float(reinterpret_cast<const T&>(narrow_added_[h][i])));
    if (narrow_[h][i] > 0) {
      const auto bits = reinterpret_cast<const unsigned short&>(rounded);
      asm volatile("st.global.b16 [%0], %1;" ::"l"(at), "h"(bits) : "memory");
    }
    if (wide_[h][i] > 0) asm volatile("st.global.f32 [%0], %1;" ::"l"(at), "f"(value + wide_added_[h][i]) : "memory");
  }

 private:
  const char* residuals_[kHalves] = {};
  char* outputs_[kHalves] = {};
  // Whether there is something to store, or (2) to add as well, of that width.
  unsigned wide_[kHalves][2] = {}, narrow_[kHalves][2] = {};
  float wide_added_[kHalves][2] = {};
  unsigned short narrow_added_[kHalves][2] = {};
  int next_ = 0;
};

// One column of the only row.
template <typename T>
class ColumnPlace {
 public:
  __device__ void find(const MmaLayer<T>& layer, int column, bool is_inside) {
    const int64_t at = static_cast<int64_t>(blockIdx.y * layer.out_features + column) << (layer.is_wide ? 2 : 1);
    residual_ = static_cast<const char*>(layer.residual) + at;
    output_ = static_cast<char*>(layer.output) + at;
    const unsigned is_there = !is_inside ? 0 : layer.residual == nullptr ? 1 : 2;
    wide_ = layer.is_wide ? is_there : 0u;
    narrow_ = layer.is_wide ? 0u : is_there;
    narrow_added_ = 0, wide_added_ = 0.f;
  }

  // Called before the wait.
  __device__ void settle() {
    fuseopt::settle(residual_), fuseopt::settle(output_), fuseopt::settle(wide_), fuseopt::settle(narrow_);
  }

  __device__ void load_residual() {
    if (narrow_ > 1) narrow_added_ = __ldcg(reinterpret_cast<const unsigned short*>(residual_));
    if (wide_ > 1) wide_added_ = __ldcg(reinterpret_cast<const float*>(residual_));
  }

  __device__ void store(float value) const {
    if (narrow_ > 0) *reinterpret_cast<T*>(output_) = from_acc<T>(value + to_float(reinterpret_cast<const T&>(narrow_added_)));
    if (wide_ > 0) *reinterpret_cast<float*>(output_) = value + wide_added_;
  }

 private:
  const char* residual_;
  char* output_;
  unsigned wide_, narrow_;  // whether there is something to store, or (2) to add as well, of that width
  float wide_added_;
  unsigned short narrow_added_;
};

// Four neighbouring columns of a row, residual and output in T.
template <typename T>
class QuadPlace {
 public:
  __device__ void find(const MmaLayer<T>& layer, int row, int column, bool is_inside) {
    const int at = row * layer.output_stride + blockIdx.y * layer.out_features + column;
    residual_ = static_cast<const T*>(layer.residual) + at;
    output_ = static_cast<T*>(layer.output) + at;
    is_there_ = !is_inside ? 0 : layer.residual == nullptr ? 1 : 2;
    added_ = {};
  }

  // Called before the wait.
  __device__ void settle() { fuseopt::settle(residual_), fuseopt::settle(output_), fuseopt::settle(is_there_); }

  __device__ void load_residual() {
    if (is_there_ > 1) added_ = __ldcg(reinterpret_cast<const uint2*>(residual_));
  }

  __device__ void store(float (&values)[kQuad]) const {
    const auto& added = reinterpret_cast<const Vector<T, kQuad>&>(added_);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) values[j] += added[j];
    uint2 words;
    store_floats_as<T>(&words, 0, values);
    if (is_there_ > 0) asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(output_), "r"(words.x), "r"(words.y) : "memory");
  }

 private:
  const T* residual_;
  T* output_;
  unsigned is_there_;  // 2: so is a residual
  uint2 added_;        // as it lies in memory: what is converted where it is loaded is waited for there
};

}  // namespace fuseopt
