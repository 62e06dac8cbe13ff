// What RMSNorm and LayerNorm share: how a row is laid over threads, and the column sums of their weight gradients.
//
// Fast path: a team of threads (a warp for narrow rows, a block for wide ones) holds a row in registers, so that it is
// read once. Forward, every row has a team of its own: measured faster than teams that walk the rows with the next
// row's loads in flight. Backward, as many teams as the device holds walk the rows: a thread has the same columns in
// every row, and sums their weight gradients in registers. Anything else (float64, unaligned or odd rows, rows wider
// than the registers) takes the "any" kernels: a block a row, an element at a time.
#pragma once

#include <initializer_list>

#include "launch.cuh"
#include "vector.cuh"

namespace fuseopt {

constexpr int kFwdBlockElements = 32;  // of a row in a thread, where a block has the row
constexpr int kBwdBlockElements = 16;  // fewer, since it holds two rows and their columns' sums
constexpr int kAnyThreads = 256;

// Backward, a block leaves one row of partial sums, however many warps it has. Hence larger blocks than forward, and no
// more of them to a multiprocessor than its memory bandwidth needs.
constexpr int kBwdWarpTeamBlock = 256;
constexpr int kBwdWarpTeamBlocksPerProcessor = 2;
constexpr int kPartialsPerProcessor = 4;

// Whether the fast path can take rows of `columns` elements of `rows_of.front()`'s dtype, by type and alignment:
// `others` may have another 16- or 32-bit dtype.
inline bool is_fast(std::initializer_list<TypedPointer> rows_of, std::initializer_list<TypedPointer> others,
                    int64_t columns) {
  const int dtype = rows_of.begin()->dtype;
  for (const TypedPointer& tensor : rows_of) {
    if (tensor.dtype != dtype || !is_aligned(tensor.data)) return false;
  }
  for (const TypedPointer& tensor : others) {
    if (tensor.data != nullptr && (tensor.dtype == kFloat64 || !is_aligned(tensor.data))) return false;
  }
  return columns * element_size(static_cast<DType>(dtype)) % kAccessBytes == 0;
}

// The precision of the "any" path: "float64 in, float64 maths".
inline bool needs_float64(TypedPointer input, TypedPointer weight, TypedPointer bias = {}) {
  for (const TypedPointer& tensor : {input, weight, bias}) {
    if (tensor.data != nullptr && tensor.dtype == kFloat64) return true;
  }
  return false;
}

template <typename Shape>
constexpr int kBwdMaxThreads = Shape::kWarpPerRow ? kBwdWarpTeamBlock : kMaxBlockTeam;

// Calls `launch(TypeTag<W>)` for the weight dtypes compiled for input T: T, float32, and for float32 all of them. An
// absent weight is a null pointer of type T. False for other dtypes.
template <typename T, typename Launch>
bool dispatch_weight_dtype(TypedPointer weight, Launch launch) {
  if (weight.data == nullptr || weight.dtype == kDType<T>) return launch(TypeTag<T>{});
  if constexpr (std::is_same_v<T, float>) {
    if (weight.dtype == kFloat16) return launch(TypeTag<__half>{});
    if (weight.dtype == kBFloat16) return launch(TypeTag<__nv_bfloat16>{});
  } else {
    if (weight.dtype == kFloat32) return launch(TypeTag<float>{});
  }
  return false;
}

template <typename Shape>
int bwd_blocks() {
  return (Shape::kWarpPerRow ? kBwdWarpTeamBlocksPerProcessor : kPartialsPerProcessor) * multiprocessor_count();
}

inline unsigned any_grid(int64_t rows) {
  return static_cast<unsigned>(std::min<int64_t>(rows, 8 * multiprocessor_count()));
}

// A thread's part of one row: vectors lane, lane + size, lane + 2 size ... of its team, as they lie in memory. `kWidth`
// is the width of the input's vectors, of which a weight's vectors must have the same columns.
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
};

// A weight or bias as floats in shared memory, in the order in which a team reads it: the first 16 bytes of every
// vector's floats, then the second, so that neighbouring lanes read from neighbouring banks.
template <int kWidth>
class SharedColumns {
 public:
  // Fills `values`, of `columns` floats, with the tensor plus `offset`, or `absent` plus `offset`. To be followed by a
  // barrier.
  __device__ SharedColumns(float* values, TypedPointer tensor, float absent, float offset, int columns)
      : parts_(reinterpret_cast<const Vector<float>*>(values)), vectors_(columns / kWidth) {
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
      const int part = c % kWidth / kPartWidth * vectors_ + c / kWidth;
      values[part * kPartWidth + c % kPartWidth] =
          (tensor.data != nullptr ? load_as<float>(tensor, c) : absent) + offset;
    }
  }

  // The floats of the row's vector v.
  __device__ void load(int v, float (&out)[kWidth]) const {
#pragma unroll
    for (int p = 0; p < kWidth / kPartWidth; ++p) {
      const Vector<float> part = parts_[p * vectors_ + v];
#pragma unroll
      for (int j = 0; j < kPartWidth; ++j) out[p * kPartWidth + j] = part[j];
    }
  }

 private:
  static constexpr int kPartWidth = kVectorWidth<float>;
  const Vector<float>* parts_;
  int vectors_;
};

// Adds up the column sums of a block's teams, in the order of the warps, and stores them as the block's row of
// `partials`.
template <int kVectors, int kWidth, Team kTeam>
__device__ inline void store_block_partials(const float (&sums)[kVectors][kWidth], float* partials, int columns,
                                            const RowTeam<kTeam>& team) {
  float* const row = partials + static_cast<int64_t>(blockIdx.x) * columns;
  if constexpr (kTeam == Team::kWarp) {
    constexpr int kWarps = kBwdWarpTeamBlock / kWarpSize;
    __shared__ Vector<float, kWidth> warp_sums[kWarps][kVectors * kWarpSize];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        warp_sums[threadIdx.x / kWarpSize][team.lane + k * kWarpSize].values[j] = sums[k][j];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sum += warp_sums[warp][c / kWidth].values[c % kWidth];
      row[c] = sum;
    }
    __syncthreads();  // before a second tensor's sums overwrite these
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v * kWidth < columns) store_floats_as<float>(row, v, sums[k]);
    }
  }
}

// Where the first stage of a backward leaves its column sums: for each of up to two tensors `count` rows of partial
// sums.
template <typename Acc>
struct Partials {
  Acc* data;
  int64_t count;
  int64_t columns;

  __host__ __device__ Acc* of(int tensor) const { return data + tensor * count * columns; }
};

int64_t max_partials(int64_t rows);
int64_t any_partials(int64_t rows, int64_t columns);  // rows of partial sums in the "any" path: at most max_partials

// The second stage: sums the partials of each column into grad_weight and, where it is wanted, grad_bias (absent: data
// == nullptr).
template <typename Acc>
cudaError_t reduce_partials(Partials<Acc> partials, TypedPointer grad_weight, TypedPointer grad_bias,
                            cudaStream_t stream);

// First stage of the "any" path: column sums of grad_output * xhat and of grad_output. `mean` is absent for RMSNorm.
template <typename Acc>
cudaError_t column_partials_any(TypedPointer grad_output, TypedPointer input, TypedPointer mean, TypedPointer rstd,
                                Partials<Acc> partials, int64_t rows, cudaStream_t stream);

}  // namespace fuseopt
