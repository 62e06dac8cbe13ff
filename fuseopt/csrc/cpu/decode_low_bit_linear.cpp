// A linear layer of few rows with weights in 8 or 4 bits: see fuseopt/ops/decode/low_bit_linear.py.
#include "check.h"
#include "cpu/decode_kernels.h"
#include "cpu/decode_layer.h"
#include "cpu/ops.h"

namespace fuseopt {
namespace {

constexpr const char* kOp = "fuseopt::decode_low_bit_linear: ";
constexpr int64_t kNibblesPerWord = 8;

struct LowBitWeight {
  Tensor values, scales;
  std::optional<Tensor> zeros;

  LowBitWeight(const Tensor& values, const Tensor& scales, const std::optional<Tensor>& zeros)
      : values(torch::stable::contiguous(values)), scales(torch::stable::contiguous(scales)) {
    if (zeros) this->zeros = torch::stable::contiguous(*zeros);
  }

  int bits() const { return values.scalar_type() == ScalarType::Char ? 8 : 4; }
  int64_t out_features() const { return values.size(0); }
  int64_t in_features() const { return values.size(1) * (bits() == 8 ? 1 : kNibblesPerWord); }
  int64_t groups() const { return scales.size(1); }

  /// Without input and output.
  LowBitProducts products() const {
    LowBitProducts all = {};
    all.bits = bits();
    all.values = values.const_data_ptr();
    all.scales = scales.const_data_ptr();
    all.scale_type = dtype(scales);
    all.zeros = zeros ? static_cast<const uint8_t*>(zeros->const_data_ptr()) : nullptr;
    all.group = in_features() / groups();
    all.lines = out_features();
    all.length = in_features();
    return all;
  }

  void check(int64_t in_features) const {
    FUSEOPT_CHECK(values.dim() == 2 && in_features > 0 && this->in_features() == in_features, kOp,
                  "values must be [N, ", in_features, "] of int8, or int32 with 8 nibbles each");
    FUSEOPT_CHECK(scales.dim() == 2 && scales.size(0) == out_features(), kOp, "scales must be [N, groups]");
    const int64_t group = groups() > 0 ? in_features / groups() : 0;
    if (bits() == 8) {
      FUSEOPT_CHECK(groups() == 1 && scales.scalar_type() == ScalarType::Float && !zeros, kOp,
                    "int8 takes scales [N, 1] of float32, and no zeros");
    } else {
      const bool is_power_of_two = (group & (group - 1)) == 0;
      FUSEOPT_CHECK(group >= kNibblesPerWord && is_power_of_two && group * groups() == in_features, kOp,
                    "groups must be of 8, 16, 32, ... inputs");
    }
    FUSEOPT_CHECK(!zeros || (zeros->dim() == 2 && zeros->size(0) == out_features() && zeros->size(1) == groups()), kOp,
                  "zeros must be [N, groups]");
  }
};

/// Products [rows, columns of all weights] of rows of numbers of `type` with weights, which threads share by outputs.
void multiply(const float* input, int64_t rows, ScalarType type, const std::vector<LowBitWeight>& weights,
              const std::vector<int64_t>& first, float* products) {
  const int64_t in_features = weights[0].in_features(), width = first.back() + weights.back().out_features();
  const int64_t group = in_features / weights[0].groups();
  std::optional<BFloat16Rows> rounded;
  if (type == ScalarType::BFloat16 && rows >= kLowBitPairRows && group >= kSmallestPairedGroup && bfloat16_kernels()) {
    rounded.emplace(input, rows, in_features);
  }
  parallel(width, in_features, [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < weights.size(); ++i) {
      const LowBitWeight& weight = weights[i];
      const int64_t line = std::max<int64_t>(0, begin - first[i]);
      const int64_t lines = std::min(end - first[i], weight.out_features()) - line;
      if (lines <= 0) continue;
      LowBitProducts work = weight.products();
      work.rows = rows;
      work.output = products + first[i];
      work.output_stride = width;
      work = lines_from(work, line);
      work.lines = lines;
      if (rounded) {
        work.input = rounded->get();
        work.input_stride = rounded->stride;
        const int64_t done = bfloat16_kernels()->low_bit_tiles(work);
        work = lines_from(work, done);
      }
      work.input = input;
      work.input_stride = in_features;
      if (work.lines > 0) decode_kernels().low_bit(work);
    }
  });
}

}  // namespace

Tensor decode_low_bit_linear(const Tensor& input, const std::vector<Tensor>& values, const std::vector<Tensor>& scales,
                             const std::vector<Tensor>& zeros, const std::vector<Tensor>& biases,
                             const std::optional<Tensor>& residual, const std::string& norm,
                             const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                             double eps, const std::string& activation, bool gated, bool, const std::vector<Tensor>&) {
  FUSEOPT_CHECK(!values.empty() && input.dim() > 0, kOp, "needs a weight, and an input with a dimension");
  FUSEOPT_CHECK(scales.size() == values.size() && (zeros.empty() || zeros.size() == values.size()), kOp,
                "needs scales for each weight, and zeros for each or none");
  std::vector<LowBitWeight> weights;
  std::vector<int64_t> out_features;
  for (size_t i = 0; i < values.size(); ++i) {
    weights.emplace_back(values[i], scales[i], zeros.empty() ? std::nullopt : std::optional(zeros[i]));
    weights.back().check(input.size(input.dim() - 1));
    out_features.push_back(values[i].size(0));
  }
  const ScalarType type = input.scalar_type();
  const DecodeLayer layer(kOp, input, type, out_features, biases, residual, {norm, norm_weight, norm_bias, eps},
                          activation, gated);
  if (layer.output.numel() == 0) return layer.output;
  const int64_t rows = Rows(input).n_rows(), width = layer.first.back() + out_features.back();
  const RowBuffer<float> x = rounded_rows<float>(layer.input, type), products(rows * width);
  multiply(x.get(), rows, type, weights, layer.first, products.get());
  finish_layer<float>(layer, [&](int64_t row, int64_t index, int64_t column, int64_t) {
    return products.get() + row * width + layer.first[index] + column;
  });
  return layer.output;
}

}  // namespace fuseopt
