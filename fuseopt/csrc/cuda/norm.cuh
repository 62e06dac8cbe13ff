// What RMSNorm and LayerNorm share: how a row is laid over threads, and the column sums of their weight gradients.
//
// Fast path: a team of threads (a warp for narrow rows, a block for wide ones) holds a row in registers, so that it is
// read once: in 16-byte vectors, or an element at a time where rows are unaligned or of odd length. Forward, every row
// has a team of its own: measured faster than teams that walk the rows with the next row's loads in flight. Backward,
// as many teams as the device holds walk the rows: a thread has the same columns in every row, and sums their weight
// gradients in registers. Anything else (float64, rows wider than the registers) takes the "any" kernels: a block a
// row, read once for each pass over it.
//
// With a residual the row is the sum of two tensors, rounded to the sum's dtype T and stored on the way.
#pragma once

#include <initializer_list>

#include "launch.cuh"
#include "vector.cuh"

namespace fuseopt {

constexpr int kFwdBlockElements = 32;  // of a row in a thread, where a block has the row
constexpr int kBwdBlockElements = 16;  // fewer, since it holds two rows and their columns' sums
constexpr int kElementwise = 8;        // where they are read one by one
constexpr int kElementwiseWarp = 32;   // and a warp has the row
constexpr int kAnyThreads = 256;

// Backward, a block leaves one row of partial sums, however many warps it has. Hence larger blocks than forward, and no
// more of them to a multiprocessor than its memory bandwidth needs.
constexpr int kBwdWarpTeamBlock = 256;
constexpr int kBwdWarpTeamBlocksPerProcessor = 2;
constexpr int kBwdThreadsPerProcessor = 1024;
constexpr int kPartialsPerProcessor = 8;

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

template <int kValue>
using IntTag = std::integral_constant<int, kValue>;

// Calls `launch(RowShape, IntTag<kWidth>, threads)`: rows of `columns` elements of T in vectors of kWidth, which is 1
// unless they are `vectors`; without vectors a warp has the row up to kElementwiseWarp * 32 columns if `kWarps`. False
// when no shape holds them.
template <typename T, int kBlockElements, bool kWarps, typename Launch>
bool dispatch_row(int64_t columns, bool vectors, Launch launch) {
  if (vectors) {
    return dispatch_row_shape<kBlockElements>(
        columns, [&](auto shape, int threads) { launch(shape, IntTag<kVectorWidth<T>>{}, threads); });
  }
  const auto consider = [&](auto shape) {
    if (columns == 0 || columns > shape.kMaxRow) return false;
    launch(shape, IntTag<1>{}, shape.threads(columns));
    return true;
  };
  if constexpr (kWarps) {
    if (consider(RowShape<kElementwiseWarp, Team::kWarp>{})) return true;
  }
  return consider(RowShape<kElementwise, Team::kBlock>{});
}

template <typename Shape>
constexpr int kBwdMaxThreads = Shape::kWarpPerRow ? kBwdWarpTeamBlock : kMaxBlockTeam;

// Calls `launch(TypeTag<T>, TypeTag<R>, wide, narrow)` for the dtypes compiled for a sum of type T of `wide`, of type
// T, and `narrow`, of type R: `input` and `residual` in either order. R is void without a residual. False for others.
template <typename Launch>
bool dispatch_stream_dtypes(TypedPointer input, TypedPointer residual, Launch launch) {
  if (residual.data == nullptr) {
    return dispatch_fast_dtype(input.dtype, [&](auto tag) { launch(tag, TypeTag<void>{}, input, residual); });
  }
  if (input.dtype == residual.dtype) {
    return dispatch_fast_dtype(input.dtype, [&](auto tag) { launch(tag, tag, input, residual); });
  }
  const TypedPointer wide = input.dtype == kFloat32 ? input : residual;
  const TypedPointer narrow = input.dtype == kFloat32 ? residual : input;
  if (wide.dtype != kFloat32) return false;
  return dispatch_fast_dtype(narrow.dtype, [&](auto tag) { launch(TypeTag<float>{}, tag, wide, narrow); });
}

// Calls `launch(TypeTag<W>)` for the weight dtypes compiled for a sum of type T and a residual of type R: T, float32, and
// for float32 the half types that come with it. An absent weight is a null pointer of type T. False for other dtypes.
template <typename T, typename R, typename Launch>
bool dispatch_weight_dtype(TypedPointer weight, Launch launch) {
  if (weight.data == nullptr || weight.dtype == kDType<T>) return launch(TypeTag<T>{});
  if constexpr (!std::is_same_v<T, float>) {
    if (weight.dtype == kFloat32) return launch(TypeTag<float>{});
  } else if constexpr (std::is_void_v<R>) {
    if (weight.dtype == kFloat16) return launch(TypeTag<__half>{});
    if (weight.dtype == kBFloat16) return launch(TypeTag<__nv_bfloat16>{});
  } else if constexpr (!std::is_same_v<R, float>) {
    if (weight.dtype == kDType<R>) return launch(TypeTag<R>{});
  }
  return false;
}

template <typename Shape>
int64_t bwd_blocks(int threads) {
  const int per_processor = Shape::kWarpPerRow ? kBwdWarpTeamBlocksPerProcessor
                                               : std::min(kPartialsPerProcessor, kBwdThreadsPerProcessor / threads);
  return static_cast<int64_t>(per_processor) * multiprocessor_count();
}

// Whether there is a forward block for every row. Beyond that the "any" path walks the rows.
inline bool fits_grid(int64_t rows) { return rows <= INT32_MAX; }

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

