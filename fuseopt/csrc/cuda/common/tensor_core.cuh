// Instructions around the tensor cores: loads of data that is read once, and matrix products. They exist from sm_80 on;
// code for older devices compiles, and traps.
#pragma once

#include "cuda/common/dtype.cuh"

namespace fuseopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define FUSEOPT_SM80_ASM(...) __trap()
#else
#define FUSEOPT_SM80_ASM(...) asm volatile(__VA_ARGS__)
#endif

// Loads data that is read once and not written while the kernel runs, past the L1 cache.
template <typename Access>
__device__ inline Access load_once(const void* data) {
  Access value;
  if constexpr (std::is_same_v<Access, uint4>) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(data));
  } else if constexpr (std::is_same_v<Access, uint2>) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(data));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(data));
  }
  return value;
}

// The largest value of all lanes, in one instruction.
__device__ inline unsigned largest_in_warp(unsigned value) {
  unsigned largest = 0;
  FUSEOPT_SM80_ASM("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(largest) : "r"(value));
  return largest;
}

// Loads four tiles of 8 x 8 16-bit values from shared memory. Lane 8 t + i gives the address of line i of tile t. Word
// t has the values at place lane / 4 of lines 2 (lane % 4) and the next, of tile t.
__device__ inline uint4 load_transposed(const void* line) {
  uint4 tiles = {};
  FUSEOPT_SM80_ASM("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(tiles.x), "=r"(tiles.y), "=r"(tiles.z), "=r"(tiles.w)
                   : "r"(static_cast<unsigned>(__cvta_generic_to_shared(line)))
                   : "memory");
  return tiles;
}

// Transposes an 8 x 8 matrix of 16-bit elements; four lanes have a row.
__device__ inline unsigned transposed(unsigned pair) {
  unsigned result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Two products of 16-bit values, each rounded.
template <typename T>
__device__ inline unsigned multiply_pair(unsigned a, unsigned b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair product = __hmul2(reinterpret_cast<Pair&>(a), reinterpret_cast<Pair&>(b));
  return reinterpret_cast<const unsigned&>(product);
}

// Two times a * b + c, each rounded once.
template <typename T>
__device__ inline unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  __trap();  // the intrinsic for bfloat16 needs sm_80, as the kernels that call this do
  return 0;
#else
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair sum = __hfma2(reinterpret_cast<Pair&>(a), reinterpret_cast<Pair&>(b), reinterpret_cast<Pair&>(c));
  return reinterpret_cast<const unsigned&>(sum);
#endif
}

// As load_transposed, but word t has two neighbouring values, 2 (lane % 4) and the next, of line lane / 4 of tile t.
__device__ inline uint4 load_lines(const void* line) {
  uint4 tiles = {};
  FUSEOPT_SM80_ASM("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(tiles.x), "=r"(tiles.y), "=r"(tiles.z), "=r"(tiles.w)
                   : "r"(static_cast<unsigned>(__cvta_generic_to_shared(line)))
                   : "memory");
  return tiles;
}

// The place in shared memory of a 16-byte piece of a line of kPieces pieces. The loads above take 8 neighbouring lines
// together; their pieces of one number are in different banks. kPieces is a power of two from 4 on. For an even `i` below
// kPieces and the first two pieces, index ^ i is the place of piece + i.
template <int kPieces>
__device__ inline int piece_index(int line, int piece) {
  constexpr int kLines = kPieces < 8 ? 8 / kPieces : 1;  // lines of the shared memory's 128 bytes
  return line * kPieces + (piece ^ line / kLines % (8 / kLines));
}

template <typename T>
__device__ inline unsigned packed(float low, float high) {
  const T pair[2] = {from_acc<T>(low), from_acc<T>(high)};
  return reinterpret_cast<const unsigned&>(pair);
}

// sums += 16 lines (low and high: 8 each) x 8 columns, over 16 values of k.
template <typename T>
__device__ inline void multiply(float (&sums)[4], uint2 low, uint2 high, unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, __half>) {
    FUSEOPT_SM80_ASM("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(low.x), "r"(high.x), "r"(low.y), "r"(high.y), "r"(b0), "r"(b1));
  } else {
    FUSEOPT_SM80_ASM("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(low.x), "r"(high.x), "r"(low.y), "r"(high.y), "r"(b0), "r"(b1));
  }
}

// A finite float32 in two parts that tensor cores take (TF32, 11 significant bits; they cut off further ones). The first is
// rounded to nearest, so of the rest only the last bit is cut off. Of infinity, and of what rounds to it, the rest is NaN.
struct Tf32Parts {
  unsigned high, low;

  __device__ explicit Tf32Parts(unsigned word) : high((word + 0x1000u) & 0xffffe000u) {
    low = __float_as_uint(__uint_as_float(word) - __uint_as_float(high));
  }
};

// sums += 16 lines x 8 columns, over 8 values of k. Lines as in `multiply`.
__device__ inline void multiply_tf32(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  FUSEOPT_SM80_ASM("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fuseopt
