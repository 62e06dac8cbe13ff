// The raw CPU ops. Schemas and meaning: fuseopt/ops/<op>.py.
#pragma once

#include <string>
#include <tuple>

#include "rows.h"

namespace fuseopt {

std::tuple<Tensor, Tensor> rms_norm_fwd(const Tensor& input, const std::optional<Tensor>& weight, double eps,
                                        double offset, ScalarType norm_dtype, ScalarType output_dtype);
std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& grad_output, const Tensor& input,
                                        const std::optional<Tensor>& weight, const Tensor& rstd, double offset,
                                        bool need_weight_grad);
std::tuple<Tensor, Tensor, Tensor> add_rms_norm_fwd(const Tensor& input, const Tensor& residual,
                                                    const std::optional<Tensor>& weight, double eps, double offset,
                                                    ScalarType norm_dtype, ScalarType output_dtype);
std::tuple<Tensor, Tensor> add_rms_norm_bwd(const Tensor& grad_output, const std::optional<Tensor>& grad_sum,
                                            const Tensor& sum, const std::optional<Tensor>& weight, const Tensor& rstd,
                                            double offset, bool need_weight_grad);

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd(const Tensor& input, const std::optional<Tensor>& weight,
                                                  const std::optional<Tensor>& bias, double eps,
                                                  ScalarType output_dtype);
std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& grad_output, const Tensor& input,
                                                  const std::optional<Tensor>& weight, const Tensor& mean,
                                                  const Tensor& rstd, bool need_weight_grad, bool need_bias_grad);
std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_fwd(const Tensor& input, const Tensor& residual,
                                                              const std::optional<Tensor>& weight,
                                                              const std::optional<Tensor>& bias, double eps,
                                                              ScalarType output_dtype);
std::tuple<Tensor, Tensor, Tensor> add_layer_norm_bwd(const Tensor& grad_output, const std::optional<Tensor>& grad_sum,
                                                      const Tensor& sum, const std::optional<Tensor>& weight,
                                                      const Tensor& mean, const Tensor& rstd, bool need_weight_grad,
                                                      bool need_bias_grad);

Tensor gelu_fwd(const Tensor& input, const std::optional<Tensor>& bias, const std::string& approximate,
                ScalarType output_dtype);
Tensor gelu_bwd(const Tensor& grad_output, const Tensor& input, const std::optional<Tensor>& bias,
                const std::string& approximate);

Tensor gated_activation_fwd(const Tensor& gate, const Tensor& up, const std::string& activation,
                            ScalarType activation_dtype, ScalarType output_dtype);
std::tuple<Tensor, Tensor> gated_activation_bwd(const Tensor& grad_output, const Tensor& gate, const Tensor& up,
                                                const std::string& activation, ScalarType activation_dtype);

Tensor softmax_fwd(const Tensor& input, const std::optional<Tensor>& mask, double scale, ScalarType output_dtype);
Tensor softmax_bwd(const Tensor& grad_output, const Tensor& output, double scale, ScalarType input_dtype);

Tensor process_logits(const Tensor& input_ids, const Tensor& scores, double repetition_penalty,
                      const std::optional<Tensor>& prompt_ignore_length, int64_t no_repeat_ngram_size,
                      const std::optional<Tensor>& encoder_input_ids, int64_t encoder_no_repeat_ngram_size,
                      const std::optional<Tensor>& suppress_tokens, double temperature);
void process_logits_(const Tensor& input_ids, Tensor scores, double repetition_penalty,
                     const std::optional<Tensor>& prompt_ignore_length, int64_t no_repeat_ngram_size,
                     const std::optional<Tensor>& encoder_input_ids, int64_t encoder_no_repeat_ngram_size,
                     const std::optional<Tensor>& suppress_tokens, double temperature);

}  // namespace fuseopt
