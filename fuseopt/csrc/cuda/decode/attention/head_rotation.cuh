// RMS norm and rotation of a head's vector before attention, 8 neighbouring dimensions a lane, in float or double. The
// table and the norms' weights are read before a kernel waits for its predecessor.
#pragma once

#include "cuda/common/dtype.cuh"
#include "cuda/common/row_team.cuh"
#include "cuda/common/vector.cuh"

namespace fuseopt {

// Bypasses the L1 cache: it may be read both before and after the previous kernel has written it.
__device__ inline int64_t integer_at(const Integers& integers, int64_t index) {
  if (integers.data == nullptr) return 0;
  const int64_t i = index * integers.stride;
  return integers.bytes == 4 ? __ldcg(static_cast<const int*>(integers.data) + i)
                             : __ldcg(static_cast<const long long*>(integers.data) + i);
}

__device__ inline float reciprocal_root(float x) { return rsqrtf(x); }
__device__ inline double reciprocal_root(double x) { return rsqrt(x); }

constexpr int kLaneDims = 8;

template <typename T>
using AccFor = std::conditional_t<std::is_same_v<T, double>, double, float>;

enum class HeadPart { kQuery, kKey, kValue };

// What a row's rotation and the norms do to dimensions [dim, dim + 8) of a vector.
template <typename Acc>
class LaneRotation {
 public:
  // Elements of shared memory for each lane, for partners at any distance, without bank conflicts.
  static constexpr int kScratch = kLaneDims + 1;

  __device__ LaneRotation(const HeadRotation& rotation, int64_t row, int dim, int head_dim)
      : rotation_(rotation), dim_(dim), head_dim_(head_dim), reciprocal_dim_(Acc(1) / head_dim) {
    if (rotation.table != nullptr) {
      const int64_t last = rotation.positions - 1;
      const int64_t position = min(max(integer_at(rotation.row_positions, row), int64_t(0)), last);
      const float* const line = rotation.table + position * rotation.rotated;
      const int pairs = rotation.rotated / 2;
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) {
        const int pair = rotation.interleaved ? (dim + i) / 2 : dim + i - (is_first(i) ? 0 : pairs);
        const int there = dim + i < rotation.rotated ? pair : 0;  // loads without branches are in flight together
        cos_[i] = line[there];
        sin_[i] = is_first(i) ? -line[pairs + there] : line[pairs + there];
      }
    }
    load_weight(rotation.q_norm, q_weight_);
    load_weight(rotation.k_norm, k_weight_);
  }

  // A vector has kLanes neighbouring lanes; all lanes of the warp call. `x` is 0 from the vector's end on. `scratch`:
  // kLanes * kScratch elements of shared memory for the vector.
  template <int kLanes>
  __device__ void apply(Acc (&x)[kLaneDims], HeadPart part, Acc* scratch) const {
    if (rotation_.q_norm.data != nullptr || rotation_.k_norm.data != nullptr) {
      Acc squares = 0;
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) squares += x[i] * x[i];
      const Acc mean = warp_reduce<Sum, kLanes>(squares) * reciprocal_dim_;
      const Acc factor = reciprocal_root(mean + Acc(rotation_.eps));
      const bool has_norm = part == HeadPart::kQuery ? rotation_.q_norm.data != nullptr
                                                     : part == HeadPart::kKey && rotation_.k_norm.data != nullptr;
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) {
        if (has_norm) x[i] = x[i] * factor * (part == HeadPart::kKey ? k_weight_[i] : q_weight_[i]);
      }
    }
    if (rotation_.table == nullptr) return;
    const int rotated = part == HeadPart::kValue ? 0 : rotation_.rotated, half = rotation_.rotated / 2;
    Acc partners[kLaneDims];
    if (rotation_.interleaved) {
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) partners[i] = x[i ^ 1];
    } else if (half % kLaneDims == 0) {
      const int lane = threadIdx.x % kWarpSize, apart = half / kLaneDims;
      const int source = dim_ < half ? lane + apart : dim_ < 2 * half ? lane - apart : lane;
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) partners[i] = __shfl_sync(kFullWarp, x[i], source);
    } else {
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) scratch[place_of(dim_ + i)] = x[i];
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) {
        if (dim_ + i < 2 * half) partners[i] = scratch[place_of(dim_ + i + (is_first(i) ? half : -half))];
      }
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      if (dim_ + i < rotated) x[i] = x[i] * cos_[i] + partners[i] * sin_[i];
    }
  }

 private:
  // Whether a dimension is the first of its pair.
  __device__ bool is_first(int i) const {
    return rotation_.interleaved ? i % 2 == 0 : dim_ + i < rotation_.rotated / 2;
  }

  __device__ static int place_of(int dim) { return dim + dim / kLaneDims; }

  template <typename Weight>
  __device__ void load_weight_as(const void* norm, Acc (&weight)[kLaneDims]) const {
    Weight loaded[kLaneDims] = {};
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      if (dim_ + i < head_dim_) loaded[i] = static_cast<const Weight*>(norm)[dim_ + i];
    }
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      if constexpr (std::is_same_v<Weight, double>) weight[i] = static_cast<Acc>(loaded[i]);
      else weight[i] = to_float(loaded[i]);
      weight[i] += static_cast<Acc>(rotation_.offset);
    }
  }

  __device__ void load_weight(TypedPointer norm, Acc (&weight)[kLaneDims]) const {
    if (norm.data == nullptr) return;
    switch (static_cast<DType>(norm.dtype)) {
      case kFloat32: return load_weight_as<float>(norm.data, weight);
      case kFloat16: return load_weight_as<__half>(norm.data, weight);
      case kBFloat16: return load_weight_as<__nv_bfloat16>(norm.data, weight);
      case kFloat64: return load_weight_as<double>(norm.data, weight);
    }
  }

  const HeadRotation& rotation_;
  const int dim_, head_dim_;
  const Acc reciprocal_dim_;
  // The sines of the first of a pair are negative.
  Acc cos_[kLaneDims] = {}, sin_[kLaneDims] = {}, q_weight_[kLaneDims] = {}, k_weight_[kLaneDims] = {};
};

// A lane's 8 dimensions of one head's vector; zeros after its end.
template <typename T>
struct alignas(16) LaneVector {
  T values[kLaneDims];

  __device__ void load(const T* vector, int dim, int head_dim, bool aligned) {
    *this = {};
    if (aligned) {
      if (dim < head_dim) *this = *reinterpret_cast<const LaneVector*>(vector + dim);
    } else {
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) {
        if (dim + i < head_dim) values[i] = vector[dim + i];
      }
    }
  }

  __device__ void store(T* vector, int dim, int head_dim, bool aligned) const {
    if (aligned) {
      if (dim < head_dim) *reinterpret_cast<LaneVector*>(vector + dim) = *this;
    } else {
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) {
        if (dim + i < head_dim) vector[dim + i] = values[i];
      }
    }
  }

  // Norm and rotation; the result is rounded to T.
  template <int kGroup>
  __device__ void rotate(const LaneRotation<AccFor<T>>& rotation, HeadPart part, AccFor<T>* scratch) {
    AccFor<T> wide[kLaneDims];
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) wide[i] = (*this)[i];
    rotation.template apply<kGroup>(wide, part, scratch);
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) values[i] = from_acc<T>(wide[i]);
  }

  __device__ AccFor<T> operator[](int i) const {
    if constexpr (std::is_same_v<T, double>) return values[i];
    else return reinterpret_cast<const Vector<T, kLaneDims>&>(*this)[i];
  }
};

}  // namespace fuseopt
