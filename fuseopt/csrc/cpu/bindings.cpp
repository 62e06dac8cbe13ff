#include <torch/csrc/stable/library.h>
#include "ops.h"

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&fuseopt::rms_norm));
  m.impl("rms_norm_fwd", TORCH_BOX(&fuseopt::rms_norm_fwd));
  m.impl("rms_norm_bwd", TORCH_BOX(&fuseopt::rms_norm_bwd));
  m.impl("add_rms_norm", TORCH_BOX(&fuseopt::add_rms_norm));
  m.impl("add_rms_norm_fwd", TORCH_BOX(&fuseopt::add_rms_norm_fwd));
  m.impl("add_rms_norm_bwd", TORCH_BOX(&fuseopt::add_rms_norm_bwd));
  m.impl("layer_norm", TORCH_BOX(&fuseopt::layer_norm));
  m.impl("layer_norm_fwd", TORCH_BOX(&fuseopt::layer_norm_fwd));
  m.impl("layer_norm_bwd", TORCH_BOX(&fuseopt::layer_norm_bwd));
  m.impl("add_layer_norm", TORCH_BOX(&fuseopt::add_layer_norm));
  m.impl("add_layer_norm_fwd", TORCH_BOX(&fuseopt::add_layer_norm_fwd));
  m.impl("add_layer_norm_bwd", TORCH_BOX(&fuseopt::add_layer_norm_bwd));
  m.impl("gelu_fwd", TORCH_BOX(&fuseopt::gelu_fwd));
  m.impl("gelu_bwd", TORCH_BOX(&fuseopt::gelu_bwd));
  m.impl("gated_activation_fwd", TORCH_BOX(&fuseopt::gated_activation_fwd));
  m.impl("gated_activation_bwd", TORCH_BOX(&fuseopt::gated_activation_bwd));
  m.impl("softmax_fwd", TORCH_BOX(&fuseopt::softmax_fwd));
  m.impl("softmax_bwd", TORCH_BOX(&fuseopt::softmax_bwd));
  m.impl("process_logits", TORCH_BOX(&fuseopt::process_logits));
  m.impl("process_logits_", TORCH_BOX(&fuseopt::process_logits_));
}
