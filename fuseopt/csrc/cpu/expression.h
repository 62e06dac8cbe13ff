// Runs an elementwise expression, which fuseopt/extend/cpu_expression.py writes as a loop over contiguous elements, over
// tensors that broadcast, of any strides and of each floating point type: forward, and backward with the sums of
// gradients of tensors that broadcast.
//
// A `Function` has kInputs, kOutputs, kScalars and
//   template <typename Math>
//   static void compute(int64_t n, const Math* const* inputs, const Math* scalars, Math* const* outputs);
#pragma once

#include <array>
#include <tuple>
#include <utility>

#include "cast_order.h"
#include "check.h"
#include "cpu/expression_math.h"
#include "cpu/rows.h"

namespace fuseopt::expression {

/// Tensors broadcast to one shape, as rows: as few dimensions as describe all of them.
class Space {
 public:
  struct Operand {
    const char* data;
    DType dtype;
    int64_t col_stride = 0;
    std::vector<int64_t> row_strides = {};  // of row_sizes, innermost first
    bool is_dense = false;   // rows follow each other without gaps
    bool is_repeated = false;  // all rows are the same memory
  };

  explicit Space(const std::vector<const Tensor*>& tensors) {
    int64_t dim = 0;
    for (const Tensor* tensor : tensors) dim = std::max<int64_t>(dim, tensor->dim());
    shape.assign(dim, 1);
    for (const Tensor* tensor : tensors) {
      operands.push_back({static_cast<const char*>(tensor->const_data_ptr()), dtype(*tensor)});
      const auto sizes = tensor->sizes();
      for (int64_t d = 0; d < tensor->dim(); ++d) {
        int64_t& size = shape[dim - tensor->dim() + d];
        FUSEOPT_CHECK(size == 1 || sizes[d] == 1 || size == sizes[d], "fuseopt: tensor ", operands.size(),
                      " of the expression has size ", sizes[d], " in dimension ", d - tensor->dim(),
                      ", an earlier tensor has ", size, "; sizes must be equal or 1");
        if (size == 1) size = sizes[d];
      }
    }
    std::vector<int64_t> group_sizes;  // innermost first
    std::vector<std::vector<int64_t>> group_strides;
    for (int64_t d = dim - 1; d >= 0; --d) {
      if (shape[d] == 1) continue;
      std::vector<int64_t> strides;
      for (const Tensor* tensor : tensors) {
        const int64_t own = d - (dim - tensor->dim());
        strides.push_back(own < 0 || tensor->sizes()[own] == 1 ? 0 : tensor->strides()[own]);
      }
      bool continues = !group_sizes.empty();
      for (size_t t = 0; continues && t < strides.size(); ++t) {
        continues = strides[t] == group_strides.back()[t] * group_sizes.back();
      }
      if (continues) {
        group_sizes.back() *= shape[d];
      } else {
        group_sizes.push_back(shape[d]);
        group_strides.push_back(std::move(strides));
      }
    }
    if (group_sizes.empty()) {
      group_sizes.push_back(1);
      group_strides.emplace_back(tensors.size(), 0);
    }
    n_cols = group_sizes[0];
    row_sizes.assign(group_sizes.begin() + 1, group_sizes.end());
    for (const int64_t size : row_sizes) n_rows *= size;
    for (size_t t = 0; t < operands.size(); ++t) {
      Operand& operand = operands[t];
      operand.col_stride = group_strides[0][t];
      operand.is_dense = operand.col_stride == 1 || n_cols == 1;
      operand.is_repeated = true;
      int64_t dense = n_cols;
      for (size_t g = 1; g < group_sizes.size(); ++g) {
        operand.row_strides.push_back(group_strides[g][t]);
        operand.is_dense &= group_strides[g][t] == dense;
        operand.is_repeated &= group_strides[g][t] == 0;
        dense *= group_sizes[g];
      }
    }
    rows_at_once = n_cols > kPiece / 2 ? 1 : std::clamp<int64_t>(kPiece / std::max<int64_t>(n_cols, 1), 1, std::max<int64_t>(n_rows, 1));
    col_pieces = (n_cols + kPiece - 1) / kPiece;
  }

