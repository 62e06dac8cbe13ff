// RMSNorm (Zhang and Sennrich, 2019): xhat = x * rstd, rstd = 1 / sqrt(mean(x^2) + eps), output = xhat * (weight +
// offset).
#include "norm.cuh"
#include "norm_odd_rows.cuh"

namespace fuseopt::rms_norm {
namespace {

constexpr int kBlockElements = 16;  // of a row in a thread, where a block has the row

// Holds the kernel to as few registers as let three quarters of the threads be resident that a multiprocessor may have.
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

template <typename Acc>
__global__ void __launch_bounds__(kAnyThreads)
    rms_norm_fwd_any_kernel(AnyStream stream, TypedPointer weight, TypedPointer output, TypedPointer rstd, int64_t rows,
                            int64_t columns, Acc eps, Acc offset, int norm_dtype) {
  RowTeam<Team::kBlock, Acc> team;
  const TypedPointer input = stream.residual.data != nullptr ? stream.sum : stream.input;
  for (int64_t row = team.index; row < rows; row += team.count) {
    Acc sum_of_squares = 0;
#pragma unroll 4
    for (int64_t i = row * columns + team.lane; i < (row + 1) * columns; i += team.size) {
      const Acc x = stream.at<Acc>(i);
      if (stream.residual.data != nullptr) store_as(stream.sum, i, x);
      sum_of_squares += x * x;
    }
    const Acc row_rstd = 1 / sqrt(team.template reduce<Sum>(sum_of_squares) / columns + eps);
    if (team.lane == 0 && rstd.data != nullptr) store_as(rstd, row, row_rstd);
#pragma unroll 4
    for (int64_t c = team.lane; c < columns; c += team.size) {
      const Acc xhat = round_to(norm_dtype, load_as<Acc>(input, row * columns + c) * row_rstd);
      store_as(output, row * columns + c,
               xhat * ((weight.data != nullptr ? load_as<Acc>(weight, c) : Acc(1)) + offset));
    }
  }
}

}  // namespace

extern "C" cudaError_t fuseopt_rms_norm_fwd(TypedPointer input, TypedPointer residual, TypedPointer weight,
                                            TypedPointer output, TypedPointer sum, TypedPointer rstd, int64_t rows,
                                            int64_t columns, double eps, double offset, int norm_dtype,
                                            cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const bool float64 = any_has(kFloat64, {input, residual, weight});
  const bool vectors = are_vectors(residual.data != nullptr ? sum.dtype : input.dtype, columns,
                                   {input, residual, weight, output, sum});
  if (!vectors && residual.data == nullptr &&
      launch_odd_rows_fwd({input, weight, output, static_cast<float*>(rstd.data), rows, columns, static_cast<float>(eps),
                           static_cast<float>(offset), norm_dtype},
                          stream)) {
    return cudaGetLastError();
  }
  bool launched = false;
  if (!float64 && output.dtype != kFloat64 && fits_grid(rows)) {
    launched = dispatch_fwd<kBlockElements, true>(
        input, residual, weight, rows, columns, vectors,
        [&](auto types, auto shape, auto width, int threads, TypedPointer wide, TypedPointer narrow) {
          using Types = decltype(types);
          using T = typename Types::T;
          using Shape = decltype(shape);
          launch_following(rms_norm_fwd_kernel<T, typename Types::R, typename Types::W, Shape, width>,
                           row_blocks<Shape>(rows, threads), threads, 0, stream,
                           {static_cast<const T*>(wide.data), narrow, static_cast<T*>(sum.data)}, weight, output,
                           static_cast<float*>(rstd.data), rows, static_cast<int>(columns), 1.0f / columns,
                           static_cast<float>(eps), static_cast<float>(offset), norm_dtype);
        });
  }
  if (!launched) {
    const auto launch_any = [&](auto kernel, auto precise_eps, auto precise_offset) {
      kernel<<<any_grid(rows), kAnyThreads, 0, stream>>>({input, residual, sum}, weight, output, rstd, rows, columns,
                                                         precise_eps, precise_offset, norm_dtype);
    };
    if (float64) launch_any(rms_norm_fwd_any_kernel<double>, eps, offset);
    else launch_any(rms_norm_fwd_any_kernel<float>, static_cast<float>(eps), static_cast<float>(offset));
  }
  return cudaGetLastError();
}

}  // namespace fuseopt::rms_norm
