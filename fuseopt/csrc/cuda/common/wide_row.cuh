// A row that is too wide for a team's registers. A block keeps as much of it as it can in shared memory.
#pragma once

#include <cuda_pipeline.h>

#include "cuda/softmax_loss/softmax.cuh"

namespace fuseopt {

constexpr int kWideStaticShared = 2048;  // upper bound of static shared memory in the kernels for wide rows

// A RowSpan whose vectors are counted from the beginning of a cache line, so that a warp's accesses cover whole lines.
// Otherwise each access touches one more line, and shares a memory transaction with the next warp.
template <int kWidth>
struct LineSpan : RowSpan<kWidth> {
  static constexpr int kLineVectors = 128 / kAccessBytes;
  int whole;    // the row's vectors
  int skipped;  // vectors of the first line that belong to another row

  __device__ LineSpan(int64_t row, int columns, int lane) : RowSpan<kWidth>(row, columns, lane) {
    whole = this->vectors;
    skipped = static_cast<int>(this->first % kLineVectors);
    this->first -= skipped;
    this->vectors += skipped;
  }

  __device__ bool has(int v) const { return static_cast<unsigned>(v - skipped) < static_cast<unsigned>(whole); }
};

// A thread's maximum of the logits it has seen, and the sum of exp(logit - origin). The origin is that maximum, or zero
// before any finite logit.
template <bool kPrecise>
struct OnlineSum {
  float max;
  float origin;
  ScaledExp<kPrecise> exponential;
  float sum = 0;

  __device__ explicit OnlineSum(float max, ScaledExp<kPrecise> exponential = ScaledExp<kPrecise>(1.0f))
      : max(max), origin(max == -INFINITY ? 0.0f : max), exponential(exponential) {}

  template <int kWidth>
  __device__ void add(const float (&logits)[kWidth]) {
    float largest = logits[0];
#pragma unroll
    for (int j = 1; j < kWidth; ++j) largest = fmaxf(largest, logits[j]);
    if (largest > max) {
      sum *= exponential(max - largest);
      max = origin = largest;
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += exponential(logits[j] - origin);
  }
};

// Calls `visit(v, loaded)` for this thread's vectors v of a row, from number `begin` of the thread on. `load(v)` is
// called for kLoads vectors before they are visited.
template <int kLoads, int kWidth, typename RowTeam, typename Load, typename Visit>
__device__ void visit_row(const LineSpan<kWidth>& span, const RowTeam& team, int begin, Load load, Visit visit) {
  for (int first = begin * team.size + team.lane; first < span.vectors; first += kLoads * team.size) {
    decltype(load(0)) loaded[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (first + k * team.size < span.vectors) loaded[k] = load(first + k * team.size);
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (first + k * team.size < span.vectors) visit(first + k * team.size, loaded[k]);
    }
  }
}

// Starts copies of a block's vectors of a row, from vector `first` on, from `data` to shared memory: all of them at
// once, and without registers from sm_80 on. A thread reads back only what it has copied itself, so it waits only for
// its own copies.
template <typename T, int kWidth>
__device__ void fetch_row(Vector<T>* slots, const T* data, const LineSpan<kWidth>& span, int first) {
  for (int v = threadIdx.x; first + v < span.vectors; v += blockDim.x) {
    const auto source = reinterpret_cast<const Vector<T>*>(data) + span.first + first + v;
    __pipeline_memcpy_async(slots + v, source, sizeof(Vector<T>));
  }
  __pipeline_commit();
}

// Waits until this thread can read what it has copied. cuda_pipeline.h alone lets the compiler move reads of shared
// memory before the wait.
__device__ inline void await_row() {
  __pipeline_wait_prior(0);
  asm volatile("" ::: "memory");
}

}  // namespace fuseopt
