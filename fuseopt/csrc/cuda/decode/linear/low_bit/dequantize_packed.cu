// Dequantises packed 8-bit and 4-bit weights to a row-major weight [N, K] in 16 bits, for products with so many rows that the
// BLAS library is faster.
#include "cuda/decode/linear/params.cuh"

namespace fuseopt {
namespace {

constexpr int kDequantizingThreads = 256;

// One warp for each block of K of a line.
template <typename T, int kBits>
__global__ void __launch_bounds__(kDequantizingThreads)
    dequantize_packed_kernel(const char* packed, PackedShape shape, T* weight, int outputs, int in_features) {
  constexpr int kChunks = kBlockChunks<kBits>, kUnitChunks = kChunks / kBlockUnits;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t item = (static_cast<int64_t>(blockIdx.x) * kDequantizingThreads + threadIdx.x) / kWarpSize;
  const int line = static_cast<int>(item / shape.blocks), block = static_cast<int>(item % shape.blocks);
  if (line * kLineOutputs >= outputs) return;
  const char* const header = packed + static_cast<int64_t>(line) * shape.line_bytes;
  const char* const at = header + kLineHeader<kBits> + static_cast<int64_t>(block) * shape.block_bytes;
  const char* const scales = at + kBlockUnits * kUnitBytes + lane / 4 * 4;
  const int group_bytes = shape.has_zeros ? 2 * kGroupBytes : kGroupBytes;
  uint4 units[kBlockUnits];
#pragma unroll
  for (int u = 0; u < kBlockUnits; ++u) units[u] = load_once<uint4>(at + u * kUnitBytes + lane * kAccessBytes);
  const int output = line * kLineOutputs + lane / 4, first_k = block * kBlockK<kBits> + lane % 4 * kLaneValues;
  T* const to = weight + static_cast<int64_t>(output) * in_features + first_k;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    uint4 values[2];
    const char* const group = scales + (c >> shape.group_bits) * group_bytes;
    unsigned zeros = kMagic<T> + 0x00080008u;
    if (kBits == 4 && shape.has_zeros) zeros = __ldg(reinterpret_cast<const unsigned*>(group + kGroupBytes));
    unpack_chunk<T, kBits>(units[c / kUnitChunks], c, __byte_perm(zeros, 0, kFirstHalf), __byte_perm(zeros, 0, kSecondHalf),
                           values[0], values[1]);
    if constexpr (kBits == 4) {
      const unsigned pair = __ldg(reinterpret_cast<const unsigned*>(group));
      multiply_words<T>(values[0], __byte_perm(pair, 0, kFirstHalf));
      multiply_words<T>(values[1], __byte_perm(pair, 0, kSecondHalf));
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        multiply_words<T>(values[i], __ldg(reinterpret_cast<const float*>(header) + lane / 4 + i * kTileColumns));
      }
    }
    if (first_k + c * kChunk >= in_features) break;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (output + i * kTileColumns >= outputs) continue;
      *reinterpret_cast<uint4*>(to + static_cast<int64_t>(i * kTileColumns) * in_features + c * kChunk) = values[i];
    }
  }
}

template <typename T, int kBits>
cudaError_t launch_dequantize_packed(const PackedLinear& packed, cudaStream_t stream) {
  const DecodeLinear& layer = packed.layer;
  const PackedShape shape = packed_shape(layer.in_features, kBits, packed.group, packed.has_zeros);
  const int64_t items = ceil_div(layer.out_features, kLineOutputs) * shape.blocks;
  const auto blocks = static_cast<unsigned>(ceil_div(items * kWarpSize, kDequantizingThreads));
  dequantize_packed_kernel<T, kBits><<<blocks, kDequantizingThreads, 0, stream>>>(
      static_cast<const char*>(layer.weights[0]), shape, static_cast<T*>(layer.output.data),
      static_cast<int>(layer.out_features), static_cast<int>(layer.in_features));
  return cudaPeekAtLastError();
}

}  // namespace

extern "C" cudaError_t fuseopt_dequantize_packed(PackedLinear packed, cudaStream_t stream) {
  const DecodeLinear& layer = packed.layer;
  if (compute_capability_major() < 8 || layer.in_features % kLaneValues != 0) return cudaErrorNotSupported;
  if (layer.out_features == 0 || layer.in_features == 0) return cudaSuccess;
  if (layer.weight_dtype == kBFloat16) {
    return packed.bits == 4 ? launch_dequantize_packed<__nv_bfloat16, 4>(packed, stream)
                            : launch_dequantize_packed<__nv_bfloat16, 8>(packed, stream);
  }
  return packed.bits == 4 ? launch_dequantize_packed<__half, 4>(packed, stream)
                          : launch_dequantize_packed<__half, 8>(packed, stream);
}

}  // namespace fuseopt
