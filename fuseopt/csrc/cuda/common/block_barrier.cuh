// Barriers for some of a block's warps. A block has 15 of them besides that of __syncthreads, which is number 0.
#pragma once

namespace fuseopt {

// `threads`: of all warps that arrive or wait. Call with whole warps.
__device__ inline void arrive_at_barrier(int barrier, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Returns once that many threads have arrived or wait.
__device__ inline void wait_at_barrier(int barrier, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace fuseopt
