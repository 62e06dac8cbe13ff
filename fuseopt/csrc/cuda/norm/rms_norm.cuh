// RMSNorm forward: the kernel that holds rows in registers, and its launch. Several files each compile a part of it, to
// shorten the build.
#pragma once

#include "cuda/norm/norm_fwd.cuh"

namespace fuseopt::rms_norm {

// TUNED: 16 bits gain from half of LayerNorm's elements while registers leave room for 75% of a multiprocessor's
// threads (cbe4a22).
constexpr int kBlockElements = 16;  // elements of a row per thread, if a block has the row

// Limits registers so that three quarters of a multiprocessor's threads can be resident.
template <typename T, typename Shape>
constexpr int kFwdMinBlocks = sizeof(T) == 2 && std::is_same_v<Shape, RowShape<kBlockElements, Team::kBlock>> ? 3 : 1;

template <typename T, typename R, typename W, typename Shape, int kWidth>
__global__ void __launch_bounds__(Shape::kMaxThreads, (kFwdMinBlocks<T, Shape>))
    rms_norm_fwd_kernel(Stream<T, R> stream, TypedPointer weight, TypedPointer output, float* __restrict__ rstd,
                        int64_t rows, int columns, float inverse_columns, float eps, float offset, int norm_dtype) {
  constexpr int kVectors = Shape::kElements / kWidth;
  RowTeam<Shape::kTeam> team;
  const int vectors_in_row = columns / kWidth;
  const int64_t row = team.index;
  if (row >= rows) return;
  follow_predecessor();

  RowPart<T, kVectors, kWidth> x;
  stream.load(x, row * columns, team, vectors_in_row);
  Columns<W, kWidth> scale[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = team.lane + k * team.size;
    if (v < vectors_in_row) scale[k].load_or(weight, v * kWidth, 1.0f);
  }

  float sum_of_squares = 0;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum_of_squares += x.vectors[k][j] * x.vectors[k][j];
  }
  const float row_rstd = rsqrtf(team.template reduce<Sum>(sum_of_squares) * inverse_columns + eps);
  if (team.lane == 0 && rstd != nullptr) rstd[row] = row_rstd;

#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = team.lane + k * team.size;
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result[j] = x.vectors[k][j] * row_rstd;
    round_floats(norm_dtype, result);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result[j] *= scale[k][j] + offset;
    if (v < vectors_in_row) store_floats(output, row * vectors_in_row + v, result);
  }
}

// `vectors` as in dispatch_fwd. Returns false if no kernel that holds rows in registers takes the arguments.
template <bool kOfSum>
bool launch_fwd(const NormFwd& call, bool vectors, cudaStream_t stream) {
  return dispatch_fwd<kBlockElements, true, kOfSum>(
      call.input, call.residual, call.weight, call.rows, call.columns, vectors,
      [&](auto types, auto shape, auto width, int threads, TypedPointer wide, TypedPointer narrow) {
        using Types = decltype(types);
        using T = typename Types::T;
        using Shape = decltype(shape);
        using Kernel = FollowingKernel<rms_norm_fwd_kernel<T, typename Types::R, typename Types::W, Shape, width>>;
        Kernel::launch_evenly(row_blocks<Shape>(call.rows, threads), threads, stream,
                              {static_cast<const T*>(wide.data), narrow, static_cast<T*>(call.sum.data)}, call.weight,
                              call.output, static_cast<float*>(call.rstd.data), call.rows,
                              static_cast<int>(call.columns), 1.0f / call.columns, static_cast<float>(call.eps),
                              static_cast<float>(call.offset), call.norm_dtype);
      });
}

extern template bool launch_fwd<true>(const NormFwd&, bool, cudaStream_t);

}  // namespace fuseopt::rms_norm
