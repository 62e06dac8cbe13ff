// Layout of 8-bit and 4-bit weights in the order in which tensor core products read them, and the exact conversion of stored
// words to pairs of 16-bit values. fuseopt/ops/packed_weight.py makes such weights.
//
// A weight [N, K] is stored in lines of 16 outputs, one after the other. A line is a header (8 bits: 16 float32 scales),
// then blocks of K. A block is two units, then (4 bits) the scales of its groups. A unit is 512 bytes, 16 for each lane: the
// lane's operands for outputs lane / 4 and lane / 4 + 8, and for 64 (4 bits) or 32 (8 bits) values of k. A group's scales are
// 16 values of T, as pairs (output, output + 8). Zero points follow as 16 words of 16 bits, the `zero` of `unpack`.
// N is padded to 16 and K to a block, so no access goes past the end.
#pragma once

#include "cuda/common/tensor_core.cuh"
#include "cuda/common/vector.cuh"

namespace fuseopt {

constexpr int kLineOutputs = 16, kUnitBytes = 512, kBlockUnits = 2, kGroupBytes = kLineOutputs * 2;
template <int kBits>
constexpr int kBlockChunks = kBits == 4 ? 4 : 2;  // chunks of a block, 32 values of k each
template <int kBits>
constexpr int kBlockK = kBlockChunks<kBits> * 32;
template <int kBits>
constexpr int kLineHeader = kBits == 8 ? kLineOutputs * 4 : 0;

// Properties of a weight's blocks that depend on more than kBits.
struct PackedShape {
  int line_bytes, block_bytes;
  int blocks;           // along K
  unsigned group_ends;  // bit c: a group ends with chunk c of a block
  int group_bits;       // log2 of the chunks of a group
  bool has_zeros;
};

inline PackedShape packed_shape(int64_t in_features, int bits, int64_t group, bool has_zeros) {
  PackedShape shape = {};
  const int block_k = bits == 4 ? kBlockK<4> : kBlockK<8>;
  shape.blocks = static_cast<int>((in_features + block_k - 1) / block_k);
  shape.block_bytes = kBlockUnits * kUnitBytes;
  if (bits == 4) {
    shape.block_bytes += static_cast<int>(kBlockK<4> / group) * kGroupBytes * (has_zeros ? 2 : 1);
    shape.group_bits = group == 128 ? 2 : group == 64 ? 1 : 0;
    shape.group_ends = group == 128 ? 8 : group == 64 ? 10 : 15;
  }
  shape.has_zeros = has_zeros;
  shape.line_bytes = shape.blocks * shape.block_bytes + (bits == 8 ? kLineHeader<8> : 0);
  return shape;
}

// Two 16-bit values kMagic + n, whose last bits hold the integer n.
template <typename T>
constexpr unsigned kMagic = std::is_same_v<T, __half> ? 0x64006400u : 0x43004300u;

template <typename T>
__device__ inline unsigned subtract_pair(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  __trap();  // the intrinsic for bfloat16 needs sm_80, as the kernels that call this do
  return 0;
#else
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair difference = __hsub2(reinterpret_cast<Pair&>(a), reinterpret_cast<Pair&>(b));
  return reinterpret_cast<const unsigned&>(difference);
#endif
}

// (a & kMask) ^ kBits in one instruction.
template <unsigned kMask, unsigned kOther>
__device__ inline unsigned and_xor(unsigned a) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(a), "n"(kMask), "r"(kOther));
  return result;
}

// Converts a word exactly: each of `pairs` gets two neighbouring values of k. `zero`: kMagic plus the zero point (4 bits).
// 8 bits: bytes are in the order k, k + 2, k + 1, k + 3. bfloat16's mantissa stores 7 bits; the eighth bit, of weight -128,
// changes the number that is subtracted from 128 to 256.
template <typename T, int kBits>
__device__ inline void unpack(unsigned word, unsigned zero, unsigned* pairs) {
  if constexpr (kBits == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = and_xor<0x000f000fu, kMagic<T>>(word >> 4 * i);
      pairs[i] = subtract_pair<T>(pairs[i], zero);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned bytes = word >> 8 * i;
      if constexpr (std::is_same_v<T, __half>) {
        pairs[i] = subtract_pair<T>(and_xor<0x00ff00ffu, kMagic<T> + 0x00800080u>(bytes), kMagic<T> + 0x00800080u);
      } else {
        pairs[i] = subtract_pair<T>(and_xor<0x007f007fu, kMagic<T>>(bytes), and_xor<0x00800080u, kMagic<T>>(bytes));
      }
    }
  }
}

// A lane's operands of a chunk, from its 16 bytes of a unit: for output lane / 4 and for output lane / 4 + 8.
template <typename T, int kBits>
__device__ inline void unpack_chunk(const uint4& unit, int chunk, unsigned zero_low, unsigned zero_high, uint4& low,
                                    uint4& high) {
  unsigned *const to_low = reinterpret_cast<unsigned*>(&low), *const to_high = reinterpret_cast<unsigned*>(&high);
  if constexpr (kBits == 4) {
    unpack<T, 4>(chunk % 2 == 0 ? unit.x : unit.z, zero_low, to_low);
    unpack<T, 4>(chunk % 2 == 0 ? unit.y : unit.w, zero_high, to_high);
  } else {
    unpack<T, 8>(unit.x, 0, to_low), unpack<T, 8>(unit.y, 0, to_low + 2);
    unpack<T, 8>(unit.z, 0, to_high), unpack<T, 8>(unit.w, 0, to_high + 2);
  }
}

// Pairs of values times a pair, each product rounded.
template <typename T>
__device__ inline void multiply_words(uint4& words, unsigned pair) {
  words = {multiply_pair<T>(words.x, pair), multiply_pair<T>(words.y, pair), multiply_pair<T>(words.z, pair),
           multiply_pair<T>(words.w, pair)};
}

template <typename T>
__device__ inline void multiply_words(uint4& words, float scale) {
  constexpr int kValues = sizeof(uint4) / sizeof(T);
  const auto& values = reinterpret_cast<const Vector<T, kValues>&>(words);
  float scaled[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) scaled[i] = values[i] * scale;
  store_floats_as<T>(&words, 0, scaled);
}

constexpr unsigned kFirstHalf = 0x1010, kSecondHalf = 0x3232;  // of a word, twice: for __byte_perm

}  // namespace fuseopt
