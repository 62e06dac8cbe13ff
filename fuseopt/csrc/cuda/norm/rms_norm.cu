// RMSNorm (Zhang and Sennrich, 2019): xhat = x * rstd, rstd = 1 / sqrt(mean(x^2) + eps), output = xhat * (weight +
// offset).
#include "cuda/norm/norm_odd_rows.cuh"
#include "cuda/norm/rms_norm.cuh"

namespace fuseopt::rms_norm {
namespace {

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
    const FwdArguments arguments = {input, residual, weight, output, sum, rstd, rows, columns, eps, offset, norm_dtype};
    launched = residual.data != nullptr ? launch_fwd<true>(arguments, vectors, stream)
                                        : launch_fwd<false>(arguments, vectors, stream);
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
