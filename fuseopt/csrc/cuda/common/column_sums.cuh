// Column sums for the gradients of a weight or bias, in two stages without atomics, so that results are bitwise
// repeatable.
#pragma once

#include "cuda/common/launchers.h"

namespace fuseopt {

constexpr int kMostSummed = 3;

// Where the first stage of a backward writes its column sums: `count` rows of partial sums for each of up to
// kMostSummed tensors.
template <typename Acc>
struct Partials {
  Acc* data;
  int64_t count;
  int64_t columns;

  __host__ __device__ Acc* of(int tensor) const { return data + tensor * count * columns; }
};

int64_t max_partials(int64_t rows);
int64_t any_partials(int64_t rows, int64_t columns);  // rows of partial sums in the "any" path: at most max_partials

// A gradient for each of the tensors, absent (data == nullptr) if it is not wanted.
struct ColumnSums {
  TypedPointer of[kMostSummed];
};

// The second stage: adds up the partials of each column.
template <typename Acc>
cudaError_t reduce_partials(Partials<Acc> partials, ColumnSums sums, cudaStream_t stream);

}  // namespace fuseopt
