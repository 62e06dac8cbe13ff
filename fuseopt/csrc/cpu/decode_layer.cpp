#include "cpu/decode_layer.h"

#include <numeric>

#include "check.h"
#include "cpu/ops.h"

namespace fuseopt {
namespace {

/// "rms_norm": rounded to `type` before the product with the weight. "gemma_rms_norm": times 1 + weight, not rounded before.
template <typename Math>
Tensor rms_normalised(const Tensor& input, const Norm& norm, ScalarType type) {
  const Rows rows(input);
  const int64_t n = rows.n_cols();
  const DType rounded_to = to_dtype(type);
  const std::vector<Math> weights =
      norm.weight ? flatten_parameter<Math>(*norm.weight, n, "norm_weight") : std::vector<Math>();
  const bool is_gemma = norm.kind == "gemma_rms_norm";
  const Math one = is_gemma ? 1 : 0;
  Tensor output = empty_like(input, type);
  const OutputRows output_rows(output, n);
  parallel(rows.n_rows(), n, [&](int64_t begin, int64_t end) {
    const RowBuffer<Math> x_buffer(n), y_buffer(n);
    for (int64_t row = begin; row < end; ++row) {
      const Math* x = rows.read(row, x_buffer.get());
      Math* y = y_buffer.get();
      const double square = sum<Math>(n, [=](int64_t i) { return x[i] * x[i]; });
      const Math scale = static_cast<Math>(1.0 / std::sqrt(square / n + norm.eps));
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) y[i] = x[i] * scale;
      if (norm.weight) {
        if (!is_gemma) round_row(y, n, rounded_to);
        const Math* w = weights.data();
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) y[i] *= one + w[i];
      }
      output_rows.store(row, 0, n, y);
    }
  });
  return output;
}

/// The layer's input in `type`.
Tensor normalised(const std::string& op, const Tensor& input, const Norm& norm, ScalarType type) {
  if (norm.kind == "layer_norm") return layer_norm(input, norm.weight, norm.bias, norm.eps, type);
  FUSEOPT_CHECK(norm.kind == "rms_norm" || norm.kind == "gemma_rms_norm", op, "unknown norm ", norm.kind);
  return any_double(input, norm.weight) ? rms_normalised<double>(input, norm, type)
                                        : rms_normalised<float>(input, norm, type);
}

LinearActivation activation_of(const std::string& op, const std::string& name) {
  if (name.empty()) return LinearActivation::kNone;
  if (name == "relu") return LinearActivation::kRelu;
  if (name == "gelu") return LinearActivation::kGelu;
  if (name == "silu") return LinearActivation::kSilu;
  FUSEOPT_CHECK(name == "gelu_tanh", op, "unknown activation ", name);
  return LinearActivation::kGeluTanh;
}

ScalarType output_type(ScalarType type, const std::optional<Tensor>& residual) {
  if (!residual) return type;
  const ScalarType other = residual->scalar_type();
  const int size = element_size(to_dtype(type)), other_size = element_size(to_dtype(other));
  // Two types of 2 bytes that differ are float16 and bfloat16.
  if (other != type && other_size == size) return ScalarType::Float;
  return other_size > size ? other : type;
}

}  // namespace

DecodeLayer::DecodeLayer(const std::string& op, const Tensor& given, ScalarType type,
                         const std::vector<int64_t>& out_features, const std::vector<Tensor>& given_biases,
                         const std::optional<Tensor>& given_residual, const Norm& norm,
                         const std::string& activation_name, bool gated)
    : out_features(out_features), first(out_features.size()), gated(gated), activation(activation_of(op, activation_name)),
      input(given) {
  const size_t count = out_features.size();
  FUSEOPT_CHECK(given_biases.empty() || given_biases.size() == count, op, given_biases.size(), " biases for ", count,
                " weights");
  FUSEOPT_CHECK(!gated || (count == 2 && out_features[0] == out_features[1]), op, "gated takes two weights of one shape");
  for (size_t i = 0; i < given_biases.size(); ++i) {
    FUSEOPT_CHECK(given_biases[i].dim() == 1 && given_biases[i].size(0) == out_features[i], op, "bias must be [",
                  out_features[i], "]");
    biases.emplace_back(given_biases[i]);
  }
  std::exclusive_scan(out_features.begin(), out_features.end(), first.begin(), int64_t{0});
  std::vector<int64_t> sizes(given.sizes().begin(), given.sizes().end());
  sizes.back() = gated ? out_features[0] : first.back() + out_features.back();
  if (given_residual) residual.emplace(*given_residual, IntHeaderOnlyArrayRef(sizes));
  output = empty(sizes.data(), sizes.size(), output_type(type, given_residual));
  if (!norm.kind.empty() && output.numel() > 0) input = normalised(op, given, norm, type);
}

}  // namespace fuseopt
