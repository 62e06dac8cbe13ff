// LayerNorm (Ba, Kiros and Hinton, 2016): xhat = (x - mean) * rstd, rstd = 1 / sqrt(var + eps), output = xhat * weight
// + bias.
#include "norm.cuh"

namespace fuseopt {
namespace {

// Of a row in a thread, where a block has the row: with more threads its two barriers cost more.
constexpr int kBlockElements = kMostElements;

template <typename T, typename R, typename W, typename Shape, int kWidth>
__global__ void __launch_bounds__(Shape::kMaxThreads)
    layer_norm_fwd_kernel(Stream<T, R> stream, TypedPointer weight, TypedPointer bias, TypedPointer output,
                          float* __restrict__ mean, float* __restrict__ rstd, int64_t rows, int columns,
                          float inverse_columns, float eps) {
  constexpr int kVectors = Shape::kElements / kWidth;
  // Before the reductions that they wait for; but not where that takes registers from more rows in flight.
  constexpr bool kEarly = kWidth > 1 ? Shape::kWithinWarp || sizeof(T) == 4 || kVectors == 1 : std::is_same_v<W, AnyType>;
  RowTeam<Shape::kTeam> team;
  const int vectors_in_row = columns / kWidth;
  const int64_t row = team.index;
  if (row >= rows) return;

  RowPart<T, kVectors, kWidth> x;
  stream.load(x, row * columns, team, vectors_in_row);
  Columns<W, kWidth> scale[kVectors], shift[kVectors];
  const auto load_parameters = [&](int k) {
    const int v = team.lane + k * team.size;
    if (v >= vectors_in_row) return;
    scale[k].load_or(weight, v * kWidth, 1.0f);
    shift[k].load_or(bias, v * kWidth, 0.0f);
  };
  if constexpr (kEarly) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) load_parameters(k);
  }

  // The mean as a distance from one element, so that a constant row comes out exact; then the variance in a second pass
  // over the registers, since E[x^2] - E[x]^2 would cancel for rows far from zero.
  const float origin = stream[row * columns];
  float distance = 0;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (team.lane + k * team.size >= vectors_in_row) continue;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) distance += x.vectors[k][j] - origin;
  }
  const float row_mean = origin + team.template reduce<Sum>(distance) * inverse_columns;
  float sum_of_squares = 0;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (team.lane + k * team.size >= vectors_in_row) continue;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float centred = x.vectors[k][j] - row_mean;
      sum_of_squares += centred * centred;
    }
  }
  const float row_rstd = rsqrtf(team.template reduce<Sum>(sum_of_squares) * inverse_columns + eps);
  if (team.lane == 0) {
    mean[row] = row_mean;
    rstd[row] = row_rstd;
  }

#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = team.lane + k * team.size;
    if (v >= vectors_in_row) continue;
    if constexpr (!kEarly) load_parameters(k);
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      result[j] = (x.vectors[k][j] - row_mean) * row_rstd * scale[k][j] + shift[k][j];
    }
    store_floats(output, row * vectors_in_row + v, result);
  }
}

// Holds the kernel to as few registers as let kBwdThreadsPerProcessor threads be resident, where that spills next to none.
template <typename T, typename Shape, int kWidth, bool kHasGradSum>
constexpr int kBwdMinBlocks = sizeof(T) == 2 && kWidth > 1 && !kHasGradSum && !Shape::kWithinWarp
                                  ? kBwdThreadsPerProcessor / kBwdMaxThreads<Shape>
                                  : 1;

