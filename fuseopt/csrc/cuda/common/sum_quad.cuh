// Four neighbouring outputs, which one thread of decode_linear's kernels for many rows finishes.
#pragma once

#include "cuda/common/vector.cuh"

namespace fuseopt {

constexpr int kQuad = 4;

using SumQuad = Vector<float, kQuad>;

__device__ inline void add_quad(SumQuad& total, const float* others) {
  const auto sums = *reinterpret_cast<const SumQuad*>(others);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) total.values[i] += sums.values[i];
}

}  // namespace fuseopt
