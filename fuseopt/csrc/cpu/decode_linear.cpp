// A linear layer of few rows for decode steps: see fuseopt/ops/decode/linear.py.
#include <cstring>

#include "check.h"
#include "cpu/decode_kernels.h"
#include "cpu/decode_layer.h"
#include "cpu/ops.h"

namespace fuseopt {
namespace {

constexpr int64_t kMostParts = 8;

/// A weight [N, K] with unit stride in either dimension, copied if it has neither.
struct Weight {
  Tensor tensor;
  bool is_transposed;  // stored as [K, N]
  int64_t line_stride;
  int64_t first;  // of its columns, in the products with all weights

  Weight(const Tensor& given, int64_t first_column) : tensor(given), first(first_column) {
    const bool has_rows = given.stride(1) == 1 || given.size(1) == 1;
    is_transposed = !has_rows && (given.stride(0) == 1 || given.size(0) == 1);
    if (!has_rows && !is_transposed) tensor = torch::stable::contiguous(given);
    line_stride = tensor.stride(is_transposed ? 1 : 0);
  }

  int64_t out_features() const { return tensor.size(0); }
};

/// Products of all rows with all weights, in some parts that add up to them: of a transposed weight and few rows, each
/// thread reads some of the lines.
template <typename Math>
class LayerProducts {
 public:
  /// `is_rounded`: the weights' dtype has all numbers of the input.
  LayerProducts(const Math* input, int64_t rows, const std::vector<Weight>& weights, bool is_rounded)
      : input_(input), rows_(rows), weights_(weights), in_features_(weights[0].tensor.size(1)),
        width_(weights.back().first + weights.back().out_features()),
        threads_(threads_for(width_ * in_features_)),
        is_paired_(is_rounded && rows > kLinesRows && dtype(weights[0].tensor) == kBFloat16 && bfloat16_kernels()),
        column_tiles_(rows > kAddLinesRows || is_paired_ ? threads_ : (threads_ + kMostParts - 1) / kMostParts),
        parts_(has_transposed() ? threads_ / column_tiles_ : 1), products_(parts_ * rows * width_) {
    if constexpr (std::is_same_v<Math, float>) {
      if (is_paired_) rounded_.emplace(input, rows, in_features_);
    }
    torch::stable::parallel_for(0, threads_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread) compute(thread);
    });
  }

  /// [rows, columns of all weights], of weights that are not transposed.
  const Math* all() const { return products_.get(); }

