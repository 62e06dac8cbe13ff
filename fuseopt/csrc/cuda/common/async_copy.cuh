// Copies from global to shared memory that are on their way while a thread does other things. They exist from sm_80 on;
// code for older devices compiles, and traps.
#pragma once

#include "cuda/common/tensor_core.cuh"

namespace fuseopt {

// Where lanes copy whole lines of 128 bytes side by side: what lies across two such lines of shared memory takes longer.
constexpr int kRingAlignment = 128;

// 16 bytes, zeros where there is nothing to copy.
__device__ inline void copy_async(void* to, const void* from, bool is_there) {
  FUSEOPT_SM80_ASM("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                       static_cast<unsigned>(__cvta_generic_to_shared(to))),
                   "l"(from), "r"(is_there ? 16 : 0)
                   : "memory");
}

// To be the first that leaves the L2 cache where that is short of room.
__device__ inline uint64_t evict_first() {
  uint64_t policy = 0;
  FUSEOPT_SM80_ASM("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// As copy_async, with such a policy for what is copied.
__device__ inline void copy_async(void* to, const void* from, bool is_there, uint64_t policy) {
  FUSEOPT_SM80_ASM("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
                       static_cast<unsigned>(__cvta_generic_to_shared(to))),
                   "l"(from), "r"(is_there ? 16 : 0), "l"(policy)
                   : "memory");
}

// Makes one group of the thread's copies since the last group.
__device__ inline void end_copy_group() { FUSEOPT_SM80_ASM("cp.async.commit_group;" ::: "memory"); }

// Returns when the thread can read what its groups brought, but for the last kLater.
template <int kLater>
__device__ inline void await_copy_groups() {
  FUSEOPT_SM80_ASM("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

}  // namespace fuseopt
