// Softmax of scale * input + mask over the last dimension, and its gradient.
//
// Rows that fit stay in the registers of a warp, part of a warp, or a block. Wider rows are read once, into registers
// and shared memory of a block, while the maximum and the sum are updated (online softmax: Milakov and Gimelshein,
// 2018). Still wider rows stay in the registers of a cluster of blocks; the cluster reads most of a row twice if even
// its registers cannot hold the row. Rows of odd length also move in 16-byte vectors, those of the whole matrix: see
// RowSpan.
#include "cuda/softmax_loss/softmax.cuh"

namespace fuseopt::softmax {
namespace {

// TUNED: with the kernels (b5728bd); 8 in a backward: c620c07.
constexpr int kBlockElements = 32;  // elements of a row per thread, if a block has the row
constexpr int kLightElements = 8;   // in a backward over rows of whole vectors, if they suffice
constexpr int kFewRowsThreads = 256;  // threads per row at most, if there are few rows
constexpr int kAnyThreads = 256;

// `kWhole`: rows are whole vectors.
template <bool kWhole, int kWidth>
__device__ RowSpan<kWidth> span_of(int64_t row, int columns, int lane) {
  if constexpr (kWhole) return {row, columns};
  else return {row, columns, lane};
}

template <typename T, typename M, typename Shape, bool kWhole>
__global__ void __launch_bounds__(Shape::kMaxThreads)
    softmax_fwd_kernel(const T* input, typename RowMask<M>::Source mask, TypedPointer output, int64_t rows,
                       int columns, float scale) {
  follow_predecessor();
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kVectors = Shape::kElements / kWidth;
  constexpr bool kPrecise = sizeof(T) == 4;
  using Logits = RowLogits<T, M, kVectors>;
  RowTeam<Shape::kTeam> team;
  const int64_t row = team.index;
  if (row >= rows) return;
  const auto span = span_of<kWhole, kWidth>(row, columns, team.lane);
  Logits logits(input, span, team, scale);
  const RowMask<M> row_mask(mask, row);  // overlaps with the loads of the input
  logits.load(row_mask, span, team);

  float edge = -INFINITY;
  if constexpr (!kWhole) edge = edge_logit(input, span, scale, row_mask);
  float max = edge;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = team.lane + k * team.size;
    if (v >= span.vectors) continue;
    logits.make(k);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) max = fmaxf(max, logits.at(k, j));
  }
  max = team.template reduce<Max>(max);

  const auto exponential = [&](int k, int j) { return exp_as<kPrecise>(logits.at(k, j) - max); };
  edge = kWhole ? 0.0f : exp_as<kPrecise>(edge - max);
  float sum = edge;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (team.lane + k * team.size >= span.vectors) continue;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float value = exponential(k, j);
      if constexpr (!Logits::kRemade) logits.values[k][j] = value;
      sum += value;
    }
  }
  sum = team.template reduce<Sum>(sum);
  const float inverse_sum = 1.0f / sum;

  if (!kWhole && span.edge != span.kNone) store_as(output, span.edge, divide<kPrecise>(edge, sum, inverse_sum));
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = team.lane + k * team.size;
    if (v >= span.vectors) continue;
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float value = Logits::kRemade ? exponential(k, j) : logits.at(k, j);
      result[j] = divide<kPrecise>(value, sum, inverse_sum);
    }
    store_floats(output, span.first + v, result);
  }
}

// grad_input = scale * y * (g - sum(g * y)).
template <typename T, typename Shape, bool kWhole>
__global__ void __launch_bounds__(Shape::kMaxThreads)
    softmax_bwd_kernel(const T* grad_output, const T* output, TypedPointer grad_input,
                       int64_t rows, int columns, float scale) {
  follow_predecessor();
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kVectors = Shape::kElements / kWidth;
  RowTeam<Shape::kTeam> team;
  const int64_t row = team.index;
  if (row >= rows) return;
  const auto span = span_of<kWhole, kWidth>(row, columns, team.lane);
  Vector<T> y[kVectors] = {}, g[kVectors] = {};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = team.lane + k * team.size;
    if (v < span.vectors) {
      y[k] = load_vector(output, span.first + v);
      g[k] = load_vector(grad_output, span.first + v);
    }
  }
  const bool has_edge = !kWhole && span.edge != span.kNone;
  const float edge_y = has_edge ? to_float(output[span.edge]) : 0.0f;
  const float edge_g = has_edge ? to_float(grad_output[span.edge]) : 0.0f;

  float dot = edge_g * edge_y;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) dot += g[k][j] * y[k][j];
  }
  dot = team.template reduce<Sum>(dot);

  if (has_edge) store_as(grad_input, span.edge, scale * edge_y * (edge_g - dot));
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float values[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = scale * y[k][j] * (g[k][j] - dot);
    const int v = team.lane + k * team.size;
    if (v < span.vectors) store_floats(grad_input, span.first + v, values);
  }
}

