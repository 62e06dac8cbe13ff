// Rows on their way into shared memory, several ahead of the block that works on them, by copies that take no register
// and no instruction of its threads. From sm_90 on; code for older devices compiles, and must not use it.
#pragma once

#include "arrivals.cuh"

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
    for (int s = 0; s < stages_; ++s) arrivals(s).open();
    Arrivals::publish();
  }

  // By one thread: brings row `row` of each tensor into a stage that nobody reads any more.
  template <typename T>
  __device__ void fetch(int stage, const T* const (&tensors)[kTensors], int64_t row) const {
#if __CUDA_ARCH__ >= 900
    arrivals(stage).expect(kTensors * row_bytes_);
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       shared_address(slot(stage, t))),
                   "l"(reinterpret_cast<const char*>(tensors[t]) + row * row_bytes_), "r"(row_bytes_),
                   "r"(arrivals(stage).address())
                   : "memory");
    }
#endif
  }

  // Returns when the current stage's rows are there.
  __device__ void wait() const { arrivals(stage_).wait<false>(parity_); }

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
  __device__ static Arrivals& arrivals(int stage) {
    __shared__ Arrivals arrived[kMaxRingStages];
    return arrived[stage];
  }

  char* slots_;
  int row_bytes_;
  int stages_;
  int stage_ = 0;
  unsigned parity_ = 0;
};

}  // namespace fuseopt
