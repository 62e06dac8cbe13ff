// Softmax of rows and its gradient. A warp holds a few narrow rows in registers; a block, or a cluster of blocks, a wide
// one.
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
  __device__ float operator[](int k) const { return float(values[k]); }
};

__device__ float combined(float a, float b, bool is_max) { return is_max ? fmaxf(a, b) : a + b; }

template <int kRows>
__device__ void over_warp(float (&values)[kRows], bool is_max) {
#pragma unroll
  for (int lane = 16; lane; lane /= 2) {
#pragma unroll
    for (float& value : values) value = combined(value, __shfl_xor_sync(~0u, value, lane), is_max);
  }
}

// The maximum or sum over the threads that hold a row. Each call needs shared memory of its own.
template <int kThreads, int kCluster>
__device__ void over_block(float& value, bool is_max, float* shared) {
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[threadIdx.x % (kThreads / 32)];
  for (int lane = kThreads / 64; lane; lane /= 2) value = combined(value, __shfl_xor_sync(~0u, value, lane), is_max);
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster > 1) {
    const auto cluster = cooperative_groups::this_cluster();
    if (threadIdx.x == 0) shared[32] = value;
    cluster.sync();
    const float other = *cluster.map_shared_rank(shared + 32, threadIdx.x % kCluster);
    value = other;
    for (int lane = kCluster / 2; lane; lane /= 2) value = combined(value, __shfl_xor_sync(~0u, value, lane), is_max);
  }
#endif
}

// Forward: a is x. Backward: a is the output and b its gradient. `packs` of 16 bytes a row, of which a thread holds
// kPacks: of x, or of the gradient, as the output is read again from a cache. With 32 threads a row, a warp has kRows.
template <typename T, int kThreads, int kPacks, int kCluster, int kRows, bool kBackward>
__global__ void __launch_bounds__(kThreads > 32 ? kThreads : 128)
    softmax_kernel(const Pack<T>* __restrict__ a, const Pack<T>* __restrict__ b, Pack<T>* __restrict__ result,
                   int64_t rows, int packs) {
  constexpr bool kIsWarp = kThreads == 32;
  __shared__ float shared[2][33];
  const int64_t row = kIsWarp ? (int64_t{blockIdx.x} * 4 + threadIdx.x / 32) * kRows : blockIdx.x / kCluster;
  const int first = kIsWarp ? threadIdx.x % 32 : blockIdx.x % kCluster * kThreads + threadIdx.x;
  Pack<T> held[kRows][kPacks];
  float top[kRows], sum[kRows];
  const auto each = [&](auto visit) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const int place = first + i * kThreads * kCluster;
        if (place < packs && row + r < rows) visit(r, held[r][i], (row + r) * packs + place);
      }
    }
  };
  const auto over_row = [&](float(&values)[kRows], bool is_max) {
    over_warp(values, is_max);
    if constexpr (!kIsWarp) over_block<kThreads, kCluster>(values[0], is_max, shared[is_max]);
  };
#pragma unroll
  for (int r = 0; r < kRows; ++r) top[r] = -INFINITY, sum[r] = 0;
  each([&](int, Pack<T>& own, int64_t place) { own = kBackward ? b[place] : a[place]; });
  if constexpr (kBackward) {
    each([&](int r, const Pack<T>& g, int64_t place) {
      const Pack<T> y = a[place];
      for (int k = 0; k < Pack<T>::kSize; ++k) sum[r] += y[k] * g[k];
    });
  } else {
    each([&](int r, const Pack<T>& x, int64_t) {
      for (int k = 0; k < Pack<T>::kSize; ++k) top[r] = fmaxf(top[r], x[k]);
    });
    over_row(top, true);
    each([&](int r, const Pack<T>& x, int64_t) {
      for (int k = 0; k < Pack<T>::kSize; ++k) sum[r] += __expf(x[k] - top[r]);
    });
  }
  over_row(sum, false);
  float scale[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) scale[r] = 1 / sum[r];
  each([&](int r, const Pack<T>& own, int64_t place) {
    Pack<T> out;
    if constexpr (kBackward) {
      const Pack<T> y = a[place];
      for (int k = 0; k < Pack<T>::kSize; ++k) out.values[k] = T(y[k] * (own[k] - sum[r]));
    } else {
      for (int k = 0; k < Pack<T>::kSize; ++k) out.values[k] = T(__expf(own[k] - top[r]) * scale[r]);
    }
    result[place] = out;
  });
#if __CUDA_ARCH__ >= 900
  if constexpr (kCluster > 1) cooperative_groups::this_cluster().sync();  // others may still read this shared memory
#endif
}

template <typename T, bool kBackward, int kThreads, int kPacks, int kCluster = 1, int kRows = 1>
void launch(const Tensor& a, const Tensor& b, const Tensor& result, int64_t rows, int packs) {
  const auto kernel = softmax_kernel<T, kThreads, kPacks, kCluster, kRows, kBackward>;
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(a.get_device_index(), &stream);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(kThreads > 32 ? rows * kCluster : (rows + 4 * kRows - 1) / (4 * kRows)));
  config.blockDim = dim3(kThreads > 32 ? kThreads : 128);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kCluster, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  config.attrs = &cluster, config.numAttrs = kCluster > 1;
  if (kCluster > 8) cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchKernelEx(&config, kernel, static_cast<const Pack<T>*>(a.const_data_ptr()),
                     static_cast<const Pack<T>*>(b.const_data_ptr()), static_cast<Pack<T>*>(result.mutable_data_ptr()),
                     rows, packs);
}

template <typename T, bool kBackward>
void dispatch(const Tensor& a, const Tensor& b, const Tensor& result) {
  const int64_t columns = a.size(a.dim() - 1), rows = a.numel() / columns;
  const int packs = columns / Pack<T>::kSize;
  const auto run = packs <= 32      ? launch<T, kBackward, 32, 1, 1, 4>
                   : packs <= 64    ? launch<T, kBackward, 32, 2>
                   : packs <= 128   ? launch<T, kBackward, 32, 4>
                   : packs <= 256   ? launch<T, kBackward, 128, 2>
                   : packs <= 512   ? launch<T, kBackward, 128, 4>
                   : packs <= 1024  ? launch<T, kBackward, 256, 4>
                   : packs <= 2048  ? launch<T, kBackward, 512, 4>
                   : packs <= 4096  ? launch<T, kBackward, 256, 8, 2>
                   : packs <= 8192  ? launch<T, kBackward, 256, 8, 4>
                   : packs <= 16384 ? launch<T, kBackward, 256, 8, 8>
                   : packs <= 32768 ? launch<T, kBackward, 256, 8, 16>
                                    : launch<T, kBackward, 512, 8, 16>;
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
