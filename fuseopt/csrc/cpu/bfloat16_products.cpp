// Products of bfloat16 by the instruction that adds products of pairs of elements (AVX-512 BF16), in the loops of
// decode_tiles_body.h.
#include "cpu/decode_kernels.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cpu/rows.h"
#include "cpu/vec_math.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define FUSEOPT_VECTOR_BYTES 64
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")
#endif
namespace fuseopt::avx512_bf16 {
#include "cpu/decode_kernels_body.h"
#include "cpu/decode_tiles_body.h"
#include "cpu/low_bit_body.h"
#include "cpu/low_bit_tiles_body.h"

constexpr int64_t kPair = 2, kPairs = kLanes<uint32_t>;

// A word is a pair.
template <>
struct Multiply<BFloat16, BFloat16> {
  using Word = uint32_t;
  static constexpr int64_t kInputsPerWord = kPair;
  static Vector<Word> read(const BFloat16* data, int64_t count = kPair * kPairs) {
    Vector<Word> pairs = {};
    std::memcpy(&pairs, data, count * sizeof(BFloat16));
    return pairs;
  }
  static void add(Vector<float>& sum, const Vector<Word>& weights, const Vector<Word>& x) {
    sum = (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)x);
  }
};
using PairProducts = Multiply<BFloat16, BFloat16>;

// `lines`: lines of bfloat16, two of which make pairs, or lines of pairs. `scales`: null, or factors of the outputs' sums.
template <int kRows, typename Weight>
__attribute__((noinline)) void add_scaled_tile(const Weight* weight, const float* scales, int64_t line_stride,
                                               int64_t lines, const BFloat16* input, int64_t input_stride,
                                               float* output, int64_t output_stride, Prefetch& outer) {
  Prefetch prefetch = outer;  // in registers
  constexpr bool kInterleaves = std::is_same_v<Weight, BFloat16>;
  constexpr int64_t kLines = kInterleaves ? kPair : 1;
  Vector<float> sums[kRows][kTileVectors] = {};
  for (int64_t line = 0; line < lines; line += kLines, weight += kLines * line_stride, input += kPair) {
    Vector<uint32_t> weights[kTileVectors];
    for (int64_t i = 0; i < kLines; ++i) prefetch.step();
    if constexpr (kInterleaves) {
      for (int i = 0; i < kTileVectors; i += kPair) {
        const auto even = (__m512i)PairProducts::read(weight + i * kPairs);
        const auto odd = line + 1 < lines ? (__m512i)PairProducts::read(weight + i * kPairs + line_stride) : __m512i{};
        weights[i] = (Vector<uint32_t>)_mm512_unpacklo_epi16(even, odd);
        weights[i + 1] = (Vector<uint32_t>)_mm512_unpackhi_epi16(even, odd);
      }
    } else {
      for (int i = 0; i < kTileVectors; ++i) std::memcpy(&weights[i], weight + i * kPairs, sizeof(weights[i]));
    }
    for (int row = 0; row < kRows; ++row) {
      int32_t pair;
      std::memcpy(&pair, input + row * input_stride, sizeof(pair));
      const auto x = (Vector<uint32_t>)_mm512_set1_epi32(pair);
      for (int i = 0; i < kTileVectors; ++i) PairProducts::add(sums[row][i], weights[i], x);
    }
  }
  outer = prefetch;
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kTileVectors; i += kPair) {
      Vector<float> left = sums[row][i], right = sums[row][i + 1];
      if constexpr (kInterleaves) {  // within 128 bits
        const auto low = left, high = right;
        left = shuffled<float, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23>(low, high);
        right = shuffled<float, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31>(low, high);
      }
      if (scales != nullptr) {
        left *= load(scales + i * kPairs);
        right *= load(scales + (i + 1) * kPairs);
      }
      float* target = output + row * output_stride + i * kPairs;
      store<float>(target, load(target) + left);
      store<float>(target + kPairs, load(target + kPairs) + right);
    }
  }
}

template <int kRows, typename Block, typename... Arguments>
inline void add_tile(const Block& block, Arguments&&... arguments) {
  if constexpr (std::is_pointer_v<Block>) {
    add_scaled_tile<kRows>(block, nullptr, arguments...);
  } else {
    add_scaled_tile<kRows>(block.lines, block.scales, arguments...);
  }
}

void dot_tiles(const Products& products) { dot_tiles_of<BFloat16, BFloat16>(products); }
void add_tiles(const Products& products) { add_tiles_of<BFloat16, BFloat16>(products); }
int64_t low_bit_tiles(const LowBitProducts& products) { return low_bit_tiles_of<BFloat16>(products); }
constexpr BFloat16Kernels kKernels = {dot_tiles, add_tiles, low_bit_tiles};
}  // namespace fuseopt::avx512_bf16
#include "cpu/target_end.h"
#endif

namespace fuseopt {

const BFloat16Kernels* bfloat16_kernels() {
#if defined(__x86_64__)
  static const bool has_pairs = __builtin_cpu_supports("avx512bf16") && has_avx512();
  if (has_pairs) return &avx512_bf16::kKernels;
#endif
  return nullptr;
}

}  // namespace fuseopt
