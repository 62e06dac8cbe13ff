// Rows on their way into shared memory, several ahead of the block that works on them, by copies that take no register
// and no instruction of its threads. From sm_90 on; code for older devices compiles, and must not use it.
#pragma once

#include <cstdint>

namespace fuseopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasRowRings = true;
#else
constexpr bool kHasRowRings = false;
#endif

constexpr int kMaxRingStages = 4;

// A stage holds a row of each of `kTensors` tensors, of `row_bytes` bytes: whole multiples of 16, and aligned to them.
template <int kTensors>
class RowRing {
 public:
  // `slots`: shared memory for the stages, aligned to 16 bytes.
  __device__ RowRing(char* slots, int row_bytes, int stages) : slots_(slots), row_bytes_(row_bytes), stages_(stages) {}

  // By one thread, with a barrier of the block after it.
  __device__ void open() const {
#if __CUDA_ARCH__ >= 900
    for (int s = 0; s < stages_; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier(s)) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // By one thread: brings row `row` of each tensor into a stage that nobody reads any more.
  template <typename T>
  __device__ void fetch(int stage, const T* const (&tensors)[kTensors], int64_t row) const {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier(stage)),
                 "r"(kTensors * row_bytes_)
                 : "memory");
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       address(slot(stage, t))),
                   "l"(reinterpret_cast<const char*>(tensors[t]) + row * row_bytes_), "r"(row_bytes_), "r"(barrier(stage))
                   : "memory");
    }
#endif
  }

  // Returns when the current stage's rows are there.
  __device__ void wait() const {
#if __CUDA_ARCH__ >= 900
    unsigned done = 0;
    while (done == 0) {
      asm volatile(
          "{\n"
          ".reg .pred done;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done;\n"
          "}\n"
          : "=r"(done)
          : "r"(barrier(stage_)), "r"(parity_)
          : "memory");
    }
#endif
  }

  template <typename T>
  __device__ const T* row(int tensor) const {
    return reinterpret_cast<const T*>(slot(stage_, tensor));
  }

  __device__ int stages() const { return stages_; }
  __device__ int stage() const { return stage_; }
  __device__ void advance() {
    if (++stage_ == stages_) stage_ = 0, parity_ ^= 1;
  }

 private:
  __device__ char* slot(int stage, int tensor) const { return slots_ + (stage * kTensors + tensor) * row_bytes_; }
  __device__ static unsigned address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }
  __device__ static unsigned barrier(int stage) {
    __shared__ uint64_t arrived[kMaxRingStages];
    return address(arrived + stage);
  }

  char* slots_;
  int row_bytes_;
  int stages_;
  int stage_ = 0;
  unsigned parity_ = 0;
};

}  // namespace fuseopt