// grad_input = rstd * (g - mean(g) - xhat * mean(g * xhat)) + grad_sum with g = grad_output * weight; grad_weight = sum
// over rows of grad_output * xhat and grad_bias = sum over rows of grad_output, left as one row of partial sums each a
// block. grad_sum is what reaches a fused residual sum, here `input`, from elsewhere.
template <typename T, typename Shape, int kWidth, bool kHasGradSum>
__global__ void __launch_bounds__(kBwdMaxThreads<Shape>, (kBwdMinBlocks<T, Shape, kWidth, kHasGradSum>))
    layer_norm_bwd_kernel(const T* __restrict__ grad_output, const T* __restrict__ grad_sum,
                          const T* __restrict__ input, TypedPointer weight, const float* __restrict__ mean,
                          const float* __restrict__ rstd, T* __restrict__ grad_input, Partials<float> partials,
                          int64_t rows, int columns) {
  constexpr int kVectors = Shape::kElements / kWidth;
  RowTeam<Shape::kTeam> team;
  const int vectors_in_row = columns / kWidth;

  extern __shared__ __align__(kAccessBytes) float shared[];
  const SharedColumns<kWidth> scale(shared, weight, 1.0f, 0.0f, columns);
  __syncthreads();
  float weight_sums[kVectors][kWidth] = {}, bias_sums[kVectors][kWidth] = {};

  for (int64_t row = team.index; row < rows; row += team.count) {
    RowPart<T, kVectors, kWidth> x, grad, added;
    x.load(input + row * columns, team, vectors_in_row);
    grad.load(grad_output + row * columns, team, vectors_in_row);
    if constexpr (kHasGradSum) added.load(grad_sum + row * columns, team, vectors_in_row);
    const float row_mean = mean[row], row_rstd = rstd[row];

    float sums[2] = {};  // of g and of g * xhat
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v >= vectors_in_row) continue;
      float weights[kWidth];
      scale.load(v, weights);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float xhat = (x.vectors[k][j] - row_mean) * row_rstd;
        const float g = grad.vectors[k][j] * weights[j];
        weight_sums[k][j] += grad.vectors[k][j] * xhat;
        bias_sums[k][j] += grad.vectors[k][j];
        sums[0] += g;
        sums[1] += g * xhat;
      }
    }
    team.template reduce<Sum>(sums);
    const float mean_g = sums[0] / columns, mean_dot = sums[1] / columns;

#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v >= vectors_in_row) continue;
      float result[kWidth], weights[kWidth];
      scale.load(v, weights);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float xhat = (x.vectors[k][j] - row_mean) * row_rstd;
        result[j] = row_rstd * (grad.vectors[k][j] * weights[j] - mean_g - xhat * mean_dot);
        if constexpr (kHasGradSum) result[j] += added.vectors[k][j];
      }
      store_floats_as<T>(grad_input + row * columns, v, result);
    }
  }
  if (partials.data != nullptr) {
    store_block_partials(weight_sums, partials.of(0), columns, team);
    store_block_partials(bias_sums, partials.of(1), columns, team);
  }
}

template <typename Acc>
__global__ void __launch_bounds__(kAnyThreads)
    layer_norm_fwd_any_kernel(AnyStream stream, TypedPointer weight, TypedPointer bias, TypedPointer output,
                              TypedPointer mean, TypedPointer rstd, int64_t rows, int64_t columns, Acc eps) {
  RowTeam<Team::kBlock, Acc> team;
  const TypedPointer input = stream.residual.data != nullptr ? stream.sum : stream.input;
  for (int64_t row = team.index; row < rows; row += team.count) {
    const Acc origin = columns > 0 ? stream.at<Acc>(row * columns) : Acc(0);
    Acc distance = 0;
#pragma unroll 4
    for (int64_t i = row * columns + team.lane; i < (row + 1) * columns; i += team.size) {
      const Acc x = stream.at<Acc>(i);
      if (stream.residual.data != nullptr) store_as(stream.sum, i, x);
      distance += x - origin;
    }
    const Acc row_mean = origin + team.template reduce<Sum>(distance) / columns;
    Acc sum_of_squares = 0;
#pragma unroll 4
    for (int64_t c = team.lane; c < columns; c += team.size) {
      const Acc centred = load_as<Acc>(input, row * columns + c) - row_mean;
      sum_of_squares += centred * centred;
    }
    const Acc row_rstd = 1 / sqrt(team.template reduce<Sum>(sum_of_squares) / columns + eps);
    if (team.lane == 0) {
      store_as(mean, row, row_mean);
      store_as(rstd, row, row_rstd);
    }
#pragma unroll 4
    for (int64_t c = team.lane; c < columns; c += team.size) {
      const Acc xhat = (load_as<Acc>(input, row * columns + c) - row_mean) * row_rstd;
      const Acc scale = weight.data != nullptr ? load_as<Acc>(weight, c) : Acc(1);
      const Acc shift = bias.data != nullptr ? load_as<Acc>(bias, c) : Acc(0);
      store_as(output, row * columns + c, xhat * scale + shift);
    }
  }
}

