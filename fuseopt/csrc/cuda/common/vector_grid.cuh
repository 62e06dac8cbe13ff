// Grids for elementwise kernels over vectors.
#pragma once

#include "cuda/common/launch.cuh"

namespace fuseopt {

// TUNED: measurement not recorded (4fdec8e, 9f339f7); `fuseopt bench ops --op gelu` measures it again.
constexpr int kVectorGridThreads = 128;
constexpr int kFewWidth = 2;  // elements per thread, if there are few

// A tensor as rows of vectors; a thread has one column of them. These are the tensor's own rows if the column matters
// (a thread then reads the bias once) or if rows have gaps. Otherwise any division of the flattened tensor will do.
// Neighbouring blocks have neighbouring memory.
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

// Calls `launch(VectorGrid, blocks, threads)` for `vectors` vectors, with `rows_per_thread` of them per thread.
template <typename Launch>
void launch_vectors(int64_t vectors, int64_t vectors_in_row, int rows_per_thread, Launch launch) {
  constexpr int64_t kMostBlocks = 65535;  // in the second dimension of a grid
  const int threads =
      static_cast<int>(std::min<int64_t>(kVectorGridThreads, ceil_div(vectors_in_row, kWarpSize) * kWarpSize));
  const int64_t groups = ceil_div(ceil_div(vectors, vectors_in_row), rows_per_thread);
  const int64_t layers = ceil_div(groups, kMostBlocks);  // equally filled, since blocks without work take time too
  launch(VectorGrid{vectors, vectors_in_row},
         dim3(static_cast<unsigned>(ceil_div(vectors_in_row, threads)),
              static_cast<unsigned>(ceil_div(groups, layers)), static_cast<unsigned>(layers)),
         threads);
}

// Calls `launch(IntTag<kWidth>, IntTag<kVectors>)`: the width of a vector of T, and how many of them a thread has.
// `kMost` 16-byte vectors keep enough memory in flight. Elements so few that all their threads run at once are spread
// over more threads, since then the sequential work of a thread counts.
template <typename T, int kMost, typename Launch>
void dispatch_vector_width(int64_t elements, Launch launch) {
  if (elements <= kFewWidth * tuning().elementwise_few_threads * multiprocessor_count()) {
    launch(IntTag<kFewWidth>{}, IntTag<1>{});
  } else {
    launch(IntTag<kVectorWidth<T>>{}, IntTag<kMost>{});
  }
}

}  // namespace fuseopt
