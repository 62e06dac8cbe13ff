// What the two kernels of decode_linear share: the norm on the way in, the epilogue on the way out, and the strips of
// output columns that blocks take.
#pragma once

#include "dependent_launch.cuh"
#include "vector.cuh"

namespace fuseopt {

constexpr int kTileColumns = 8;  // output columns of one tile: the width of a 16-byte access to a 16-bit Conv1D weight

// The kernels for weights of a 16-bit type T; false where they cannot take the arguments.
template <typename T>
bool launch_decode_linear_mma(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error);

__device__ inline float activate(int activation, float x) {
  switch (activation) {
    case kRelu: return x > 0.f || isnan(x) ? x : 0.f;
    case kGelu: return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
    case kGeluTanh: return 0.5f * x * (1.f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    default: return x;
  }
}

__device__ inline double activate(int activation, double x) {
  switch (activation) {
    case kRelu: return x > 0 || isnan(x) ? x : 0;
    case kGelu: return 0.5 * x * (1 + erf(x * 0.70710678118654752));
    case kGeluTanh: return 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
    default: return x;
  }
}

// Which outputs are computed together: `columns` of them from `column`, of weight `weight` (and of the gate beside it).
struct Strip {
  int weight;
  int column;
  int columns;

  __device__ Strip(const DecodeLinear& layer, unsigned index, int width) : columns(width) {
    const unsigned strips = (static_cast<unsigned>(layer.outputs) + width - 1) / width;
    weight = static_cast<int>(index / strips);
    column = static_cast<int>(index % strips) * width;
  }
};

inline unsigned strip_count(const DecodeLinear& layer, int width) {
  return static_cast<unsigned>(ceil_div(layer.outputs, width) * (layer.gated ? 1 : layer.weight_count));
}

// An element of a tensor, converted when it is used rather than when it is loaded: a thread does not stop for it.
template <typename Acc>
class LateElement {
 public:
  __device__ void load(TypedPointer tensor, int64_t i) {
    if constexpr (std::is_same_v<Acc, float>) {
      if (tensor.dtype == kFloat32) bits_ = static_cast<const unsigned*>(tensor.data)[i];
      else if (tensor.dtype == kFloat64) bits_ = __float_as_uint(load_as<float>(tensor, i));
      else bits_ = static_cast<const unsigned short*>(tensor.data)[i];
    } else {
      bits_ = load_as<Acc>(tensor, i);
    }
  }

  __device__ Acc value(int dtype) const {
    if constexpr (std::is_same_v<Acc, float>) {
      switch (dtype) {
        case kFloat16: return __half2float(__ushort_as_half(static_cast<unsigned short>(bits_)));
        case kBFloat16: return __uint_as_float(bits_ << 16);
        default: return __uint_as_float(bits_);
      }
    } else {
      return bits_;
    }
  }

 private:
  std::conditional_t<std::is_same_v<Acc, float>, unsigned, Acc> bits_ = 0;
};

// The parts of one output besides the product, in two steps, so that their loads can be under way during the product.
template <typename Acc>
class Epilogue {
 public:
  // Output `index` of the strip; rows ahead of columns. Nothing here depends on a kernel ahead.
  __device__ Epilogue(const DecodeLinear& layer, const Strip& strip, int index) {
    const int row = index / strip.columns, column = strip.column + index % strip.columns;
    if (row >= layer.rows || column >= layer.outputs) return;
    const int64_t width = layer.outputs * (layer.gated ? 1 : layer.weight_count);
    element_ = row * width + strip.weight * layer.outputs + column;
    if (layer.biases[0].data == nullptr) return;
    bias_.load(layer.biases[strip.weight], column);
    if (layer.gated) gate_bias_.load(layer.biases[1], column);
  }

  __device__ void load_residual(const DecodeLinear& layer) {
    if (element_ >= 0 && layer.residual.data != nullptr) residual_.load(layer.residual, element_);
  }

  __device__ void store(const DecodeLinear& layer, const Strip& strip, Acc product, Acc gate_product) const {
    if (element_ < 0) return;
    Acc value = activate(layer.activation, product + bias_.value(layer.biases[strip.weight].dtype));
    if (layer.gated) value *= gate_product + gate_bias_.value(layer.biases[1].dtype);
    store_as(layer.output, element_, value + residual_.value(layer.residual.dtype));
  }

 private:
  int64_t element_ = -1;  // of the output
  LateElement<Acc> bias_, gate_bias_, residual_;
};

}  // namespace fuseopt
