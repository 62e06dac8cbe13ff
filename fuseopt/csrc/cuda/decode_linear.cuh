// What the two kernels of decode_linear share: the norm on the way in, the epilogue on the way out, and the strips of
// output columns that blocks take.
#pragma once

#include "dependent_launch.cuh"
#include "vector.cuh"

namespace fuseopt {

constexpr int kTileColumns = 8;  // output columns of one tile: the width of a 16-byte access to a 16-bit Conv1D weight

// The kernel for 16-bit weights; false where it cannot take the arguments.
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

// Which outputs a block computes: `columns` of them from `column`, of weight `weight` (and of the gate beside it).
struct Strip {
  int weight;
  int64_t column;
  int columns;

  __device__ Strip(const DecodeLinear& layer, int width) : columns(width) {
    const int64_t strips = (layer.outputs + width - 1) / width;
    weight = static_cast<int>(blockIdx.x / strips);
    column = blockIdx.x % strips * width;
  }
};

inline unsigned strip_blocks(const DecodeLinear& layer, int width) {
  return static_cast<unsigned>(ceil_div(layer.outputs, width) * (layer.gated ? 1 : layer.weight_count));
}

// The parts of one output besides the product, in two steps, so that their loads can be under way during the product.
template <typename Acc>
struct Epilogue {
  int64_t element = -1;  // of the output
  Acc bias = 0, gate_bias = 0, residual = 0;

  // Output `index` of the block; rows ahead of columns. Nothing here depends on a kernel ahead.
  __device__ Epilogue(const DecodeLinear& layer, const Strip& strip, int index) {
    const int64_t row = index / strip.columns, column = strip.column + index % strip.columns;
    if (row >= layer.rows || column >= layer.outputs) return;
    const int64_t width = layer.outputs * (layer.gated ? 1 : layer.weight_count);
    element = row * width + strip.weight * layer.outputs + column;
    if (layer.biases[0].data == nullptr) return;
    bias = load_as<Acc>(layer.biases[strip.weight], column);
    if (layer.gated) gate_bias = load_as<Acc>(layer.biases[1], column);
  }

  __device__ void load_residual(const DecodeLinear& layer) {
    if (element >= 0 && layer.residual.data != nullptr) residual = load_as<Acc>(layer.residual, element);
  }

  __device__ void store(const DecodeLinear& layer, Acc product, Acc gate_product) const {
    if (element < 0) return;
    Acc value = activate(layer.activation, product + bias);
    if (layer.gated) value *= gate_product + gate_bias;
    store_as(layer.output, element, value + residual);
  }
};

}  // namespace fuseopt
