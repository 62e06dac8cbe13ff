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

// TUNED: measurement not recorded (b5728bd; 8 in a backward: c620c07); `fuseopt bench ops --op softmax` measures it
// again.
constexpr int kBlockElements = 32;  // elements of a row per thread, if a block has the row
constexpr int kLightElements = 8;   // in a backward over rows of whole vectors, if they suffice
constexpr int kFewRowsThreads = 256;  // threads per row at most, if there are few rows
constexpr int kAnyThreads = 256;

// Rows of a warp, or part of one, whose threads hold one vector of each: blocks of fewer rows end before enough others
// have started.
// TUNED: bfloat16 [1048576, 256], H200: 0.86 of a copy's bandwidth with 1 row, 0.99 with 2, 1.00 with 4, 0.98 with 8.
constexpr int kRowsTogether = 4;

// `kWhole`: rows are whole vectors.
template <bool kWhole, int kWidth>
__device__ RowSpan<kWidth> span_of(int64_t row, int columns, int lane) {
  if constexpr (kWhole) return {row, columns};
  else return {row, columns, lane};
}

// A team has kRows rows at once, whose loads are in flight together.
template <typename T, typename M, typename Shape, bool kWhole, int kRows>
__global__ void __launch_bounds__(Shape::kMaxThreads)
    softmax_fwd_kernel(const T* input, typename RowMask<M>::Source mask, TypedPointer output, int64_t rows,
                       int columns, float scale) {
  follow_predecessor();
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kVectors = Shape::kElements / kWidth;
  constexpr bool kPrecise = sizeof(T) == 4;
  using Logits = RowLogits<T, M, kVectors>;
  RowTeam<Shape::kTeam> team;
  const int64_t first_row = team.index * kRows;
  if (first_row >= rows) return;
  const auto span_at = [&](int r) {
    const bool is_row = kRows == 1 || first_row + r < rows;
    return span_of<kWhole, kWidth>(first_row + r, is_row ? columns : 0, team.lane);
  };
  const auto visit = [&](auto visit_vector) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto span = span_at(r);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int v = team.lane + k * team.size;
        if (v < span.vectors) visit_vector(r, k, span.first + v);
      }
    }
  };
  const float factor = factor_of_input<M>(scale);
  const ScaledExp<kPrecise> exponential(factor_of_difference<M>(scale));
  Logits logits[kRows];
  float edges[kRows], max[kRows], sum[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const auto span = span_at(r);
    logits[r].factor = factor;
    logits[r].load(input, span, team);
    const RowMask<M> row_mask(mask, first_row + r);  // overlaps with the loads of the input
    logits[r].load(row_mask, span, team);
    max[r] = edges[r] = kWhole ? -INFINITY : edge_logit(input, span, factor, row_mask);
  }

  // A loop that runs once: ptxas starts all loads before it. In straight-line code it waits for a float32 vector's maximum
  // before it starts the next load.
#pragma unroll 1
  do {
    visit([&](int r, int k, int64_t) {
      logits[r].make(k);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) max[r] = fmaxf(max[r], logits[r].at(k, j));
    });
  } while (columns < 0);
  team.template reduce<Max>(max);

#pragma unroll
  for (int r = 0; r < kRows; ++r) sum[r] = edges[r] = kWhole ? 0.0f : exponential(edges[r] - max[r]);
  visit([&](int r, int k, int64_t) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float value = exponential(logits[r].at(k, j) - max[r]);
      logits[r].keep(k, j, value);
      sum[r] += value;
    }
  });
  team.template reduce<Sum>(sum);

  float inverse_sum[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) inverse_sum[r] = 1.0f / sum[r];
  const auto share = [&](int r, float value) { return divide<kPrecise>(value, sum[r], inverse_sum[r]); };
  if constexpr (!kWhole) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto span = span_at(r);
      if (span.edge != span.kNone) store_as(output, span.edge, share(r, edges[r]));
    }
  }
  visit([&](int r, int k, int64_t vector) {
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      result[j] = share(r, Logits::kRemade ? exponential(logits[r].at(k, j) - max[r]) : logits[r].kept(k, j));
    }
    store_floats(output, vector, result);
  });
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
  const bool is_masked = mask.values.data != nullptr;
  const Acc factor = is_masked ? scale : factor_of_input<void>(scale);
  const Acc steepness = is_masked ? Acc(1) : factor_of_difference<void>(scale);
  for (int64_t row = team.index; row < rows; row += team.count) {
    const int64_t mask_offset = mask.row_offset(row);
    const auto logit = [&](int64_t c) {
      const Acc x = load_as<Acc>(input, row * columns + c);
      return is_masked ? fma(x, factor, load_as<Acc>(mask.values, mask_offset + c * mask.column_stride)) : x * factor;
    };
    const auto exponential = [&](int64_t c, Acc max) { return exp((logit(c) - max) * steepness); };
    Acc max = -INFINITY, sum = 0;
    for (int64_t c = team.lane; c < columns; c += team.size) max = fmax(max, logit(c));
    max = team.template reduce<Max>(max);
    for (int64_t c = team.lane; c < columns; c += team.size) sum += exponential(c, max);
    sum = team.template reduce<Sum>(sum);
    for (int64_t c = team.lane; c < columns; c += team.size)
      store_as(output, row * columns + c, exponential(c, max) / sum);
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
  using Warp = RowShape<8, Team::kWarp>;
  if (is_whole && dispatch_shape<RowShape<8, Team::kQuarterWarp>, Half, Warp>(columns, launch_whole)) return true;
  return dispatch_shape<Half, Warp, RowShape<16, Team::kWarp>, RowShape<24, Team::kWarp>,
                        RowShape<32, Team::kWarp>, RowShape<kBlockElements, Team::kBlock>>(columns, launch_any);
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
          const auto launch = [&](auto rows_of_team) {
            FollowingKernel<softmax_fwd_kernel<T, M, Shape, whole, rows_of_team>>::launch_evenly(
                row_blocks<Shape>(ceil_div(rows, rows_of_team), threads), threads, stream, x,
                typename RowMask<M>::Source(mask), output, rows, row_columns, factor);
          };
          if constexpr (Shape::kWithinWarp && Shape::kElements == kVectorWidth<T> && std::is_void_v<M>) {
            if (row_blocks<Shape>(rows, threads) >= tuning().softmax_rows_together_min_blocks * multiprocessor_count())
              return launch(IntTag<kRowsTogether>{});
          }
          launch(IntTag<1>{});
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