// One element at a time, one block per row: for float64, unaligned tensors, and more rows than a grid has blocks.
template <typename Acc>
__global__ void __launch_bounds__(kAnyThreads)
    softmax_fwd_any_kernel(TypedPointer input, IndexedMask mask, TypedPointer output, int64_t rows, int64_t columns,
                           Acc scale) {
  RowTeam<Team::kBlock, Acc> team;
  for (int64_t row = team.index; row < rows; row += team.count) {
    const int64_t mask_offset = mask.row_offset(row);
    const auto logit = [&](int64_t c) {
      const Acc x = scale * load_as<Acc>(input, row * columns + c);
      return mask.values.data != nullptr ? x + load_as<Acc>(mask.values, mask_offset + c * mask.column_stride) : x;
    };
    Acc max = -INFINITY, sum = 0;
    for (int64_t c = team.lane; c < columns; c += team.size) max = fmax(max, logit(c));
    max = team.template reduce<Max>(max);
    for (int64_t c = team.lane; c < columns; c += team.size) sum += exp(logit(c) - max);
    sum = team.template reduce<Sum>(sum);
    for (int64_t c = team.lane; c < columns; c += team.size)
      store_as(output, row * columns + c, exp(logit(c) - max) / sum);
  }
}

template <typename Acc>
__global__ void __launch_bounds__(kAnyThreads)
    softmax_bwd_any_kernel(TypedPointer grad_output, TypedPointer output, TypedPointer grad_input, int64_t rows,
                           int64_t columns, Acc scale) {
  RowTeam<Team::kBlock, Acc> team;
  for (int64_t row = team.index; row < rows; row += team.count) {
    Acc dot = 0;
    for (int64_t i = row * columns + team.lane; i < (row + 1) * columns; i += team.size) {
      dot += load_as<Acc>(grad_output, i) * load_as<Acc>(output, i);
    }
    dot = team.template reduce<Sum>(dot);
    for (int64_t i = row * columns + team.lane; i < (row + 1) * columns; i += team.size) {
      store_as(grad_input, i, scale * load_as<Acc>(output, i) * (load_as<Acc>(grad_output, i) - dot));
    }
  }
}

// Calls `launch(RowShape, threads, whole)` for rows that a team holds in registers; returns false for wider ones.
// `whole`: rows are whole vectors, where that is compiled. Otherwise each lane takes at most one element outside the
// vectors, for which a quarter of a warp has too few lanes.
template <typename T, typename Launch>
bool dispatch_softmax_row(int64_t rows, int64_t columns, Launch launch) {
  const auto launch_whole = [&](auto shape, int threads) { launch(shape, threads, std::true_type{}); };
  const auto launch_any = [&](auto shape, int threads) { launch(shape, threads, std::false_type{}); };
  const bool is_whole = columns % kVectorWidth<T> == 0;
  if (are_few_rows(rows) && columns <= kFewRowsThreads * kVectorWidth<T>) {
    using Block = RowShape<kVectorWidth<T>, Team::kBlock>;
    return is_whole ? dispatch_shape<Block>(columns, launch_whole) : dispatch_shape<Block>(columns, launch_any);
  }
  using Half = RowShape<8, Team::kHalfWarp>;
  if (is_whole && dispatch_shape<RowShape<8, Team::kQuarterWarp>, Half>(columns, launch_whole)) return true;
  return dispatch_shape<Half, RowShape<8, Team::kWarp>, RowShape<16, Team::kWarp>, RowShape<24, Team::kWarp>,
                        RowShape<kBlockElements, Team::kBlock>>(columns, launch_any);
}

}  // namespace

