// Softmax of rows and its gradient. A warp, a block or a cluster of 8 blocks holds a row in registers.
#pragma once
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

__device__ float combined(float a, float b, bool is_max) { return is_max ? fmaxf(a, b) : a + b; }

// The maximum or sum over the threads that hold a row. Each call needs shared memory of its own.
template <int kThreads, int kCluster>
__device__ float over_row(float value, bool is_max, float* shared) {
  for (int lane = 16; lane; lane /= 2) value = combined(value, __shfl_xor_sync(~0u, value, lane), is_max);
  if constexpr (kThreads > 32) {
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[threadIdx.x % (kThreads / 32)];
    for (int lane = 16; lane; lane /= 2)
      if (lane < kThreads / 32) value = combined(value, __shfl_xor_sync(~0u, value, lane), is_max);
  }
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster > 1) {
    const auto cluster = cooperative_groups::this_cluster();
    if (threadIdx.x == 0) shared[32] = value;
    cluster.sync();
    value = *cluster.map_shared_rank(shared + 32, 0);
    for (int rank = 1; rank < kCluster; ++rank)
      value = combined(value, *cluster.map_shared_rank(shared + 32, rank), is_max);
    cluster.sync();  // no block ends while another reads its shared memory
  }
#endif
  return value;
}

// Forward: a is x. Backward: a is the output and b its gradient. `packs` of 16 bytes a row.
template <typename T, int kThreads, int kPacks, int kCluster, bool kBackward>
__global__ void __launch_bounds__(kThreads > 32 ? kThreads : 128)
    softmax_kernel(const Pack<T>* __restrict__ a, const Pack<T>* __restrict__ b, Pack<T>* __restrict__ result,
                   int64_t rows, int packs) {
  constexpr int kRowsABlock = kThreads > 32 ? 1 : 4;
  __shared__ float shared[2][33];
  const int64_t row = int64_t{blockIdx.x} / kCluster * kRowsABlock + (kRowsABlock > 1 ? threadIdx.x / 32 : 0);
  if (row >= rows) return;  // whole warps: rows of a block or a cluster are all there
  const int first = blockIdx.x % kCluster * kThreads + (kRowsABlock > 1 ? threadIdx.x % 32 : threadIdx.x);
  a += row * packs, b += row * packs, result += row * packs;
  Pack<T> held[kPacks];  // of x, or of the gradient; the output is read again, from a cache
  float top = -INFINITY, sum = 0;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int place = first + i * kThreads * kCluster;
    if (place >= packs) continue;
    held[i] = kBackward ? b[place] : a[place];
    if constexpr (kBackward) {
      const Pack<T> y = a[place];
      for (int k = 0; k < Pack<T>::kSize; ++k) sum += float(y.values[k]) * float(held[i].values[k]);
    } else {
      for (int k = 0; k < Pack<T>::kSize; ++k) top = fmaxf(top, float(held[i].values[k]));
    }
  }
  if constexpr (!kBackward) {
    top = over_row<kThreads, kCluster>(top, true, shared[0]);
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      if (first + i * kThreads * kCluster < packs)
        for (int k = 0; k < Pack<T>::kSize; ++k) sum += __expf(float(held[i].values[k]) - top);
  }
  sum = over_row<kThreads, kCluster>(sum, false, shared[1]);
  const float scale = 1 / sum;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int place = first + i * kThreads * kCluster;
    if (place >= packs) continue;
    Pack<T> out;
    if constexpr (kBackward) {
      const Pack<T> y = a[place];
      for (int k = 0; k < Pack<T>::kSize; ++k)
        out.values[k] = T(float(y.values[k]) * (float(held[i].values[k]) - sum));
    } else {
      for (int k = 0; k < Pack<T>::kSize; ++k) out.values[k] = T(__expf(float(held[i].values[k]) - top) * scale);
    }
    result[place] = out;
  }
}

template <typename T, bool kBackward, int kThreads, int kPacks, int kCluster = 1>
void launch(const Tensor& a, const Tensor& b, const Tensor& result, int64_t rows, int packs) {
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(a.get_device_index(), &stream);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(kThreads > 32 ? rows * kCluster : (rows + 3) / 4));
  config.blockDim = dim3(kThreads > 32 ? kThreads : 128);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kCluster, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  config.attrs = &cluster, config.numAttrs = kCluster > 1 ? 1 : 0;
  cudaLaunchKernelEx(&config, softmax_kernel<T, kThreads, kPacks, kCluster, kBackward>,
                     static_cast<const Pack<T>*>(a.const_data_ptr()), static_cast<const Pack<T>*>(b.const_data_ptr()),
                     static_cast<Pack<T>*>(result.mutable_data_ptr()), rows, packs);
}

template <typename T, bool kBackward>
void dispatch(const Tensor& a, const Tensor& b, const Tensor& result) {
  const int64_t columns = a.size(a.dim() - 1), rows = a.numel() / columns;
  const int packs = columns / Pack<T>::kSize;
  const auto run = packs <= 32      ? launch<T, kBackward, 32, 1>
                   : packs <= 128   ? launch<T, kBackward, 32, 4>
                   : packs <= 512   ? launch<T, kBackward, 128, 4>
                   : packs <= 2048  ? launch<T, kBackward, 512, 4>
                   : packs <= 8192  ? launch<T, kBackward, 1024, 8>
                   : packs <= 32768 ? launch<T, kBackward, 1024, 4, 8>
                                    : launch<T, kBackward, 1024, 8, 8>;
  run(a, b, result, rows, packs);
}

template <bool kBackward>
Tensor softmax_of(const Tensor& a, const Tensor& b) {
  Tensor result = torch::stable::empty_like(a);
  if (a.numel() == 0) return result;
  switch (a.scalar_type()) {
    case ScalarType::Float: dispatch<float, kBackward>(a, b, result); break;
    case ScalarType::Half: dispatch<__half, kBackward>(a, b, result); break;
    default: dispatch<__nv_bfloat16, kBackward>(a, b, result);
  }
  return result;
}

}  // namespace
