#include "cuda/common/binding.h"

namespace fuseopt::cross_entropy_grad_binding {
namespace {

constexpr const char* kOp = "cross_entropy_grad_";

void* vector_of(const char* name, const Tensor& vector, const Tensor& logits) {
  FUSEOPT_CHECK(vector.is_contiguous() && vector.numel() == logits.size(0), "fuseopt::", kOp, ": ", name,
                " must be contiguous with an element for each of ", logits.size(0), " rows");
  return vector.data_ptr();
}

void cross_entropy_grad(Tensor logits, std::optional<Tensor> grad_output, Tensor target, Tensor losses, Tensor in_range,
                        int64_t classes, int64_t ignore_index, double label_smoothing, double z_loss,
                        bool writes_gradient) {
  const Launch launch(kOp, logits);
  CrossEntropyGrad loss = {};
  loss.logits = pointer(kOp, logits);
  FUSEOPT_CHECK(logits.dim() == 2 && logits.is_contiguous(), "fuseopt::", kOp,
                ": logits must be a contiguous matrix [rows, width]");
  loss.rows = logits.size(0);
  loss.width = logits.size(1);
  const int64_t vector = 16 / (loss.logits.dtype == kFloat32 ? 4 : 2);
  FUSEOPT_CHECK(loss.width % vector == 0 && reinterpret_cast<uintptr_t>(loss.logits.data) % 16 == 0, "fuseopt::", kOp,
                ": rows of logits must begin at multiples of 16 bytes");
  FUSEOPT_CHECK(loss.rows <= INT32_MAX && loss.width <= INT32_MAX - 2 * vector, "fuseopt::", kOp, ": ", loss.rows,
                " x ", loss.width, " logits are too many");
  FUSEOPT_CHECK(classes > 0 && classes <= loss.width, "fuseopt::", kOp, ": ", classes, " classes in rows of ",
                loss.width);
  loss.classes = classes;
  if (grad_output.has_value()) {
    loss.grad_output = static_cast<const float*>(vector_of("grad_output", *grad_output, logits));
  }
  loss.target = static_cast<const int64_t*>(vector_of("target", target, logits));
  loss.losses = static_cast<float*>(vector_of("losses", losses, logits));
  loss.in_range = static_cast<bool*>(vector_of("in_range", in_range, logits));
  loss.ignore_index = ignore_index;
  loss.label_smoothing = static_cast<float>(label_smoothing);
  loss.z_loss = static_cast<float>(z_loss);
  loss.writes_gradient = writes_gradient;
  launch.check(fuseopt_cross_entropy_grad(loss, launch.stream()));
}

constexpr auto kCrossEntropyGradInPlace = arguments("cross_entropy_grad_", {
    {"logits", kUpToFloat}, {"grad_output", kOnlyFloat}, {"target", kOnlyLong}, {"losses", kOnlyFloat},
    {"in_range", kOnlyBool}});

}  // namespace
}  // namespace fuseopt::cross_entropy_grad_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::cross_entropy_grad_binding;
  library.impl("cross_entropy_grad_", TORCH_BOX((fuseopt::checked<cross_entropy_grad, kCrossEntropyGradInPlace>)));
}
