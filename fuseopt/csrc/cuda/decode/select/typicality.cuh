// Typical-p's order of scores.
#pragma once

#include <cmath>

namespace fuseopt {

// How far the information of a score is from the mean; upstream: TypicalLogitsWarper.
struct Typicality {
  float highest;
  float log_sum = 0;
  float entropy = 0;

  // `sums`: of the weights, and of the weights times the scores, less the highest one.
  __device__ Typicality(float highest, const double (&sums)[2])
      : highest(highest),
        log_sum(static_cast<float>(log(sums[0]))),
        entropy(static_cast<float>(log(sums[0]) - sums[1] / sums[0])) {}

  // The nearest score is the highest.
  __device__ float operator()(float score) const { return -fabsf(-(score - highest - log_sum) - entropy); }
};

}  // namespace fuseopt
