// Typical-p's order of scores.
#pragma once

namespace fuseopt {

// How far the information of a score is from the entropy, negated; upstream: TypicalLogitsWarper. The logarithm of the sum
// of weights is in both, so it cancels out.
struct Typicality {
  float highest = 0;
  float mean = 0;  // of the scores, less the highest one

  Typicality() = default;
  // `sums`: of the weights, and of the weights times the scores, less the highest one.
  __device__ Typicality(float highest, const double (&sums)[2])
      : highest(highest), mean(static_cast<float>(sums[1] / sums[0])) {}

  // The nearest score is the highest.
  __device__ float operator()(float score) const { return -fabsf((score - highest) - mean); }
};

}  // namespace fuseopt
