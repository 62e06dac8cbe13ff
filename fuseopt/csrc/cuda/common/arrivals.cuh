// Bulk copies and remote stores to a block's shared memory, and the wait for them (mbarrier). From sm_90 on; code for
// older devices compiles, and does nothing.
#pragma once

#include <cstdint>

namespace fuseopt {

__device__ inline unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Lies in the shared memory that is written, and counts the bytes that arrive, round by round.
class Arrivals {
 public:
  // Called by one thread. `publish` must follow, then a barrier of all threads that take part.
  __device__ void open() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address()) : "memory");
#endif
  }

  // Called by the thread that opened them.
  __device__ static void publish() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // Called by one thread: sets how many bytes make up the next round. Some of them may already have arrived.
  __device__ void expect(unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
#endif
  }

  // Returns once a round has arrived; `parity` is that of the rounds before it. kFromOthers: other blocks store, which
  // costs more to observe.
  template <bool kFromOthers>
  __device__ void wait(unsigned parity) {
#if __CUDA_ARCH__ >= 900
#define FUSEOPT_TRY_WAIT(scope)                                                      \
  asm volatile(                                                                      \
      "{\n"                                                                          \
      ".reg .pred done;\n"                                                           \
      "mbarrier.try_wait.parity.acquire." scope ".shared::cta.b64 done, [%1], %2;\n" \
      "selp.u32 %0, 1, 0, done;\n"                                                   \
      "}\n"                                                                          \
      : "=r"(done)                                                                   \
      : "r"(address()), "r"(parity)                                                  \
      : "memory")
    unsigned done = 0;
    while (done == 0) {
      if constexpr (kFromOthers) FUSEOPT_TRY_WAIT("cluster");
      else FUSEOPT_TRY_WAIT("cta");
    }
#undef FUSEOPT_TRY_WAIT
#endif
  }

  __device__ unsigned address() const { return shared_address(&state_); }

 private:
  uint64_t state_;
};

}  // namespace fuseopt
