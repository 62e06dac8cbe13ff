// Registers the CUDA kernels with PyTorch's dispatcher, through the stable ABI only: one build serves many versions of
// torch. Schemas are defined in Python (fuseopt/ops); a function here takes the arguments of its schema in order.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../check.h"
#include "launchers.h"

namespace fuseopt {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Makes the tensor's device current for as long as it lives, and knows the current stream there.
class Launch {
 public:
  Launch(const char* op, const Tensor& tensor) : op_(op), guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    FUSEOPT_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) == TORCH_SUCCESS,
                  "fuseopt::", op, ": no current CUDA stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

  void check(cudaError_t error) const {
    FUSEOPT_CHECK(error == cudaSuccess, "fuseopt::", op_, ": CUDA launch failed: ", cudaGetErrorString(error));
  }

 private:
  const char* op_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

int dtype_code(const char* op, ScalarType type) {
  switch (type) {
    case ScalarType::Float: return kFloat32;
    case ScalarType::Half: return kFloat16;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Double: return kFloat64;
    default:
      FUSEOPT_CHECK(false, "fuseopt::", op, ": dtype ", toString(type),
                    " is not supported; use float32, float16, bfloat16 or float64");
  }
}

TypedPointer pointer(const char* op, const Tensor& tensor) {
  return {tensor.data_ptr(), dtype_code(op, tensor.scalar_type())};
}

TypedPointer pointer(const char* op, const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? pointer(op, *tensor) : TypedPointer{nullptr, kFloat32};
}

Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// A parameter of `columns` elements on input's device, or none.
std::optional<Tensor> parameter(const char* op, const char* name, const std::optional<Tensor>& tensor,
                                const Tensor& input) {
  if (!tensor.has_value()) return std::nullopt;
  FUSEOPT_CHECK(tensor->numel() == input.size(input.dim() - 1), "fuseopt::", op, ": ", name, " has ", tensor->numel(),
                " elements, the last dimension of the input ", input.size(input.dim() - 1));
  FUSEOPT_CHECK(tensor->get_device_index() == input.get_device_index() && tensor->is_cuda(), "fuseopt::", op, ": ",
                name, " is not on the input's device");
  return as_contiguous(*tensor);
}

struct Matrix {
  int64_t rows;
  int64_t columns;
};

// The shape flattened to two dimensions.
Matrix matrix_of(const char* op, const Tensor& tensor) {
  FUSEOPT_CHECK(tensor.dim() >= 1, "fuseopt::", op, ": a tensor without dimensions has no last dimension to work on");
  const int64_t columns = tensor.size(tensor.dim() - 1);
  int64_t rows = 1;
  for (int64_t dim = 0; dim < tensor.dim() - 1; ++dim) rows *= tensor.size(dim);
  return {rows, columns};
}

void check_same(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  bool same = tensor.dim() == input.dim() && tensor.get_device_index() == input.get_device_index();
  for (int64_t dim = 0; same && dim < input.dim(); ++dim) same = tensor.size(dim) == input.size(dim);
  FUSEOPT_CHECK(same, "fuseopt::", op, ": ", name, " has not the shape and device of the input");
}

// An uninitialised contiguous tensor on the device of `like`. Straight from the C interface: torch::stable::new_empty
// goes through the dispatcher, at several times the cost.
Tensor allocate(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  AtenTensorHandle handle = nullptr;
  const auto status = aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                               torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
                                               aoti_torch_device_type_cuda(), like.get_device_index(), &handle);
  FUSEOPT_CHECK(status == TORCH_SUCCESS, "fuseopt: out of memory for a tensor of ", stride, " elements");
  return Tensor(handle);
}

Tensor allocate_like(const Tensor& like, ScalarType type) {
  const auto sizes = like.sizes();
  return allocate(like, std::vector<int64_t>(sizes.begin(), sizes.end()), type);
}

// Row statistics: float64 for float64 inputs, else float32.
Tensor allocate_statistic(const Tensor& input) {
  const auto sizes = input.sizes();
  const ScalarType type = input.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  return allocate(input, std::vector<int64_t>(sizes.begin(), sizes.end() - 1), type);
}

