// relu(x + bias) of x [rows, columns] and bias [columns], in float32, float16 or bfloat16; float32 inside. A thread
// takes 16 bytes. Columns are a multiple of 16 bytes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include "new_tensor.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 256;

template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

template <typename T>
__global__ void bias_relu_kernel(const Pack<T>* x, const Pack<T>* bias, Pack<T>* output, int64_t packs,
                                 unsigned packs_a_row) {
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (place >= packs) return;
  Pack<T> loaded = x[place];
  const Pack<T> added = bias[static_cast<unsigned>(place) % packs_a_row];
#pragma unroll
  for (int j = 0; j < Pack<T>::kSize; ++j) {
    const float sum = static_cast<float>(loaded.values[j]) + static_cast<float>(added.values[j]);
    loaded.values[j] = T(sum < 0.0f ? 0.0f : sum);
  }
  output[place] = loaded;
}

template <typename T>
void launch(const Tensor& x, const Tensor& bias, Tensor& output) {
  const int64_t packs = x.numel() / Pack<T>::kSize;
  if (packs == 0) return;
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream);
  const int64_t blocks = (packs + kThreads - 1) / kThreads;
  bias_relu_kernel<T><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const Pack<T>*>(x.const_data_ptr()), static_cast<const Pack<T>*>(bias.const_data_ptr()),
      static_cast<Pack<T>*>(output.mutable_data_ptr()), packs, bias.numel() / Pack<T>::kSize);
}

Tensor bias_relu(Tensor x, Tensor bias) {
  Tensor output = fuseopt::new_tensor_like(x);
  const auto run = x.scalar_type() == ScalarType::Float  ? launch<float>
                   : x.scalar_type() == ScalarType::Half ? launch<__half>
                                                         : launch<__nv_bfloat16>;
  run(x, bias, output);
  return output;
}
