// What the kernels of decode_linear share.
#pragma once

#include "cuda/common/dependent_launch.cuh"
#include "cuda/common/vector.cuh"

namespace fuseopt {

constexpr int kTileColumns = 8;  // output columns of one tile: the width of a 16-byte access to a 16-bit Conv1D weight

// The kernels for weights of a 16-bit type or float32, T; false where they cannot take the arguments. None for float32 emits
// or accepts partials.
template <typename T>
bool launch_decode_linear_few_rows(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error);
template <typename T>
int64_t decode_linear_parts(const DecodeLinear& layer);  // as fuseopt_decode_linear_parts
template <typename T>
bool emits_partials(const DecodeLinear& layer);  // as fuseopt_emits_partials
template <typename T>
bool accepts_partials(const DecodeLinear& layer);  // as fuseopt_accepts_partials
template <typename T>
bool takes_low_rank(const DecodeLinear& layer);  // as fuseopt_takes_low_rank
template <typename T>
cudaError_t launch_low_rank(const DecodeLinear& layer, cudaStream_t stream);
template <typename T>
bool launch_decode_linear_many_rows(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error);
template <typename T>
bool launch_decode_linear_tiles(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error);

extern template bool launch_decode_linear_few_rows<__half>(const DecodeLinear&, cudaStream_t, cudaError_t&);
extern template bool launch_decode_linear_few_rows<__nv_bfloat16>(const DecodeLinear&, cudaStream_t, cudaError_t&);
extern template int64_t decode_linear_parts<__half>(const DecodeLinear&);
extern template int64_t decode_linear_parts<__nv_bfloat16>(const DecodeLinear&);
extern template bool emits_partials<__half>(const DecodeLinear&);
extern template bool emits_partials<__nv_bfloat16>(const DecodeLinear&);
extern template bool accepts_partials<__half>(const DecodeLinear&);
extern template bool accepts_partials<__nv_bfloat16>(const DecodeLinear&);
extern template bool takes_low_rank<__half>(const DecodeLinear&);
extern template bool takes_low_rank<__nv_bfloat16>(const DecodeLinear&);
extern template cudaError_t launch_low_rank<__half>(const DecodeLinear&, cudaStream_t);
extern template cudaError_t launch_low_rank<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);
extern template bool launch_decode_linear_many_rows<__half>(const DecodeLinear&, cudaStream_t, cudaError_t&);
extern template bool launch_decode_linear_many_rows<__nv_bfloat16>(const DecodeLinear&, cudaStream_t, cudaError_t&);
extern template bool launch_decode_linear_tiles<__half>(const DecodeLinear&, cudaStream_t, cudaError_t&);
extern template bool launch_decode_linear_tiles<__nv_bfloat16>(const DecodeLinear&, cudaStream_t, cudaError_t&);
extern template bool launch_decode_linear_tiles<float>(const DecodeLinear&, cudaStream_t, cudaError_t&);

// float32 has a kernel of its own for few rows (fma.cuh).
template <>
bool launch_decode_linear_few_rows<float>(const DecodeLinear&, cudaStream_t, cudaError_t&);
template <>
int64_t decode_linear_parts<float>(const DecodeLinear&);
bool takes_softmax_fma(const DecodeLinear& layer, int64_t groups);  // as fuseopt_takes_decode_softmax_linear
cudaError_t launch_softmax_fma(const DecodeLinear& layer, cudaStream_t stream);

// Acc is float or double.
template <typename Acc>
__device__ inline Acc activate(int activation, Acc x) {
  constexpr Acc kRootHalf = 0.70710678118654752, kRootTwoOverPi = 0.79788456080286536;
  switch (static_cast<Activation>(activation)) {
    case kIdentity: return x;
    case kRelu: return x > 0 || isnan(x) ? x : 0;
    case kGelu: return Acc(0.5) * x * (1 + erf(x * kRootHalf));
    case kGeluTanh: return Acc(0.5) * x * (1 + tanh(kRootTwoOverPi * (x + Acc(0.044715) * x * x * x)));
    case kSilu: return x / (1 + exp(-x));
  }
  __trap();
  return x;
}

}  // namespace fuseopt