template <typename Acc>
__global__ void __launch_bounds__(kAnyThreads)
    layer_norm_bwd_any_kernel(TypedPointer grad_output, TypedPointer grad_sum, TypedPointer input, TypedPointer weight,
                              TypedPointer mean, TypedPointer rstd, TypedPointer grad_input, int64_t rows,
                              int64_t columns) {
  RowTeam<Team::kBlock, Acc> team;
  for (int64_t row = team.index; row < rows; row += team.count) {
    const Acc row_mean = load_as<Acc>(mean, row), row_rstd = load_as<Acc>(rstd, row);
    const auto xhat = [&](int64_t c) { return (load_as<Acc>(input, row * columns + c) - row_mean) * row_rstd; };
    const auto grad_times_weight = [&](int64_t c) {
      return load_as<Acc>(grad_output, row * columns + c) * (weight.data != nullptr ? load_as<Acc>(weight, c) : Acc(1));
    };
    Acc sums[2] = {};
    for (int64_t c = team.lane; c < columns; c += team.size) {
      sums[0] += grad_times_weight(c);
      sums[1] += grad_times_weight(c) * xhat(c);
    }
    team.template reduce<Sum>(sums);
    for (int64_t c = team.lane; c < columns; c += team.size) {
      const Acc added = grad_sum.data != nullptr ? load_as<Acc>(grad_sum, row * columns + c) : Acc(0);
      store_as(grad_input, row * columns + c,
               row_rstd * (grad_times_weight(c) - sums[0] / columns - xhat(c) * (sums[1] / columns)) + added);
    }
  }
}

}  // namespace

extern "C" cudaError_t fuseopt_layer_norm_fwd(TypedPointer input, TypedPointer residual, TypedPointer weight,
                                              TypedPointer bias, TypedPointer output, TypedPointer sum,
                                              TypedPointer mean, TypedPointer rstd, int64_t rows, int64_t columns,
                                              double eps, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const bool float64 = any_has(kFloat64, {input, residual, weight, bias});
  const bool vectors = are_vectors(residual.data != nullptr ? sum.dtype : input.dtype, columns,
                                   {input, residual, weight, bias, output, sum});
  const TypedPointer parameter = weight.data != nullptr ? weight : bias;
  bool launched = false;
  if (!float64 && output.dtype != kFloat64 && fits_grid(rows) && have_dtype(parameter.dtype, {bias})) {
    launched = dispatch_fwd<kBlockElements, false>(
        input, residual, parameter, rows, columns, vectors,
        [&](auto types, auto shape, auto width, int threads, TypedPointer wide, TypedPointer narrow) {
          using Types = decltype(types);
          using T = typename Types::T;
          using Shape = decltype(shape);
          layer_norm_fwd_kernel<T, typename Types::R, typename Types::W, Shape, width>
              <<<row_blocks<Shape>(rows, threads), threads, 0, stream>>>(
                  {static_cast<const T*>(wide.data), narrow, static_cast<T*>(sum.data)}, weight, bias, output,
                  static_cast<float*>(mean.data), static_cast<float*>(rstd.data), rows, static_cast<int>(columns),
                  1.0f / columns, static_cast<float>(eps));
        });
  }
  if (!launched) {
    const auto launch_any = [&](auto kernel, auto precise_eps) {
      kernel<<<any_grid(rows), kAnyThreads, 0, stream>>>({input, residual, sum}, weight, bias, output, mean, rstd, rows,
                                                         columns, precise_eps);
    };
    if (float64) launch_any(layer_norm_fwd_any_kernel<double>, eps);
    else launch_any(layer_norm_fwd_any_kernel<float>, static_cast<float>(eps));
  }
  return cudaGetLastError();
}