  /// Columns of a row, of the product with weight `index`; `row` is a buffer that they may be computed in.
  Math* sums(int64_t row, int64_t index, int64_t column, int64_t n) {
    Math* total = at(0, row, index) + column;
    const int64_t parts = weights_[index].is_transposed ? parts_ : 1;
    for (int64_t part = 1; part < parts; ++part) {
      const Math* other = at(part, row, index) + column;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) total[i] += other[i];
    }
    return total;
  }

 private:
  static int64_t threads_for(int64_t elements) {
    constexpr int64_t kElementsPerThread = 16384;
    const int64_t most = torch::stable::get_num_threads();
    return std::clamp<int64_t>(elements / kElementsPerThread, 1, most);
  }

  bool has_transposed() const {
    return std::any_of(weights_.begin(), weights_.end(), [](const Weight& weight) { return weight.is_transposed; });
  }

  Math* at(int64_t part, int64_t row, int64_t index) {
    return products_.get() + (part * rows_ + row) * width_ + weights_[index].first;
  }

  /// Where the share of thread `index` of `count` in n outputs begins.
  int64_t share(int64_t n, int64_t index, int64_t count) const {
    if (rows_ <= kLinesRows) return n * index / count;
    return std::min(n, (n * index / count + kTileOutputs - 1) / kTileOutputs * kTileOutputs);
  }

  void compute(int64_t thread) {
    const DecodeKernels& kernels = decode_kernels();
    for (size_t i = 0; i < weights_.size(); ++i) {
      const Weight& weight = weights_[i];
      const int64_t out_features = weight.out_features();
      if (weight.is_transposed) {
        const int64_t part = thread % parts_, tile = thread / parts_;
        if (tile >= column_tiles_) continue;
        const int64_t begin = in_features_ * part / parts_, end = in_features_ * (part + 1) / parts_;
        const int64_t column = share(out_features, tile, column_tiles_);
        const int64_t columns = share(out_features, tile + 1, column_tiles_) - column;
        const auto of_floats = rows_ > kAddLinesRows ? kernels.add_tiles : kernels.add_lines;
        run(rounded_ ? bfloat16_kernels()->add_tiles : of_floats, weight, begin, end - begin, column, columns, begin,
            at(part, 0, i) + column);
      } else {
        const int64_t begin = share(out_features, thread, threads_), end = share(out_features, thread + 1, threads_);
        const auto of_floats = rows_ > kLinesRows ? kernels.dot_tiles : kernels.dot_lines;
        run(rounded_ ? bfloat16_kernels()->dot_tiles : of_floats, weight, begin, end - begin, 0, in_features_, 0,
            at(0, 0, i) + begin);
      }
    }
  }

  /// `first`: of the input's elements.
  void run(void (*kernel)(const Products&), const Weight& weight, int64_t line, int64_t lines, int64_t column,
           int64_t length, int64_t first, Math* output) const {
    const DType type = dtype(weight.tensor);
    const char* data = static_cast<const char*>(weight.tensor.const_data_ptr());
    const void* input = rounded_ ? static_cast<const void*>(rounded_->get() + first) : input_ + first;
    kernel({type, data + (line * weight.line_stride + column) * element_size(type), lines, length, weight.line_stride,
            input, rows_, rounded_ ? rounded_->stride : in_features_, output, width_});
  }

  const Math* input_;
  const int64_t rows_;
  const std::vector<Weight>& weights_;
  const int64_t in_features_, width_, threads_;
  const bool is_paired_;
  const int64_t column_tiles_, parts_;
  const RowBuffer<Math> products_;
  std::optional<BFloat16Rows> rounded_;
};

struct LowRank {
  std::optional<Tensor> a;  // [R, K]: the rows of each weight's update, one after another
  std::vector<Tensor> b;    // [N, its share of R] for each weight
};

/// The low-rank update of one weight's products.
template <typename Math>
class LowRankUpdate {
 public:
  /// `projected`: [rows, R], of which this update has the columns from `first` on.
  LowRankUpdate(const Tensor& b, const Math* projected, int64_t rows, int64_t ranks, int64_t first)
      : weight_{Weight(b, 0)}, input_(rows * b.size(1)) {
    const int64_t own = b.size(1);
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(projected + row * ranks + first, own, input_.get() + row * own);
    }
    products_.emplace(input_.get(), rows, weight_, false);
  }

  void add_to(Math* sums, int64_t row, int64_t column, int64_t n) {
    const Math* added = products_->sums(row, 0, column, n);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sums[i] += added[i];
  }

 private:
  const std::vector<Weight> weight_;
  const RowBuffer<Math> input_;
  std::optional<LayerProducts<Math>> products_;
};

/// By weight; null where there is none.
template <typename Math>
std::vector<std::unique_ptr<LowRankUpdate<Math>>> updates_of(const LowRank& low_rank, const Math* input, int64_t rows) {
  std::vector<std::unique_ptr<LowRankUpdate<Math>>> updates(low_rank.b.size());
  if (!low_rank.a) return updates;
  const std::vector<Weight> a{Weight(*low_rank.a, 0)};
  LayerProducts<Math> projected(input, rows, a, true);
  const int64_t ranks = a[0].out_features();
  int64_t first = 0;
  for (size_t i = 0; i < updates.size(); first += low_rank.b[i++].size(1)) {
    if (low_rank.b[i].size(1) == 0) continue;
    updates[i] = std::make_unique<LowRankUpdate<Math>>(low_rank.b[i], projected.all(), rows, ranks, first);
  }
  return updates;
}

