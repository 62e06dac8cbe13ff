// Weights of 8 and 4 bits as the tensor cores take them: stored words to exact pairs of 16-bit values, and the part of a
// strip that a warp has in registers. fuseopt/ops/low_bit.py has the formats.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/decode/linear/weight_stream.cuh"

namespace fuseopt {

constexpr int kLowBitStrip = 2 * kTileColumns;  // outputs of a strip, half of them each weight's if gated

template <typename T>
struct LowBitLayer : StreamLayer<T> {
  static constexpr int kMaxWeights = StreamLayer<T>::kMaxWeights;
  const char* values[kMaxWeights];
  const void* scales[kMaxWeights];  // float32 of 8 bits, T of 4
  const void* zeros[kMaxWeights];   // null: symmetric
  int row_bytes;                    // of the values
  int groups;                       // of 4 bits: chunks of K, each with a scale
  int chunks;                       // of K, for each warp
  int passes;                       // over these
};

// Two values that are kMagic, plus an integer that replaces their last bits.
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

// (a & b) | c in one instruction.
__device__ inline unsigned and_or(unsigned a, unsigned b, unsigned c) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// `pairs`: the values of a word, exactly, two neighbouring k each. `zero`: kMagic plus the zero point.
template <typename T, int kBits>
__device__ inline void unpack(unsigned word, unsigned zero, unsigned (&pairs)[16 / kBits]) {
  if constexpr (kBits == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = subtract_pair<T>(and_or(word >> 4 * i, 0x000f000fu, kMagic<T>), zero);
  } else if constexpr (std::is_same_v<T, __half>) {
    word ^= 0x80808080u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pairs[i] = subtract_pair<T>(__byte_perm(word, kMagic<T>, i == 0 ? 0x7170 : 0x7372), kMagic<T> + 0x00800080u);
    }
  } else {  // 7 bits fit behind bfloat16's first one: the sign bit makes 256 of the 128 that is subtracted
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned pair = __byte_perm(word, kMagic<T>, i == 0 ? 0x7170 : 0x7372);
      pairs[i] = subtract_pair<T>(pair & 0xff7fff7fu, pair & 0xff80ff80u);
    }
  }
}

// A lane's part of a strip in registers: of 16 outputs it has two, 8 apart, and of each chunk of K kPieces neighbouring
// pieces of 8 values. Of a gated pair, a strip has 8 outputs, and the lane has one of each weight.
template <typename T, int kBits, int kPieces, int kChunks>
class LowBitPart {
 public:
  static constexpr int kWords = kPieces * kBits / 4;  // that neighbour
  static constexpr int kChunkK = kPieces * kChunk;

  // Where the part of a strip from chunk `chunk` on lies.
  __device__ void find(const LowBitLayer<T>& layer, int index, int strip, int chunk) {
    const int lane = threadIdx.x % kWarpSize;
    const int column = strip * kLowBitStrip / (layer.is_gated ? 2 : 1) + lane / 4;
    const int byte = (chunk * 4 + lane % 4) * kWords * 4;
    columns_left_ = layer.widths[index] - column;
    bytes_left_ = layer.row_bytes - byte;
    from_ = layer.values[index] + static_cast<int64_t>(column) * layer.row_bytes + byte;
    apart_ = layer.is_gated ? layer.values[1] - layer.values[0] : static_cast<int64_t>(kTileColumns) * layer.row_bytes;
  }

  // Chunk c from there; nothing if not `is_there`.
  __device__ void load(const LowBitLayer<T>& layer, int c, bool is_there) {
    using Access = std::conditional_t<kWords == 4, uint4, std::conditional_t<kWords == 2, uint2, unsigned>>;
    const bool is_inside = is_there && c * 16 * kWords < bytes_left_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Access words = {};
      if (is_inside && (layer.is_gated ? 0 : i * kTileColumns) < columns_left_) {
        words = load_once<Access>(from_ + i * apart_ + c * 16 * kWords);
      }
      reinterpret_cast<Access&>(words_[c][i]) = words;
    }
  }

  // sums += the products of piece `piece` of chunk c with 8 rows' pieces. `zeros`: of both outputs, see `unpack`.
  template <int kHalves>
  __device__ void multiply_add(float (&sums)[kHalves][4], int c, int piece, const unsigned (&zeros)[2],
                               const uint4 (&x)[kHalves]) const {
    constexpr int kOfPiece = kBits / 4, kPairs = 16 / kBits;
    unsigned low[4], high[4];
#pragma unroll
    for (int w = 0; w < kOfPiece; ++w) {
      unsigned pairs[2][kPairs];
#pragma unroll
      for (int i = 0; i < 2; ++i) unpack<T, kBits>(words_[c][i][piece * kOfPiece + w], zeros[i], pairs[i]);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) low[w * kPairs + p] = pairs[0][p], high[w * kPairs + p] = pairs[1][p];
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      multiply<T>(sums[h], {low[0], low[1]}, {high[0], high[1]}, x[h].x, x[h].y);
      multiply<T>(sums[h], {low[2], low[3]}, {high[2], high[3]}, x[h].z, x[h].w);
    }
  }

 private:
  alignas(16) unsigned words_[kChunks][2][kWords];
  const char* from_;
  int64_t apart_;  // the two outputs, in bytes
  int columns_left_, bytes_left_;
};

// Starts copying what a strip has of scales or zero points, [its outputs, groups], one of Value each, to shared memory:
// first all outputs of the first weight, then those of a gate.
template <typename Value, typename T>
__device__ inline void copy_strip(void* to, const LowBitLayer<T>& layer, const void* const* of, int index, int strip) {
  const int weights = layer.is_gated ? 2 : 1, row_bytes = layer.groups * static_cast<int>(sizeof(Value));
  const int bytes = kLowBitStrip / weights * row_bytes;
  const int64_t first = static_cast<int64_t>(strip) * bytes;
  const int64_t valid = static_cast<int64_t>(layer.widths[index]) * row_bytes - first;
#pragma unroll 1
  for (int weight = 0; weight < weights; ++weight) {
    const char* const from = static_cast<const char*>(of[index + weight]) + first;
#pragma unroll 1
    for (int i = threadIdx.x * kFewBytes; i < bytes; i += blockDim.x * kFewBytes) {
      const int count = static_cast<int>(max(min(valid - i, int64_t{kFewBytes}), int64_t{0}));
      copy_few_async(static_cast<char*>(to) + weight * bytes + i, count > 0 ? from + i : of[index], count);
    }
  }
}

}  // namespace fuseopt
