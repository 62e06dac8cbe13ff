#include <torch/csrc/stable/library.h>
#include "shared_arguments.h"
#include "cpu/ops.h"

namespace fuseopt {

struct CpuLibrary {
  static int32_t device_type() { return aoti_torch_device_type_cpu(); }
  struct Scope {
    explicit Scope(int32_t) {}
  };
};

template <auto function, const auto& declaration>
constexpr auto checked = &Checked<function, declaration, CpuLibrary>::call;

}  // namespace fuseopt

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CPU, m) {
  using namespace fuseopt;
  m.impl("rms_norm", TORCH_BOX((checked<rms_norm, declared::kRmsNorm>)));
  m.impl("rms_norm_fwd", TORCH_BOX((checked<rms_norm_fwd, declared::kRmsNormFwd>)));
  m.impl("rms_norm_bwd", TORCH_BOX((checked<rms_norm_bwd, declared::kRmsNormBwd>)));
  m.impl("add_rms_norm", TORCH_BOX((checked<add_rms_norm, declared::kAddRmsNorm>)));
  m.impl("add_rms_norm_fwd", TORCH_BOX((checked<add_rms_norm_fwd, declared::kAddRmsNormFwd>)));
  m.impl("add_rms_norm_bwd", TORCH_BOX((checked<add_rms_norm_bwd, declared::kAddRmsNormBwd>)));
  m.impl("layer_norm", TORCH_BOX((checked<layer_norm, declared::kLayerNorm>)));
  m.impl("layer_norm_fwd", TORCH_BOX((checked<layer_norm_fwd, declared::kLayerNormFwd>)));
  m.impl("layer_norm_bwd", TORCH_BOX((checked<layer_norm_bwd, declared::kLayerNormBwd>)));
  m.impl("add_layer_norm", TORCH_BOX((checked<add_layer_norm, declared::kAddLayerNorm>)));
  m.impl("add_layer_norm_fwd", TORCH_BOX((checked<add_layer_norm_fwd, declared::kAddLayerNormFwd>)));
  m.impl("add_layer_norm_bwd", TORCH_BOX((checked<add_layer_norm_bwd, declared::kAddLayerNormBwd>)));
  m.impl("gelu_fwd", TORCH_BOX((checked<gelu_fwd, declared::kGeluFwd>)));
  m.impl("gelu_bwd", TORCH_BOX((checked<gelu_bwd, declared::kGeluBwd>)));
  m.impl("gated_activation_fwd", TORCH_BOX((checked<gated_activation_fwd, declared::kGatedActivationFwd>)));
  m.impl("gated_activation_bwd", TORCH_BOX((checked<gated_activation_bwd, declared::kGatedActivationBwd>)));
  m.impl("softmax_fwd", TORCH_BOX((checked<softmax_fwd, declared::kSoftmaxFwd>)));
  m.impl("softmax_bwd", TORCH_BOX((checked<softmax_bwd, declared::kSoftmaxBwd>)));
  m.impl("process_logits", TORCH_BOX((checked<process_logits, declared::kProcessLogits>)));
  m.impl("process_logits_", TORCH_BOX((checked<process_logits_, declared::kProcessLogitsInPlace>)));
  m.impl("decode_linear", TORCH_BOX((checked<decode_linear, declared::kDecodeLinear>)));
  m.impl("decode_linear_low_rank", TORCH_BOX((checked<decode_linear_low_rank, declared::kDecodeLinearLowRank>)));
  m.impl("decode_low_bit_linear", TORCH_BOX((checked<decode_low_bit_linear, declared::kDecodeLowBitLinear>)));
  m.impl("decode_attention", TORCH_BOX((checked<decode_attention, declared::kDecodeAttention>)));
  m.impl("decode_attention_", TORCH_BOX((checked<decode_attention_, declared::kDecodeAttentionInPlace>)));
}
