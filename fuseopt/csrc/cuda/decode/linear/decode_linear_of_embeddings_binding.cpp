#include "cuda/decode/linear/decode_embedding_binding.h"
#include "cuda/decode/linear/decode_linear_binding.h"

namespace fuseopt::decode_linear_of_embeddings_binding {
namespace {

constexpr const char* kOp = "decode_linear_of_embeddings";

// Whose rows add up to `sum`, together with those of another one.
EmbeddingTable table_for(const Tensor& sum, const Tensor& weight, const Tensor& indices) {
  FUSEOPT_CHECK(weight.is_contiguous() && indices.is_contiguous(), "fuseopt::", kOp,
                ": tables must be contiguous, and tokens and positions too");
  FUSEOPT_CHECK(weight.dim() == 2 && weight.size(1) == sum.size(sum.dim() - 1) &&
                    indices.numel() * weight.size(1) == sum.numel(),
                "fuseopt::", kOp, ": tables must be alike but for their lengths, and so must tokens and positions");
  return table_of(weight, indices);
}

// The layer of the sum of embeddings, which is yet to be written.
LinearCall call_of(const Tensor& sum, const Tensor& tokens, const Tensor& token_weight, const Tensor& positions,
                   const Tensor& position_weight, const Tensor& weight, const std::optional<Tensor>& bias,
                   const std::string& norm, const std::optional<Tensor>& norm_weight,
                   const std::optional<Tensor>& norm_bias, double eps, PdlGuard& guard,
                   const std::vector<Tensor>& prefetch) {
  LinearCall call = linear_call(kOp, sum, {weight}, as_list(bias), std::nullopt, norm, norm_weight, norm_bias, eps, "", false,
                                guard, prefetch);
  call.layer.tokens = table_for(sum, token_weight, tokens);
  call.layer.positions = table_for(sum, position_weight, positions);
  call.layer.sum = sum.data_ptr();
  return call;
}

Tensor sum_of(const Tensor& tokens, const Tensor& token_weight) {
  const auto sizes = tokens.sizes();
  std::vector<int64_t> sum_sizes(sizes.begin(), sizes.end());
  sum_sizes.push_back(token_weight.size(1));
  return allocate(token_weight, sum_sizes, dtype_of(token_weight));
}

bool takes_embeddings(Tensor tokens, Tensor token_weight, Tensor positions, Tensor position_weight, Tensor weight,
                      std::optional<Tensor> bias, std::string norm, std::optional<Tensor> norm_weight,
                      std::optional<Tensor> norm_bias) {
  PdlGuard none(false);
  const LinearCall call = call_of(sum_of(tokens, token_weight), tokens, token_weight, positions, position_weight, weight,
                                  bias, norm, norm_weight, norm_bias, 0, none, {});
  return fuseopt_takes_embeddings(call.layer);
}

std::tuple<Tensor, Tensor> decode_linear_of_embeddings(Tensor tokens, Tensor token_weight, Tensor positions,
                                                       Tensor position_weight, Tensor weight,
                                                       std::optional<Tensor> bias, std::string norm,
                                                       std::optional<Tensor> norm_weight,
                                                       std::optional<Tensor> norm_bias, double eps, bool pdl,
                                                       std::vector<Tensor> prefetch) {
  const Tensor sum = sum_of(tokens, token_weight);
  PdlGuard guard(pdl);
  const LinearCall call = call_of(sum, tokens, token_weight, positions, position_weight, weight, bias, norm, norm_weight,
                                  norm_bias, eps, guard, prefetch);
  FUSEOPT_CHECK(fuseopt_takes_embeddings(call.layer), "fuseopt::", kOp,
                ": the kernel does not take embeddings for such a layer");
  const Launch launch(kOp, call.output);
  launch.check(fuseopt_decode_linear(call.layer, launch.stream()));
  return {call.output, sum};
}

constexpr auto kTakesEmbeddings = arguments("takes_embeddings", {
    {"tokens", kIntegers}, {"token_weight", kFloats}, {"positions", kIntegers},
    {"position_weight", kFloats, "token_weight"}, {"weight", kFloats}, {"bias", kFloats}, {"norm_weight", kFloats},
    {"norm_bias", kFloats}});
constexpr auto kDecodeLinearOfEmbeddings = arguments("decode_linear_of_embeddings", {
    {"tokens", kIntegers}, {"token_weight", kFloats}, {"positions", kIntegers},
    {"position_weight", kFloats, "token_weight"}, {"weight", kFloats}, {"bias", kFloats}, {"norm_weight", kFloats},
    {"norm_bias", kFloats}, {"prefetch", kFloats}});

}  // namespace
}  // namespace fuseopt::decode_linear_of_embeddings_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_linear_of_embeddings_binding;
  library.impl("takes_embeddings", TORCH_BOX((fuseopt::checked<takes_embeddings, kTakesEmbeddings>)));
  library.impl("decode_linear_of_embeddings",
               TORCH_BOX((fuseopt::checked<decode_linear_of_embeddings, kDecodeLinearOfEmbeddings>)));
}
