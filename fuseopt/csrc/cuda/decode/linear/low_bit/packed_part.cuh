// An 8-bit or 4-bit weight in the registers of skinny_mma: loaded as stored, converted to 16-bit values before the wait.
#pragma once

#include "cuda/decode/linear/weight_fragments.cuh"

namespace fuseopt {

// As WeightPart of a weight [N, K]. `expand` must follow `load`: it rounds the dequantised values to T.
template <typename T, bool kGated, int kTiles, int kChunks, int kBits>
struct PackedPart : WeightPart<T, Layout::kRowMajorNK, kGated, kTiles, kChunks> {
  static_assert(kChunks * kChunk % 64 == 0 && (!kGated || kTiles == 4));
  static constexpr int kLines = kTiles / 2, kUnitChunks = kBits == 4 ? 2 : 1, kUnits = kChunks / kUnitChunks;
  using Scale = std::conditional_t<kBits == 4, unsigned, float2>;  // of outputs lane / 4 and lane / 4 + 8
  static constexpr int kScales = kBits == 4 ? kChunks : 1;

  uint4 units[kLines][kUnits];
  Scale scales[kLines][kScales];
  unsigned zeros[kLines][kScales];

  __device__ void load(const MmaLayer<T>& layer, int column, int k) {
    const PackedShape& shape = layer.packed;
    const int lane = threadIdx.x % kWarpSize, first_chunk = k / kChunk;
#pragma unroll
    for (int j = 0; j < kLines; ++j) {
      const int line = column / kLineOutputs + (kGated ? 0 : j), index = kGated ? j : blockIdx.y;
      const bool is_line = line * kLineOutputs < layer.widths[blockIdx.y];
      const char* const at = reinterpret_cast<const char*>(layer.weights[index]) + static_cast<int64_t>(line) * shape.line_bytes;
      const char* const blocks = at + kLineHeader<kBits>;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const int chunk = first_chunk + u * kUnitChunks, block = chunk / kBlockChunks<kBits>;
        const int unit = chunk / kUnitChunks % kBlockUnits;
        units[j][u] = {};
        if (is_line && block < shape.blocks) {
          units[j][u] = load_once<uint4>(blocks + static_cast<int64_t>(block) * shape.block_bytes + unit * kUnitBytes + lane * 16);
        }
      }
      if constexpr (kBits == 8) {
        scales[j][0] = {};
        if (!is_line) continue;
        const float* const of_line = reinterpret_cast<const float*>(at) + lane / 4;
        scales[j][0] = {__ldg(of_line), __ldg(of_line + kTileColumns)};
      } else {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const int block = (first_chunk + c) / kBlockChunks<4>, of_block = (first_chunk + c) % kBlockChunks<4>;
          const char* const group = blocks + static_cast<int64_t>(block) * shape.block_bytes + kBlockUnits * kUnitBytes +
                                    (of_block >> shape.group_bits) * (kGroupBytes << (shape.has_zeros ? 1 : 0)) + lane / 4 * 4;
          const bool is_there = is_line && block < shape.blocks;
          scales[j][c] = 0, zeros[j][c] = kMagic<T> + 0x00080008u;
          if (is_there) scales[j][c] = __ldg(reinterpret_cast<const unsigned*>(group));
          if (is_there && shape.has_zeros) zeros[j][c] = __ldg(reinterpret_cast<const unsigned*>(group + kGroupBytes));
        }
      }
    }
  }

  // Keeps the compiler from using what is loaded before this call.
  __device__ void not_before_here() {
#pragma unroll
    for (int j = 0; j < kLines; ++j) {
#pragma unroll
      for (uint4& w : units[j]) asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));
    }
  }

  __device__ void expand() {
#pragma unroll
    for (int j = 0; j < kLines; ++j) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int low = kGated ? j : 2 * j, high = kGated ? 2 + j : 2 * j + 1, s = kBits == 4 ? c : 0;
        uint4 &to_low = this->words[c][low], &to_high = this->words[c][high];
        const unsigned zero = kBits == 4 ? zeros[j][s] : 0;
        unpack_chunk<T, kBits>(units[j][c / kUnitChunks], c, __byte_perm(zero, 0, kFirstHalf),
                               __byte_perm(zero, 0, kSecondHalf), to_low, to_high);
        if constexpr (kBits == 4) {
          multiply_words<T>(to_low, __byte_perm(scales[j][s], 0, kFirstHalf));
          multiply_words<T>(to_high, __byte_perm(scales[j][s], 0, kSecondHalf));
        } else {
          multiply_words<T>(to_low, scales[j][s].x);
          multiply_words<T>(to_high, scales[j][s].y);
        }
      }
    }
  }
};

}  // namespace fuseopt
