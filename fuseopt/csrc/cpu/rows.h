// Tensors as rows along their last dimension, and the loop over rows. Every op of this folder uses them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "cpu/convert.h"

namespace fuseopt {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/// The code of a floating point type; raises for any other type.
DType to_dtype(ScalarType type);
inline DType dtype(const Tensor& tensor) { return to_dtype(tensor.scalar_type()); }

/// A new contiguous CPU tensor.
Tensor empty(const int64_t* sizes, int64_t dim, ScalarType type);
inline Tensor empty_like(const Tensor& tensor, ScalarType type) {
  return empty(tensor.sizes().data(), tensor.dim(), type);
}
/// A new tensor with one element per row of `tensor`: its sizes without the last.
inline Tensor empty_per_row(const Tensor& tensor, ScalarType type) {
  return empty(tensor.sizes().data(), tensor.dim() - 1, type);
}

/// The type of the arithmetic: double if one of the tensors is double, else float.
inline bool any_double(const Tensor& a, const std::optional<Tensor>& b = std::nullopt) {
  return dtype(a) == kFloat64 || (b && dtype(*b) == kFloat64);
}

/// Long rows are processed in pieces of this many elements, so that buffers stay in the L1 cache.
constexpr int64_t kPiece = 1024;

/// Uninitialised scratch memory for one row.
template <typename Math>
class RowBuffer {
 public:
  explicit RowBuffer(int64_t n) : data_(static_cast<Math*>(::operator new(n * sizeof(Math), kAlignment))) {}
  Math* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(Math* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<Math, Free> data_;
};

/// The rows of a tensor of any strides. A 0-dim tensor is one row of one column.
class Rows {
 public:
  explicit Rows(const Tensor& tensor) : Rows(tensor, tensor.sizes()) {}
  /// `tensor` broadcast to `sizes`; raises if it cannot be.
  Rows(const Tensor& tensor, IntHeaderOnlyArrayRef sizes);
  /// All elements of a contiguous tensor as one row.
  static Rows single(const Tensor& tensor);

  int64_t n_rows() const { return n_rows_; }
  int64_t n_cols() const { return n_cols_; }

  /// n elements of a row as Math, from column `begin`: in place if they are stored so, else copied to `buffer`.
  template <typename Math>
  const Math* read(int64_t row, int64_t begin, int64_t n, Math* buffer) const {
    const char* src = data_ + (offset(row) + begin * col_stride_) * element_size(dtype_);
    if (dtype_ == dtype_of<Math> && col_stride_ == 1) return reinterpret_cast<const Math*>(src);
    load_row(src, dtype_, col_stride_, n, buffer);
    return buffer;
  }
  template <typename Math>
  const Math* read(int64_t row, Math* buffer) const {
    return read(row, 0, n_cols_, buffer);
  }

 private:
  struct Dim {
    int64_t size;
    int64_t stride;
  };

  Rows(const Tensor& tensor, DType dtype)
      : data_(static_cast<const char*>(tensor.const_data_ptr())), dtype_(dtype) {}

  int64_t offset(int64_t row) const {
    int64_t offset = 0;
    for (const Dim& dim : dims_) {  // innermost first
      offset += row % dim.size * dim.stride;
      row /= dim.size;
    }
    return offset + row * outer_stride_;
  }

  const char* data_;
  DType dtype_;
  int64_t n_rows_ = 1;
  int64_t n_cols_ = 1;
  int64_t col_stride_ = 1;
  int64_t outer_stride_ = 0;
  std::vector<Dim> dims_;  // leading dimensions except the outermost; neighbours are merged if strides allow
};

/// The rows of a new contiguous tensor, to be written.
class OutputRows {
 public:
  OutputRows(const Tensor& tensor, int64_t n_cols)
      : data_(static_cast<char*>(tensor.mutable_data_ptr())), dtype_(dtype(tensor)), n_cols_(n_cols) {}

  /// Where to compute a row: in the tensor if it holds Math, else in `buffer`.
  template <typename Math>
  Math* target(int64_t row, int64_t begin, Math* buffer) const {
    return dtype_ == dtype_of<Math> ? reinterpret_cast<Math*>(at(row, begin)) : buffer;
  }
  template <typename Math>
  Math* target(int64_t row, Math* buffer) const {
    return target(row, 0, buffer);
  }
  /// Stores n elements computed at target().
  template <typename Math>
  void commit(int64_t row, int64_t begin, int64_t n, const Math* values) const {
    if (dtype_ != dtype_of<Math>) store_row(values, n, dtype_, at(row, begin));
  }
  template <typename Math>
  void commit(int64_t row, const Math* values) const {
    commit(row, 0, n_cols_, values);
  }
  /// Stores n elements from another place.
  template <typename Math>
  void store(int64_t row, int64_t begin, int64_t n, const Math* values) const {
    store_row(values, n, dtype_, at(row, begin));
  }

 private:
  char* at(int64_t row, int64_t col) const { return data_ + (row * n_cols_ + col) * element_size(dtype_); }

  char* data_;
  DType dtype_;
  int64_t n_cols_;
};

/// Raises unless the two have the same shape.
void check_same_shape(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other);

/// All elements of a tensor in row-major order, `n` of them; raises for another number.
template <typename Math>
std::vector<Math> flatten(const Tensor& tensor, int64_t n, const char* name);

/// The same for one dimension.
template <typename Math>
std::vector<Math> flatten_parameter(const Tensor& tensor, int64_t n, const char* name);

/// Calls body(begin, end) for pieces of [0, n) on torch's threads. A piece is large enough for a thread, at a cost of
/// `cost` elements per item.
template <typename Body>
void parallel(int64_t n, int64_t cost, const Body& body) {
  constexpr int64_t kElementsPerThread = 16384;
  torch::stable::parallel_for(0, n, std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, cost)), body);
}

/// Calls body(row, first column, count) for every piece of every row.
template <typename Body>
void for_each_piece(const Rows& rows, const Body& body) {
  const int64_t pieces = (rows.n_cols() + kPiece - 1) / kPiece;
  parallel(rows.n_rows() * pieces, std::min(rows.n_cols(), kPiece), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t col = i % pieces * kPiece;
      body(i / pieces, col, std::min(kPiece, rows.n_cols() - col));
    }
  });
}

}  // namespace fuseopt
