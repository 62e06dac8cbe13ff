// The choice between decode_linear's kernels: those of the tensor cores, of float32, and the plain one.
#include "cuda/decode/linear/plain.cuh"

namespace fuseopt::decode_linear {
namespace {

// Launches a kernel for T; false if none takes the arguments.
template <typename T>
bool launch_fast(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error) {
  if (launch_decode_linear_few_rows<T>(layer, stream, error) || launch_decode_linear_tiles<T>(layer, stream, error)) return true;
  if constexpr (sizeof(T) == sizeof(uint16_t)) return launch_decode_linear_many_rows<T>(layer, stream, error);
  else return false;
}

}  // namespace

extern "C" int64_t fuseopt_decode_linear_parts(DecodeLinear layer) {
  if (layer.weight_dtype == kFloat32) return decode_linear_parts<float>(layer);
  if (layer.weight_dtype == kFloat16) return decode_linear_parts<__half>(layer);
  return layer.weight_dtype == kBFloat16 ? decode_linear_parts<__nv_bfloat16>(layer) : 0;
}

extern "C" bool fuseopt_emits_partials(DecodeLinear layer) {
  if (layer.weight_dtype == kFloat16) return emits_partials<__half>(layer);
  return layer.weight_dtype == kBFloat16 && emits_partials<__nv_bfloat16>(layer);
}

extern "C" bool fuseopt_accepts_partials(DecodeLinear layer) {
  if (layer.weight_dtype == kFloat16) return accepts_partials<__half>(layer);
  return layer.weight_dtype == kBFloat16 && accepts_partials<__nv_bfloat16>(layer);
}

extern "C" bool fuseopt_takes_low_rank(DecodeLinear layer) {
  if (layer.rows == 0 || layer.exchange == nullptr) return false;
  if (layer.weight_dtype == kFloat16) return takes_low_rank<__half>(layer);
  return layer.weight_dtype == kBFloat16 && takes_low_rank<__nv_bfloat16>(layer);
}

extern "C" cudaError_t fuseopt_decode_linear(DecodeLinear layer, cudaStream_t stream) {
  if (layer.rows == 0 || layer.out_features == 0) return cudaSuccess;
  if (layer.low_rank_a != nullptr) {
    return layer.weight_dtype == kFloat16 ? launch_low_rank<__half>(layer, stream)
                                          : launch_low_rank<__nv_bfloat16>(layer, stream);
  }
  cudaError_t error = cudaSuccess;
  if (layer.weight_dtype == kFloat16 && launch_fast<__half>(layer, stream, error)) return error;
  if (layer.weight_dtype == kBFloat16 && launch_fast<__nv_bfloat16>(layer, stream, error)) return error;
  if (layer.weight_dtype == kFloat32 && launch_fast<float>(layer, stream, error)) return error;
  switch (static_cast<DType>(layer.weight_dtype)) {
    case kFloat16: return launch_plain(DenseWeights<__half>(layer), stream);
    case kBFloat16: return launch_plain(DenseWeights<__nv_bfloat16>(layer), stream);
    case kFloat64: return launch_plain(DenseWeights<double>(layer), stream);
    case kFloat32: return launch_plain(DenseWeights<float>(layer), stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fuseopt::decode_linear
