// Asynchronous copies from global to shared memory (cp.async). They exist from sm_80 on; code for older devices
// compiles, and traps.
#pragma once

#include "cuda/common/tensor_core.cuh"

namespace fuseopt {

// Alignment if lanes copy whole 128-byte lines side by side. A line that spans two lines of shared memory takes longer.
constexpr int kRingAlignment = 128;

// Copies 16 bytes, or writes zeros unless `is_there`.
__device__ inline void copy_async(void* to, const void* from, bool is_there) {
  FUSEOPT_SM80_ASM("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                       static_cast<unsigned>(__cvta_generic_to_shared(to))),
                   "l"(from), "r"(is_there ? 16 : 0)
                   : "memory");
}

// A cache policy: evicted first when the L2 cache is full.
__device__ inline uint64_t evict_first() {
  uint64_t policy = 0;
  FUSEOPT_SM80_ASM("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The same with a cache policy.
__device__ inline void copy_async(void* to, const void* from, bool is_there, uint64_t policy) {
  FUSEOPT_SM80_ASM("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
                       static_cast<unsigned>(__cvta_generic_to_shared(to))),
                   "l"(from), "r"(is_there ? 16 : 0), "l"(policy)
                   : "memory");
}

// Groups the thread's copies since the last group.
__device__ inline void end_copy_group() { FUSEOPT_SM80_ASM("cp.async.commit_group;" ::: "memory"); }

// Returns once the thread can read the copies of its groups, except the last kLater groups.
template <int kLater>
__device__ inline void await_copy_groups() {
  FUSEOPT_SM80_ASM("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

}  // namespace fuseopt
