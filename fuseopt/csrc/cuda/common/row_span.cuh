// Rows of a contiguous matrix that begin at any element, as those of odd length do.
#pragma once

#include <cstdint>

namespace fuseopt {

// A row of a contiguous matrix: the matrix's whole vectors in it, and up to kWidth - 1 elements before and after those,
// of which each lane of the team takes at most one.
template <int kWidth>
struct RowSpan {
  int64_t begin;  // element
  int64_t first;  // whole vector
  int vectors;    // whole vectors
  int64_t edge;   // this lane's element outside the whole vectors, or kNone
  static constexpr int64_t kNone = -1;

  // For rows that are whole vectors, in an aligned matrix.
  __device__ RowSpan(int64_t row, int columns)
      : begin(row * columns), first(begin / kWidth), vectors(columns / kWidth), edge(kNone) {}

  __device__ RowSpan(int64_t row, int columns, int lane) : begin(row * columns) {
    const int64_t end = begin + columns;
    first = (begin + kWidth - 1) / kWidth;
    vectors = static_cast<int>(max(end / kWidth - first, int64_t{0}));
    const int64_t head_end = vectors > 0 ? first * kWidth : end;
    const int64_t tail_begin = vectors > 0 ? (first + vectors) * kWidth : end;
    edge = begin + lane < head_end ? begin + lane : tail_begin + lane - (head_end - begin);
    if (edge >= end) edge = kNone;
  }

  __device__ bool has(int v) const { return v < vectors; }
  __device__ int64_t column(int v) const { return (first + v) * kWidth - begin; }
};

}  // namespace fuseopt
