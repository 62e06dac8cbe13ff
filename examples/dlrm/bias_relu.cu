// relu(x + bias) of x [rows, columns] and bias [columns], in float32, float16 or bfloat16; float32 inside.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
__global__ void bias_relu_kernel(const T* x, const T* bias, T* output, int64_t columns, int64_t size) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= size) return;
  const float sum = static_cast<float>(x[i]) + static_cast<float>(bias[i % columns]);
  output[i] = T(sum < 0.0f ? 0.0f : sum);
}

template <typename T>
void launch(const Tensor& x, const Tensor& bias, Tensor& output) {
  const int64_t size = x.numel();
  if (size == 0) return;
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream);
  bias_relu_kernel<T><<<(size + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const T*>(x.const_data_ptr()), static_cast<const T*>(bias.const_data_ptr()),
      static_cast<T*>(output.mutable_data_ptr()), bias.numel(), size);
}

Tensor bias_relu(Tensor x, Tensor bias) {
  Tensor output = torch::stable::empty_like(x);
  const auto run = x.scalar_type() == ScalarType::Float  ? launch<float>
                   : x.scalar_type() == ScalarType::Half ? launch<__half>
                                                         : launch<__nv_bfloat16>;
  run(x, bias, output);
  return output;
}