  int64_t offset(const Operand& operand, int64_t row) const {
    int64_t offset = 0;
    for (size_t g = 0; g + 1 < row_sizes.size(); ++g) {
      offset += row % row_sizes[g] * operand.row_strides[g];
      row /= row_sizes[g];
    }
    return row_sizes.empty() ? 0 : offset + row * operand.row_strides.back();
  }

  std::vector<int64_t> shape;
  std::vector<Operand> operands;
  int64_t n_rows = 1;
  int64_t n_cols = 1;
  std::vector<int64_t> row_sizes;  // innermost first
  int64_t rows_at_once = 1;        // rows of a piece, of which all columns are computed together
  int64_t col_pieces = 1;          // pieces of one row
};

/// Elements of which one call of Function::compute takes care: `rows` whole rows, or columns of one row.
struct Piece {
  int64_t row, rows, col, n;
};

/// The inputs of one thread, and the computation of pieces.
template <typename Function, typename Math>
class Evaluator {
 public:
  Evaluator(const Space& space, const Math* scalars) : space_(space), scalars_(scalars) {}

  void operator()(const Piece& piece, Math* const* outputs) {
    const Math* inputs[Function::kInputs];
    for (int t = 0; t < Function::kInputs; ++t) inputs[t] = read(t, piece);
    Function::compute(piece.n, inputs, scalars_, outputs);
  }

 private:
  const Math* read(int t, const Piece& piece) {
    const Space::Operand& operand = space_.operands[t];
    Math* buffer = buffers_[t];
    if (piece.rows == 1 || operand.is_dense) {
      return load(operand, space_.offset(operand, piece.row) + piece.col * operand.col_stride, piece.n, buffer);
    }
    const int64_t known = operand.is_repeated ? rows_known_[t] : 0;
    for (int64_t r = known; r < piece.rows; ++r) {
      Math* row = buffer + r * space_.n_cols;
      const Math* source = load(operand, space_.offset(operand, piece.row + r), space_.n_cols, row);
      if (source != row) std::copy_n(source, space_.n_cols, row);
    }
    rows_known_[t] = std::max(known, piece.rows);
    return buffer;
  }

  /// n elements of an operand as Math: in place if they are stored so, else in `buffer`.
  static const Math* load(const Space::Operand& operand, int64_t offset, int64_t n, Math* buffer) {
    const char* source = operand.data + offset * element_size(operand.dtype);
    if (operand.col_stride == 0) {
      Math value;
      load_row(source, operand.dtype, 1, 1, &value);
      std::fill_n(buffer, n, value);
      return buffer;
    }
    if (operand.dtype == dtype_of<Math> && operand.col_stride == 1) return reinterpret_cast<const Math*>(source);
    load_row(source, operand.dtype, operand.col_stride, n, buffer);
    return buffer;
  }

  const Space& space_;
  const Math* scalars_;
  int64_t rows_known_[Function::kInputs] = {};
  alignas(64) Math buffers_[Function::kInputs][kPiece];
};

/// Calls body(evaluator, unit, piece) for all pieces on torch's threads. A unit is the pieces of one range of rows,
/// [n_rows * part / n_parts ...), and kPiece columns; a thread has whole units.
template <typename Function, typename Math, typename Body>
void for_each_piece(const Space& space, const Math* scalars, int64_t n_parts, const Body& body) {
  const int64_t cost = space.n_rows * std::min(space.n_cols, kPiece) / n_parts;
  parallel(n_parts * space.col_pieces, cost, [&](int64_t begin, int64_t end) {
    Evaluator<Function, Math> evaluator(space, scalars);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t part = unit / space.col_pieces, col = unit % space.col_pieces * kPiece;
      const int64_t last = space.n_rows * (part + 1) / n_parts;
      for (int64_t row = space.n_rows * part / n_parts; row < last; row += space.rows_at_once) {
        const int64_t rows = std::min(space.rows_at_once, last - row);
        body(evaluator, unit, Piece{row, rows, col, rows * std::min(kPiece, space.n_cols - col)});
      }
    }
  });
}

template <typename Math, size_t kCount>
std::array<Math, kCount> as_math(const std::array<double, kCount>& scalars) {
  std::array<Math, kCount> values{};
  for (size_t i = 0; i < kCount; ++i) values[i] = static_cast<Math>(scalars[i]);
  return values;
}

