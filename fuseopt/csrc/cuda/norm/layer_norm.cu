// LayerNorm (Ba, Kiros and Hinton, 2016): xhat = (x - mean) * rstd, rstd = 1 / sqrt(var + eps), output = xhat * weight
// + bias.
#include "cuda/norm/norm_fwd.cuh"
#include "cuda/norm/norm_odd_rows.cuh"

namespace fuseopt::layer_norm {
namespace {

// Elements of a row that each thread holds when a block has the row. More threads would make the block's barriers
// slower.
// TUNED: half as many lose, also with registers capped for full occupancy (cbe4a22).
constexpr int kBlockElements = kMostElements;

template <typename T, typename R, typename W, typename Shape, int kWidth>
__global__ void __launch_bounds__(Shape::kMaxThreads)
    layer_norm_fwd_kernel(Stream<T, R> stream, TypedPointer weight, TypedPointer bias, TypedPointer output,
                          float* __restrict__ mean, float* __restrict__ rstd, int64_t rows, int columns,
                          float inverse_columns, float eps) {
  constexpr int kVectors = Shape::kElements / kWidth;
  // Saves a barrier. Only for bfloat16: reading one from a register takes an instruction, reading a half takes less.
  constexpr bool kOnePass = std::is_same_v<T, __nv_bfloat16> && !Shape::kWithinWarp;
  // Parameters are loaded before the reductions if this costs no registers that more resident rows could use.
  constexpr bool kEarlyShift = kWidth > 1 && (Shape::kWithinWarp || sizeof(T) == 4 || kVectors == 1);
  constexpr bool kEarlyScale =
      kEarlyShift || (kWidth > 1 && kOnePass && std::is_void_v<R> && std::is_same_v<W, T>);
  // For short rows the distances from the mean stay in registers and are not recomputed from 16 bits.
  constexpr bool kHeld = kHasShortRows<Shape>;
  RowTeam<Shape::kTeam> team;
  const int vectors_in_row = columns / kWidth;
  const int64_t row = team.index;
  if (row >= rows) return;
  follow_predecessor();

  RowPart<T, kVectors, kWidth> x;
  stream.load(x, row * columns, team, vectors_in_row);
  Columns<W, kWidth> scale[kVectors], shift[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = team.lane + k * team.size;
    if (v >= vectors_in_row) continue;
    if constexpr (kEarlyScale) scale[k].load_or(weight, v * kWidth, 1.0f);
    if constexpr (kEarlyShift) shift[k].load_or(bias, v * kWidth, 0.0f);
  }

  // The mean is computed as a distance from an element, so that it is exact for a constant row. The variance comes from
  // a second pass over the registers, because E[x^2] - E[x]^2 would cancel for rows far from zero. With kOnePass it
  // comes from the distances, in the first pass. The origin is then the mean of the row's first vector, at most
  // sqrt(columns / kWidth) deviations from the row's mean, so cancellation loses less than the rounding of the result.
  float origin;
  if constexpr (kHeld) origin = team.of_first_lane(x.vectors[0][0]);
  else origin = stream.template mean<kOnePass ? kWidth : 1>(row * columns);
  float held[kVectors][kWidth];
  float sums[1 + kOnePass] = {};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (team.lane + k * team.size >= vectors_in_row) continue;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float distance = x.vectors[k][j] - origin;
      if constexpr (kHeld) held[k][j] = distance;
      sums[0] += distance;
      if constexpr (kOnePass) sums[1] += distance * distance;
    }
  }
  team.template reduce<Sum>(sums);
  const float shift_of_mean = sums[0] * inverse_columns;
  const float row_mean = origin + shift_of_mean;
  const auto centred = [&](int k, int j) {
    if constexpr (kHeld) return held[k][j] - shift_of_mean;
    else return x.vectors[k][j] - row_mean;
  };
  float variance;
  if constexpr (kOnePass) {
    const float square = sums[1] * inverse_columns;
    // Above float's range there is nothing to subtract.
    variance = isinf(square) ? square : square - shift_of_mean * shift_of_mean;
    if (variance < 0) variance = 0;
  } else {
    float sum_of_squares = 0;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (team.lane + k * team.size >= vectors_in_row) continue;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum_of_squares += centred(k, j) * centred(k, j);
    }
    variance = team.template reduce<Sum>(sum_of_squares) * inverse_columns;
  }
  const float row_rstd = rsqrtf(variance + eps);
  if (team.lane == 0 && mean != nullptr) {
    mean[row] = row_mean;
    rstd[row] = row_rstd;
  }

