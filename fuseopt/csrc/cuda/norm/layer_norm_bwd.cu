// LayerNorm's backward. It has a file of its own to shorten the build.
#include "cuda/norm/norm_bwd.cuh"

namespace fuseopt::layer_norm_bwd {
namespace {

// Limits registers so that kBwdThreadsPerProcessor threads are resident, where that spills almost nothing.
template <typename T, typename Shape, int kWidth, bool kHasGradSum>
constexpr int kBwdMinBlocks = !kHasRowRings && sizeof(T) == 2 && kWidth > 1 && !kHasGradSum && !Shape::kWithinWarp
                                  ? kBwdThreadsPerProcessor / kBwdMaxThreads<Shape>
                                  : 1;

// grad_input = rstd * (g - mean(g) - xhat * mean(g * xhat)) + grad_sum with g = grad_output * weight. grad_weight is
// the sum over rows of grad_output * xhat, grad_bias the sum over rows of grad_output; each block writes one row of
// partial sums of each. grad_sum is the other gradient of a fused residual sum, which here is `input`.
template <typename T, typename Shape, int kWidth, bool kHasGradSum>
__global__ void __launch_bounds__(kBwdMaxThreads<Shape>, (kBwdMinBlocks<T, Shape, kWidth, kHasGradSum>))
    layer_norm_bwd_kernel(const T* grad_output, const T* grad_sum,
                          const T* input, TypedPointer weight, const float* mean,
                          const float* rstd, T* __restrict__ grad_input, Partials<float> partials,
                          int64_t rows, int columns, int stages) {
  follow_predecessor();
  constexpr int kVectors = Shape::kElements / kWidth;
  RowTeam<Shape::kTeam> team;
  const int vectors_in_row = columns / kWidth;

  extern __shared__ __align__(kAccessBytes) float shared[];
  const SharedColumns<kWidth> scale(shared, weight, 1.0f, 0.0f, columns);
  constexpr int kTensors = kHasGradSum ? 3 : 2;
  const T* tensors[kTensors] = {input, grad_output};
  if constexpr (kHasGradSum) tensors[2] = grad_sum;
  WalkedRows<T, kTensors, (kWidth > 1), Shape::kTeam> walk(tensors, rows, columns,
                                                           reinterpret_cast<char*>(shared + columns), stages);
  __syncthreads();
  walk.start(team);
  float weight_sums[kVectors][kWidth] = {}, bias_sums[kVectors][kWidth] = {};

  for (int64_t row = team.index; team.walks(row, rows); row += team.count) {
    const bool is_row = row < rows;
    const int vectors = is_row ? vectors_in_row : 0;
    const float row_mean = is_row ? mean[row] : 0.0f, row_rstd = is_row ? rstd[row] : 0.0f;
    RowPart<T, kVectors, kWidth> parts[kTensors];
    walk.load(parts, row, team, vectors);
    const auto &x = parts[0], &grad = parts[1];

    float sums[2] = {};  // of g and of g * xhat
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v >= vectors) continue;
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
    walk.advance(row, team);
    const float mean_g = sums[0] / columns, mean_dot = sums[1] / columns;

#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v >= vectors) continue;
      float result[kWidth], weights[kWidth];
      scale.load(v, weights);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float xhat = (x.vectors[k][j] - row_mean) * row_rstd;
        result[j] = row_rstd * (grad.vectors[k][j] * weights[j] - mean_g - xhat * mean_dot);
        if constexpr (kHasGradSum) result[j] += parts[2].vectors[k][j];
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

template <typename Acc>
cudaError_t layer_norm_bwd_any(const NormBwd& call, cudaStream_t stream) {
  if (call.rows > 0) {
    layer_norm_bwd_any_kernel<Acc><<<any_grid(call.rows), kAnyThreads, 0, stream>>>(
        call.grad_output, call.grad_sum, call.input, call.weight, call.mean, call.rstd, call.grad_input, call.rows,
        call.columns);
  }
  return column_sums_any<Acc>(call, stream);
}

extern "C" cudaError_t fuseopt_layer_norm_bwd(const NormBwd& call, cudaStream_t stream) {
  bool launched = false;
  Partials<float> partials{static_cast<float*>(call.workspace), 0, call.columns};
  if (has_fast_dtypes(call)) {
    const bool vectors = are_vectors(call);
    if (vectors && are_few_rows(call.rows) && launch_few_rows_bwd(call, stream)) return cudaGetLastError();
    const auto launch = [&](auto tag, auto shape, auto width, auto has_grad_sum, int threads) {
      using T = typename decltype(tag)::type;
      using Kernel = FollowingKernel<layer_norm_bwd_kernel<T, decltype(shape), width, has_grad_sum>>;
      launched = launch_walk<T, decltype(shape), width, has_grad_sum, Kernel>(
          call, threads, tuning().layer_norm_bwd_ring_threads, partials, [&](const BwdLaunch& form) {
            Kernel::launch(static_cast<unsigned>(partials.count), threads, form.shared_bytes, stream,
                           static_cast<const T*>(call.grad_output.data), static_cast<const T*>(call.grad_sum.data),
                           static_cast<const T*>(call.input.data), call.weight,
                           static_cast<const float*>(call.mean.data), static_cast<const float*>(call.rstd.data),
                           static_cast<T*>(call.grad_input.data), partials, call.rows, static_cast<int>(call.columns),
                           form.stages);
          });
    };
    dispatch_bwd<ElementwiseBlock>(call, vectors, launch);
  }
  if (launched) {
    if (call.workspace == nullptr) return cudaGetLastError();
    return reduce_partials(partials, {call.grad_weight, call.grad_bias}, stream);
  }
  if (any_has(kFloat64, {call.input, call.weight})) return layer_norm_bwd_any<double>(call, stream);
  return layer_norm_bwd_any<float>(call, stream);
}

}  // namespace fuseopt::layer_norm_bwd
