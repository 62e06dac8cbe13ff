// decode_softmax_linear on the tensor cores; for float32 weights it is a variant of fma.cuh. A warp has one group of a row's
// scores, and what they weigh in its registers before it waits for the previous kernel. So a softmax is among lanes, and
// warps meet once, to add up.
#include "cuda/decode/linear/weight_fragments.cuh"
#include "cuda/common/math.cuh"

namespace fuseopt::decode_softmax_linear {
namespace {

constexpr int kSlots = 128;  // of a group
constexpr int kChunks = kSlots / kChunk;
// TUNED: T5-base, 1 row: 192 -> 173 us a step with the kernel (20fcb55).
constexpr int kTiles = 4;
constexpr int kColumns = kTiles * kTileColumns;    // of a block's strip
constexpr int kMostGroups = 16;                    // warps of a block
constexpr int kRowGap = 4;                         // floats, for rows of sums to start in different banks
constexpr int kOwnSlots = kSlots / kWarpSize;      // of a lane, in the softmax
constexpr int kPowersStride = kSlots + kLaneValues;  // of rows in shared memory, for lanes with several to meet no bank twice

// Of a group's softmax: powers as the tensor cores take them, and what their products are to be multiplied with.
struct Powers {
  float values[kOwnSlots];
  float reciprocal_of_sum;

  // All lanes of a warp together.
  __device__ explicit Powers(const float4& scores) : values{scores.x, scores.y, scores.z, scores.w} {
    float highest = warp_reduce<Max>(fmaxf(fmaxf(scores.x, scores.y), fmaxf(scores.z, scores.w)));
    float sum = 0.f;
#pragma unroll
    for (float& value : values) {
      value = exp_as<false>(value - highest);
      sum += value;
    }
    reciprocal_of_sum = __fdividef(1.f, warp_reduce<Sum>(sum));
  }
};

// kRows: at a time.
template <typename T, int kRows>
__global__ void __launch_bounds__(kMostGroups* kWarpSize, 1)
    decode_softmax_linear_kernel(const __grid_constant__ MmaLayer<T> layer) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int rows = layer.rows, strip = blockIdx.x * kColumns, first_k = warp * kSlots;
  const int own_k = first_k + lane % 4 * kLaneValues;

  // Sums of each warp [rows][warps][kColumns] and what they are to be multiplied with [rows][warps]; powers of each warp
  // [warps][kRows][kSlots].
  extern __shared__ __align__(16) char shared[];
  float* const sums_of = reinterpret_cast<float*>(shared);
  const int row_stride = warps * kColumns + kRowGap;
  const auto sums_at = [&](int r, int w) { return sums_of + r * row_stride + w * kColumns; };
  float* const factors = sums_of + rows * row_stride;
  T* const powers_of = reinterpret_cast<T*>(factors + (rows * warps + 3) / 4 * 4) + warp * kRows * kPowersStride;

  let_successor_start();
  WeightPart<T, Layout::kColMajorKN, false, kTiles, kChunks> weight;
  weight.load(layer, strip, own_k);
  prefetch_next_weights(layer);
  weight.pair_lines(layer.in_features, own_k);
  const float* scores = static_cast<const float*>(layer.input) + first_k + lane * kOwnSlots;
  settle(scores);
  const int column = strip + Pair<Layout::kColMajorKN, false, kTiles>::column_of(lane);  // that the thread finishes
  wait_for_predecessor_settled(rows < 0);

