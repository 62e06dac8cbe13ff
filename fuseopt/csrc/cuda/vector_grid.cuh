// Grids for elementwise kernels over vectors.
#pragma once

#include "launch.cuh"

namespace fuseopt {

constexpr int kVectorGridThreads = 128;

// A tensor as rows of vectors, of which a thread has one column: the tensor's own rows, where the column matters (a bias
// is then read once a thread) or the rows lie apart; else any cut of the flattened tensor.
struct VectorGrid {
  int64_t vectors;
  int64_t vectors_in_row;

  __device__ int64_t column() const { return static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; }
  __device__ int64_t vector(int64_t row) const { return row * vectors_in_row + column(); }
};

// Calls `launch(VectorGrid, blocks, threads)` for `vectors` vectors, `rows_per_thread` of them a thread.
template <typename Launch>
void launch_vectors(int64_t vectors, int64_t vectors_in_row, int rows_per_thread, Launch launch) {
  const int threads =
      static_cast<int>(std::min<int64_t>(kVectorGridThreads, ceil_div(vectors_in_row, kWarpSize) * kWarpSize));
  const int64_t rows = ceil_div(vectors, vectors_in_row);
  launch(VectorGrid{vectors, vectors_in_row},
         dim3(static_cast<unsigned>(ceil_div(rows, rows_per_thread)),
              static_cast<unsigned>(ceil_div(vectors_in_row, threads))),
         threads);
}

}  // namespace fuseopt
