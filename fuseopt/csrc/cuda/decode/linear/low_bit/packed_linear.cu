// Chooses the kernel for a layer of packed weights.
#include "cuda/decode/linear/low_bit/packed_launch.cuh"

namespace fuseopt {

#define FUSEOPT_EXTERN(T, kBits) \
  extern template cudaError_t launch_packed_rows<T, kBits>(const DecodeLinear&, const PackedShape&, cudaStream_t)
FUSEOPT_EXTERN(__half, 4);
FUSEOPT_EXTERN(__half, 8);
FUSEOPT_EXTERN(__nv_bfloat16, 4);
FUSEOPT_EXTERN(__nv_bfloat16, 8);
#undef FUSEOPT_EXTERN

namespace {

PackedShape shape_of(const PackedLinear& packed) {
  return packed_shape(packed.layer.in_features, packed.bits, packed.group, packed.has_zeros);
}

}  // namespace

extern "C" int64_t fuseopt_packed_line_bytes(PackedLinear packed) { return shape_of(packed).line_bytes; }

extern "C" cudaError_t fuseopt_decode_packed_linear(PackedLinear packed, cudaStream_t stream) {
  const DecodeLinear& layer = packed.layer;
  if (layer.rows == 0 || layer.out_features == 0) return cudaSuccess;
  const auto launch = packed.bits == 4 ? layer.weight_dtype == kBFloat16 ? launch_packed_rows<__nv_bfloat16, 4> : launch_packed_rows<__half, 4>
                                       : layer.weight_dtype == kBFloat16 ? launch_packed_rows<__nv_bfloat16, 8> : launch_packed_rows<__half, 8>;
  return launch(layer, shape_of(packed), stream);
}

}  // namespace fuseopt
