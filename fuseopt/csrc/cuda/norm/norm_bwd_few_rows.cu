// Backward of RMSNorm and LayerNorm over few rows, in one launch: a block has either a row or some columns. The column
// sums need no result of the blocks that have rows. Reading such small tensors twice costs less than a second launch.
#include "cuda/norm/norm_bwd.cuh"

namespace fuseopt {
namespace {

constexpr int kMaxThreads = 1024;
// TUNED: measurement not recorded (b5728bd); `fuseopt bench ops --op rms_norm` measures it again.
constexpr int kColumnsPerBlock = 2 * kWarpSize;
constexpr int kEnoughWarps = 8;  // for the rows of a block's columns

// `mean` is null for RMSNorm. Gradients of parameters that are not wanted are absent.
struct FewRowsBwd {
  TypedPointer grad_output, grad_sum, input, weight;
  const float* mean;
  const float* rstd;
  TypedPointer grad_input, grad_weight, grad_bias;
  int rows;
  int columns;
  float inverse_columns;
  float offset;
};

// A thread has one vector of the row.
template <typename T>
__device__ void store_grad_input(const FewRowsBwd& call, int row) {
  constexpr int kWidth = kVectorWidth<T>;
  RowTeam<Team::kBlock> team;
  const int64_t begin = static_cast<int64_t>(row) * call.columns;
  const int column = team.lane * kWidth;
  const bool has_vector = column < call.columns;
  Columns<T, kWidth> x, grad, added;
  float weights[kWidth];
  if (has_vector) {
    x.load(call.input, begin + column);
    grad.load(call.grad_output, begin + column);
    added.load_or(call.grad_sum, call.grad_sum.data != nullptr ? begin + column : 0, 0.0f);
    Columns<AnyType, kWidth> scale;
    scale.load_or(call.weight, column, 1.0f);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) weights[j] = scale[j] + call.offset;
  }
  const float mean = call.mean != nullptr ? call.mean[row] : 0.0f;
  const float rstd = call.rstd[row];

  float xhat[kWidth], g[kWidth];
  float sums[2] = {};  // of g and of g * xhat
  if (has_vector) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      xhat[j] = (x[j] - mean) * rstd;
      g[j] = grad[j] * weights[j];
      sums[0] += g[j];
      sums[1] += g[j] * xhat[j];
    }
  }
  team.template reduce<Sum>(sums);
  if (!has_vector) return;
  const float mean_g = call.mean != nullptr ? sums[0] * call.inverse_columns : 0.0f;
  const float mean_dot = sums[1] * call.inverse_columns;
  float result[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) result[j] = rstd * (g[j] - mean_g - xhat[j] * mean_dot) + added[j];
  store_floats_as<T>(static_cast<T*>(call.grad_input.data) + begin, team.lane, result);
}

// Lanes have two columns each, warps the rows in turn.
template <typename T>
__device__ void store_column_sums(const FewRowsBwd& call, int block) {
  __shared__ float warp_sums[kMaxWarps][2][kColumnsPerBlock];  // of grad_output * xhat and of grad_output
  const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int first = block * kColumnsPerBlock, column = first + 2 * (threadIdx.x % kWarpSize);
  float sums[2][2] = {};
  if (column < call.columns) {
#pragma unroll 4
    for (int row = warp; row < call.rows; row += warps) {
      Columns<T, 2> x, grad;
      x.load(call.input, static_cast<int64_t>(row) * call.columns + column);
      grad.load(call.grad_output, static_cast<int64_t>(row) * call.columns + column);
      const float mean = call.mean != nullptr ? call.mean[row] : 0.0f, rstd = call.rstd[row];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sums[0][j] += grad[j] * ((x[j] - mean) * rstd);
        sums[1][j] += grad[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) store_floats_as<float>(warp_sums[warp][i], threadIdx.x % kWarpSize, sums[i]);
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * kColumnsPerBlock; i += blockDim.x) {
    const TypedPointer gradient = i < kColumnsPerBlock ? call.grad_weight : call.grad_bias;
    const int c = i % kColumnsPerBlock;
    if (gradient.data == nullptr || first + c >= call.columns) continue;
    float sum = 0;
    for (int w = 0; w < warps; ++w) sum += warp_sums[w][i / kColumnsPerBlock][c];
    store_as(gradient, first + c, sum);
  }
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads) norm_bwd_few_rows_kernel(FewRowsBwd call) {
  follow_predecessor();
  const int block = blockIdx.x;
  if (block < call.rows) store_grad_input<T>(call, block);
  else store_column_sums<T>(call, block - call.rows);
}

}  // namespace

bool launch_few_rows_bwd(const NormBwd& of, cudaStream_t stream) {
  const FewRowsBwd call = {of.grad_output, of.grad_sum, of.input, of.weight, static_cast<const float*>(of.mean.data),
                           static_cast<const float*>(of.rstd.data), of.grad_input, of.grad_weight, of.grad_bias,
                           static_cast<int>(of.rows), static_cast<int>(of.columns), 1.0f / of.columns,
                           static_cast<float>(of.offset)};
  const bool wants_sums = call.grad_weight.data != nullptr || call.grad_bias.data != nullptr;
  bool launched = false;
  dispatch_fast_dtype(call.input.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t row_threads = ceil_div(call.columns, kVectorWidth<T> * kWarpSize) * kWarpSize;
    if (row_threads > kMaxThreads) return;
    const int64_t threads = std::max<int64_t>(row_threads, kWarpSize * std::min(call.rows, kEnoughWarps));
    const int64_t column_blocks = wants_sums ? ceil_div(call.columns, kColumnsPerBlock) : 0;
    FollowingKernel<norm_bwd_few_rows_kernel<T>>::launch(static_cast<unsigned>(call.rows + column_blocks),
                                                         static_cast<unsigned>(threads), 0, stream, call);
    launched = true;
  });
  return launched;
}

}  // namespace fuseopt
