#include "cuda/decode/linear/decode_linear_binding.h"
#include "shared_arguments.h"

namespace fuseopt::low_rank_binding {
namespace {

constexpr const char* kOp = "decode_linear_low_rank";

// Points `layer` at the factors; false if they do not lie as the kernels read them.
bool add_factors(DecodeLinear& layer, const Tensor& a, const std::vector<Tensor>& b,
                 const std::optional<Tensor>& exchange) {
  const auto fits = [&](const Tensor& factor, int64_t rows) {
    FUSEOPT_CHECK(factor.dim() == 2 && factor.size(0) == rows, "fuseopt::", kOp, ": a factor has ", factor.size(0),
                  " rows, not ", rows);
    return factor.is_contiguous() && dtype_code(kOp, dtype_of(factor)) == layer.weight_dtype;
  };
  FUSEOPT_CHECK(b.size() == static_cast<size_t>(layer.weight_count), "fuseopt::", kOp, ": ", b.size(),
                " factors b for ", layer.weight_count, " weights");
  bool fit = true;
  int64_t ranks = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    fit &= fits(b[i], layer.widths[i]);
    layer.low_rank_b[i] = b[i].data_ptr();
    ranks += layer.low_ranks[i] = b[i].size(1);
  }
  fit &= fits(a, ranks);
  FUSEOPT_CHECK(a.size(1) == layer.in_features, "fuseopt::", kOp, ": a has ", a.size(1), " columns, the input ",
                layer.in_features);
  layer.low_rank_a = a.data_ptr();
  if (!exchange.has_value()) return false;
  constexpr int64_t kOfRank = DecodeLinear::kExchangeCopies * DecodeLinear::kLowRankRows;
  const int64_t words = DecodeLinear::kExchangeHeader + kOfRank * ranks;
  FUSEOPT_CHECK(exchange->is_contiguous() && exchange->numel() == words, "fuseopt::", kOp,
                ": exchange must be contiguous and have ", words, " elements");
  layer.exchange = static_cast<uint64_t*>(exchange->data_ptr());
  return fit && fuseopt_takes_low_rank(layer);
}

bool takes_low_rank(Tensor input, std::vector<Tensor> weights, std::vector<Tensor> biases, Tensor a,
                    std::vector<Tensor> b, std::optional<Tensor> exchange, std::optional<Tensor> residual,
                    std::string norm, std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias, double eps,
                    std::string activation, bool gated, bool pdl, std::vector<Tensor> prefetch) {
  PdlGuard guard(pdl);
  LinearCall call = linear_call(kOp, guard, input, weights, biases, residual, {norm, norm_weight, norm_bias, eps},
                                prefetch, activation, gated);
  return add_factors(call.layer, a, b, exchange);
}

Tensor decode_linear_low_rank(Tensor input, std::vector<Tensor> weights, std::vector<Tensor> biases, Tensor a,
                              std::vector<Tensor> b, std::optional<Tensor> exchange, std::optional<Tensor> residual,
                              std::string norm, std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias,
                              double eps, std::string activation, bool gated, bool pdl, std::vector<Tensor> prefetch) {
  PdlGuard guard(pdl);
  LinearCall call = linear_call(kOp, guard, input, weights, biases, residual, {norm, norm_weight, norm_bias, eps},
                                prefetch, activation, gated);
  FUSEOPT_CHECK(add_factors(call.layer, a, b, exchange), "fuseopt::", kOp, ": no kernel takes such a layer");
  const Launch launch(kOp, call.output);
  launch.check(fuseopt_decode_linear(call.layer, launch.stream()));
  return call.output;
}

}  // namespace
}  // namespace fuseopt::low_rank_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::low_rank_binding;
  using namespace fuseopt::declared;
  library.impl("takes_low_rank", TORCH_BOX((fuseopt::checked<takes_low_rank, kTakesLowRank>)));
  library.impl("decode_linear_low_rank", TORCH_BOX((fuseopt::checked<decode_linear_low_rank, kDecodeLinearLowRank>)));
}