#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = team.lane + k * team.size;
    if (v >= vectors_in_row) continue;
    if constexpr (!kEarlyScale) scale[k].load_or(weight, v * kWidth, 1.0f);
    if constexpr (!kEarlyShift) shift[k].load_or(bias, v * kWidth, 0.0f);
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      result[j] = centred(k, j) * row_rstd * scale[k][j] + shift[k][j];
    }
    store_floats(output, row * vectors_in_row + v, result);
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
    if (team.lane == 0 && mean.data != nullptr) {
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

}  // namespace

extern "C" cudaError_t fuseopt_layer_norm_fwd(const NormFwd& call, cudaStream_t stream) {
  if (call.rows == 0) return cudaSuccess;
  const bool has_residual = call.residual.data != nullptr;
  const bool float64 = any_has(kFloat64, {call.input, call.residual, call.weight, call.bias});
  const bool vectors = are_vectors(has_residual ? call.sum.dtype : call.input.dtype, call.columns,
                                   {call.input, call.residual, call.weight, call.bias, call.output, call.sum});
  if (!vectors && !has_residual && launch_odd_rows_fwd(call, true, stream)) return cudaGetLastError();
  const TypedPointer parameter = call.weight.data != nullptr ? call.weight : call.bias;
  bool launched = false;
  if (!float64 && call.output.dtype != kFloat64 && fits_grid(call.rows) && have_dtype(parameter.dtype, {call.bias})) {
    const auto launch = [&](auto types, auto shape, auto width, int threads, TypedPointer wide, TypedPointer narrow) {
      using Types = decltype(types);
      using T = typename Types::T;
      using Shape = decltype(shape);
      // The registers of a multiprocessor hold about 25 rows of such sums. With single warps, new rows start as others
      // end.
      if (std::is_same_v<Shape, NarrowRow> && has_residual) threads = kWarpSize;
      using Kernel = FollowingKernel<layer_norm_fwd_kernel<T, typename Types::R, typename Types::W, Shape, width>>;
      Kernel::launch_evenly(row_blocks<Shape>(call.rows, threads), threads, stream,
                            {static_cast<const T*>(wide.data), narrow, static_cast<T*>(call.sum.data)}, call.weight,
                            call.bias, call.output, static_cast<float*>(call.mean.data),
                            static_cast<float*>(call.rstd.data), call.rows, static_cast<int>(call.columns),
                            1.0f / call.columns, static_cast<float>(call.eps));
    };
    const auto dispatch = [&](auto of_sum) {
      return dispatch_fwd<kBlockElements, false, of_sum>(call.input, call.residual, parameter, call.rows, call.columns,
                                                         vectors, launch);
    };
    launched = has_residual ? dispatch(std::true_type{}) : dispatch(std::false_type{});
  }
  if (!launched) {
    const auto launch_any = [&](auto kernel, auto eps) {
      kernel<<<any_grid(call.rows), kAnyThreads, 0, stream>>>({call.input, call.residual, call.sum}, call.weight,
                                                              call.bias, call.output, call.mean, call.rstd, call.rows,
                                                              call.columns, eps);
    };
    if (float64) launch_any(layer_norm_fwd_any_kernel<double>, call.eps);
    else launch_any(layer_norm_fwd_any_kernel<float>, static_cast<float>(call.eps));
  }
  return cudaGetLastError();
}

}  // namespace fuseopt::layer_norm
