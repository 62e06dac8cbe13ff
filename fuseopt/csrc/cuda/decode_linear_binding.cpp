#include "binding.h"

namespace fuseopt::decode_linear_binding {
namespace {

constexpr const char* kOp = "decode_linear";

int norm_code(const std::string& name) {
  if (name == "") return kNoNorm;
  FUSEOPT_CHECK(name == "layer_norm" || name == "t5_rms_norm", "fuseopt::", kOp, ": unknown norm '", name, "'");
  return name == "layer_norm" ? kLayerNorm : kT5RmsNorm;
}

int activation_code(const std::string& name) {
  if (name == "") return kIdentity;
  if (name == "relu") return kRelu;
  FUSEOPT_CHECK(name == "gelu" || name == "gelu_tanh", "fuseopt::", kOp, ": unknown activation '", name, "'");
  return name == "gelu" ? kGelu : kGeluTanh;
}

enum class Layout { kRows, kColumns, kNeither };

// Which dimension of a weight [N, K] has unit stride: K, N, or neither, nor one of a single element.
Layout layout_of(const Tensor& weight) {
  if (weight.size(1) <= 1 || weight.stride(1) == 1) return Layout::kRows;
  return weight.size(0) <= 1 || weight.stride(0) == 1 ? Layout::kColumns : Layout::kNeither;
}

int64_t stride_of(const Tensor& weight) { return weight.stride(layout_of(weight) == Layout::kRows ? 0 : 1); }

constexpr int64_t kPrefetchBytes = 16;

int64_t element_size(ScalarType type) {
  if (type == ScalarType::Double) return 8;
  return type == ScalarType::Float ? 4 : 2;
}

// Whether a matrix fills one aligned piece of memory.
bool is_dense(const Tensor& matrix) {
  const bool fills = matrix.is_contiguous() ||
                     (matrix.dim() == 2 && matrix.stride(0) == 1 && matrix.stride(1) == matrix.size(0));
  return fills && reinterpret_cast<uintptr_t>(matrix.data_ptr()) % kPrefetchBytes == 0;
}

// The weights as they are, where one layout and stride serves them all; else copies.
std::vector<Tensor> readable(const std::vector<Tensor>& weights) {
  bool alike = layout_of(weights[0]) != Layout::kNeither;
  for (const Tensor& weight : weights) {
    FUSEOPT_CHECK(weight.dim() == 2 && weight.size(0) == weights[0].size(0) && weight.size(1) == weights[0].size(1) &&
                      weight.scalar_type() == weights[0].scalar_type(),
                  "fuseopt::", kOp, ": weights must share one shape [N, K] and one dtype");
    alike = alike && layout_of(weight) == layout_of(weights[0]) && stride_of(weight) == stride_of(weights[0]);
  }
  if (alike) return weights;
  std::vector<Tensor> copies;
  for (const Tensor& weight : weights) copies.push_back(torch::stable::contiguous(weight));
  return copies;
}

// What torch.promote_types gives for two floating point types.
ScalarType promoted(ScalarType type, const std::optional<Tensor>& other) {
  if (!other.has_value() || other->scalar_type() == type) return type;
  const ScalarType second = other->scalar_type();
  return type == ScalarType::Double || second == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

Tensor decode_linear(Tensor input, std::vector<Tensor> weights, std::vector<Tensor> biases,
                     std::optional<Tensor> residual, std::string norm, std::optional<Tensor> norm_weight,
                     std::optional<Tensor> norm_bias, double eps, std::string activation, bool gated, bool overlap,
                     std::vector<Tensor> ahead) {
  FUSEOPT_CHECK(!weights.empty() && weights.size() <= DecodeLinear::kMaxWeights, "fuseopt::", kOp,
                ": one to three weights, not ", weights.size());
  FUSEOPT_CHECK(biases.empty() || biases.size() == weights.size(), "fuseopt::", kOp, ": ", biases.size(),
                " biases for ", weights.size(), " weights");
  FUSEOPT_CHECK(!gated || weights.size() == 2, "fuseopt::", kOp, ": gated takes two weights");
  const Matrix shape = matrix_of(kOp, input);
  const std::vector<Tensor> read = readable(weights);
  FUSEOPT_CHECK(read[0].size(1) == shape.columns, "fuseopt::", kOp, ": weight has ", read[0].size(1),
                " columns, the input ", shape.columns);
  const Tensor x = as_contiguous(input);
  const auto norm_scale = parameter(kOp, "norm_weight", norm_weight, input);
  const auto norm_shift = parameter(kOp, "norm_bias", norm_bias, input);
  const ScalarType weight_type = read[0].scalar_type();
  const auto added = residual.has_value() ? std::optional(as_contiguous(*residual)) : std::nullopt;
  const auto check_device = [&](const char* name, const Tensor& tensor) {
    FUSEOPT_CHECK(tensor.is_cuda() && tensor.get_device_index() == x.get_device_index(), "fuseopt::", kOp, ": ", name,
                  " is not on the input's device");
  };
  if (added.has_value()) check_device("residual", *added);
  const Launch launch(kOp, x);

  DecodeLinear layer = {};
  layer.input = pointer(kOp, x);
  layer.rows = shape.rows;
  layer.columns = shape.columns;
  layer.weight_count = static_cast<int>(read.size());
  layer.weight_dtype = dtype_code(kOp, weight_type);
  layer.weight_stride = stride_of(read[0]);
  layer.weights_are_transposed = layout_of(read[0]) == Layout::kColumns;
  layer.outputs = read[0].size(0);
  std::vector<Tensor> kept_biases;
  for (size_t i = 0; i < read.size(); ++i) {
    check_device("a weight", read[i]);
    layer.weights[i] = read[i].data_ptr();
    if (biases.empty()) continue;
    check_device("a bias", biases[i]);
    FUSEOPT_CHECK(biases[i].numel() == layer.outputs, "fuseopt::", kOp, ": bias has ", biases[i].numel(),
                  " elements for ", layer.outputs, " outputs");
    kept_biases.push_back(as_contiguous(biases[i]));
    layer.biases[i] = pointer(kOp, kept_biases.back());
  }
  layer.residual = pointer(kOp, added);
  layer.norm_weight = pointer(kOp, norm_scale);
  layer.norm_bias = pointer(kOp, norm_shift);
  layer.norm = norm_code(norm);
  layer.eps = eps;
  layer.activation = activation_code(activation);
  layer.gated = gated;
  layer.overlap = overlap;
  FUSEOPT_CHECK(ahead.size() <= DecodeLinear::kMaxWeights, "fuseopt::", kOp, ": at most three tensors ahead, not ",
                ahead.size());
  for (size_t i = 0; i < ahead.size(); ++i) {
    FUSEOPT_CHECK(ahead[i].is_cuda() && ahead[i].get_device_index() == x.get_device_index() &&
                      ahead[i].numel() == ahead[0].numel() && ahead[i].scalar_type() == ahead[0].scalar_type(),
                  "fuseopt::", kOp, ": tensors ahead must be on the input's device, of one size and dtype");
    if (is_dense(ahead[i])) layer.ahead[i] = ahead[i].data_ptr();
    layer.ahead_bytes = ahead[0].numel() * element_size(ahead[0].scalar_type()) / kPrefetchBytes * kPrefetchBytes;
  }

  const auto sizes = x.sizes();
  std::vector<int64_t> output_sizes(sizes.begin(), sizes.end());
  output_sizes.back() = layer.outputs * (gated ? 1 : layer.weight_count);
  Tensor output = allocate(x, output_sizes, promoted(weight_type, added));
  FUSEOPT_CHECK(!added.has_value() || added->numel() == output.numel(), "fuseopt::", kOp, ": residual has ",
                added->numel(), " elements, the output ", output.numel());
  layer.output = pointer(kOp, output);
  launch.check(fuseopt_decode_linear(layer, launch.stream()));
  return output;
}

}  // namespace
}  // namespace fuseopt::decode_linear_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_linear_binding;
  library.impl("decode_linear", TORCH_BOX(&decode_linear));
}
