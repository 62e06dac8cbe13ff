// decode_low_bit_linear in plain multiply-adds, and the choice between this and the tensor cores' kernel.
#include "cuda/decode/linear/low_bit_suits.cuh"
#include "cuda/decode/linear/plain.cuh"

namespace fuseopt::decode_low_bit_linear {
namespace {

template <typename W>
struct LowBitWeights : decode_linear::PlainLayer {
  using Value = W;
  static constexpr int kWidth = 8;
  static constexpr bool kMayBeTransposed = false;
  TypedPointer scales[DecodeLinear::kMaxWeights];
  const uint8_t* zeros[DecodeLinear::kMaxWeights];
  int bits;
  int64_t group, groups;

  explicit LowBitWeights(const LowBitLinear& of)
      : PlainLayer(of.layer), bits(of.bits), group(of.group), groups(of.layer.in_features / of.group) {
    for (int i = 0; i < DecodeLinear::kMaxWeights; ++i) {
      scales[i] = {const_cast<void*>(of.scales[i]), of.scale_dtype};
      zeros[i] = static_cast<const uint8_t*>(of.zeros[i]);
    }
  }

  template <typename Acc>
  __device__ void load(int weight, int column, int64_t k, int64_t valid, Acc (&out)[kWidth]) const {
    const int64_t element = column * layer.in_features + k, scale_index = column * groups + k / group;
    const Acc scale = load_as<Acc>(scales[weight], scale_index);
    if (bits == 8) {
      const int8_t* const values = static_cast<const int8_t*>(layer.weights[weight]) + element;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) out[i] = i < valid ? scale * static_cast<Acc>(values[i]) : Acc(0);
      return;
    }
    const unsigned word = static_cast<const unsigned*>(layer.weights[weight])[element / kWidth];
    const int zero = zeros[weight] == nullptr ? 8 : zeros[weight][scale_index];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      out[i] = scale * static_cast<Acc>(static_cast<int>(word >> (i / 2 * 4 + i % 2 * 16) & 15) - zero);
    }
  }

  __device__ void prefetch(int, int, int) const {}
};

}  // namespace

extern "C" cudaError_t fuseopt_decode_low_bit_linear(LowBitLinear low_bit, cudaStream_t stream) {
  const DecodeLinear& layer = low_bit.layer;
  if (layer.rows == 0 || layer.out_features == 0) return cudaSuccess;
  switch (static_cast<DType>(layer.weight_dtype)) {
    case kFloat16:
      if (suits_low_bit<__half>(low_bit)) return launch_low_bit<__half>(low_bit, stream);
      return launch_plain(LowBitWeights<__half>(low_bit), stream);
    case kBFloat16:
      if (suits_low_bit<__nv_bfloat16>(low_bit)) return launch_low_bit<__nv_bfloat16>(low_bit, stream);
      return launch_plain(LowBitWeights<__nv_bfloat16>(low_bit), stream);
    case kFloat64: return launch_plain(LowBitWeights<double>(low_bit), stream);
    case kFloat32: return launch_plain(LowBitWeights<float>(low_bit), stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fuseopt::decode_low_bit_linear
