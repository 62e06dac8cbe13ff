// Prefetch of rows into shared memory, several before the block needs them, by bulk copies that take neither registers
// nor instructions of its threads. From sm_90 on; code for older devices compiles, and must not use it.
#pragma once

#include "cuda/common/arrivals.cuh"

namespace fuseopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasRowRings = true;
#else
constexpr bool kHasRowRings = false;
#endif

// TUNED: 2 or 3 blocks with 3 or 4 rows in flight are faster than 4 blocks without (843c4ec).
constexpr int kMaxRingStages = 4;

// Stages of `stage_bytes` bytes, each filled by its own bulk copies.
class StageRing {
 public:
  // `slots`: shared memory for the stages, aligned to 16 bytes.
  __device__ StageRing(char* slots, int stage_bytes, int stages)
      : slots_(slots), stage_bytes_(stage_bytes), stages_(stages) {}

  // Called by one thread; a barrier of the block must follow.
  __device__ void open() const {
    for (int s = 0; s < stages_; ++s) arrivals(s).open();
    Arrivals::publish();
  }

  // Called by one thread, for a stage that is no longer read, before `bring` fills it.
  __device__ void begin(int stage) const { arrivals(stage).expect(stage_bytes_); }

  // Called by the same thread: copies `bytes` to `offset` in the stage; all are multiples of 16.
  __device__ void bring(int stage, int offset, const void* from, int bytes) const {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(slots_ + stage * stage_bytes_ + offset)),
                 "l"(from), "r"(bytes), "r"(arrivals(stage).address())
                 : "memory");
#endif
  }

  // Returns once the current stage is complete.
  __device__ void wait() const { arrivals(stage_).wait<false>(parity_); }

  __device__ const char* data() const { return slots_ + stage_ * stage_bytes_; }
  __device__ int stages() const { return stages_; }
  __device__ int stage() const { return stage_; }
  __device__ void advance() {
    if (++stage_ == stages_) stage_ = 0, parity_ ^= 1;
  }

 private:
  __device__ static Arrivals& arrivals(int stage) {
    __shared__ Arrivals arrived[kMaxRingStages];
    return arrived[stage];
  }

  char* slots_;
  int stage_bytes_;
  int stages_;
  int stage_ = 0;
  unsigned parity_ = 0;
};

// A stage holds one row of each of `kTensors` tensors; `row_bytes` and the addresses are multiples of 16.
template <int kTensors>
class RowRing : public StageRing {
 public:
  __device__ RowRing(char* slots, int row_bytes, int stages)
      : StageRing(slots, kTensors * row_bytes, stages), row_bytes_(row_bytes) {}

  // Called by one thread: copies row `row` of each tensor to a stage that is no longer read.
  template <typename T>
  __device__ void fetch(int stage, const T* const (&tensors)[kTensors], int64_t row) const {
    begin(stage);
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      bring(stage, t * row_bytes_, reinterpret_cast<const char*>(tensors[t]) + row * row_bytes_, row_bytes_);
    }
  }

  template <typename T>
  __device__ const T* row(int tensor) const {
    return reinterpret_cast<const T*>(data() + tensor * row_bytes_);
  }

 private:
  int row_bytes_;
};

}  // namespace fuseopt