extern "C" cudaError_t fuseopt_softmax_fwd(TypedPointer input, SoftmaxMask mask, TypedPointer output, int64_t rows,
                                           int64_t columns, double scale, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  bool launched = false;
  if (output.dtype != kFloat64 && is_aligned(input.data) && is_aligned(output.data) && columns <= INT32_MAX &&
      fits_grid(rows)) {
    dispatch_fast_dtype(input.dtype, [&](auto input_tag) {
      using T = typename decltype(input_tag)::type;
      launched = dispatch_mask<T>(mask, [&](auto mask_tag) {
        using M = typename decltype(mask_tag)::type;
        const T* const x = static_cast<const T*>(input.data);
        const int row_columns = static_cast<int>(columns);
        const float factor = static_cast<float>(scale);
        const bool narrow = dispatch_softmax_row<T>(rows, columns, [&](auto shape, int threads, auto whole) {
          using Shape = decltype(shape);
          FollowingKernel<softmax_fwd_kernel<T, M, Shape, whole>>::launch_evenly(
              row_blocks<Shape>(rows, threads), threads, stream, x, typename RowMask<M>::Source(mask), output, rows,
              row_columns, factor);
        });
        if (narrow) return;
        launch_softmax_fwd_wide(input, mask, output, rows, row_columns, factor, stream);
      });
    });
  }
  if (!launched) {
    const auto launch_any = [&](auto kernel, auto precise_scale) {
      kernel<<<block_per_row(rows), kAnyThreads, 0, stream>>>(input, IndexedMask(mask), output, rows, columns,
                                                              precise_scale);
    };
    const bool float64 = input.dtype == kFloat64 || (mask.values.data != nullptr && mask.values.dtype == kFloat64);
    if (float64) launch_any(softmax_fwd_any_kernel<double>, scale);
    else launch_any(softmax_fwd_any_kernel<float>, static_cast<float>(scale));
  }
  return cudaGetLastError();
}

extern "C" cudaError_t fuseopt_softmax_bwd(TypedPointer grad_output, TypedPointer output, TypedPointer grad_input,
                                           int64_t rows, int64_t columns, double scale, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  bool launched = false;
  if (grad_input.dtype != kFloat64 && is_aligned(grad_output.data) && is_aligned(output.data) &&
      is_aligned(grad_input.data) && columns <= INT32_MAX && fits_grid(rows)) {
    launched = dispatch_fast_dtype(output.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const T* const g = static_cast<const T*>(grad_output.data);
      const T* const y = static_cast<const T*>(output.data);
      const int row_columns = static_cast<int>(columns);
      const float factor = static_cast<float>(scale);
      const auto launch = [&](auto shape, int threads, auto whole) {
        using Shape = decltype(shape);
        FollowingKernel<softmax_bwd_kernel<T, Shape, whole>>::launch_evenly(
            row_blocks<Shape>(rows, threads), threads, stream, g, y, grad_input, rows, row_columns, factor);
      };
      using Light = RowShape<kLightElements, Team::kBlock>;
      const auto launch_light = [&](auto shape, int threads) { launch(shape, threads, std::true_type{}); };
      if (columns > tuning().softmax_bwd_light_min_columns && columns % kVectorWidth<T> == 0 && dispatch_shape<Light>(columns, launch_light)) return;
      if (dispatch_softmax_row<T>(rows, columns, launch)) return;
      launch_softmax_bwd_wide(grad_output, output, grad_input, rows, row_columns, factor, stream);
    });
  }
  if (!launched) {
    const auto launch_any = [&](auto kernel, auto precise_scale) {
      kernel<<<block_per_row(rows), kAnyThreads, 0, stream>>>(grad_output, output, grad_input, rows, columns,
                                                              precise_scale);
    };
    if (output.dtype == kFloat64) launch_any(softmax_bwd_any_kernel<double>, scale);
    else launch_any(softmax_bwd_any_kernel<float>, static_cast<float>(scale));
  }
  return cudaGetLastError();
}

}  // namespace fuseopt::softmax
