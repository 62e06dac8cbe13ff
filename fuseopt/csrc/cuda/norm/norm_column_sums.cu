// The second stage of column sums, and both stages of a norm's "any" path; see column_sums.cuh.
#include "cuda/norm/norm_bwd.cuh"

namespace fuseopt {
namespace {

constexpr int kSummedColumns = kWarpSize;
// TUNED: measurement not recorded (18a48f6); `fuseopt bench ops --op rms_norm` measures it again.
constexpr int kSummedGroups = 32;  // warps of a block, each summing its own rows of the same columns
constexpr int kLoads = 8;          // loads in flight per thread

// Adds up `value` over the row groups of a block; the result is in row group 0.
template <typename Acc>
__device__ Acc sum_row_groups(Acc value) {
  __shared__ Acc groups[kSummedGroups][kSummedColumns];
  groups[threadIdx.y][threadIdx.x] = value;
  __syncthreads();
  Acc sum = 0;
  if (threadIdx.y == 0) {
    for (int group = 0; group < kSummedGroups; ++group) sum += groups[group][threadIdx.x];
  }
  __syncthreads();
  return sum;
}

template <typename Acc>
__global__ void __launch_bounds__(kSummedColumns* kSummedGroups)
    reduce_partials_kernel(Partials<Acc> partials, ColumnSums sums) {
  follow_predecessor();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kSummedColumns + threadIdx.x;
  const TypedPointer output = sums.of[blockIdx.y];
  if (output.data == nullptr) return;
  const Acc* const values = partials.of(blockIdx.y);
  Acc sum = 0;
  if (column < partials.columns) {
    for (int64_t first = threadIdx.y; first < partials.count; first += kLoads * kSummedGroups) {
      Acc loaded[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const int64_t row = first + k * kSummedGroups;
        loaded[k] = row < partials.count ? values[row * partials.columns + column] : Acc(0);
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) sum += loaded[k];
    }
  }
  sum = sum_row_groups(sum);
  if (threadIdx.y == 0 && column < partials.columns) store_as(output, column, sum);
}

template <typename Acc>
__global__ void __launch_bounds__(kSummedColumns* kSummedGroups)
    column_partials_any_kernel(TypedPointer grad_output, TypedPointer input, TypedPointer mean, TypedPointer rstd,
                               Partials<Acc> partials, int64_t rows) {
  const int64_t columns = partials.columns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kSummedColumns + threadIdx.x;
  Acc weight_sum = 0;
  Acc bias_sum = 0;
  if (column < columns) {
    const int64_t step = static_cast<int64_t>(gridDim.y) * kSummedGroups;
#pragma unroll 4
    for (int64_t row = static_cast<int64_t>(blockIdx.y) * kSummedGroups + threadIdx.y; row < rows; row += step) {
      const Acc grad = load_as<Acc>(grad_output, row * columns + column);
      const Acc centre = mean.data != nullptr ? load_as<Acc>(mean, row) : Acc(0);
      weight_sum += grad * (load_as<Acc>(input, row * columns + column) - centre) * load_as<Acc>(rstd, row);
      bias_sum += grad;
    }
  }
  weight_sum = sum_row_groups(weight_sum);
  bias_sum = sum_row_groups(bias_sum);
  if (threadIdx.y == 0 && column < columns) {
    partials.of(0)[blockIdx.y * columns + column] = weight_sum;
    if (mean.data != nullptr) partials.of(1)[blockIdx.y * columns + column] = bias_sum;
  }
}

}  // namespace

// Without rows there are no partial sums, and reduce_partials writes zeros.
int64_t any_partials(int64_t rows, int64_t columns) {
  if (rows == 0) return 0;
  const int64_t blocks = tuning().norm_column_sums_blocks * multiprocessor_count();
  const int64_t enough = ceil_div(blocks, ceil_div(columns, kSummedColumns));
  return std::min(enough, max_partials(rows));
}

// At least one, since a workspace that exists stands for "wanted", even without rows.
int64_t max_partials(int64_t rows) {
  return std::max<int64_t>(
      1, std::min<int64_t>(rows, static_cast<int64_t>(kPartialsPerProcessor) * multiprocessor_count()));
}

template <typename Acc>
cudaError_t reduce_partials(Partials<Acc> partials, ColumnSums sums, cudaStream_t stream) {
  unsigned tensors = kMostSummed;
  while (tensors > 1 && sums.of[tensors - 1].data == nullptr) --tensors;
  const dim3 threads(kSummedColumns, kSummedGroups);
  const dim3 blocks(static_cast<unsigned>(ceil_div(partials.columns, kSummedColumns)), tensors);
  FollowingKernel<reduce_partials_kernel<Acc>>::launch(blocks, threads, 0, stream, partials, sums);
  return cudaGetLastError();
}

template <typename Acc>
cudaError_t column_sums_any(const NormBwd& call, cudaStream_t stream) {
  if (call.workspace == nullptr || call.columns == 0) return cudaGetLastError();
  const Partials<Acc> partials{static_cast<Acc*>(call.workspace), any_partials(call.rows, call.columns), call.columns};
  if (partials.count > 0) {
    const dim3 threads(kSummedColumns, kSummedGroups);
    const dim3 blocks(static_cast<unsigned>(ceil_div(partials.columns, kSummedColumns)),
                      static_cast<unsigned>(partials.count));
    column_partials_any_kernel<<<blocks, threads, 0, stream>>>(call.grad_output, call.input, call.mean, call.rstd,
                                                               partials, call.rows);
  }
  return reduce_partials(partials, {call.grad_weight, call.grad_bias}, stream);
}

template cudaError_t reduce_partials(Partials<float>, ColumnSums, cudaStream_t);
template cudaError_t reduce_partials(Partials<double>, ColumnSums, cudaStream_t);
template cudaError_t column_sums_any<float>(const NormBwd&, cudaStream_t);
template cudaError_t column_sums_any<double>(const NormBwd&, cudaStream_t);

}  // namespace fuseopt

extern "C" size_t fuseopt_norm_bwd_workspace_bytes(int64_t rows, int64_t columns, int tensors, bool float64) {
  return static_cast<size_t>(fuseopt::max_partials(rows) * columns * tensors) *
         (float64 ? sizeof(double) : sizeof(float));
}
