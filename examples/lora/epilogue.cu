// y = activation(base + scale * delta + bias): each thread takes 16 bytes of a row.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

enum Activation { kNone, kRelu, kGelu, kSilu };

template <Activation kActivation>
__device__ float activate(float x) {
  if (kActivation == kRelu) return x <= 0 ? 0 : x;
  if (kActivation == kGelu) return x * (0.5f + 0.5f * erff(x * 0.7071067811865476f));
  if (kActivation == kSilu) return x / (1 + expf(-x));
  return x;
}

template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

template <typename T, Activation kActivation>
__global__ void epilogue_kernel(const Pack<T>* base, const Pack<T>* delta, const Pack<T>* bias, float scale,
                                Pack<T>* output, int64_t packs, unsigned packs_a_row) {
  const int64_t place = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (place >= packs) return;
  const Pack<T> x = base[place], d = delta[place], b = bias[static_cast<unsigned>(place) % packs_a_row];
  Pack<T> y;
#pragma unroll
  for (int i = 0; i < Pack<T>::kSize; ++i) {
    const float sum = float(x.values[i]) + scale * float(d.values[i]) + float(b.values[i]);
    y.values[i] = T(activate<kActivation>(sum));
  }
  output[place] = y;
}

template <typename T>
void launch(const Tensor& base, const Tensor& delta, const Tensor& bias, float scale, const std::string& activation,
            const Tensor& output) {
  const auto kernel = activation == "relu"   ? epilogue_kernel<T, kRelu>
                      : activation == "gelu" ? epilogue_kernel<T, kGelu>
                      : activation == "silu" ? epilogue_kernel<T, kSilu>
                                             : epilogue_kernel<T, kNone>;
  const auto packs_of = [](const Tensor& tensor) { return static_cast<const Pack<T>*>(tensor.const_data_ptr()); };
  const int64_t packs = base.numel() / Pack<T>::kSize;
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(base.get_device_index(), &stream);
  kernel<<<(packs + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(
      packs_of(base), packs_of(delta), packs_of(bias), scale, static_cast<Pack<T>*>(output.mutable_data_ptr()), packs,
      bias.numel() / Pack<T>::kSize);
}

Tensor epilogue(Tensor base, Tensor delta, Tensor bias, double scale, std::string activation) {
  Tensor output = torch::stable::empty_like(base);
  if (base.numel() == 0) return output;
  switch (base.scalar_type()) {
    case ScalarType::Float: launch<float>(base, delta, bias, scale, activation, output); break;
    case ScalarType::Half: launch<__half>(base, delta, bias, scale, activation, output); break;
    default: launch<__nv_bfloat16>(base, delta, bias, scale, activation, output);
  }
  return output;
}