template <typename Function, typename Math, size_t kScalars>
Tensor forward_in(const Space& space, const std::array<double, kScalars>& scalars, ScalarType type) {
  Tensor output = empty(space.shape.data(), space.shape.size(), type);
  if (space.n_rows * space.n_cols == 0) return output;
  const auto values = as_math<Math>(scalars);
  const OutputRows rows(output, space.n_cols);
  const int64_t n_parts = (space.n_rows + space.rows_at_once - 1) / space.rows_at_once;
  for_each_piece<Function, Math>(space, values.data(), n_parts, [&](auto& evaluator, int64_t, const Piece& piece) {
    alignas(64) Math buffer[kPiece];
    Math* target = rows.target(piece.row, piece.col, buffer);
    evaluator(piece, &target);
    rows.commit(piece.row, piece.col, piece.n, target);
  });
  return output;
}

/// The expression, contiguous, in the type that the tensors promote to.
template <typename Function, size_t kScalars>
Tensor forward(const std::vector<const Tensor*>& tensors, const std::array<double, kScalars>& scalars) {
  ScalarType type = tensors[0]->scalar_type();
  for (const Tensor* tensor : tensors) type = promote_types(type, tensor->scalar_type());
  const Space space(tensors);
  return type == ScalarType::Double ? forward_in<Function, double>(space, scalars, type)
                                    : forward_in<Function, float>(space, scalars, type);
}

/// How the gradient of a tensor comes from that of its broadcast form. Sums are in double, in an order that depends only
/// on shapes and strides.
enum class Sum { kNotNeeded, kNone, kRows, kColumns, kAll, kLater };

inline Sum sum_of(const Tensor& tensor, const Space& space, const Space::Operand& operand, bool sums_here) {
  const int64_t numel = tensor.numel();
  if (numel == space.n_rows * space.n_cols) return Sum::kNone;
  if (!sums_here) return Sum::kLater;
  if (numel == 1) return Sum::kAll;
  if (operand.is_repeated && operand.col_stride != 0 && numel == space.n_cols) return Sum::kRows;
  const bool has_rows = std::ranges::find(operand.row_strides, 0) == operand.row_strides.end();
  return operand.col_stride == 0 && has_rows && numel == space.n_rows ? Sum::kColumns : Sum::kLater;
}

/// The gradient of one tensor while pieces are computed.
template <typename Math>
class Gradient {
 public:
  Gradient(const Tensor& tensor, const Space& space, Sum sum, int64_t n_parts)
      : space_(space), sum_(sum), n_parts_(n_parts), type_(tensor.scalar_type()) {
    constexpr ScalarType kMath = std::is_same_v<Math, double> ? ScalarType::Double : ScalarType::Float;
    if (sum == Sum::kNone) result_ = empty_like(tensor, type_);
    if (sum == Sum::kLater) result_ = empty(space.shape.data(), space.shape.size(), kMath);
    if (result_) rows_.emplace(*result_, space.n_cols);
    if (sum == Sum::kRows) sums_.resize(n_parts * space.n_cols);
    if (sum == Sum::kColumns) sums_.resize(space.n_rows * space.col_pieces);
    if (sum == Sum::kAll) sums_.resize(n_parts * space.col_pieces);
  }

  Math* target(const Piece& piece, Math* buffer) const {
    return rows_ ? rows_->target(piece.row, piece.col, buffer) : buffer;
  }