  // Adds another row, rounds to T, and stores the sum.
  template <typename R, typename RowTeam>
  __device__ void add(const RowPart<R, kVectors, kWidth>& other, T* sum, const RowTeam& team, int vectors_in_row) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        vectors[k].values[j] = from_acc<T>(vectors[k][j] + other.vectors[k][j]);
      }
      const int v = team.lane + k * team.size;
      if (v < vectors_in_row) reinterpret_cast<Vector<T, kWidth>*>(sum)[v] = vectors[k];
    }
  }
};

// The row's vector v of a weight or bias; `absent` in each element where there is none, and past the end of the row.
template <int kWidth, typename W>
__device__ inline Vector<W, kWidth> load_columns(const W* columns, int v, int vectors_in_row, float absent) {
  if (columns != nullptr && v < vectors_in_row) return reinterpret_cast<const Vector<W, kWidth>*>(columns)[v];
  Vector<W, kWidth> vector;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) vector.values[j] = from_acc<W>(absent);
  return vector;
}

// What a forward normalises: a matrix of T, or the sum of one of T and one of R; R is void without a residual.
template <typename T, typename R>
struct Stream {
  const T* input;
  const R* residual;
  T* sum;

  // The row that begins at element `begin`.
  template <int kVectors, int kWidth, typename RowTeam>
  __device__ void load(RowPart<T, kVectors, kWidth>& x, int64_t begin, const RowTeam& team, int vectors_in_row) const {
    x.load(input + begin, team, vectors_in_row);
    if constexpr (!std::is_void_v<R>) {
      RowPart<R, kVectors, kWidth> addend;
      addend.load(residual + begin, team, vectors_in_row);
      x.add(addend, sum + begin, team, vectors_in_row);
    }
  }

  __device__ float operator[](int64_t i) const {
    if constexpr (std::is_void_v<R>) return to_float(input[i]);
    else return to_float(from_acc<T>(to_float(input[i]) + to_float(residual[i])));
  }
};

// The same in the "any" path. A thread reads back from `sum` only what it has stored itself.
struct AnyStream {
  TypedPointer input, residual, sum;

  template <typename Acc>
  __device__ Acc at(int64_t i) const {
    const Acc x = load_as<Acc>(input, i);
    return residual.data != nullptr ? round_to(sum.dtype, x + load_as<Acc>(residual, i)) : x;
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
      : parts_(reinterpret_cast<const Vector<float, kPartWidth>*>(values)), vectors_(columns / kWidth) {
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
      const Vector<float, kPartWidth> part = parts_[p * vectors_ + v];
#pragma unroll
      for (int j = 0; j < kPartWidth; ++j) out[p * kPartWidth + j] = part[j];
    }
  }

 private:
  static constexpr int kPartWidth = std::min(kWidth, kVectorWidth<float>);
  const Vector<float, kPartWidth>* parts_;
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
