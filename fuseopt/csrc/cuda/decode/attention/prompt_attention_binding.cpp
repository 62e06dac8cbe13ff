#include "cuda/decode/attention/decode_attention_binding.h"

namespace fuseopt::prompt_attention_binding {
namespace {

constexpr const char* kOp = "prompt_attention_";
constexpr int64_t kMaxHeadDim = 128, kHeadDimMultiple = 16, kMaxLength = 1 << 20;

PromptAttention::Cache cache_of(const char* name, const Tensor& cache, const Tensor& qkv) {
  FUSEOPT_CHECK(cache.dim() == 4 && cache.size(0) == qkv.size(0) && cache.size(1) == qkv.size(3) &&
                    cache.size(2) >= qkv.size(1) && cache.size(3) == qkv.size(4),
                "fuseopt::", kOp, ": ", name, " must be [rows, heads, capacity, head_dim] of qkv's sizes");
  FUSEOPT_CHECK(has_aligned_vectors(cache), "fuseopt::", kOp, ": vectors of ", name, " must be aligned to 16 bytes");
  return {cache.data_ptr(), cache.stride(0), cache.stride(1), cache.stride(2)};
}

Tensor prompt_attention_(Tensor qkv, Tensor key_cache, Tensor value_cache, double scale, bool pdl) {
  FUSEOPT_CHECK(qkv.dim() == 5 && qkv.size(2) == 3 && qkv.size(1) <= kMaxLength, "fuseopt::", kOp,
                ": qkv must be [rows, length, 3, heads, head_dim] with a length of ", kMaxLength, " at most");
  const int64_t head_dim = qkv.size(4);
  FUSEOPT_CHECK(head_dim % kHeadDimMultiple == 0 && head_dim <= kMaxHeadDim, "fuseopt::", kOp,
                ": head_dim must be a multiple of ", kHeadDimMultiple, ", ", kMaxHeadDim, " at most, not ", head_dim);
  const ScalarType type = dtype_of(qkv);
  const Launch launch(kOp, qkv);
  PdlGuard guard(pdl);
  const Tensor packed = guard.contiguous(qkv);
  FUSEOPT_CHECK(has_aligned_vectors(packed), "fuseopt::", kOp, ": vectors of qkv must be aligned to 16 bytes");
  PromptAttention attention = {};
  attention.dtype = dtype_code(kOp, type);
  attention.qkv = packed.data_ptr();
  attention.key_cache = cache_of("key_cache", key_cache, qkv);
  attention.value_cache = cache_of("value_cache", value_cache, qkv);
  attention.rows = qkv.size(0);
  attention.length = qkv.size(1);
  attention.heads = qkv.size(3);
  attention.head_dim = head_dim;
  attention.scale = scale;
  attention.pdl = guard.allowed();
  Tensor output = allocate(qkv, {attention.rows, attention.length, attention.heads * head_dim}, type);
  attention.output = output.data_ptr();
  launch.check(fuseopt_prompt_attention(attention, launch.stream()));
  return output;
}

constexpr auto kPromptAttentionInPlace = arguments("prompt_attention_", {
    {"qkv", kHalves}, {"key_cache", kHalves, "qkv"}, {"value_cache", kHalves, "qkv"}});

}  // namespace
}  // namespace fuseopt::prompt_attention_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::prompt_attention_binding;
  library.impl("prompt_attention_", TORCH_BOX((fuseopt::checked<prompt_attention_, kPromptAttentionInPlace>)));
}
