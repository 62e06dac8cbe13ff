// Declarations of the ops that both libraries have kernels for, and checks that they share.
#pragma once

#include <algorithm>

#include "arguments.h"
#include "dtypes.h"

namespace fuseopt::declared {

constexpr Argument kOfRmsNorm[] = {{"input", kFloats}, {"weight", kFloats}};
constexpr Argument kOfAddRmsNorm[] = {{"input", kFloats}, {"residual", kFloats}, {"weight", kFloats}};
constexpr Argument kOfLayerNorm[] = {{"input", kFloats}, {"weight", kFloats}, {"bias", kFloats}};
constexpr Argument kOfAddLayerNorm[] = {{"input", kFloats}, {"residual", kFloats}, {"weight", kFloats}, {"bias", kFloats}};

constexpr auto kRmsNorm = arguments("rms_norm", kOfRmsNorm);
constexpr auto kRmsNormFwd = arguments("rms_norm_fwd", kOfRmsNorm);
constexpr auto kRmsNormBwd = arguments(
    "rms_norm_bwd", {{"grad_output", kFloats}, {"input", kFloats}, {"weight", kFloats}, {"rstd", kOnlyFloat | kOnlyDouble}});
constexpr auto kAddRmsNorm = arguments("add_rms_norm", kOfAddRmsNorm);
constexpr auto kAddRmsNormFwd = arguments("add_rms_norm_fwd", kOfAddRmsNorm);
constexpr auto kAddRmsNormBwd = arguments("add_rms_norm_bwd", {{"grad_output", kFloats},
                                                               {"grad_sum", kFloats},
                                                               {"sum", kFloats},
                                                               {"weight", kFloats},
                                                               {"rstd", kOnlyFloat | kOnlyDouble}});
constexpr auto kLayerNorm = arguments("layer_norm", kOfLayerNorm);
constexpr auto kLayerNormFwd = arguments("layer_norm_fwd", kOfLayerNorm);
constexpr auto kLayerNormBwd = arguments("layer_norm_bwd", {{"grad_output", kFloats},
                                                            {"input", kFloats},
                                                            {"weight", kFloats},
                                                            {"mean", kOnlyFloat | kOnlyDouble},
                                                            {"rstd", kOnlyFloat | kOnlyDouble}});
constexpr auto kAddLayerNorm = arguments("add_layer_norm", kOfAddLayerNorm);
constexpr auto kAddLayerNormFwd = arguments("add_layer_norm_fwd", kOfAddLayerNorm);
constexpr auto kAddLayerNormBwd = arguments("add_layer_norm_bwd", {{"grad_output", kFloats},
                                                                   {"grad_sum", kFloats},
                                                                   {"sum", kFloats},
                                                                   {"weight", kFloats},
                                                                   {"mean", kOnlyFloat | kOnlyDouble},
                                                                   {"rstd", kOnlyFloat | kOnlyDouble}});
constexpr auto kGeluFwd = arguments("gelu_fwd", {{"input", kFloats}, {"bias", kFloats}});
constexpr auto kGeluBwd = arguments("gelu_bwd", {{"grad_output", kFloats}, {"input", kFloats}, {"bias", kFloats}});
constexpr auto kGatedActivationFwd = arguments("gated_activation_fwd", {{"gate", kFloats}, {"up", kFloats}});
constexpr auto kGatedActivationBwd =
    arguments("gated_activation_bwd", {{"grad_output", kFloats}, {"gate", kFloats}, {"up", kFloats}});
constexpr auto kSoftmaxFwd = arguments("softmax_fwd", {{"input", kFloats}, {"mask", kFloats}});
constexpr auto kSoftmaxBwd = arguments("softmax_bwd", {{"grad_output", kFloats}, {"output", kFloats}});

constexpr Argument kOfProcessLogits[] = {{"input_ids", kIntegers},
                                         {"scores", kFloats},
                                         {"suppress_tokens", kIntegers},
                                         {"encoder_input_ids", kIntegers},
                                         {"prompt_ignore_length", kIntegers}};
constexpr auto kProcessLogits = arguments("process_logits", kOfProcessLogits);
constexpr auto kProcessLogitsInPlace = arguments("process_logits_", kOfProcessLogits);

constexpr auto kDecodeLinear = arguments("decode_linear", {{"input", kFloats},
                                                           {"weights", kFloats},
                                                           {"biases", kFloats},
                                                           {"residual", kFloats},
                                                           {"norm_weight", kFloats},
                                                           {"norm_bias", kFloats},
                                                           {"prefetch", kFloats}});
constexpr auto kDecodeLowBitLinear = arguments("decode_low_bit_linear", {{"input", kUpToFloat},
                                                                        {"values", kOnlyChar | kOnlyInt},
                                                                        {"scales", kUpToFloat},
                                                                        {"zeros", kOnlyByte},
                                                                        {"biases", kFloats},
                                                                        {"residual", kFloats},
                                                                        {"norm_weight", kFloats},
                                                                        {"norm_bias", kFloats},
                                                                        {"prefetch", kFloats | kOnlyChar | kOnlyInt}});
constexpr Argument kOfLowRank[] = {{"input", kFloats},      {"weights", kFloats},     {"biases", kFloats},
                                   {"a", kFloats},          {"b", kFloats},           {"exchange", kOnlyLong},
                                   {"residual", kFloats},   {"norm_weight", kFloats}, {"norm_bias", kFloats},
                                   {"prefetch", kFloats}};
constexpr auto kDecodeLinearLowRank = arguments("decode_linear_low_rank", kOfLowRank);
constexpr auto kTakesLowRank = arguments("takes_low_rank", kOfLowRank);
constexpr Dtypes kOfCaches = kFloats | kOnlyChar | kOnlyByte;
constexpr auto kDecodeAttention = arguments("decode_attention", {{"query", kFloats},
                                                                 {"key_cache", kOfCaches},
                                                                 {"value_cache", kOfCaches, "key_cache"},
                                                                 {"key_scales", kOnlyFloat},
                                                                 {"value_scales", kOnlyFloat},
                                                                 {"lengths", kIntegers},
                                                                 {"starts", kIntegers},
                                                                 {"mask", kOnlyBool},
                                                                 {"bias", kFloats}});
constexpr auto kDecodeAttentionInPlace = arguments("decode_attention_", {{"query", kFloats},
                                                                         {"key", kFloats, "query"},
                                                                         {"value", kFloats, "query"},
                                                                         {"key_cache", kOfCaches},
                                                                         {"value_cache", kOfCaches, "key_cache"},
                                                                         {"key_scales", kOnlyFloat},
                                                                         {"value_scales", kOnlyFloat},
                                                                         {"positions", kIntegers},
                                                                         {"starts", kIntegers},
                                                                         {"mask", kOnlyBool},
                                                                         {"bias", kFloats},
                                                                         {"ancestry", kOnlyInt},
                                                                         {"rotary", kOnlyFloat},
                                                                         {"row_positions", kIntegers},
                                                                         {"q_norm", kFloats},
                                                                         {"k_norm", kFloats}});

}  // namespace fuseopt::declared

