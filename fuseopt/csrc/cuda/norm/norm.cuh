// What the forwards (norm_fwd.cuh) and backwards (norm_bwd.cuh) of RMSNorm and LayerNorm share: how a row is spread over
// threads, and a thread's part of it.
//
// Fast path: a team of threads holds a row in registers, so that the row is read once. A team is a warp or part of one
// for narrow rows; a block for wide rows, and for all rows if there are few. It reads 16-byte vectors, or single
// elements if rows are unaligned, or of odd length and not taken by norm_odd_rows.cu.
//
// All other cases take the "any" kernels: float64, rows wider than the registers, dtypes that differ without vectors.
// There a block has a row and reads it once for each pass.
#pragma once

#include <initializer_list>

#include "cuda/common/dependent_launch.cuh"
#include "cuda/common/launchers.h"
#include "cuda/common/row_team.cuh"
#include "cuda/common/vector.cuh"

namespace fuseopt {

// Elements of a row that each thread holds.
// TUNED: 8: a quarter of a warp takes almost 50% off RMSNorm over 64 columns of 16 bits (64347c2). 24: b5728bd.
constexpr int kShortElements = 8;  // if a warp or part of one has the row
constexpr int kWarpElements = 24;  // at most, if a warp has the row
constexpr int kAnyThreads = 256;

template <typename Shape>
constexpr bool kHasShortRows = Shape::kWithinWarp && Shape::kElements == kShortElements;

using NarrowRow = RowShape<kWarpElements, Team::kWarp>;
// TUNED: rows of odd length: a warp is 17% to 25% faster than a block for RMSNorm, slower for LayerNorm (47c4843).
using ElementwiseBlock = RowShape<8, Team::kBlock>;  // elements are read one by one
using ElementwiseWarp = RowShape<32, Team::kWarp>;   // the same, for a warp

// Whether one of the tensors present has `dtype`.
inline bool any_has(int dtype, std::initializer_list<TypedPointer> tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [=](const TypedPointer& tensor) { return tensor.data != nullptr && tensor.dtype == dtype; });
}

// Whether every tensor present has `dtype`.
inline bool have_dtype(int dtype, std::initializer_list<TypedPointer> tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [=](const TypedPointer& tensor) { return tensor.data == nullptr || tensor.dtype == dtype; });
}

// Whether every tensor present is aligned for vectors of `columns` elements of `dtype`, from row to row.
inline bool are_vectors(int dtype, int64_t columns, std::initializer_list<TypedPointer> tensors) {
  return columns * element_size(static_cast<DType>(dtype)) % kAccessBytes == 0 &&
         std::all_of(tensors.begin(), tensors.end(), [](const TypedPointer& tensor) { return is_aligned(tensor.data); });
}

// Calls `launch(RowShape, IntTag<1>, threads)` for unaligned tensors and rows of odd length, element by element. `First`
// is the shape for narrow rows. Returns false if no shape holds the rows.
template <typename First, typename Launch>
bool dispatch_elementwise_row(int64_t columns, Launch launch) {
  return dispatch_shape<First, ElementwiseBlock>(
      columns, [&](auto shape, int threads) { launch(shape, IntTag<1>{}, threads); });
}

inline unsigned any_grid(int64_t rows) {
  return static_cast<unsigned>(std::min<int64_t>(rows, 8 * multiprocessor_count()));
}

// kWidth neighbouring elements of a tensor of type W: in their own dtype, or as floats if W is known only at run time.
template <typename W, int kWidth>
struct Columns {
  Vector<std::conditional_t<std::is_same_v<W, AnyType>, float, W>, kWidth> vector;

  // Loads from element i on.
  __device__ void load(TypedPointer tensor, int64_t i) {
    if constexpr (std::is_same_v<W, AnyType>) load_floats(tensor, i, vector.values);
    else vector = *reinterpret_cast<const decltype(vector)*>(static_cast<const W*>(tensor.data) + i);
  }

  // Loads from element i on; without a tensor every element is `absent`.
  __device__ void load_or(TypedPointer tensor, int64_t i, float absent) {
    if (tensor.data != nullptr) {
      load(tensor, i);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) vector.values[j] = from_acc<std::decay_t<decltype(vector.values[j])>>(absent);
    }
  }

  __device__ float operator[](int j) const { return vector[j]; }
};

// A thread's part of one row: vectors lane, lane + size, lane + 2 size ... of its team, in the tensor's own dtype.
// `kWidth` is the width of the input's vectors; a weight's vectors must have the same columns.
template <typename T, int kVectors, int kWidth = kVectorWidth<T>>
struct RowPart {
  Vector<T, kWidth> vectors[kVectors];

  // Vectors past the end of the row read as zero.
  template <typename RowTeam>
  __device__ void load(const T* row, const RowTeam& team, int vectors_in_row) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v < vectors_in_row) vectors[k] = reinterpret_cast<const Vector<T, kWidth>*>(row)[v];
      else vectors[k] = {};
    }
  }

  // Adds another row of type R, rounds to T, and stores the sum.
  template <typename R, typename RowTeam>
  __device__ void add(TypedPointer residual, int64_t begin, T* sum, const RowTeam& team, int vectors_in_row) {
    Columns<R, kWidth> addend[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v < vectors_in_row) addend[k].load(residual, begin + v * kWidth);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v >= vectors_in_row) continue;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) vectors[k].values[j] = from_acc<T>(vectors[k][j] + addend[k][j]);
      reinterpret_cast<Vector<T, kWidth>*>(sum + begin)[v] = vectors[k];
    }
  }
};

}  // namespace fuseopt
