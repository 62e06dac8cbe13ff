// What short_attention's kernels share: a head's rows, and the launch on the tensor cores (short_attention_mma.cu).
#pragma once

#include "cuda/common/dependent_launch.cuh"
#include "cuda/common/launchers.h"
#include "cuda/common/vector.cuh"

namespace fuseopt::short_attention {

constexpr int kQueries = 16;  // per warp on the tensor cores
// TUNED: measurement not recorded (71bb838, c620c07); `fuseopt bench ops --op short_attention` measures it again.
constexpr int kMaxWarps = 4;  // per block, if its warps share nothing

// One head's rows of a tensor.
template <typename T>
struct Rows {
  const T* data;
  int64_t stride;
};

// One head of one sequence.
template <typename T>
struct Head {
  bool exists;
  Rows<T> query, key, value;
  T* output;  // of the sequence's first position, [head_dim]

  __device__ Head(const ShortAttention& attention, int64_t index) {
    const int64_t head = index % attention.heads, item = index / attention.heads;
    exists = item < attention.batch;
    const auto rows_of = [&](const ShortAttention::Heads& heads) {
      const T* const data = static_cast<const T*>(heads.data) + item * heads.batch_stride + head * heads.head_stride;
      return Rows<T>{data, heads.row_stride};
    };
    query = rows_of(attention.query);
    key = rows_of(attention.key);
    value = rows_of(attention.value);
    output = static_cast<T*>(attention.output) +
             (item * attention.length * attention.heads + head) * attention.head_dim;
  }
};

// For 16-bit T, a head size of 64 or 128, rows aligned for vectors, and compute capability 8.0 or newer.
template <typename T>
cudaError_t launch_mma(const ShortAttention& attention, cudaStream_t stream);

}  // namespace fuseopt::short_attention