template <typename Acc>
cudaError_t layer_norm_bwd_any(TypedPointer grad_output, TypedPointer grad_sum, TypedPointer input, TypedPointer weight,
                               TypedPointer mean, TypedPointer rstd, TypedPointer grad_input, TypedPointer grad_weight,
                               TypedPointer grad_bias, void* workspace, int64_t rows, int64_t columns,
                               cudaStream_t stream) {
  if (rows > 0) {
    layer_norm_bwd_any_kernel<Acc><<<any_grid(rows), kAnyThreads, 0, stream>>>(grad_output, grad_sum, input, weight,
                                                                               mean, rstd, grad_input, rows, columns);
  }
  if (workspace == nullptr || columns == 0) return cudaGetLastError();
  const Partials<Acc> partials{static_cast<Acc*>(workspace), any_partials(rows, columns), columns};
  column_partials_any(grad_output, input, mean, rstd, partials, rows, stream);
  return reduce_partials(partials, grad_weight, grad_bias, stream);
}

extern "C" cudaError_t fuseopt_layer_norm_bwd(TypedPointer grad_output, TypedPointer grad_sum, TypedPointer input,
                                              TypedPointer weight, TypedPointer mean, TypedPointer rstd,
                                              TypedPointer grad_input, TypedPointer grad_weight, TypedPointer grad_bias,
                                              void* workspace, int64_t rows, int64_t columns, cudaStream_t stream) {
  bool launched = false;
  Partials<float> partials{static_cast<float*>(workspace), 0, columns};
  if (rows > 0 && !any_has(kFloat64, {weight}) && have_dtype(input.dtype, {grad_output, grad_sum})) {
    const bool vectors = are_vectors(input.dtype, columns, {grad_output, grad_sum, input, grad_input});
    if (vectors && are_few_rows(rows) &&
        launch_few_rows_bwd({grad_output, grad_sum, input, weight, static_cast<const float*>(mean.data),
                             static_cast<const float*>(rstd.data), grad_input, grad_weight, grad_bias,
                             static_cast<int>(rows), static_cast<int>(columns), 1.0f / columns, 0.0f},
                            stream)) {
      return cudaGetLastError();
    }
    dispatch_fast_dtype(input.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const auto launch = [&](auto shape, auto width, int threads, auto has_grad_sum) {
        using Shape = decltype(shape);
        const size_t shared_bytes = columns * sizeof(float);
        static ResidentBlocks resident;
        const auto kernel = layer_norm_bwd_kernel<T, Shape, width, has_grad_sum>;
        const int64_t most_blocks = std::min<int64_t>(resident(kernel, threads, shared_bytes), bwd_blocks<Shape>(threads));
        partials.count = row_blocks<Shape>(rows, threads, most_blocks);
        kernel<<<static_cast<unsigned>(partials.count), threads, shared_bytes, stream>>>(
            static_cast<const T*>(grad_output.data), static_cast<const T*>(grad_sum.data),
            static_cast<const T*>(input.data), weight, static_cast<const float*>(mean.data),
            static_cast<const float*>(rstd.data), static_cast<T*>(grad_input.data), partials, rows,
            static_cast<int>(columns));
      };
      launched = dispatch_bwd_row<T>(columns, vectors, [&](auto shape, auto width, int threads) {
        if (grad_sum.data != nullptr) launch(shape, width, threads, std::true_type{});
        else launch(shape, width, threads, std::false_type{});
      });
    });
  }
  if (launched)
    return workspace == nullptr ? cudaGetLastError() : reduce_partials(partials, grad_weight, grad_bias, stream);
  const auto any = any_has(kFloat64, {input, weight}) ? layer_norm_bwd_any<double> : layer_norm_bwd_any<float>;
  return any(grad_output, grad_sum, input, weight, mean, rstd, grad_input, grad_weight, grad_bias, workspace, rows,
             columns, stream);
}

}  // namespace fuseopt
