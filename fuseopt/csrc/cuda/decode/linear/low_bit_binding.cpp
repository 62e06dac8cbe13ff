#include "cuda/decode/linear/decode_linear_binding.h"
#include "shared_arguments.h"

namespace fuseopt::low_bit_binding {
namespace {

constexpr const char* kOp = "decode_low_bit_linear";
constexpr int64_t kNibbles = 8;  // of a word

// [N, groups] contiguous, of the dtype of the first weight's.
Tensor of_groups(const char* name, PdlGuard& guard, const std::vector<Tensor>& tensors, size_t i, const Tensor& values,
                 int64_t groups) {
  const Tensor& tensor = tensors[i];
  FUSEOPT_CHECK(tensor.dim() == 2 && tensor.size(0) == values.size(0) && tensor.size(1) == groups &&
                    dtype_of(tensor) == dtype_of(tensors[0]),
                "fuseopt::", kOp, ": ", name, " of weight ", i, " must be [", values.size(0), ", ", groups,
                "], of one dtype");
  return guard.contiguous(tensor);
}

Tensor decode_low_bit_linear(Tensor input, std::vector<Tensor> values, std::vector<Tensor> scales,
                             std::vector<Tensor> zeros, std::vector<Tensor> biases, std::optional<Tensor> residual,
                             std::string norm, std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias,
                             double eps, std::string activation, bool gated, bool pdl, std::vector<Tensor> prefetch) {
  check_weight_count(kOp, values.size());
  FUSEOPT_CHECK(scales.size() == values.size() && (zeros.empty() || zeros.size() == values.size()), "fuseopt::", kOp, ": ",
                scales.size(), " scales and ", zeros.size(), " zeros for ", values.size(), " values");
  PdlGuard guard(pdl);
  LowBitLinear low_bit = {};
  low_bit.bits = dtype_of(values[0]) == ScalarType::Char ? 8 : 4;
  FUSEOPT_CHECK(low_bit.bits == 4 || zeros.empty(), "fuseopt::", kOp, ": 8 bits have no zeros");
  std::vector<Tensor> read;
  for (const Tensor& of_weight : values) {
    FUSEOPT_CHECK(of_weight.dim() == 2 && of_weight.size(1) == values[0].size(1) && dtype_of(of_weight) == dtype_of(values[0]),
                  "fuseopt::", kOp, ": values must be int8 [N, K] or int32 [N, K / 8], all of one K and one dtype");
    read.push_back(guard.contiguous(of_weight));
  }
  const int64_t columns = values[0].size(1) * (low_bit.bits == 8 ? 1 : kNibbles);
  FUSEOPT_CHECK(scales[0].dim() == 2 && scales[0].size(1) > 0 && columns % scales[0].size(1) == 0, "fuseopt::", kOp,
                ": scales must be [N, K / group]");
  const int64_t groups = scales[0].size(1);
  low_bit.group = columns / groups;
  const bool is_group = low_bit.group == 32 || low_bit.group == 64 || low_bit.group == 128;
  FUSEOPT_CHECK(low_bit.bits == 8 ? groups == 1 : is_group, "fuseopt::", kOp, ": ", low_bit.bits,
                " bits with groups of ", low_bit.group, "; 8 bits have one scale an output, 4 bits groups of 32, 64 or 128");
  low_bit.scale_dtype = dtype_code(kOp, dtype_of(scales[0]));
  std::vector<Tensor> kept;
  for (size_t i = 0; i < values.size(); ++i) {
    low_bit.scales[i] = kept.emplace_back(of_groups("scales", guard, scales, i, values[i], groups)).data_ptr();
    if (zeros.empty()) continue;
    low_bit.zeros[i] = kept.emplace_back(of_groups("zeros", guard, zeros, i, values[i], groups)).data_ptr();
  }
  const StoredWeights weights{read, dtype_of(input), columns, columns};
  const LinearCall call = linear_call(kOp, guard, input, weights, biases, residual, {norm, norm_weight, norm_bias, eps},
                                      prefetch, activation, gated);
  low_bit.layer = call.layer;
  const Launch launch(kOp, call.output);
  launch.check(fuseopt_decode_low_bit_linear(low_bit, launch.stream()));
  return call.output;
}

}  // namespace
}  // namespace fuseopt::low_bit_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::low_bit_binding;
  library.impl("decode_low_bit_linear",
               TORCH_BOX((fuseopt::checked<decode_low_bit_linear, fuseopt::declared::kDecodeLowBitLinear>)));
}