// Memory for the partial column sums of a backward; absent when no gradient of a parameter is wanted.
std::optional<Tensor> norm_bwd_workspace(const Tensor& input, const std::optional<Tensor>& weight, Matrix shape,
                                         int tensors) {
  if (tensors == 0) return std::nullopt;
  const bool float64 =
      input.scalar_type() == ScalarType::Double || (weight.has_value() && weight->scalar_type() == ScalarType::Double);
  const size_t bytes = fuseopt_norm_bwd_workspace_bytes(shape.rows, shape.columns, tensors, float64);
  return allocate(input, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
}

void* data_of(const std::optional<Tensor>& tensor) { return tensor.has_value() ? tensor->data_ptr() : nullptr; }

// [columns] for a wanted gradient of a parameter, else [0].
Tensor allocate_parameter_grad(const Tensor& input, const std::optional<Tensor>& parameter, int64_t columns,
                               bool wanted) {
  return allocate(input, {wanted ? columns : 0},
                  parameter.has_value() ? parameter->scalar_type() : input.scalar_type());
}

TypedPointer wanted_pointer(const char* op, const Tensor& grad, bool wanted) {
  return wanted ? pointer(op, grad) : TypedPointer{nullptr, kFloat32};
}

std::tuple<Tensor, Tensor> rms_norm_fwd(Tensor input, std::optional<Tensor> weight, double eps, double offset,
                                        ScalarType norm_dtype, ScalarType output_dtype) {
  constexpr const char* kOp = "rms_norm_fwd";
  const Matrix shape = matrix_of(kOp, input);
  const Tensor x = as_contiguous(input);
  const auto scale = parameter(kOp, "weight", weight, input);
  const Launch launch(kOp, x);
  Tensor output = allocate_like(x, output_dtype);
  Tensor rstd = allocate_statistic(x);
  launch.check(fuseopt_rms_norm_fwd(pointer(kOp, x), pointer(kOp, scale), pointer(kOp, output), pointer(kOp, rstd),
                                    shape.rows, shape.columns, eps, offset, dtype_code(kOp, norm_dtype),
                                    launch.stream()));
  return {output, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_bwd(Tensor grad_output, Tensor input, std::optional<Tensor> weight, Tensor rstd,
                                        double offset, bool need_weight_grad) {
  constexpr const char* kOp = "rms_norm_bwd";
  const Matrix shape = matrix_of(kOp, input);
  check_same(kOp, "grad_output", grad_output, input);
  const Tensor grad = as_contiguous(grad_output), x = as_contiguous(input), row_rstd = as_contiguous(rstd);
  const auto scale = parameter(kOp, "weight", weight, input);
  const bool wanted = need_weight_grad && scale.has_value();
  const Launch launch(kOp, x);
  Tensor grad_input = allocate_like(x, x.scalar_type());
  Tensor grad_weight = allocate_parameter_grad(x, scale, shape.columns, wanted);
  const auto workspace = norm_bwd_workspace(x, scale, shape, wanted ? 1 : 0);
  launch.check(fuseopt_rms_norm_bwd(pointer(kOp, grad), pointer(kOp, x), pointer(kOp, scale), pointer(kOp, row_rstd),
                                    pointer(kOp, grad_input), wanted_pointer(kOp, grad_weight, wanted),
                                    data_of(workspace), shape.rows, shape.columns, offset, launch.stream()));
  return {grad_input, grad_weight};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd(Tensor input, std::optional<Tensor> weight,
                                                  std::optional<Tensor> bias, double eps, ScalarType output_dtype) {
  constexpr const char* kOp = "layer_norm_fwd";
  const Matrix shape = matrix_of(kOp, input);
  const Tensor x = as_contiguous(input);
  const auto scale = parameter(kOp, "weight", weight, input);
  const auto shift = parameter(kOp, "bias", bias, input);
  const Launch launch(kOp, x);
  Tensor output = allocate_like(x, output_dtype);
  Tensor mean = allocate_statistic(x);
  Tensor rstd = allocate_statistic(x);
  launch.check(fuseopt_layer_norm_fwd(pointer(kOp, x), pointer(kOp, scale), pointer(kOp, shift), pointer(kOp, output),
                                      pointer(kOp, mean), pointer(kOp, rstd), shape.rows, shape.columns, eps,
                                      launch.stream()));
  return {output, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(Tensor grad_output, Tensor input, std::optional<Tensor> weight,
                                                  Tensor mean, Tensor rstd, bool need_weight_grad,
                                                  bool need_bias_grad) {
  constexpr const char* kOp = "layer_norm_bwd";
  const Matrix shape = matrix_of(kOp, input);
  check_same(kOp, "grad_output", grad_output, input);
  const Tensor grad = as_contiguous(grad_output), x = as_contiguous(input), row_mean = as_contiguous(mean),
               row_rstd = as_contiguous(rstd);
  const auto scale = parameter(kOp, "weight", weight, input);
  const bool weight_wanted = need_weight_grad && scale.has_value();
  const Launch launch(kOp, x);
  Tensor grad_input = allocate_like(x, x.scalar_type());
  Tensor grad_weight = allocate_parameter_grad(x, scale, shape.columns, weight_wanted);
  Tensor grad_bias = allocate_parameter_grad(x, scale, shape.columns, need_bias_grad);
  const auto workspace = norm_bwd_workspace(x, scale, shape, weight_wanted || need_bias_grad ? 2 : 0);
  launch.check(fuseopt_layer_norm_bwd(
      pointer(kOp, grad), pointer(kOp, x), pointer(kOp, scale), pointer(kOp, row_mean), pointer(kOp, row_rstd),
      pointer(kOp, grad_input), wanted_pointer(kOp, grad_weight, weight_wanted),
      wanted_pointer(kOp, grad_bias, need_bias_grad), data_of(workspace), shape.rows, shape.columns, launch.stream()));
  return {grad_input, grad_weight, grad_bias};
}

int gelu_approximation(const char* op, const std::string& approximate) {
  FUSEOPT_CHECK(approximate == "none" || approximate == "tanh", "fuseopt::", op,
                ": approximate must be 'none' or 'tanh', not '", approximate, "'");
  return approximate == "tanh" ? kTanh : kErf;
}

Tensor gelu_fwd(Tensor input, std::optional<Tensor> bias, std::string approximate, ScalarType output_dtype) {
  constexpr const char* kOp = "gelu_fwd";
  const Tensor x = as_contiguous(input);
  const auto shift = bias.has_value() ? parameter(kOp, "bias", bias, input) : std::nullopt;
  const int64_t columns = x.dim() > 0 ? x.size(x.dim() - 1) : 1;
  const Launch launch(kOp, x);
  Tensor output = allocate_like(x, output_dtype);
  launch.check(fuseopt_gelu_fwd(pointer(kOp, x), pointer(kOp, shift), pointer(kOp, output), x.numel(), columns,
                                gelu_approximation(kOp, approximate), launch.stream()));
  return output;
}

Tensor gelu_bwd(Tensor grad_output, Tensor input, std::optional<Tensor> bias, std::string approximate) {
  constexpr const char* kOp = "gelu_bwd";
  check_same(kOp, "grad_output", grad_output, input);
  const Tensor grad = as_contiguous(grad_output), x = as_contiguous(input);
  const auto shift = bias.has_value() ? parameter(kOp, "bias", bias, input) : std::nullopt;
  const int64_t columns = x.dim() > 0 ? x.size(x.dim() - 1) : 1;
  const Launch launch(kOp, x);
  Tensor grad_input = allocate_like(x, x.scalar_type());
  launch.check(fuseopt_gelu_bwd(pointer(kOp, grad), pointer(kOp, x), pointer(kOp, shift), pointer(kOp, grad_input),
                                x.numel(), columns, gelu_approximation(kOp, approximate), launch.stream()));
  return grad_input;
}

// The mask as it is broadcast to the input: stride 0 where it repeats, neighbouring dimensions merged where one stride
// walks both.
SoftmaxMask broadcast_mask(const char* op, const Tensor& mask, const Tensor& input) {
  SoftmaxMask result{};
  result.values = pointer(op, mask);
  FUSEOPT_CHECK(mask.dim() <= input.dim(), "fuseopt::", op, ": the mask has more dimensions than the input");
  FUSEOPT_CHECK(mask.is_cuda() && mask.get_device_index() == input.get_device_index(), "fuseopt::", op,
                ": the mask is not on the input's device");
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

Tensor softmax_fwd(Tensor input, std::optional<Tensor> mask, double scale, ScalarType output_dtype) {
  constexpr const char* kOp = "softmax_fwd";
  const Matrix shape = matrix_of(kOp, input);
  const Tensor x = as_contiguous(input);
  const Launch launch(kOp, x);
  Tensor output = allocate_like(x, output_dtype);
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
      grad_output.scalar_type() == y.scalar_type() ? grad_output : torch::stable::to(grad_output, y.scalar_type()));
  const Launch launch(kOp, y);
  Tensor grad_input = allocate_like(y, input_dtype);
  launch.check(fuseopt_softmax_bwd(pointer(kOp, grad), pointer(kOp, y), pointer(kOp, grad_input), shape.rows,
                                   shape.columns, scale, launch.stream()));
  return grad_input;
}

TokenIds token_ids(const char* op, const char* name, const Tensor& ids) {
  FUSEOPT_CHECK(ids.dim() == 2, "fuseopt::", op, ": ", name, " must be [rows, length]");
  FUSEOPT_CHECK(ids.scalar_type() == ScalarType::Int || ids.scalar_type() == ScalarType::Long, "fuseopt::", op, ": ",
                name, " must be int32 or int64");
  return {ids.data_ptr(), ids.scalar_type() == ScalarType::Int ? 4 : 8, ids.size(1), ids.stride(0), ids.stride(1)};
}

// `windows` holds the n-grams to avoid, `input_ids` the sequences that must not complete them. `output` absent: in
// place.
void ban_ngrams(const char* op, const Tensor& windows, const Tensor& input_ids, const Tensor& scores,
                const std::optional<Tensor>& output, int64_t ngram_size) {
  FUSEOPT_CHECK(ngram_size > 0, "fuseopt::", op, ": ngram_size must be positive, not ", ngram_size);
  FUSEOPT_CHECK(scores.dim() == 2, "fuseopt::", op, ": scores must be [rows, vocabulary]");
  const int64_t rows = scores.size(0);
  FUSEOPT_CHECK(input_ids.size(0) == rows, "fuseopt::", op, ": input_ids has ", input_ids.size(0), " rows, scores ",
                rows);
  const Tensor window_ids =
      windows.scalar_type() == input_ids.scalar_type() ? windows : torch::stable::to(windows, input_ids.scalar_type());
  const int64_t window_rows = window_ids.size(0);
  FUSEOPT_CHECK(rows == 0 || (window_rows > 0 && rows % window_rows == 0), "fuseopt::", op, ": ", rows,
                " rows of scores cannot be divided among ", window_rows, " encoder rows");
  const Launch launch(op, scores);
  const ScoreMatrix matrix{scores.data_ptr(), dtype_code(op, scores.scalar_type()), scores.stride(0), scores.stride(1)};
  launch.check(fuseopt_no_repeat_ngram(
      token_ids(op, "encoder_input_ids", window_ids), token_ids(op, "input_ids", input_ids), matrix, data_of(output),
      rows, scores.size(1), rows == 0 ? 1 : rows / window_rows, ngram_size, launch.stream()));
}

Tensor no_repeat_ngram(Tensor input_ids, Tensor scores, int64_t ngram_size) {
  Tensor output = allocate_like(scores, scores.scalar_type());
  ban_ngrams("no_repeat_ngram", input_ids, input_ids, scores, output, ngram_size);
  return output;
}

void no_repeat_ngram_(Tensor input_ids, Tensor scores, int64_t ngram_size) {
  ban_ngrams("no_repeat_ngram_", input_ids, input_ids, scores, std::nullopt, ngram_size);
}

Tensor encoder_no_repeat_ngram(Tensor encoder_input_ids, Tensor input_ids, Tensor scores, int64_t ngram_size) {
  Tensor output = allocate_like(scores, scores.scalar_type());
  ban_ngrams("encoder_no_repeat_ngram", encoder_input_ids, input_ids, scores, output, ngram_size);
  return output;
}

}  // namespace
}  // namespace fuseopt

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt;
  library.impl("rms_norm_fwd", TORCH_BOX(&rms_norm_fwd));
  library.impl("rms_norm_bwd", TORCH_BOX(&rms_norm_bwd));
  library.impl("layer_norm_fwd", TORCH_BOX(&layer_norm_fwd));
  library.impl("layer_norm_bwd", TORCH_BOX(&layer_norm_bwd));
  library.impl("gelu_fwd", TORCH_BOX(&gelu_fwd));
  library.impl("gelu_bwd", TORCH_BOX(&gelu_bwd));
  library.impl("softmax_fwd", TORCH_BOX(&softmax_fwd));
  library.impl("softmax_bwd", TORCH_BOX(&softmax_bwd));
  library.impl("no_repeat_ngram", TORCH_BOX(&no_repeat_ngram));
  library.impl("no_repeat_ngram_", TORCH_BOX(&no_repeat_ngram_));
  library.impl("encoder_no_repeat_ngram", TORCH_BOX(&encoder_no_repeat_ngram));
}
