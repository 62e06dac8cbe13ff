// What RMSNorm and LayerNorm share: how a row is spread over threads, and the column sums of their weight gradients.
//
// Fast path: a team of threads holds a row in registers, so that the row is read once. A team is a warp or part of one
// for narrow rows; a block for wide rows, and for all rows if there are few. It reads 16-byte vectors, or single
// elements if rows are unaligned, or of odd length and not taken by norm_odd_rows.cu.
//
// In the forward every row has its own team. That was measured to be faster than teams that walk the rows while loading
// the next one. In the backward as many teams as the device holds walk the rows. A thread has the same columns in every
// row and sums their weight gradients in registers. Few rows have a launch of their own (norm_bwd_few_rows.cu).
//
// All other cases take the "any" kernels: float64, rows wider than the registers, dtypes that differ without vectors.
// There a block has a row and reads it once for each pass.
//
// With a residual the row is the sum of two tensors, rounded to the sum's dtype T and stored.
#pragma once

#include <initializer_list>

#include "cuda/common/column_sums.cuh"
#include "cuda/common/dependent_launch.cuh"
#include "cuda/common/row_ring.cuh"
#include "cuda/common/vector.cuh"

namespace fuseopt {

// Elements of a row that each thread holds.
constexpr int kShortElements = 8;       // if a warp or part of one has the row
constexpr int kWarpElements = 24;       // at most, if a warp has the row
constexpr int kMostElements = 32;       // at most, if a block has the row
constexpr int kLightBlockElements = 8;  // if a block has a row that a warp could have
constexpr int kBwdBlockElements = 16;   // fewer, since a thread holds two rows and their columns' sums
constexpr int kAnyThreads = 256;

template <typename Shape>
constexpr bool kHasShortRows = Shape::kWithinWarp && Shape::kElements == kShortElements;

using NarrowRow = RowShape<kWarpElements, Team::kWarp>;
using ElementwiseBlock = RowShape<8, Team::kBlock>;  // elements are read one by one
using ElementwiseSum = RowShape<4, Team::kBlock>;    // the same, and two float32 tensors are added
using ElementwiseWarp = RowShape<32, Team::kWarp>;   // the same, for a warp

// In the backward a block writes one row of partial sums, however many warps it has. So its blocks are larger than the
// forward's, and there are no more of them per multiprocessor than memory bandwidth needs.
constexpr int kBwdWarpTeamBlock = 256;
constexpr int kBwdWarpTeamBlocksPerProcessor = 2;
// More blocks if a thread has few loads of a row in flight.
template <typename T>
constexpr int kBwdShortRowsBlocksPerProcessor = sizeof(T) == 2 ? 4 : 3;
constexpr int kBwdThreadsPerProcessor = 1024;
constexpr int kPartialsPerProcessor = 8;
constexpr int kBwdStaticShared = 2048;  // upper bound of a block's static shared memory, without weight and ring

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

// Calls `launch(RowShape, IntTag<kWidth>, threads)` for a forward over rows of `columns` elements of T in vectors. If
// all tensors have one dtype, every shape that is faster somewhere is compiled; else one for narrow rows and one for
// wide ones. Returns false if no shape holds the rows. From norm_block_min_columns to norm_block_max_columns of
// float32, a block with few elements a thread is faster than a warp, or a smaller block, with many.
// beats a warp, or a smaller block, with many.
template <typename T, int kBlockElements, bool kOneDType, typename Launch>
bool dispatch_fwd_row(int64_t rows, int64_t columns, Launch launch) {
  constexpr int kWidth = kVectorWidth<T>;
  const auto launch_shape = [&](auto shape, int threads) {
    using Shape = decltype(shape);
    // For such rows smaller blocks end sooner.
    if (sizeof(T) == 2 && kHasShortRows<Shape>) threads = kMaxWarpTeamBlock;
    launch(shape, IntTag<kWidth>{}, threads);
  };
  using Widest = RowShape<kMostElements, Team::kBlock>;
  if constexpr (kOneDType) {
    if (are_few_rows(rows) && dispatch_shape<RowShape<kWidth, Team::kBlock>>(columns, launch_shape)) return true;
    if constexpr (std::is_same_v<T, float>) {
      using Light = RowShape<kLightBlockElements, Team::kBlock>;
      const bool is_between = columns >= tuning().norm_block_min_columns && columns <= tuning().norm_block_max_columns;
      if (is_between && dispatch_shape<Light>(columns, launch_shape)) return true;
    }
    return dispatch_shape<RowShape<kShortElements, Team::kQuarterWarp>, RowShape<kShortElements, Team::kHalfWarp>,
                          RowShape<kShortElements, Team::kWarp>, NarrowRow, RowShape<kBlockElements, Team::kBlock>, Widest>(
        columns, launch_shape);
  } else {
    return dispatch_shape<NarrowRow, Widest>(columns, launch_shape);
  }
}

// The same for unaligned tensors and rows of odd length, element by element. `First` is the shape for narrow rows.
template <typename First, typename Launch>
bool dispatch_elementwise_row(int64_t columns, Launch launch) {
  return dispatch_shape<First, ElementwiseBlock>(
      columns, [&](auto shape, int threads) { launch(shape, IntTag<1>{}, threads); });
}

template <typename Shape>
constexpr int kBwdMaxThreads = Shape::kWithinWarp ? kBwdWarpTeamBlock : kMaxBlockTeam;

// The types that a forward kernel is compiled for: a sum of type T, a residual R and parameters W. See Stream and
// Columns.
template <typename Sum, typename Residual, typename Parameter>
struct FwdTypes {
  using T = Sum;
  using R = Residual;
  using W = Parameter;
};

// Calls `launch(TypeTag<T>, TypeTag<R>, wide, narrow)` for a sum of type T. `wide`, of type T, and `narrow`, of type R,
// are `input` and `residual` in either order. Unless `kOfSum` there is no residual, and R is void. Does nothing for
// dtypes other than the fast ones.
template <bool kOfSum, typename Launch>
void dispatch_stream_dtypes(TypedPointer input, TypedPointer residual, Launch launch) {
  if constexpr (!kOfSum) {
    dispatch_fast_dtype(input.dtype, [&](auto tag) { launch(tag, TypeTag<void>{}, input, residual); });
  } else if (input.dtype == residual.dtype) {
    dispatch_fast_dtype(input.dtype, [&](auto tag) { launch(tag, tag, input, residual); });
  } else if (input.dtype == kFloat32 || residual.dtype == kFloat32) {
    const TypedPointer wide = input.dtype == kFloat32 ? input : residual;
    const TypedPointer narrow = input.dtype == kFloat32 ? residual : input;
    if (narrow.dtype == kFloat16) launch(TypeTag<float>{}, TypeTag<__half>{}, wide, narrow);
    if (narrow.dtype == kBFloat16) launch(TypeTag<float>{}, TypeTag<__nv_bfloat16>{}, wide, narrow);
  }
}

// Calls `launch(TypeTag<W>)` for the parameter dtypes that are compiled for a sum of type T and a residual of type R:
// T, float32, and, with `kNarrow` and T = float32, the 16-bit types used with it. Null stands for type T. Returns false
// for others.
template <typename T, typename R, bool kNarrow, typename Launch>
bool dispatch_parameter_dtype(TypedPointer parameter, Launch launch) {
  if (parameter.data == nullptr || parameter.dtype == kDType<T>) return launch(TypeTag<T>{});
  if constexpr (!std::is_same_v<T, float>) {
    if (parameter.dtype == kFloat32) return launch(TypeTag<float>{});
  } else if constexpr (!kNarrow) {
    return false;
  } else if constexpr (std::is_void_v<R>) {
    if (parameter.dtype == kFloat16) return launch(TypeTag<__half>{});
    if (parameter.dtype == kBFloat16) return launch(TypeTag<__nv_bfloat16>{});
  } else if constexpr (!std::is_same_v<R, float>) {
    if (parameter.dtype == kDType<R>) return launch(TypeTag<R>{});
  }
  return false;
}

// Calls `launch(FwdTypes, RowShape, IntTag<kWidth>, threads, wide, narrow)`, the last two as above. Returns false if no
// kernel takes these dtypes or so wide a row. `parameter` is one of those present, which share a dtype. `vectors`: all
// tensors are aligned for them; if not, all must have one dtype. `kRmsNorm`: a warp may have a row of 16-bit elements,
// and parameters may be narrower than the sum, as a T5's in float16 are; a LayerNorm's never are. `kOfSum`: there is a
// residual.
template <int kBlockElements, bool kRmsNorm, bool kOfSum, typename Launch>
bool dispatch_fwd(TypedPointer input, TypedPointer residual, TypedPointer parameter, int64_t rows, int64_t columns,
                  bool vectors, Launch launch) {
  bool launched = false;
  dispatch_stream_dtypes<kOfSum>(input, residual, [&](auto tag, auto residual_tag, TypedPointer wide, TypedPointer narrow) {
    using T = typename decltype(tag)::type;
    using R = typename decltype(residual_tag)::type;
    const auto launch_with = [&](auto types) {
      return [&launch, types, wide, narrow](auto shape, auto width, int threads) {
        launch(types, shape, width, threads, wide, narrow);
      };
    };
    constexpr bool kOneSum = std::is_void_v<R> || std::is_same_v<R, T>;
    if (vectors) {
      launched = dispatch_parameter_dtype<T, R, kRmsNorm>(parameter, [&](auto parameter_tag) {
        using W = typename decltype(parameter_tag)::type;
        return dispatch_fwd_row<T, kBlockElements, kOneSum && std::is_same_v<W, T>>(
            rows, columns, launch_with(FwdTypes<T, R, W>{}));
      });
    } else if constexpr (kOneSum) {
      if (parameter.data == nullptr || parameter.dtype == kDType<T>) {
        using Block = std::conditional_t<std::is_same_v<R, float>, ElementwiseSum, ElementwiseBlock>;
        using First = std::conditional_t<kRmsNorm && sizeof(T) == 2, ElementwiseWarp, Block>;
        launched = dispatch_elementwise_row<First>(columns, launch_with(FwdTypes<T, R, T>{}));
      }
    }
  });
  return launched;
}

// Calls `launch(RowShape, IntTag<kWidth>, threads)` for a backward; returns false if no shape holds the rows.
// `Elementwise` is the first shape of dispatch_elementwise_row.
template <typename T, typename Elementwise, typename Launch>
bool dispatch_bwd_row(int64_t columns, bool vectors, Launch launch) {
  const auto launch_shape = [&](auto shape, auto width, int threads) {
    launch(shape, width, decltype(shape)::kWithinWarp ? kBwdWarpTeamBlock : threads);
  };
  if (!vectors) return dispatch_elementwise_row<Elementwise>(columns, launch_shape);
  return dispatch_shape<RowShape<kShortElements, Team::kQuarterWarp>, RowShape<kShortElements, Team::kHalfWarp>,
                        RowShape<kShortElements, Team::kWarp>, RowShape<16, Team::kWarp>, NarrowRow,
                        RowShape<kBwdBlockElements, Team::kBlock>>(
      columns, [&](auto shape, int threads) { launch_shape(shape, IntTag<kVectorWidth<T>>{}, threads); });
}

// Launch of a backward whose blocks walk the rows. Shared memory holds the weight and the stages of a RowRing.
struct BwdLaunch {
  int blocks_per_processor;
  int stages;  // 0: no ring
  size_t shared_bytes;

