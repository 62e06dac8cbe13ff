// RMSNorm's backward. It has a file of its own to shorten the build.
#include "cuda/norm/norm_bwd.cuh"
#include "cuda/norm/norm_odd_rows.cuh"

namespace fuseopt::rms_norm_bwd {
namespace {

// grad_input = rstd * (g - xhat * mean(g * xhat)) + grad_sum with g = grad_output * (weight + offset). grad_weight is
// the sum over rows of grad_output * xhat; each block writes one row of partial sums. grad_sum is the other gradient of
// a fused residual sum, which here is `input`.
template <typename T, typename Shape, int kWidth, bool kHasGradSum>
__global__ void __launch_bounds__(kBwdMaxThreads<Shape>)
    rms_norm_bwd_kernel(const T* grad_output, const T* grad_sum, const T* input,
                        TypedPointer weight, const float* rstd, T* __restrict__ grad_input,
                        Partials<float> partials, int64_t rows, int columns, float offset, int stages) {
  follow_predecessor();
  constexpr int kVectors = Shape::kElements / kWidth;
  RowTeam<Shape::kTeam> team;
  const int vectors_in_row = columns / kWidth;

  extern __shared__ __align__(kAccessBytes) float shared[];
  const SharedColumns<kWidth> scale(shared, weight, 1.0f, offset, columns);
  constexpr int kTensors = kHasGradSum ? 3 : 2;
  const T* tensors[kTensors] = {input, grad_output};
  if constexpr (kHasGradSum) tensors[2] = grad_sum;
  WalkedRows<T, kTensors, (kWidth > 1), Shape::kTeam> walk(tensors, rows, columns,
                                                           reinterpret_cast<char*>(shared + columns), stages);
  __syncthreads();
  walk.start(team);
  float weight_sums[kVectors][kWidth] = {};

  for (int64_t row = team.index; team.walks(row, rows); row += team.count) {
    const bool is_row = row < rows;
    const int vectors = is_row ? vectors_in_row : 0;
    const float row_rstd = is_row ? rstd[row] : 0.0f;
    RowPart<T, kVectors, kWidth> parts[kTensors];
    walk.load(parts, row, team, vectors);
    const auto &x = parts[0], &grad = parts[1];

    float dot = 0;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v >= vectors) continue;
      float weights[kWidth];
      scale.load(v, weights);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float grad_times_xhat = grad.vectors[k][j] * (x.vectors[k][j] * row_rstd);
        weight_sums[k][j] += grad_times_xhat;
        dot += grad_times_xhat * weights[j];
      }
    }
    const float mean_dot = team.template reduce<Sum>(dot) / columns;
    walk.advance(row, team);

#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v >= vectors) continue;
      float result[kWidth], weights[kWidth];
      scale.load(v, weights);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float xhat = x.vectors[k][j] * row_rstd;
        result[j] = row_rstd * (grad.vectors[k][j] * weights[j] - xhat * mean_dot);
        if constexpr (kHasGradSum) result[j] += parts[2].vectors[k][j];
      }
      store_floats_as<T>(grad_input + row * columns, v, result);
    }
  }
  if (partials.data != nullptr) store_block_partials(weight_sums, partials.of(0), columns, team);
}

template <typename Acc>
__global__ void __launch_bounds__(kAnyThreads)
    rms_norm_bwd_any_kernel(TypedPointer grad_output, TypedPointer grad_sum, TypedPointer input, TypedPointer weight,
                            TypedPointer rstd, TypedPointer grad_input, int64_t rows, int64_t columns, Acc offset) {
  RowTeam<Team::kBlock, Acc> team;
  const auto grad_times_weight = [&](int64_t row, int64_t c) {
    return load_as<Acc>(grad_output, row * columns + c) *
           ((weight.data != nullptr ? load_as<Acc>(weight, c) : Acc(1)) + offset);
  };
  for (int64_t row = team.index; row < rows; row += team.count) {
    const Acc row_rstd = load_as<Acc>(rstd, row);
    Acc dot = 0;
    for (int64_t c = team.lane; c < columns; c += team.size) {
      dot += grad_times_weight(row, c) * (load_as<Acc>(input, row * columns + c) * row_rstd);
    }
    const Acc mean_dot = team.template reduce<Sum>(dot) / columns;
    for (int64_t c = team.lane; c < columns; c += team.size) {
      const Acc xhat = load_as<Acc>(input, row * columns + c) * row_rstd;
      const Acc added = grad_sum.data != nullptr ? load_as<Acc>(grad_sum, row * columns + c) : Acc(0);
      store_as(grad_input, row * columns + c, row_rstd * (grad_times_weight(row, c) - xhat * mean_dot) + added);
    }
  }
}

}  // namespace

template <typename Acc>
cudaError_t rms_norm_bwd_any(const NormBwd& call, cudaStream_t stream) {
  if (call.rows > 0) {
    rms_norm_bwd_any_kernel<<<any_grid(call.rows), kAnyThreads, 0, stream>>>(
        call.grad_output, call.grad_sum, call.input, call.weight, call.rstd, call.grad_input, call.rows, call.columns,
        static_cast<Acc>(call.offset));
  }
  return column_sums_any<Acc>(call, stream);
}

extern "C" cudaError_t fuseopt_rms_norm_bwd(const NormBwd& call, cudaStream_t stream) {
  bool launched = false;
  Partials<float> partials{static_cast<float*>(call.workspace), 0, call.columns};
  if (has_fast_dtypes(call)) {
    const bool vectors = are_vectors(call);
    if (vectors && are_few_rows(call.rows) && launch_few_rows_bwd(call, stream)) return cudaGetLastError();
    const auto launch = [&](auto tag, auto shape, auto width, auto has_grad_sum, int threads) {
      using T = typename decltype(tag)::type;
      using Kernel = FollowingKernel<rms_norm_bwd_kernel<T, decltype(shape), width, has_grad_sum>>;
      launched = launch_walk<T, decltype(shape), width, has_grad_sum, Kernel>(
          call, threads, tuning().rms_norm_bwd_ring_threads, partials, [&](const BwdLaunch& form) {
            Kernel::launch(static_cast<unsigned>(partials.count), threads, form.shared_bytes, stream,
                           static_cast<const T*>(call.grad_output.data), static_cast<const T*>(call.grad_sum.data),
                           static_cast<const T*>(call.input.data), call.weight,
                           static_cast<const float*>(call.rstd.data), static_cast<T*>(call.grad_input.data), partials,
                           call.rows, static_cast<int>(call.columns), static_cast<float>(call.offset), form.stages);
          });
    };
    launched = !vectors && launch_odd_rows_bwd(call, partials, stream);
    if (!launched) dispatch_bwd<ElementwiseWarp>(call, vectors, launch);
  }
  if (launched) {
    if (call.workspace == nullptr) return cudaGetLastError();
    return reduce_partials(partials, {call.grad_weight, call.grad_bias}, stream);
  }
  if (any_has(kFloat64, {call.input, call.weight})) return rms_norm_bwd_any<double>(call, stream);
  return rms_norm_bwd_any<float>(call, stream);
}

}  // namespace fuseopt::rms_norm_bwd
