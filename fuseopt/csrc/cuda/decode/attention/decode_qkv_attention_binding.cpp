#include "cuda/decode/attention/decode_attention_binding.h"
#include "cuda/decode/linear/decode_linear_binding.h"

namespace fuseopt::decode_qkv_attention_binding {
namespace {

constexpr const char* kOp = "decode_qkv_attention_";

struct Call {
  LinearCall linear;
  DecodeAttention attention;
  std::optional<Tensor> mask;  // the mask in the kernel's layout
};

Call call_of(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& key_cache,
             const Tensor& value_cache, const Tensor& positions, const std::optional<Tensor>& mask, double scale,
             const NormArguments& norm, PdlGuard& guard) {
  Call call{linear_call(kOp, guard, input, {weight}, as_list(bias), std::nullopt, norm, {}), {}, guard.contiguous(mask)};
  for (const Tensor& cache : {key_cache, value_cache}) {
    FUSEOPT_CHECK(cache.dim() == 4 && cache.is_contiguous() && cache.size(0) == call.linear.layer.rows &&
                      cache.size(1) == key_cache.size(1) && cache.size(2) == key_cache.size(2) && cache.size(3) == key_cache.size(3),
                  "fuseopt::", kOp, ": the caches must be [rows, heads, capacity, head_dim], contiguous, as they are",
                  " written to");
  }
  FUSEOPT_CHECK(!mask.has_value() || call.mask->numel() == call.linear.layer.rows * key_cache.size(2), "fuseopt::",
                kOp, ": mask must be [rows, capacity]");
  DecodeAttention& attention = call.attention;
  attention.dtype = dtype_code(kOp, dtype_of(key_cache));
  attention.query.data = attention.key.data = attention.value.data = call.linear.layer.output.data;  // never read
  attention.key_cache = key_cache.data_ptr();
  attention.value_cache = value_cache.data_ptr();
  attention.rows = call.linear.layer.rows;
  attention.heads = attention.kv_heads = key_cache.size(1);
  attention.head_dim = key_cache.size(3);
  attention.capacity = key_cache.size(2);
  attention.queries_per_kv = attention.group = 1;
  attention.lengths = integers_of(kOp, "positions", positions, call.linear.layer.rows);
  attention.mask = static_cast<const bool*>(data_of(call.mask));
  attention.scale = scale;
  call.linear.layer.pdl = attention.pdl = guard.allowed();
  return call;
}

bool takes_qkv_attention(Tensor input, Tensor weight, std::optional<Tensor> bias, Tensor key_cache, Tensor value_cache,
                         std::string norm, std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias) {
  const Tensor positions = allocate(input, {1}, ScalarType::Long);
  PdlGuard none(false);
  const Call call = call_of(input, weight, bias, key_cache, value_cache, positions, std::nullopt, 0,
                            {norm, norm_weight, norm_bias}, none);
  return fuseopt_takes_qkv_attention(call.linear.layer, call.attention);
}

Tensor decode_qkv_attention_(Tensor input, Tensor weight, std::optional<Tensor> bias, Tensor key_cache,
                             Tensor value_cache, Tensor positions, std::optional<Tensor> mask, double scale,
                             std::string norm, std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias,
                             double eps, bool pdl) {
  PdlGuard guard(pdl);
  Call call = call_of(input, weight, bias, key_cache, value_cache, positions, mask, scale,
                      {norm, norm_weight, norm_bias, eps}, guard);
  FUSEOPT_CHECK(fuseopt_takes_qkv_attention(call.linear.layer, call.attention), "fuseopt::", kOp,
                ": the kernel does not take such a layer and caches");
  const Launch launch(kOp, input);
  Tensor output = allocate(input, {call.attention.rows, call.attention.heads * call.attention.head_dim}, dtype_of(weight));
  call.attention.output = output.data_ptr();
  launch.check(fuseopt_decode_qkv_attention(call.linear.layer, call.attention, launch.stream()));
  return output;
}

constexpr auto kTakesQkvAttention = arguments("takes_qkv_attention", {
    {"input", kFloats}, {"weight", kFloats}, {"bias", kFloats}, {"key_cache", kFloats, "weight"},
    {"value_cache", kFloats, "weight"}, {"norm_weight", kFloats}, {"norm_bias", kFloats}});
constexpr auto kDecodeQkvAttentionInPlace = arguments("decode_qkv_attention_", {
    {"input", kFloats}, {"weight", kFloats}, {"bias", kFloats}, {"key_cache", kFloats, "weight"},
    {"value_cache", kFloats, "weight"}, {"positions", kIntegers}, {"mask", kOnlyBool}, {"norm_weight", kFloats},
    {"norm_bias", kFloats}});

}  // namespace
}  // namespace fuseopt::decode_qkv_attention_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_qkv_attention_binding;
  library.impl("takes_qkv_attention", TORCH_BOX((fuseopt::checked<takes_qkv_attention, kTakesQkvAttention>)));
  library.impl("decode_qkv_attention_", TORCH_BOX((fuseopt::checked<decode_qkv_attention_, kDecodeQkvAttentionInPlace>)));
}