  bool fits() const {
    return shared_bytes + kBwdStaticShared <= shared_bytes_of_block();
  }
};

// `ring_threads`: threads per multiprocessor if blocks use a ring. They are fewer than without one, and few enough for
// norm_bwd_min_ring_stages to fit.
template <typename T, typename Shape, int kWidth>
BwdLaunch bwd_launch(int threads, int64_t columns, int tensors, int64_t ring_threads) {
  const size_t weight_bytes = columns * sizeof(float), stage_bytes = columns * sizeof(T) * tensors;
  if (kHasShortRows<Shape>) return {kBwdShortRowsBlocksPerProcessor<T>, 0, weight_bytes};
  if (Shape::kWithinWarp) return {kBwdWarpTeamBlocksPerProcessor, 0, weight_bytes};
  if (kWidth == 1 || sizeof(T) != 2 || !is_sm90_or_newer()) {
    return {std::min(kPartialsPerProcessor, kBwdThreadsPerProcessor / threads), 0, weight_bytes};
  }
  const auto shared = static_cast<int>(shared_bytes_of_multiprocessor());
  const auto stages_of = [&](int blocks) {
    const int64_t room = shared / blocks - kBwdStaticShared - static_cast<int64_t>(weight_bytes);
    return static_cast<int>(std::clamp<int64_t>(room / static_cast<int64_t>(stage_bytes), 1, kMaxRingStages));
  };
  int blocks = static_cast<int>(std::clamp<int64_t>(ring_threads / threads, 1, kPartialsPerProcessor));
  while (blocks > 1 && stages_of(blocks) < tuning().norm_bwd_min_ring_stages) --blocks;
  return {blocks, stages_of(blocks), weight_bytes + stages_of(blocks) * stage_bytes};
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

// The rows of a backward's tensors as a team walks them. Where the device can and elements have 16 bits, a block copies
// the next few rows to shared memory meanwhile. Holding them in registers would cost as much as it gains.
template <typename T, int kTensors, bool kInVectors, Team kTeam>
class WalkedRows {
 public:
  static constexpr bool kRing = kHasRowRings && kInVectors && sizeof(T) == 2 && !is_within_warp(kTeam);

  // Contains a block-wide barrier, before anything else. `slots` and `stages` belong to the ring.
  __device__ WalkedRows(const T* const (&tensors)[kTensors], int64_t rows, int columns, char* slots, int stages)
      : rows_(rows), columns_(columns), ring_(slots, columns * static_cast<int>(sizeof(T)), stages) {
#pragma unroll
    for (int t = 0; t < kTensors; ++t) tensors_[t] = tensors[t];
    if constexpr (kRing) {
      if (threadIdx.x == 0) ring_.open();
    }
  }

  __device__ void start(const RowTeam<kTeam>& team) const {
    if constexpr (kRing) {
      for (int s = 0; s < ring_.stages(); ++s) fetch(s, team.index + s * team.count);
    }
  }

  // Row `row`, the walk's current one, of each tensor.
  template <int kVectors, int kWidth>
  __device__ void load(RowPart<T, kVectors, kWidth> (&parts)[kTensors], int64_t row, const RowTeam<kTeam>& team,
                       int vectors_in_row) const {
    if constexpr (kRing) ring_.wait();
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      parts[t].load(kRing ? ring_.template row<T>(t) : tensors_[t] + row * columns_, team, vectors_in_row);
    }
  }

  // Call once after all threads have loaded `row`, after a barrier.
  __device__ void advance(int64_t row, const RowTeam<kTeam>& team) {
    if constexpr (kRing) {
      fetch(ring_.stage(), row + ring_.stages() * team.count);
      ring_.advance();
    }
  }

 private:
  __device__ void fetch(int stage, int64_t row) const {
    if (threadIdx.x == 0 && row < rows_) ring_.fetch(stage, tensors_, row);
  }

  const T* tensors_[kTensors];
  int64_t rows_;
  int columns_;
  RowRing<kTensors> ring_;
};

// What a forward normalises: a matrix of T, or the sum of a matrix of T and one of R. R is void without a residual.
template <typename T, typename R>
struct Stream {
  const T* input;
  TypedPointer residual;
  T* sum;

