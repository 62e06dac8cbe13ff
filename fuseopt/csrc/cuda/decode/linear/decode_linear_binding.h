// From tensors to a DecodeLinear, for the ops that have one.
#pragma once

#include "cuda/common/pdl.h"

namespace fuseopt {

inline int norm_code(const char* op, const std::string& name) {
  if (name == "") return kNoNorm;
  if (name == "layer_norm") return kLayerNorm;
  FUSEOPT_CHECK(name == "rms_norm" || name == "gemma_rms_norm", "fuseopt::", op, ": unknown norm '", name, "'");
  return name == "rms_norm" ? kRmsNorm : kGemmaRmsNorm;
}

inline int activation_code(const char* op, const std::string& name) {
  if (name == "") return kIdentity;
  if (name == "relu") return kRelu;
  if (name == "silu") return kSilu;
  FUSEOPT_CHECK(name == "gelu" || name == "gelu_tanh", "fuseopt::", op, ": unknown activation '", name, "'");
  return name == "gelu" ? kGelu : kGeluTanh;
}

// Where the neighbours of a weight [N, K] lie: along K, along N, or nowhere. A dimension of one element counts as either.
inline std::optional<Layout> layout_of(const Tensor& weight) {
  if (weight.size(1) <= 1 || weight.stride(1) == 1) return Layout::kRowMajorNK;
  if (weight.size(0) <= 1 || weight.stride(0) == 1) return Layout::kColMajorKN;
  return std::nullopt;
}

inline int64_t stride_of(const Tensor& weight) {
  return weight.stride(layout_of(weight) == Layout::kRowMajorNK ? 0 : 1);
}

constexpr int64_t kPrefetchBytes = 16;

inline int64_t element_size(ScalarType type) {
  if (type == ScalarType::Double) return 8;
  if (type == ScalarType::Byte) return 1;
  return type == ScalarType::Float ? 4 : 2;
}

// Whether a matrix fills one aligned piece of memory.
inline bool is_dense(const Tensor& matrix) {
  const bool fills = matrix.is_contiguous() ||
                     (matrix.dim() == 2 && matrix.stride(0) == 1 && matrix.stride(1) == matrix.size(0));
  return fills && reinterpret_cast<uintptr_t>(matrix.data_ptr()) % kPrefetchBytes == 0;
}

// A layer's weights, and what kernels know of all of them.
struct StoredWeights {
  std::vector<Tensor> tensors;
  std::vector<int64_t> widths;  // outputs of each
  ScalarType dtype;             // of the values that are multiplied
  int64_t columns;              // K
  int64_t stride;
  bool are_transposed = false;
};

inline void check_weight_count(const char* op, size_t count) {
  FUSEOPT_CHECK(count > 0 && count <= DecodeLinear::kMaxWeights, "fuseopt::", op, ": one to three weights, not ", count);
}

// The weights as they are, where one layout and stride serves them all; else copies.
inline StoredWeights readable(const char* op, const std::vector<Tensor>& weights, PdlGuard& guard) {
  check_weight_count(op, weights.size());
  bool alike = layout_of(weights[0]).has_value();
  for (const Tensor& weight : weights) {
    FUSEOPT_CHECK(weight.dim() == 2 && weight.size(1) == weights[0].size(1) && dtype_of(weight) == dtype_of(weights[0]),
                  "fuseopt::", op, ": weights must be [N, K] of one K and one dtype");
    alike = alike && layout_of(weight) == layout_of(weights[0]) && stride_of(weight) == stride_of(weights[0]);
  }
  StoredWeights read{{}, {}, dtype_of(weights[0]), weights[0].size(1), 0};
  for (const Tensor& weight : weights) {
    read.tensors.push_back(alike ? weight : guard.copy_of(weight));
    read.widths.push_back(weight.size(0));
  }
  read.stride = stride_of(read.tensors[0]);
  read.are_transposed = layout_of(read.tensors[0]) == Layout::kColMajorKN;
  return read;
}

// What torch.promote_types gives for two floating point types.
inline ScalarType promoted(ScalarType type, const std::optional<Tensor>& other) {
  if (!other.has_value() || dtype_of(*other) == type) return type;
  const ScalarType second = dtype_of(*other);
  return type == ScalarType::Double || second == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline std::vector<Tensor> as_list(const std::optional<Tensor>& bias) {
  return bias.has_value() ? std::vector<Tensor>{*bias} : std::vector<Tensor>{};
}

// A norm as the ops take it; by default none.
struct NormArguments {
  std::string name;
  std::optional<Tensor> weight = std::nullopt, bias = std::nullopt;
  double eps = 0;
};

// `layer` points into the call's arguments and into copies that the call's `PdlGuard` owns.
struct LinearCall {
  DecodeLinear layer;
  Tensor output;
};

inline LinearCall linear_call(const char* op, PdlGuard& guard, const Tensor& input, const StoredWeights& weights,
                              const std::vector<Tensor>& biases, const std::optional<Tensor>& residual,
                              const NormArguments& norm, const std::vector<Tensor>& prefetch,
                              const std::string& activation, bool gated) {
  const size_t count = weights.tensors.size();
  FUSEOPT_CHECK(biases.empty() || biases.size() == count, "fuseopt::", op, ": ", biases.size(), " biases for ", count,
                " weights");
  FUSEOPT_CHECK(!gated || (count == 2 && weights.widths[0] == weights.widths[1]), "fuseopt::", op,
                ": gated takes two weights of one shape");
  const Matrix shape = matrix_of(op, input);
  FUSEOPT_CHECK(weights.columns == shape.columns, "fuseopt::", op, ": weight has ", weights.columns,
                " columns, the input ", shape.columns);
  const Tensor x = guard.contiguous(input);
  const auto norm_scale = parameter(op, "norm_weight", guard.contiguous(norm.weight), input);
  const auto norm_shift = parameter(op, "norm_bias", guard.contiguous(norm.bias), input);
  const auto added = guard.contiguous(residual);

  DecodeLinear layer = {};
  layer.input = pointer(op, x);
  layer.rows = shape.rows;
  layer.in_features = shape.columns;
  layer.weight_count = static_cast<int>(count);
  layer.weight_dtype = dtype_code(op, weights.dtype);
  layer.weight_stride = weights.stride;
  layer.weights_are_transposed = weights.are_transposed;
  for (size_t i = 0; i < count; ++i) {
    layer.weights[i] = weights.tensors[i].data_ptr();
    layer.widths[i] = weights.widths[i];
    layer.out_features = std::max(layer.out_features, layer.widths[i]);
    if (biases.empty()) continue;
    FUSEOPT_CHECK(biases[i].numel() == layer.widths[i], "fuseopt::", op, ": bias has ", biases[i].numel(),
                  " elements for ", layer.widths[i], " outputs");
    layer.biases[i] = pointer(op, guard.contiguous(biases[i]));
  }
  layer.residual = pointer(op, added);
  layer.norm_weight = pointer(op, norm_scale);
  layer.norm_bias = pointer(op, norm_shift);
  layer.norm = norm_code(op, norm.name);
  layer.eps = norm.eps;
  layer.activation = activation_code(op, activation);
  layer.gated = gated;
  layer.pdl = guard.allowed();
  FUSEOPT_CHECK(prefetch.size() <= DecodeLinear::kMaxWeights, "fuseopt::", op, ": at most three tensors to prefetch, not ",
                prefetch.size());
  for (size_t i = 0; i < prefetch.size(); ++i) {
    if (!is_dense(prefetch[i])) continue;
    layer.prefetch[i] = prefetch[i].data_ptr();
    layer.prefetch_bytes[i] = prefetch[i].numel() * element_size(dtype_of(prefetch[i])) / kPrefetchBytes * kPrefetchBytes;
  }

  const auto sizes = x.sizes();
  std::vector<int64_t> output_sizes(sizes.begin(), sizes.end());
  output_sizes.back() = output_columns(layer);
  Tensor output = allocate(x, output_sizes, promoted(weights.dtype, added));
  FUSEOPT_CHECK(!added.has_value() || added->numel() == output.numel(), "fuseopt::", op, ": residual has ",
                added->numel(), " elements, the output ", output.numel());
  layer.output = pointer(op, output);
  return {layer, output};
}

inline LinearCall linear_call(const char* op, PdlGuard& guard, const Tensor& input, const std::vector<Tensor>& weights,
                              const std::vector<Tensor>& biases, const std::optional<Tensor>& residual,
                              const NormArguments& norm, const std::vector<Tensor>& prefetch,
                              const std::string& activation = "", bool gated = false) {
  return linear_call(op, guard, input, readable(op, weights, guard), biases, residual, norm, prefetch, activation, gated);
}

// Lets the call's input be that and `partials`.
inline void add_to_input(const char* op, LinearCall& call, const Tensor& input, const Tensor& partials,
                         PdlGuard& guard) {
  FUSEOPT_CHECK(fuseopt_accepts_partials(call.layer), "fuseopt::", op,
                ": the kernel does not take partials of such a layer");
  const Tensor sums = guard.contiguous(partials);
  FUSEOPT_CHECK(is_dense(sums) && sums.numel() == DecodeLinear::kSplitK * input.numel(), "fuseopt::", op,
                ": partials must begin at a multiple of 16 bytes and be two of the input's size");
  call.layer.split_k_partials = static_cast<const float*>(sums.data_ptr());
  call.layer.pdl = guard.allowed();
}

}  // namespace fuseopt
