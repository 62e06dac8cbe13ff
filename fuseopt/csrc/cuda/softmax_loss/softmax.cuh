// What the softmax kernels share: logits and their mask.
#pragma once

#include "cuda/common/dependent_launch.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/row_span.cuh"
#include "cuda/common/vector.cuh"

namespace fuseopt {

// Launches of the kernels for rows wider than a team's registers; the tensors are aligned for vectors.
void launch_softmax_fwd_wide(TypedPointer input, const SoftmaxMask& mask, TypedPointer output, int64_t rows,
                             int columns, float scale, cudaStream_t stream);
void launch_softmax_bwd_wide(TypedPointer grad_output, TypedPointer output, TypedPointer grad_input, int64_t rows,
                             int columns, float scale, cudaStream_t stream);

// A mask whose rows are found without a division.
struct IndexedMask : SoftmaxMask {
  uint64_t reciprocals[kMaxDims];  // 2^64 / size, rounded up; 0 for a size of one

  explicit IndexedMask(const SoftmaxMask& mask) : SoftmaxMask(mask) {
    for (int dim = 0; dim < dims; ++dim) reciprocals[dim] = UINT64_MAX / static_cast<uint64_t>(sizes[dim]) + 1;
  }

  // Exact for 32 bits (Lemire, Kaser and Kurz, 2019).
  __device__ uint32_t divide(uint32_t index, int dim) const {
    return reciprocals[dim] == 0 ? index : static_cast<uint32_t>(__umul64hi(reciprocals[dim], index));
  }
  __device__ int64_t divide(int64_t index, int dim) const { return index / sizes[dim]; }

  template <typename Index>
  __device__ int64_t offset_of(Index row) const {
    int64_t offset = 0;
    for (int dim = dims - 1; dim > 0; --dim) {
      const Index rest = divide(row, dim);
      offset += static_cast<int64_t>(row - rest * static_cast<Index>(sizes[dim])) * strides[dim];
      row = rest;
    }
    return dims > 0 ? offset + static_cast<int64_t>(row) * strides[0] : 0;
  }

  // The offset of a row's first element.
  __device__ int64_t row_offset(int64_t row) const {
    return row <= UINT32_MAX ? offset_of(static_cast<uint32_t>(row)) : offset_of(row);
  }
};

// A row's exponentials are of differences between its largest logit and others. Without a mask, logits are kept as x / 2
// or -x / 2, by the sign of the scale, and 2 |scale| multiplies the differences. Halves are exact and their differences
// finite. A product with the scale is neither: if the compiler rounds `x * scale` for the maximum, but not where it
// fuses `x * scale - max`, rows of finfo.min have exponents of 1e31. With a mask the logits are fmaf(x, scale, mask).
template <typename M, typename Acc>
__device__ Acc factor_of_input(Acc scale) {
  if constexpr (!std::is_void_v<M>) return scale;
  else return scale == 0 ? scale : copysign(Acc(0.5), scale);
}

template <typename M, typename Acc>
__device__ Acc factor_of_difference(Acc scale) {
  if constexpr (!std::is_void_v<M>) return 1;
  else return scale == 0 ? 1 : 2 * fabs(scale);
}

// The additive mask of one row, with elements of M; M is void if there is none.
template <typename M>
struct RowMask {
  using Source = IndexedMask;

  const M* row;
  int64_t column_stride;

  __device__ RowMask(const Source& mask, int64_t row_index)
      : row(static_cast<const M*>(mask.values.data) + mask.row_offset(row_index)),
        column_stride(mask.column_stride) {}

  // Loads the elements from `column` on without converting them, so that several loads can be in flight.
  template <int kWidth>
  __device__ void load(Vector<M, kWidth>& values, int64_t column) const {
    const M* const first = row + column * column_stride;
    if (column_stride == 1 && reinterpret_cast<uintptr_t>(first) % alignof(Vector<M, kWidth>) == 0) {
      values = *reinterpret_cast<const Vector<M, kWidth>*>(first);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values.values[j] = first[j * column_stride];
    }
  }