  // The row that begins at element `begin`.
  template <int kVectors, int kWidth, typename RowTeam>
  __device__ void load(RowPart<T, kVectors, kWidth>& x, int64_t begin, const RowTeam& team, int vectors_in_row) const {
    x.load(input + begin, team, vectors_in_row);
    if constexpr (!std::is_void_v<R>) x.template add<R>(residual, begin, sum, team, vectors_in_row);
  }

  // The mean of the kWidth elements from `begin` on. It is exact if all are equal and have 16 bits.
  template <int kWidth>
  __device__ float mean(int64_t begin) const {
    const auto head = *reinterpret_cast<const Vector<T, kWidth>*>(input + begin);
    Columns<std::conditional_t<std::is_void_v<R>, T, R>, kWidth> addend;
    if constexpr (!std::is_void_v<R>) addend.load(residual, begin);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if constexpr (std::is_void_v<R>) sum += head[j];
      else sum += to_float(from_acc<T>(head[j] + addend[j]));
    }
    return sum / kWidth;
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

// A weight or bias as floats in shared memory, in the order in which a team reads it: first the first 16 bytes of every
// vector's floats, then the second, so that neighbouring lanes read from neighbouring banks.
template <int kWidth>
class SharedColumns {
 public:
  // Fills `values`, of `columns` floats, with the tensor plus `offset`, or with `absent` plus `offset`. A barrier must
  // follow.
  __device__ SharedColumns(float* values, TypedPointer tensor, float absent, float offset, int columns)
      : parts_(reinterpret_cast<const Vector<float, kPartWidth>*>(values)), vectors_(columns / kWidth) {
    for (int v = threadIdx.x; v < vectors_; v += blockDim.x) {
      Columns<AnyType, kWidth> floats;
      floats.load_or(tensor, v * kWidth, absent);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        values[(c / kPartWidth * vectors_ + v) * kPartWidth + c % kPartWidth] = floats[c] + offset;
      }
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

// Adds up the column sums of a block's teams, first within each warp, then over the warps in order, and stores them as
// the block's row of `partials`.
template <int kVectors, int kWidth, Team kTeam>
__device__ inline void store_block_partials(const float (&sums)[kVectors][kWidth], float* partials, int columns,
                                            const RowTeam<kTeam>& team) {
  float* const row = partials + static_cast<int64_t>(blockIdx.x) * columns;
  if constexpr (is_within_warp(kTeam)) {
    constexpr int kWarps = kBwdWarpTeamBlock / kWarpSize, kLanes = kTeamLanes<kTeam>;
    __shared__ Vector<float, kWidth> warp_sums[kWarps][kVectors * kLanes];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        float sum = sums[k][j];
#pragma unroll
        for (int distance = kLanes; distance < kWarpSize; distance *= 2) {
          sum += __shfl_xor_sync(kFullWarp, sum, distance);
        }
        if (threadIdx.x % kWarpSize < kLanes) {
          warp_sums[threadIdx.x / kWarpSize][team.lane + k * kLanes].values[j] = sum;
        }
      }
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

// A backward over few rows, in vectors, without partial sums. `mean` is null for RMSNorm. Gradients of parameters that
// are not wanted are absent.
struct FewRowsBwd {
  TypedPointer grad_output, grad_sum, input, weight;
  const float* mean;
  const float* rstd;
  TypedPointer grad_input, grad_weight, grad_bias;
  int rows;
  int columns;
  float inverse_columns;
  float offset;
};

// Returns false if the rows are too wide.
bool launch_few_rows_bwd(const FewRowsBwd& call, cudaStream_t stream);

// First stage of the "any" path: column sums of grad_output * xhat and of grad_output. `mean` is absent for RMSNorm.
template <typename Acc>
cudaError_t column_partials_any(TypedPointer grad_output, TypedPointer input, TypedPointer mean, TypedPointer rstd,
                                Partials<Acc> partials, int64_t rows, cudaStream_t stream);

}  // namespace fuseopt
