// Declarations of the ops that both libraries have kernels for.
#pragma once

#include "arguments.h"

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
constexpr auto kDecodeAttention = arguments("decode_attention", {{"query", kFloats},
                                                                 {"key_cache", kFloats, "query"},
                                                                 {"value_cache", kFloats, "query"},
                                                                 {"lengths", kIntegers},
                                                                 {"starts", kIntegers},
                                                                 {"mask", kOnlyBool},
                                                                 {"bias", kFloats}});
constexpr auto kDecodeAttentionInPlace = arguments("decode_attention_", {{"query", kFloats},
                                                                         {"key", kFloats, "query"},
                                                                         {"value", kFloats, "query"},
                                                                         {"key_cache", kFloats, "query"},
                                                                         {"value_cache", kFloats, "query"},
                                                                         {"positions", kIntegers},
                                                                         {"starts", kIntegers},
                                                                         {"mask", kOnlyBool},
                                                                         {"bias", kFloats},
                                                                         {"ancestry", kOnlyInt},
                                                                         {"rotary", kOnlyFloat},
                                                                         {"row_positions", kIntegers},
                                                                         {"q_norm", kFloats},
                                                                         {"k_norm", kFloats}});
constexpr auto kQuantizedAttention = arguments("decode_quantized_attention", {{"query", kUpToFloat},
                                                                              {"key_cache", kOnlyByte},
                                                                              {"value_cache", kOnlyByte},
                                                                              {"key_scales", kOnlyFloat},
                                                                              {"value_scales", kOnlyFloat},
                                                                              {"lengths", kIntegers},
                                                                              {"starts", kIntegers},
                                                                              {"mask", kOnlyBool},
                                                                              {"bias", kFloats}});
constexpr auto kQuantizedAttentionInPlace = arguments("decode_quantized_attention_", {{"query", kUpToFloat},
                                                                                      {"key", kUpToFloat, "query"},
                                                                                      {"value", kUpToFloat, "query"},
                                                                                      {"key_cache", kOnlyByte},
                                                                                      {"value_cache", kOnlyByte},
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
