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

extern "C" cudaError_t fuseopt_rms_norm_fwd(const NormFwd& call, cudaStream_t stream) {
  if (call.rows == 0) return cudaSuccess;
  const bool has_residual = call.residual.data != nullptr;
  const bool float64 = any_has(kFloat64, {call.input, call.residual, call.weight});
  const bool vectors = are_vectors(has_residual ? call.sum.dtype : call.input.dtype, call.columns,
                                   {call.input, call.residual, call.weight, call.output, call.sum});
  if (!vectors && !has_residual && launch_odd_rows_fwd(call, false, stream)) return cudaGetLastError();
  bool launched = false;
  if (!float64 && call.output.dtype != kFloat64 && fits_grid(call.rows)) {
    launched = has_residual ? launch_fwd<true>(call, vectors, stream) : launch_fwd<false>(call, vectors, stream);
  }
  if (!launched) {
    const auto launch_any = [&](auto kernel, auto eps, auto offset) {
      kernel<<<any_grid(call.rows), kAnyThreads, 0, stream>>>({call.input, call.residual, call.sum}, call.weight,
                                                              call.output, call.rstd, call.rows, call.columns, eps,
                                                              offset, call.norm_dtype);
    };
    if (float64) launch_any(rms_norm_fwd_any_kernel<double>, call.eps, call.offset);
    else launch_any(rms_norm_fwd_any_kernel<float>, static_cast<float>(call.eps), static_cast<float>(call.offset));
  }
  return cudaGetLastError();
}

}  // namespace fuseopt::rms_norm
