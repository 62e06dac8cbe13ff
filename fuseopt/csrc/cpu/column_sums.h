// Sums down the columns of a matrix: the gradients of a norm's weight and bias.
#pragma once

#include "cpu/rows.h"

namespace fuseopt {

/// Sums over rows, added in an order that depends only on the shape, so that results are bitwise equal for any number
/// of threads.
///
/// The rows are divided into fixed parts. Each part adds into a row of its own, and the parts are added in order.
template <typename Math>
class ColumnSums {
 public:
  ColumnSums(int64_t n_rows, int64_t n_cols) : n_rows_(n_rows), n_cols_(n_cols), sums_(n_parts() * n_cols) {}

  int64_t n_parts() const { return std::clamp<int64_t>(n_rows_ / kMinRowsPerPart, 1, kMaxParts); }
  int64_t part_begin(int64_t part) const { return n_rows_ * part / n_parts(); }
  Math* part(int64_t part) { return sums_.data() + part * n_cols_; }

  /// The total as a new tensor [n_cols] of `type`.
  Tensor total(ScalarType type) {
    Tensor result = empty(&n_cols_, 1, type);
    const OutputRows output(result, n_cols_);
    parallel(n_cols_, n_parts(), [&](int64_t begin, int64_t end) {
      Math* total = part(0);
      for (int64_t p = 1; p < n_parts(); ++p) {
        const Math* sums = part(p);
#pragma omp simd
        for (int64_t col = begin; col < end; ++col) total[col] += sums[col];
      }
      output.store(0, begin, end - begin, total + begin);
    });
    return result;
  }

 private:
  static constexpr int64_t kMinRowsPerPart = 16;
  static constexpr int64_t kMaxParts = 64;

  int64_t n_rows_;
  int64_t n_cols_;
  std::vector<Math> sums_;
};

}  // namespace fuseopt