  unsigned residual = 0;
#pragma unroll 1
  for (int first_row = 0; first_row < rows; first_row += kRows) {
    float4 own[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float* const row = scores + min(first_row + r, rows - 1) * layer.in_features;
      own[r] = __ldcg(reinterpret_cast<const float4*>(row));
    }
    if (first_row == 0) {
      if (warp < rows && column < layer.out_features) residual = layer.load_residual_bits(warp * layer.out_features + column);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Powers powers(own[r]);
      store_floats_as<T>(powers_of + r * kPowersStride, lane, powers.values);
      if (lane == 0 && first_row + r < rows) factors[(first_row + r) * warps + warp] = powers.reciprocal_of_sum;
    }
    __syncwarp();
    float sums[kTiles / 2][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint4 words = {};
      const T* const part = powers_of + lane / 4 * kPowersStride + c * kChunk + lane % 4 * kLaneValues;
      if (lane / 4 < kRows) words = *reinterpret_cast<const uint4*>(part);
      weight.multiply_add(sums, c, words);
    }
    for_sums<kTiles>(sums, [&](int place, int r, float sum) {
      if (r < kRows && first_row + r < rows) sums_at(first_row + r, warp)[place] = sum;
    });
    __syncwarp();
  }
  __syncthreads();
  for (int row = warp; row < rows; row += warps) {
    float sum = 0.f;
#pragma unroll 8
    for (int w = 0; w < warps; ++w) sum = fmaf(sums_at(row, w)[lane], factors[row * warps + w], sum);
    if (column >= layer.out_features) continue;
    const int index = row * layer.out_features + column;
    layer.store(index, sum + (row == warp ? layer.residual_from(residual) : layer.load_residual(index)));
  }
}

template <typename T>
bool suits(const DecodeLinear& layer, int64_t groups) {
  return compute_capability_major() >= 8 && layer.rows <= 2 * kHalfRows && groups <= kMostGroups &&
         layer.in_features == groups * kSlots && layer.weights_are_transposed && layer.weight_stride % kLaneValues == 0 &&
         layer.out_features % kLaneValues == 0 && layer.weight_stride * layer.in_features <= INT32_MAX &&
         is_aligned(layer.weights[0]) && is_aligned(layer.input.data) && layer.input.dtype == kFloat32 &&
         (layer.residual.data == nullptr || layer.residual.dtype == layer.output.dtype) &&
         (layer.output.dtype == kDType<T> || layer.output.dtype == kFloat32);
}

template <typename T, int kRows>
cudaError_t launch_as(const DecodeLinear& layer, int64_t groups, cudaStream_t stream) {
  MmaLayer<T> mma = mma_layer<T>(layer);
  const int64_t floats = mma.rows * (groups * kColumns + kRowGap) + ceil_div(mma.rows * groups, 4) * 4;
  const size_t shared_bytes = sizeof(float) * floats + sizeof(T) * groups * kRows * kPowersStride;
  const LaunchShape shape{static_cast<unsigned>(ceil_div(layer.out_features, kColumns)),
                          static_cast<unsigned>(groups * kWarpSize), shared_bytes, 1};
  mma.share_prefetch(shape);
  return launch_dependent(decode_softmax_linear_kernel<T, kRows>, mma, shape, layer.pdl, stream);
}

template <typename T>
cudaError_t launch(const DecodeLinear& layer, int64_t groups, cudaStream_t stream) {
  return layer.rows == 1 ? launch_as<T, 1>(layer, groups, stream) : launch_as<T, kHalfRows>(layer, groups, stream);
}

}  // namespace

extern "C" bool fuseopt_takes_decode_softmax_linear(DecodeLinear layer, int64_t groups) {
  switch (static_cast<DType>(layer.weight_dtype)) {
    case kFloat16: return suits<__half>(layer, groups);
    case kBFloat16: return suits<__nv_bfloat16>(layer, groups);
    case kFloat32: return takes_softmax_fma(layer, groups);
    case kFloat64: return false;
  }
  return false;
}

extern "C" cudaError_t fuseopt_decode_softmax_linear(DecodeLinear layer, int64_t groups, cudaStream_t stream) {
  if (layer.rows == 0 || layer.out_features == 0) return cudaSuccess;
  if (layer.weight_dtype == kFloat32) return launch_softmax_fma(layer, stream);
  return layer.weight_dtype == kFloat16 ? launch<__half>(layer, groups, stream)
                                        : launch<__nv_bfloat16>(layer, groups, stream);
}

}  // namespace fuseopt::decode_softmax_linear