  // The logits of a vector that begins at `column`. `factor`: see factor_of_input.
  template <int kWidth, typename T>
  __device__ void logits_of(float (&logits)[kWidth], const Vector<T, kWidth>& x, float factor, int64_t column) const {
    Vector<M, kWidth> added;
    load(added, column);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) logits[j] = fmaf(x[j], factor, added[j]);
  }
};

template <>
struct RowMask<void> {
  struct Source {
    explicit Source(const SoftmaxMask&) {}
  };

  __device__ RowMask(const Source&, int64_t) {}
  template <int kWidth>
  __device__ void load(Vector<float, kWidth>&, int64_t) const {}
  template <int kWidth, typename T>
  __device__ void logits_of(float (&logits)[kWidth], const Vector<T, kWidth>& x, float factor, int64_t) const {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) logits[j] = x[j] * factor;
  }
};

// The logit of this lane's element outside the vectors; minus infinity, the neutral element, if it has none.
template <int kWidth, typename T, typename Mask>
__device__ float edge_logit(const T* input, const RowSpan<kWidth>& span, float factor, const Mask& mask) {
  if (span.edge == span.kNone) return -INFINITY;
  float logit[1];
  mask.logits_of(logit, Vector<T, 1>{input[span.edge]}, factor, span.edge - span.begin);
  return logit[0];
}

// The logits of a thread's first kVectors vectors of a row. For 16 bits without a mask they are recomputed from the
// input at each use: one multiplication each, but half the registers, so more rows are in flight.
template <typename T, typename M, int kVectors>
struct RowLogits {
  static constexpr int kWidth = kVectorWidth<T>;
  static constexpr bool kRemade = sizeof(T) == 2 && std::is_void_v<M>;
  Vector<T> x[kVectors];
  Vector<std::conditional_t<std::is_void_v<M>, float, M>, kWidth> added[kVectors];
  float values[std::is_void_v<M> ? 1 : kVectors][kWidth];
  float factor;  // see factor_of_input

  template <typename Span, typename RowTeam>
  __device__ void load(const T* input, const Span& span, const RowTeam& team) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (span.has(v)) x[k] = load_vector(input, span.first + v);
    }
  }

  template <typename Span, typename RowTeam>
  __device__ void load(const RowMask<M>& mask, const Span& span, const RowTeam& team) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (span.has(v)) mask.load(added[k], span.column(v));
    }
  }

  // Call once before `at`, as late as possible: it waits for input and mask.
  __device__ void make(int k) {
    if constexpr (!std::is_void_v<M>) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[k][j] = fmaf(x[k][j], factor, added[k][j]);
    }
  }

  __device__ float at(int k, int j) const {
    if constexpr (std::is_void_v<M>) return x[k][j] * factor;
    else return values[k][j];
  }

  // Keeps an exponential in the place of its logit, unless kRemade.
  __device__ void keep(int k, int j, float exponential) {
    if constexpr (!std::is_void_v<M>) values[k][j] = exponential;
    else if constexpr (!kRemade) x[k].values[j] = exponential;
  }
  __device__ float kept(int k, int j) const { return std::is_void_v<M> ? x[k][j] : values[k][j]; }
};

inline unsigned block_per_row(int64_t rows) { return static_cast<unsigned>(std::min<int64_t>(rows, INT32_MAX)); }

// Calls `launch(TypeTag<M>)` for the mask dtypes compiled for input T: none, T and float32. Returns false for others.
template <typename T, typename Launch>
bool dispatch_mask(const SoftmaxMask& mask, Launch launch) {
  if (mask.values.data == nullptr) launch(TypeTag<void>{});
  else if (mask.values.dtype == kFloat32) launch(TypeTag<float>{});
  else if (mask.values.dtype == kDType<T>) launch(TypeTag<T>{});
  else return false;
  return true;
}

}  // namespace fuseopt
