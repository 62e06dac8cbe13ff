#include "shared_arguments.h"
#include "cuda/common/binding.h"

namespace fuseopt::softmax_binding {
namespace {

// The mask as it is broadcast to the input: stride 0 where it repeats, and neighbouring dimensions merged if one stride
// covers both.
SoftmaxMask broadcast_mask(const char* op, const Tensor& mask, const Tensor& input) {
  SoftmaxMask result{};
  result.values = pointer(op, mask);
  FUSEOPT_CHECK(mask.dim() <= input.dim(), "fuseopt::", op, ": the mask has more dimensions than the input");
  const int64_t missing = input.dim() - mask.dim();
  for (int64_t dim = 0; dim < input.dim(); ++dim) {
    const int64_t size = input.size(dim);
    const int64_t mask_size = dim < missing ? 1 : mask.size(dim - missing);
    FUSEOPT_CHECK(mask_size == size || mask_size == 1, "fuseopt::", op, ": dimension ", dim, " of the mask has ",
                  mask_size, " elements where the input has ", size);
    const int64_t stride = mask_size == 1 ? 0 : mask.stride(dim - missing);
    if (dim == input.dim() - 1) {
      result.column_stride = stride;
    } else if (size != 1) {
      const int last = result.dims - 1;
      if (result.dims > 0 && result.strides[last] == stride * size) {
        result.sizes[last] *= size;
        result.strides[last] = stride;
      } else {
        FUSEOPT_CHECK(result.dims < SoftmaxMask::kMaxDims, "fuseopt::", op, ": the mask broadcasts in more than ",
                      SoftmaxMask::kMaxDims, " separate dimensions");
        result.sizes[result.dims] = size;
        result.strides[result.dims] = stride;
        ++result.dims;
      }
    }
  }
  return result;
}

Tensor softmax_fwd(Tensor input, std::optional<Tensor> mask, double scale,
                   std::optional<ScalarType> output_dtype) {
  constexpr const char* kOp = "softmax_fwd";
  const Matrix shape = matrix_of(kOp, input);
  const Tensor x = as_contiguous(input);
  const Launch launch(kOp, x);
  Tensor output = allocate_like(x, output_dtype.value_or(dtype_of(x)));
  const SoftmaxMask row_mask = mask.has_value() ? broadcast_mask(kOp, *mask, x) : SoftmaxMask{};
  launch.check(fuseopt_softmax_fwd(pointer(kOp, x), row_mask, pointer(kOp, output), shape.rows, shape.columns, scale,
                                   launch.stream()));
  return output;
}

Tensor softmax_bwd(Tensor grad_output, Tensor output, double scale, ScalarType input_dtype) {
  constexpr const char* kOp = "softmax_bwd";
  const Matrix shape = matrix_of(kOp, output);
  check_same(kOp, "grad_output", grad_output, output);
  const Tensor y = as_contiguous(output);
  const Tensor grad = as_contiguous(
      dtype_of(grad_output) == dtype_of(y) ? grad_output : torch::stable::to(grad_output, dtype_of(y)));
  const Launch launch(kOp, y);
  Tensor grad_input = allocate_like(y, input_dtype);
  launch.check(fuseopt_softmax_bwd(pointer(kOp, grad), pointer(kOp, y), pointer(kOp, grad_input), shape.rows,
                                   shape.columns, scale, launch.stream()));
  return grad_input;
}

}  // namespace
}  // namespace fuseopt::softmax_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::softmax_binding;
  library.impl("softmax_fwd", TORCH_BOX((fuseopt::checked<softmax_fwd, fuseopt::declared::kSoftmaxFwd>)));
  library.impl("softmax_bwd", TORCH_BOX((fuseopt::checked<softmax_bwd, fuseopt::declared::kSoftmaxBwd>)));
}
