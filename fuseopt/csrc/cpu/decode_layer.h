// What a linear layer of a decode step has around its products: a norm before, bias, activation, gate and residual after.
#pragma once

#include <bit>
#include <string>

#include "cpu/decode_kernels.h"
#include "cpu/gelu.h"
#include "cpu/rows.h"

namespace fuseopt {

struct Norm {
  std::string kind;
  std::optional<Tensor> weight;
  std::optional<Tensor> bias;
  double eps;
};

enum class LinearActivation { kNone, kRelu, kGelu, kGeluTanh, kSilu };

/// A call of `op`, checked, whose products have out_features[i] columns with weight i.
struct DecodeLayer {
  /// `type`: of the products' input and, unless the residual's is wider, of the output.
  DecodeLayer(const std::string& op, const Tensor& given, ScalarType type, const std::vector<int64_t>& out_features,
              const std::vector<Tensor>& given_biases, const std::optional<Tensor>& given_residual, const Norm& norm,
              const std::string& activation_name, bool gated);

  const std::vector<int64_t> out_features;
  std::vector<int64_t> first;  // column of each weight's products among all
  const bool gated;
  LinearActivation activation;
  std::vector<Rows> biases;
  std::optional<Rows> residual;
  Tensor input;  // after the norm
  Tensor output;
};

template <typename Math>
void activate(LinearActivation activation, Math* x, int64_t n) {
  const auto each = [=](auto value) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] = value(x[i]);
  };
  switch (activation) {
    case LinearActivation::kNone: return;
    case LinearActivation::kRelu: return each([](Math v) { return v < 0 ? Math{0} : v; });
    case LinearActivation::kGelu: return each([](Math v) { return ErfGelu::value(v); });
    case LinearActivation::kGeluTanh: return each([](Math v) { return TanhGelu::value(v); });
    case LinearActivation::kSilu: return each([](Math v) { return v / (1 + exp(-v)); });
  }
}

/// Stores n elements plus their residual, added as Residual: a residual may be double and a product not.
template <typename Residual, typename Math>
void store_sum(const Math* result, const Rows& residual_rows, int64_t row, int64_t column, int64_t n,
               const OutputRows& output) {
  Residual sums[kPiece];
  const Residual* residual = residual_rows.read(row, column, n, sums);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sums[i] = result[i] + residual[i];
  output.store(row, column, n, sums);
}

/// Bias, activation, gate and residual, for pieces of every row with weight `index`. `sums(row, index, column, n)` are
/// products, to be overwritten.
template <typename Math, typename Residual, typename Sums>
void finish(const DecodeLayer& layer, int64_t index, const Sums& sums_of) {
  const OutputRows output(layer.output, layer.output.size(layer.output.dim() - 1));
  const int64_t rows = Rows(layer.output).n_rows(), out_features = layer.out_features[index];
  const int64_t pieces = (out_features + kPiece - 1) / kPiece;
  parallel(rows * pieces, std::min(out_features, kPiece), [&](int64_t begin, int64_t end) {
    const RowBuffer<Math> buffer(kPiece);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / pieces, column = task % pieces * kPiece;
      const int64_t n = std::min(kPiece, out_features - column);
      const auto product = [&](int64_t of) {
        Math* sums = sums_of(row, of, column, n);
        if (!layer.biases.empty()) {
          const Math* bias = layer.biases[of].template read<Math>(0, column, n, buffer.get());
#pragma omp simd
          for (int64_t i = 0; i < n; ++i) sums[i] += bias[i];
        }
        return sums;
      };
      Math* result = product(index);
      activate(layer.activation, result, n);
      if (layer.gated) {
        const Math* factors = product(1);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) result[i] *= factors[i];
      }
      const int64_t first = layer.first[index] + column;
      if (layer.residual) {
        store_sum<Residual>(result, *layer.residual, row, first, n, output);
      } else {
        output.store(row, first, n, result);
      }
    }
  });
}

/// All weights' outputs.
template <typename Math, typename Sums>
void finish_layer(const DecodeLayer& layer, const Sums& sums) {
  const auto finish_one = [&](int64_t index) {
    if (layer.output.scalar_type() == ScalarType::Double) return finish<Math, double>(layer, index, sums);
    if constexpr (std::is_same_v<Math, float>) finish<Math, float>(layer, index, sums);
  };
  for (size_t i = 0; i < (layer.gated ? 1 : layer.out_features.size()); ++i) finish_one(i);
}

/// The rows of a layer's input, rounded to `type`.
template <typename Math>
RowBuffer<Math> rounded_rows(const Tensor& input, ScalarType type) {
  const Rows rows(input);
  const int64_t n = rows.n_cols();
  RowBuffer<Math> x(rows.n_rows() * n);
  for (int64_t row = 0; row < rows.n_rows(); ++row) {
    Math* target = x.get() + row * n;
    const Math* read = rows.read(row, target);
    if (read != target) std::copy_n(read, n, target);
    if (input.scalar_type() != type) round_row(target, n, to_dtype(type));
  }
  return x;
}

/// Rows of numbers that bfloat16 represents exactly, in the layout that BFloat16Kernels need.
class BFloat16Rows {
 public:
  BFloat16Rows(const float* rows, int64_t count, int64_t length)
      : stride((length + kPaddedLength - 1) / kPaddedLength * kPaddedLength), data_(count * stride) {
    for (int64_t row = 0; row < count; ++row, rows += length) {
      uint16_t* target = data_.get() + row * stride;
      for (int64_t i = 0; i < length; ++i) target[i] = std::bit_cast<uint32_t>(rows[i]) >> 16;
      std::fill(target + length, target + stride, 0);
    }
  }

  const uint16_t* get() const { return data_.get(); }
  const int64_t stride;

 private:
  const RowBuffer<uint16_t> data_;
};

}  // namespace fuseopt
