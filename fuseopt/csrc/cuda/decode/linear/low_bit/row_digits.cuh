// A row of values as rows of 8-bit digits, which integer products of tensor cores multiply with stored weights as they are:
//   x = unit * (d0 + 256 d1 + 65536 d2 + 2^24 d3), each digit from -128 to 127.
// The unit is a power of two, chosen by the largest |x| of what shares it: four digits have 30 bits below that value's
// leading one, so a value of 16 bits is exact unless it is less than 2^-22 of the largest. Sums of products are exact.
#pragma once

#include "cuda/common/vector.cuh"
#include "cuda/common/tensor_core.cuh"

namespace fuseopt {

constexpr int kPieceValues = 8;            // values of k that a lane multiplies in one product
constexpr int kDigitBytes = kPieceValues;  // of a piece

// sums += 16 lines x 8 columns, over 32 values of k, all of 8 bits. Exact.
__device__ inline void multiply_bytes(int (&sums)[4], const uint4& a, const uint2& b) {
  FUSEOPT_SM80_ASM("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

// The larger of a and |b|; NaN if one of them is.
__device__ inline float largest_of(float a, float b) {
  float largest = 0.f;
  FUSEOPT_SM80_ASM("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(a), "f"(fabsf(b)));
  return largest;
}

// The unit of the values of a warp, the largest of which is the largest `of_lane`.
struct DigitUnit {
  float unit, factor;  // the unit, NaN if a value is not finite; 1 / unit

  __device__ DigitUnit(float of_lane, unsigned digits) {
    constexpr unsigned kExponent = 0x7f800000u, kLeast = 30u << 23;  // below 2^-97, values have fewer bits
    const unsigned largest = max(largest_in_warp(__float_as_uint(of_lane)), kLeast);
    factor = __uint_as_float((251 + 8 * digits << 23) - (largest & kExponent));
    unit = __uint_as_float(largest >= kExponent ? ~0u : (largest & kExponent) - (8 * digits - 3 << 23));
  }
};

// Writes digits of 8 neighbouring values of k, 8 bytes for each digit, in the order of k in the words of stored weights.
template <int kBits, int kDigits>
__device__ inline void store_digits(const float (&values)[kPieceValues], float factor, void* to) {
  static_assert(kDigits == 2 || kDigits == 4);
  constexpr unsigned kHalves = kDigits == 4 ? 0x808080u : 0x80u;  // half of a digit's range, for all but the highest
  constexpr int kOrder[2][4] = {{0, kBits == 8 ? 2 : 4, 1, kBits == 8 ? 3 : 5}, {kBits == 8 ? 4 : 2, 6, kBits == 8 ? 5 : 3, 7}};
  unsigned words[kDigits][2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    unsigned of[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of[i] = static_cast<unsigned>(__float2int_rn(values[kOrder[w][i]] * factor)) + kHalves ^ kHalves;
    }
#pragma unroll
    for (int d = 0; d < kDigits; d += 2) {
      const unsigned pairs = d == 0 ? 0x5140 : 0x7362;
      const unsigned first = __byte_perm(of[0], of[1], pairs), second = __byte_perm(of[2], of[3], pairs);
      words[d][w] = __byte_perm(first, second, 0x5410), words[d + 1][w] = __byte_perm(first, second, 0x7632);
    }
  }
#pragma unroll
  for (int d = 0; d < kDigits; d += 2) {
    static_cast<uint4*>(to)[d / 2] = {words[d][0], words[d][1], words[d + 1][0], words[d + 1][1]};
  }
}

}  // namespace fuseopt
