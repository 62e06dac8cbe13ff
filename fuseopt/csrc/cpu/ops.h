// The raw CPU ops. Schemas and meaning: fuseopt/ops/<op>.py.
#pragma once

#include <string>
#include <tuple>

#include "cpu/rows.h"

namespace fuseopt {

Tensor rms_norm(const Tensor& input, const std::optional<Tensor>& weight, double eps, int64_t cast_order,
                double offset);
std::tuple<Tensor, Tensor> rms_norm_fwd(const Tensor& input, const std::optional<Tensor>& weight, double eps,
                                        int64_t cast_order, double offset);
std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& grad_output, const Tensor& input,
                                        const std::optional<Tensor>& weight, const Tensor& rstd, double offset,
                                        bool need_weight_grad);
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual,
                                        const std::optional<Tensor>& weight, double eps, int64_t cast_order,
                                        double offset);
std::tuple<Tensor, Tensor, Tensor> add_rms_norm_fwd(const Tensor& input, const Tensor& residual,
                                                    const std::optional<Tensor>& weight, double eps,
                                                    int64_t cast_order, double offset);
std::tuple<Tensor, Tensor> add_rms_norm_bwd(const Tensor& grad_output, const std::optional<Tensor>& grad_sum,
                                            const Tensor& sum, const std::optional<Tensor>& weight, const Tensor& rstd,
                                            double offset, bool need_weight_grad);

Tensor layer_norm(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                  double eps, std::optional<ScalarType> output_dtype);
std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd(const Tensor& input, const std::optional<Tensor>& weight,
                                                  const std::optional<Tensor>& bias, double eps,
                                                  std::optional<ScalarType> output_dtype);
std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& grad_output, const Tensor& input,
                                                  const std::optional<Tensor>& weight, const Tensor& mean,
                                                  const Tensor& rstd, bool need_weight_grad, bool need_bias_grad,
                                                  std::optional<ScalarType> bias_dtype);
std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual,
                                          const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                          double eps, std::optional<ScalarType> output_dtype);
std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_fwd(const Tensor& input, const Tensor& residual,
                                                              const std::optional<Tensor>& weight,
                                                              const std::optional<Tensor>& bias, double eps,
                                                              std::optional<ScalarType> output_dtype);
std::tuple<Tensor, Tensor, Tensor> add_layer_norm_bwd(const Tensor& grad_output, const std::optional<Tensor>& grad_sum,
                                                      const Tensor& sum, const std::optional<Tensor>& weight,
                                                      const Tensor& mean, const Tensor& rstd, bool need_weight_grad,
                                                      bool need_bias_grad, std::optional<ScalarType> bias_dtype);

Tensor gelu_fwd(const Tensor& input, bool tanh, const std::optional<Tensor>& bias,
                std::optional<ScalarType> output_dtype);
Tensor gelu_bwd(const Tensor& grad_output, const Tensor& input, bool tanh, const std::optional<Tensor>& bias);

Tensor gated_activation_fwd(const Tensor& gate, const Tensor& up, int64_t activation,
                            std::optional<ScalarType> activation_dtype);
std::tuple<Tensor, Tensor> gated_activation_bwd(const Tensor& grad_output, const Tensor& gate, const Tensor& up,
                                                int64_t activation, std::optional<ScalarType> activation_dtype);

Tensor softmax_fwd(const Tensor& input, const std::optional<Tensor>& mask, double scale,
                   std::optional<ScalarType> output_dtype);
Tensor softmax_bwd(const Tensor& grad_output, const Tensor& output, double scale, ScalarType input_dtype);

Tensor process_logits(const Tensor& input_ids, const Tensor& scores, int64_t no_repeat_ngram_size,
                      double repetition_penalty, double temperature, const std::optional<Tensor>& suppress_tokens,
                      const std::optional<Tensor>& encoder_input_ids, int64_t encoder_no_repeat_ngram_size,
                      const std::optional<Tensor>& prompt_ignore_length);
void process_logits_(const Tensor& input_ids, Tensor scores, int64_t no_repeat_ngram_size,
                     double repetition_penalty, double temperature, const std::optional<Tensor>& suppress_tokens,
                     const std::optional<Tensor>& encoder_input_ids, int64_t encoder_no_repeat_ngram_size,
                     const std::optional<Tensor>& prompt_ignore_length);

Tensor decode_linear(const Tensor& input, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                     const std::optional<Tensor>& residual, const std::string& norm,
                     const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias, double eps,
                     const std::string& activation, bool gated, bool pdl, const std::vector<Tensor>& prefetch);

Tensor decode_linear_low_rank(const Tensor& input, const std::vector<Tensor>& weights,
                              const std::vector<Tensor>& biases, const Tensor& a, const std::vector<Tensor>& b,
                              const std::optional<Tensor>& exchange, const std::optional<Tensor>& residual,
                              const std::string& norm, const std::optional<Tensor>& norm_weight,
                              const std::optional<Tensor>& norm_bias, double eps, const std::string& activation,
                              bool gated, bool pdl, const std::vector<Tensor>& prefetch);

Tensor decode_low_bit_linear(const Tensor& input, const std::vector<Tensor>& values, const std::vector<Tensor>& scales,
                             const std::vector<Tensor>& zeros, const std::vector<Tensor>& biases,
                             const std::optional<Tensor>& residual, const std::string& norm,
                             const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                             double eps, const std::string& activation, bool gated, bool pdl,
                             const std::vector<Tensor>& prefetch);

Tensor decode_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                        const std::optional<Tensor>& key_scales, const std::optional<Tensor>& value_scales,
                        const Tensor& lengths, const std::optional<Tensor>& starts, const std::optional<Tensor>& mask,
                        const std::optional<Tensor>& bias, double scale, bool pdl);
Tensor decode_attention_(const Tensor& query, const Tensor& key, const Tensor& value, Tensor key_cache,
                         Tensor value_cache, const std::optional<Tensor>& key_scales,
                         const std::optional<Tensor>& value_scales, const Tensor& positions,
                         const std::optional<Tensor>& starts, const std::optional<Tensor>& mask,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& ancestry, double scale,
                         const std::optional<Tensor>& rotary, const std::optional<Tensor>& row_positions,
                         bool interleaved, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                         double norm_eps, double norm_offset, int64_t window, double softcap, bool pdl);

}  // namespace fuseopt
