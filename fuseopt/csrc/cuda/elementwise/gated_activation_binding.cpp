#include "cast_order.h"
#include "shared_arguments.h"
#include "cuda/common/binding.h"

namespace fuseopt::gated_activation_binding {
namespace {

// The Activation with this index in fuseopt/ops/gated_activation.py.
int activation_code(const char* op, int64_t activation) {
  FUSEOPT_CHECK(activation >= kGelu && activation <= kRelu, "fuseopt::", op,
                ": activation must be from 0 to 3, not ", activation);
  return static_cast<int>(activation);
}

// The stride between rows of a tensor, or -1 if there is no single one.
int64_t row_stride(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (last < 0) return 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) return -1;
  int64_t stride = tensor.size(last), rows = 1;
  for (int64_t dim = last - 1; dim >= 0; --dim) {
    if (tensor.size(dim) == 1) continue;
    if (rows == 1) stride = tensor.stride(dim);
    else if (tensor.stride(dim) != stride * rows) return -1;
    rows *= tensor.size(dim);
  }
  return stride;
}

// The two inputs, read in place where possible: the halves of one projection are rows with gaps, and are not copied.
struct Inputs {
  Inputs(const char* op, const Tensor& gate_, const Tensor& up_) : gate(gate_), up(up_) {
    check_same(op, "up", up, gate);
    gate_stride = row_stride(gate);
    up_stride = row_stride(up);
    if (gate_stride < 0) {
      gate = as_contiguous(gate);
      gate_stride = row_stride(gate);
    }
    if (up_stride < 0) {
      up = as_contiguous(up);
      up_stride = row_stride(up);
    }
    columns = gate.dim() > 0 ? gate.size(gate.dim() - 1) : 1;
    rows = columns > 0 ? gate.numel() / columns : 0;
    if (gate_stride == columns && up_stride == columns) {
      columns *= rows;
      rows = 1;
    }
  }

  Tensor gate, up;
  int64_t gate_stride, up_stride;
  int64_t rows, columns;
};

Tensor gated_activation_fwd(Tensor gate, Tensor up, int64_t activation, std::optional<ScalarType> activation_dtype) {
  constexpr const char* kOp = "gated_activation_fwd";
  const Inputs in(kOp, gate, up);
  const Launch launch(kOp, in.gate);
  const ScalarType activated = activation_dtype.value_or(dtype_of(gate));
  Tensor output = allocate_like(in.gate, promote_types(activated, dtype_of(up)));
  launch.check(fuseopt_gated_activation_fwd({pointer(kOp, in.gate), in.gate_stride}, {pointer(kOp, in.up), in.up_stride},
                                            pointer(kOp, output), in.rows, in.columns, activation_code(kOp, activation),
                                            dtype_code(kOp, activated), launch.stream()));
  return output;
}

std::tuple<Tensor, Tensor> gated_activation_bwd(Tensor grad_output, Tensor gate, Tensor up, int64_t activation,
                                                std::optional<ScalarType> activation_dtype) {
  constexpr const char* kOp = "gated_activation_bwd";
  check_same(kOp, "grad_output", grad_output, gate);
  const Inputs in(kOp, gate, up);
  const Tensor grad = as_contiguous(grad_output);
  const Launch launch(kOp, in.gate);
  const ScalarType activated = activation_dtype.value_or(dtype_of(gate));
  Tensor grad_gate = allocate_like(gate, dtype_of(gate));
  Tensor grad_up = allocate_like(up, dtype_of(up));
  launch.check(fuseopt_gated_activation_bwd(pointer(kOp, grad), {pointer(kOp, in.gate), in.gate_stride},
                                            {pointer(kOp, in.up), in.up_stride}, pointer(kOp, grad_gate),
                                            pointer(kOp, grad_up), in.rows, in.columns,
                                            activation_code(kOp, activation), dtype_code(kOp, activated),
                                            launch.stream()));
  return {grad_gate, grad_up};
}

}  // namespace
}  // namespace fuseopt::gated_activation_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::gated_activation_binding;
  library.impl("gated_activation_fwd",
               TORCH_BOX((fuseopt::checked<gated_activation_fwd, fuseopt::declared::kGatedActivationFwd>)));
  library.impl("gated_activation_bwd",
               TORCH_BOX((fuseopt::checked<gated_activation_bwd, fuseopt::declared::kGatedActivationBwd>)));
}
