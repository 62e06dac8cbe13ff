// The instructions around the tensor cores: asynchronous copies into shared memory, transposing loads from it, products.
// They exist from sm_80 on; code for older devices compiles, and traps.
#pragma once

#include "dtype.cuh"

namespace fuseopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define FUSEOPT_SM80_ASM(...) __trap()
#else
#define FUSEOPT_SM80_ASM(...) asm volatile(__VA_ARGS__)
#endif

// Copies 16 bytes, of which those past the first `bytes` are zeros.
__device__ inline void copy_async(void* shared, const void* global, int bytes) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  FUSEOPT_SM80_ASM("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
}

__device__ inline void commit_copies() { FUSEOPT_SM80_ASM("cp.async.commit_group;" ::: "memory"); }

// Returns when all but the last kPending groups of this thread's copies have arrived.
template <int kPending>
__device__ inline void wait_for_copies() {
  FUSEOPT_SM80_ASM("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements, transposed; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline uint4 load_transposed(const void* shared) {
  uint4 words;
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}

// sums += rows (low, high: the two halves of 16 rows) x columns, over 16 values of k.
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

}  // namespace fuseopt
