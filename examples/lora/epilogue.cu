// y = activation(base + scale * delta + bias): a thread takes 16 bytes of one or two
// places, all loaded before the first is used.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#include "new_tensor.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 256;

enum Activation { kNone, kRelu, kGelu, kSilu };

template <Activation kActivation>
__device__ float activate(float x) {
  if (kActivation == kRelu) return x <= 0 ? 0 : x;
  if (kActivation == kGelu) return x * (0.5f + 0.5f * erff(x * 0.7071067811865476f));
  if (kActivation == kSilu) return __fdividef(x, 1 + __expf(-x));
  return x;
}

template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

// Places of a thread. A half-precision GELU takes longer than its loads: two places overlap (1.13 times as fast, H200).
template <typename T>
constexpr int kPacksOf = sizeof(T) == 4 ? 1 : 2;

template <typename T, Activation kActivation>
__global__ void epilogue_kernel(const Pack<T>* base, const Pack<T>* delta, const Pack<T>* bias, float scale,
                                Pack<T>* output, int64_t packs, unsigned packs_a_row) {
  constexpr int kPacks = kPacksOf<T>;
  const int64_t first = blockIdx.x * int64_t{kThreads * kPacks} + threadIdx.x;
  Pack<T> x[kPacks], d[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (first + i * kThreads < packs) x[i] = base[first + i * kThreads], d[i] = delta[first + i * kThreads];
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t place = first + i * kThreads;
    if (place >= packs) return;
    const Pack<T> b = bias[static_cast<unsigned>(place) % packs_a_row];
#pragma unroll
    for (int j = 0; j < Pack<T>::kSize; ++j) {
      const float sum = float(x[i].values[j]) + scale * float(d[i].values[j]) + float(b.values[j]);
      x[i].values[j] = T(activate<kActivation>(sum));
    }
    output[place] = x[i];
  }
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
  const int64_t blocks = (packs + kThreads * kPacksOf<T> - 1) / (kThreads * kPacksOf<T>);
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      packs_of(base), packs_of(delta), packs_of(bias), scale, static_cast<Pack<T>*>(output.mutable_data_ptr()), packs,
      bias.numel() / Pack<T>::kSize);
}

Tensor epilogue(Tensor base, Tensor delta, Tensor bias, double scale, std::string activation) {
  Tensor output = fuseopt::new_tensor_like(base);
  if (base.numel() == 0) return output;
  switch (base.scalar_type()) {
    case ScalarType::Float: launch<float>(base, delta, bias, scale, activation, output); break;
    case ScalarType::Half: launch<__half>(base, delta, bias, scale, activation, output); break;
    default: launch<__nv_bfloat16>(base, delta, bias, scale, activation, output);
  }
  return output;
}
