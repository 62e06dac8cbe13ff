// The rows that a norm reads: those of its input, or of the sum of its input and a residual.
#pragma once

#include "cast_order.h"
#include "cpu/rows.h"

namespace fuseopt {

/// Rows of `input`, or of `input + residual`; that sum is rounded to the dtype that both promote to, and kept in
/// `sum()`.
template <typename Math>
class StreamRows {
 public:
  StreamRows(const Tensor& input, const std::optional<Tensor>& residual) : input_(input) {
    if (!residual) return;
    check_same_shape("residual", *residual, "input", input);
    residual_.emplace(*residual, input.sizes());
    sum_ = empty_like(input, promote_types(input.scalar_type(), residual->scalar_type()));
    sum_rows_.emplace(*sum_, n_cols());
  }

  int64_t n_rows() const { return input_.n_rows(); }
  int64_t n_cols() const { return input_.n_cols(); }
  /// Present if there is a residual; complete for the rows that have been read.
  const std::optional<Tensor>& sum() const { return sum_; }

  /// The elements of a row, for which it may use the buffers. Also writes the row of the sum.
  const Math* read(int64_t row, Math* buffer, Math* residual_buffer) const {
    const Math* x = input_.read(row, buffer);
    if (!residual_) return x;
    const int64_t n = n_cols();
    const Math* r = residual_->read(row, residual_buffer);
    Math* sum = sum_rows_->target(row, buffer);
    const DType type = dtype(*sum_);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sum[i] = x[i] + r[i];
    if (type != dtype_of<Math>) round_row(sum, n, type);
    sum_rows_->commit(row, sum);
    return sum;
  }

 private:
  Rows input_;
  std::optional<Rows> residual_;
  std::optional<Tensor> sum_;
  std::optional<OutputRows> sum_rows_;
};

}  // namespace fuseopt
