// Grids for elementwise kernels over vectors.
#pragma once

#include "cuda/common/launch.cuh"

namespace fuseopt {

constexpr int kVectorGridThreads = 128;
constexpr int kFewWidth = 2;  // elements a thread where there are few

// A tensor as rows of vectors, of which a thread has one column: the tensor's own rows, where the column matters (a bias
// is then read once a thread) or the rows lie apart; else any cut of the flattened tensor. Neighbouring blocks have
// neighbouring memory.
struct VectorGrid {
  int64_t vectors;
  int64_t vectors_in_row;

  __device__ int64_t column() const { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
  // The first row of this block, which has `rows` of them.
  __device__ int64_t first_row(int rows) const {
    return (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * rows;
  }
  __device__ int64_t vector(int64_t row) const { return row * vectors_in_row + column(); }
};

// Calls `launch(VectorGrid, blocks, threads)` for `vectors` vectors, `rows_per_thread` of them a thread.
template <typename Launch>
void launch_vectors(int64_t vectors, int64_t vectors_in_row, int rows_per_thread, Launch launch) {
  constexpr int64_t kMostBlocks = 65535;  // in the second dimension of a grid
  const int threads =
      static_cast<int>(std::min<int64_t>(kVectorGridThreads, ceil_div(vectors_in_row, kWarpSize) * kWarpSize));
  const int64_t groups = ceil_div(ceil_div(vectors, vectors_in_row), rows_per_thread);
  const int64_t layers = ceil_div(groups, kMostBlocks);  // evenly filled: blocks without work take their time, too
  launch(VectorGrid{vectors, vectors_in_row},
         dim3(static_cast<unsigned>(ceil_div(vectors_in_row, threads)),
              static_cast<unsigned>(ceil_div(groups, layers)), static_cast<unsigned>(layers)),
         threads);
}

// Calls `launch(IntTag<kWidth>, IntTag<kVectors>)`: the width of a vector of T and how many a thread has of it. As many
// as `kMost` 16-byte ones keep enough of memory on the way. Elements so few that all their threads run at once are
// spread thin, since what counts is then what a thread does one after the other.
template <typename T, int kMost, typename Launch>
void dispatch_vector_width(int64_t elements, Launch launch) {
  if (elements <= kFewWidth * tuning().elementwise_few_threads * multiprocessor_count()) {
    launch(IntTag<kFewWidth>{}, IntTag<1>{});
  } else {
    launch(IntTag<kVectorWidth<T>>{}, IntTag<kMost>{});
  }
}

}  // namespace fuseopt