  void add(int64_t unit, const Piece& piece, const Math* values) {
    if (rows_) return rows_->commit(piece.row, piece.col, piece.n, values);
    const int64_t width = piece.n / piece.rows;
    if (sum_ == Sum::kAll) sums_[unit] += sum<Math>(piece.n, [=](int64_t i) { return values[i]; });
    for (int64_t r = 0; r < piece.rows && sum_ == Sum::kColumns; ++r) {
      const Math* row = values + r * width;
      sums_[(piece.row + r) * space_.col_pieces + piece.col / kPiece] =
          sum<Math>(width, [=](int64_t i) { return row[i]; });
    }
    for (int64_t r = 0; r < piece.rows && sum_ == Sum::kRows; ++r) {
      double* sums = sums_.data() + unit / space_.col_pieces * space_.n_cols + piece.col;
      const Math* row = values + r * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) sums[i] += row[i];
    }
  }

  /// Of the tensor's shape or, flat, of its elements; for kLater of the broadcast shape.
  Tensor result() {
    if (result_) return *result_;
    if (sum_ == Sum::kNotNeeded) return total(0, 1, 0, 0);
    if (sum_ == Sum::kRows) return total(space_.n_cols, n_parts_, 1, space_.n_cols);
    if (sum_ == Sum::kColumns) return total(space_.n_rows, space_.col_pieces, space_.col_pieces, 1);
    return total(1, static_cast<int64_t>(sums_.size()), 0, 1);
  }

 private:
  Tensor total(int64_t n, int64_t terms, int64_t stride, int64_t term_stride) {
    std::vector<double> totals(n);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t term = 0; term < terms; ++term) totals[i] += sums_[i * stride + term * term_stride];
    }
    Tensor result = empty(&n, 1, type_);
    OutputRows(result, n).store(0, 0, n, totals.data());
    return result;
  }

  const Space& space_;
  Sum sum_;
  int64_t n_parts_;
  ScalarType type_;
  std::optional<Tensor> result_;
  std::optional<OutputRows> rows_;
  std::vector<double> sums_;
};

template <typename Function, typename Math, size_t kScalars>
std::vector<Tensor> backward_in(const std::vector<const Tensor*>& tensors, const Space& space,
                                const std::array<double, kScalars>& scalars, int64_t needed, bool sums_here) {
  constexpr int kOutputs = Function::kOutputs;
  std::array<Sum, kOutputs> sums;
  for (int t = 0; t < kOutputs; ++t) {
    const bool is_needed = (needed >> t & 1) != 0;
    sums[t] = is_needed ? sum_of(*tensors[t], space, space.operands[t], sums_here) : Sum::kNotNeeded;
  }
  int64_t n_parts = (space.n_rows + space.rows_at_once - 1) / space.rows_at_once;
  if (std::ranges::find(sums, Sum::kRows) != sums.end()) {
    // Fewer where a row has many pieces: each part has a row of sums.
    const int64_t most = std::clamp<int64_t>(256 / space.col_pieces, 1, 64);
    n_parts = std::clamp<int64_t>(n_parts / 16, 1, most);
  }
  std::vector<Gradient<Math>> gradients;
  for (int t = 0; t < kOutputs; ++t) gradients.emplace_back(*tensors[t], space, sums[t], n_parts);
  const auto values = as_math<Math>(scalars);
  for_each_piece<Function, Math>(space, values.data(), n_parts, [&](auto& evaluator, int64_t unit, const Piece& piece) {
    alignas(64) Math buffers[kOutputs][kPiece];
    Math* targets[kOutputs];
    for (int t = 0; t < kOutputs; ++t) targets[t] = gradients[t].target(piece, buffers[t]);
    evaluator(piece, targets);
    for (int t = 0; t < kOutputs; ++t) gradients[t].add(unit, piece, targets[t]);
  });
  std::vector<Tensor> results;
  for (Gradient<Math>& gradient : gradients) results.push_back(gradient.result());
  return results;
}

/// The gradients of the first kOutputs tensors; the last tensor is that of the result, and not empty.
///
/// @param needed    a bit for each tensor; of the others comes a tensor without elements
/// @param sums_here false: gradients of tensors that broadcast come unsummed
template <typename Function, size_t kScalars>
std::vector<Tensor> backward(const std::vector<const Tensor*>& tensors, const std::array<double, kScalars>& scalars,
                             int64_t needed, bool sums_here) {
  const Space space(tensors);
  const bool is_wide = std::ranges::any_of(space.operands, [](const auto& operand) { return operand.dtype == kFloat64; });
  return is_wide ? backward_in<Function, double>(tensors, space, scalars, needed, sums_here)
                 : backward_in<Function, float>(tensors, space, scalars, needed, sums_here);
}

/// The tensors as the result of an op.
template <size_t... kPlaces>
auto as_tuple(std::vector<Tensor> tensors, std::index_sequence<kPlaces...>) {
  return std::make_tuple(std::move(tensors[kPlaces])...);
}

}  // namespace fuseopt::expression