namespace fuseopt {

// Scales of caches of 8 bits, [batch, kv_heads, capacity].
struct Scales {
  Tensor keys, values;
  CacheDType dtype;
};

// None if there are no scales and the caches have the query's dtype. Caches of e4m3 are passed as uint8.
inline std::optional<Scales> scales_of(const char* op, const Tensor& query, const Tensor& key_cache,
                                       const std::optional<Tensor>& keys, const std::optional<Tensor>& values) {
  const ScalarType type = scalar_type_of(key_cache), of_query = scalar_type_of(query);
  FUSEOPT_CHECK(keys.has_value() == values.has_value(), "fuseopt::", op, ": key_scales and value_scales belong together");
  if (!keys.has_value()) {
    FUSEOPT_CHECK(type == of_query, "fuseopt::", op, ": key_cache must be ", name_of(of_query), " without scales, not ",
                  name_of(type));
    return std::nullopt;
  }
  FUSEOPT_CHECK(type == ScalarType::Char || type == ScalarType::Byte, "fuseopt::", op,
                ": key_cache must be int8 or uint8 with scales, not ", name_of(type));
  FUSEOPT_CHECK(of_query != ScalarType::Double, "fuseopt::", op, ": query must not be float64 with scales");
  for (const Tensor& of : {*keys, *values}) {
    const auto own = of.sizes(), of_cache = key_cache.sizes();
    FUSEOPT_CHECK(of.dim() == 3 && key_cache.dim() == 4 && std::equal(own.begin(), own.end(), of_cache.begin()),
                  "fuseopt::", op, ": key_scales and value_scales must be [batch, kv_heads, capacity] of the caches");
  }
  return Scales{*keys, *values, type == ScalarType::Char ? kInt8 : kFp8};
}

}  // namespace fuseopt
