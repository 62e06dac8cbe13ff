// The forwards of RMSNorm and LayerNorm: which dtypes and which shape take a row, and what they normalise.
//
// Every row has its own team. That was measured to be faster than teams that walk the rows while loading the next one.
//
// With a residual the row is the sum of two tensors, rounded to the sum's dtype T and stored.
#pragma once

#include "cuda/norm/norm.cuh"

namespace fuseopt {

// Elements of a row that each thread holds.
// TUNED: 32: measurement not recorded (b5728bd); `fuseopt bench ops --op rms_norm` measures it again. 8: float32
// RMSNorm of 768 to 1536 columns (db1245a).
constexpr int kMostElements = 32;       // at most, if a block has the row
constexpr int kLightBlockElements = 8;  // if a block has a row that a warp could have

// TUNED: float32 with a residual: 12% less than with 8 elements; 16 bits, and without a residual, take more (64347c2).
using ElementwiseSum = RowShape<4, Team::kBlock>;  // elements are read one by one, and two float32 tensors are added

// Calls `launch(RowShape, IntTag<kWidth>, threads)` for a forward over rows of `columns` elements of T in vectors. If
// all tensors have one dtype, every shape that is faster somewhere is compiled; else one for narrow rows and one for
// wide ones. Returns false if no shape holds the rows. From norm_block_min_columns to norm_block_max_columns of
// float32, a block with few elements a thread is faster than a warp, or a smaller block, with many.
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

}  // namespace fuseopt
