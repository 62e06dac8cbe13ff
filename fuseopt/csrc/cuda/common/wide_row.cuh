// A row that is too wide for a team's registers, in a block that keeps as much of it as it can in shared memory.
#pragma once

#include <cuda_pipeline.h>

#include "cuda/softmax_loss/softmax.cuh"

namespace fuseopt {

constexpr int kWideStaticShared = 2048;  // at least what the kernels for wide rows declare

// A RowSpan whose vectors are counted from the beginning of a line of the caches, so that a warp's accesses lie in whole
// lines: else each touches one more, and shares what memory moves at once with the next warp's.
template <int kWidth>
struct LineSpan : RowSpan<kWidth> {
  static constexpr int kLineVectors = 128 / kAccessBytes;
  int whole;    // the row's vectors
  int skipped;  // of the first line, what is another row's

  __device__ LineSpan(int64_t row, int columns, int lane) : RowSpan<kWidth>(row, columns, lane) {
    whole = this->vectors;
    skipped = static_cast<int>(this->first % kLineVectors);
    this->first -= skipped;
    this->vectors += skipped;
  }

  __device__ bool has(int v) const { return static_cast<unsigned>(v - skipped) < static_cast<unsigned>(whole); }
};

// A thread's maximum of the logits it has seen, and their sum of exp(logit - origin): the origin is that maximum, or
// zero before any finite logit.
template <bool kPrecise>
struct OnlineSum {
  float max;
  float origin;
  float sum = 0;

  __device__ explicit OnlineSum(float max) : max(max), origin(max == -INFINITY ? 0.0f : max) {}

  template <int kWidth>
  __device__ void add(const float (&logits)[kWidth]) {
    float largest = logits[0];
#pragma unroll
    for (int j = 1; j < kWidth; ++j) largest = fmaxf(largest, logits[j]);
    if (largest > max) {
      sum *= exp_as<kPrecise>(max - largest);
      max = origin = largest;
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += exp_as<kPrecise>(logits[j] - origin);
  }
};

// Calls `visit(v, loaded)` for this thread's vectors v of a row from the `begin`th on, at least the second, where
// `load(v)` loads, kLoads of them ahead.
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

// A block's vectors of a row, from the `first`th on, on their way from `data` to its shared memory: all of them at once
// and past the registers, from sm_80. A thread reads back only what it has sent for itself, so that waiting for its own
// copies is enough.
template <typename T, int kWidth>
__device__ void fetch_row(Vector<T>* slots, const T* data, const LineSpan<kWidth>& span, int first) {
  for (int v = threadIdx.x; first + v < span.vectors; v += blockDim.x) {
    const auto source = reinterpret_cast<const Vector<T>*>(data) + span.first + first + v;
    __pipeline_memcpy_async(slots + v, source, sizeof(Vector<T>));
  }
  __pipeline_commit();
}

}  // namespace fuseopt