template <typename Math>
void run_layer(const DecodeLayer& layer, const std::vector<Weight>& weights, const LowRank& low_rank) {
  if (layer.output.numel() == 0) return;
  const RowBuffer<Math> x = rounded_rows<Math>(layer.input, weights[0].tensor.scalar_type());
  const int64_t rows = Rows(layer.input).n_rows();
  LayerProducts<Math> products(x.get(), rows, weights, true);
  const auto updates = updates_of(low_rank, x.get(), rows);
  finish_layer<Math>(layer, [&](int64_t row, int64_t index, int64_t column, int64_t n) {
    Math* sums = products.sums(row, index, column, n);
    if (!updates.empty() && updates[index]) updates[index]->add_to(sums, row, column, n);
    return sums;
  });
}

Tensor linear_layer(const Tensor& input, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                    const LowRank& low_rank, const std::optional<Tensor>& residual, const Norm& norm,
                    const std::string& activation, bool gated) {
  constexpr const char* kOp = "fuseopt::decode_linear: ";
  FUSEOPT_CHECK(!weights.empty() && input.dim() > 0, kOp, "needs a weight, and an input with a dimension");
  const ScalarType type = weights[0].scalar_type();
  std::vector<Weight> of_layer;
  std::vector<int64_t> out_features;
  int64_t columns = 0;
  for (const Tensor& weight : weights) {
    FUSEOPT_CHECK(weight.dim() == 2 && weight.size(1) == input.size(input.dim() - 1) && weight.scalar_type() == type,
                  kOp, "weights must be [N, ", input.size(input.dim() - 1), "] of one dtype");
    of_layer.emplace_back(weight, columns);
    out_features.push_back(weight.size(0));
    columns += weight.size(0);
  }
  const DecodeLayer layer(kOp, input, type, out_features, biases, residual, norm, activation, gated);
  (type == ScalarType::Double ? run_layer<double> : run_layer<float>)(layer, of_layer, low_rank);
  return layer.output;
}

}  // namespace

Tensor decode_linear(const Tensor& input, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                     const std::optional<Tensor>& residual, const std::string& norm,
                     const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias, double eps,
                     const std::string& activation, bool gated, bool, const std::vector<Tensor>&) {
  return linear_layer(input, weights, biases, {}, residual, {norm, norm_weight, norm_bias, eps}, activation, gated);
}

Tensor decode_linear_low_rank(const Tensor& input, const std::vector<Tensor>& weights,
                              const std::vector<Tensor>& biases, const Tensor& a, const std::vector<Tensor>& b,
                              const std::optional<Tensor>&, const std::optional<Tensor>& residual,
                              const std::string& norm, const std::optional<Tensor>& norm_weight,
                              const std::optional<Tensor>& norm_bias, double eps, const std::string& activation,
                              bool gated, bool, const std::vector<Tensor>&) {
  constexpr const char* kOp = "fuseopt::decode_linear_low_rank: ";
  FUSEOPT_CHECK(b.size() == weights.size() && a.dim() == 2 && a.size(1) == weights[0].size(1), kOp,
                "needs a of [R, K] and a factor b for each weight");
  FUSEOPT_CHECK(dtype(a) == dtype(weights[0]), kOp, "a and b must have the weights' dtype");
  int64_t ranks = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    FUSEOPT_CHECK(b[i].dim() == 2 && b[i].size(0) == weights[i].size(0), kOp, "b must be [N, its share of R]");
    FUSEOPT_CHECK(dtype(b[i]) == dtype(a), kOp, "a and b must have the weights' dtype");
    ranks += b[i].size(1);
  }
  FUSEOPT_CHECK(ranks == a.size(0), kOp, "a has ", a.size(0), " rows, and the ranks of b add up to ", ranks);
  const LowRank low_rank{torch::stable::contiguous(a), b};
  return linear_layer(input, weights, biases, low_rank, residual, {norm, norm_weight, norm_bias, eps}, activation, gated);
}

}  // namespace fuseopt
