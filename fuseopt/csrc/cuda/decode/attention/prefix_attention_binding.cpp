#include "cuda/decode/attention/decode_attention_binding.h"

namespace fuseopt::prefix_attention_binding {
namespace {

constexpr const char* kOp = "prefix_attention";
constexpr int64_t kMaxHeadDim = 256, kHeadDimMultiple = 8, kMaxSlots = 1 << 30;

TokenHeads cache_of(const char* name, const Tensor& cache, const Tensor& query) {
  FUSEOPT_CHECK(cache.dim() == 4 && cache.size(0) == query.size(0) && cache.size(2) >= query.size(1) &&
                    cache.size(3) == query.size(3),
                "fuseopt::", kOp, ": ", name, " must be [rows, kv_heads, capacity, head_dim] of query's sizes");
  FUSEOPT_CHECK(has_aligned_vectors(cache), "fuseopt::", kOp, ": vectors of ", name, " must be aligned to 16 bytes");
  return {cache.data_ptr(), cache.stride(0), cache.stride(2), cache.stride(1)};
}

const int64_t* number_of(const char* name, const std::optional<Tensor>& number) {
  if (!number.has_value()) return nullptr;
  FUSEOPT_CHECK(number->numel() == 1, "fuseopt::", kOp, ": ", name, " must have one element");
  return static_cast<const int64_t*>(number->data_ptr());
}

Tensor prefix_attention(Tensor query, Tensor key_cache, Tensor value_cache, std::optional<Tensor> start,
                        std::optional<Tensor> filled, double scale, int64_t window, bool pdl) {
  FUSEOPT_CHECK(query.dim() == 4, "fuseopt::", kOp, ": query must be [rows, length, heads, head_dim]");
  const int64_t head_dim = query.size(3);
  FUSEOPT_CHECK(head_dim % kHeadDimMultiple == 0 && head_dim > 0 && head_dim <= kMaxHeadDim, "fuseopt::", kOp,
                ": head_dim must be a multiple of ", kHeadDimMultiple, ", ", kMaxHeadDim, " at most, not ", head_dim);
  const ScalarType type = dtype_of(query);
  const Launch launch(kOp, query);
  PdlGuard guard(pdl);
  const Tensor vectors = has_aligned_vectors(query) ? query : guard.aligned(query);
  PrefixAttention attention = {};
  attention.dtype = dtype_code(kOp, type);
  attention.query = {vectors.data_ptr(), vectors.stride(0), vectors.stride(1), vectors.stride(2)};
  attention.key_cache = cache_of("key_cache", key_cache, query);
  attention.value_cache = cache_of("value_cache", value_cache, query);
  attention.start = number_of("start", start);
  attention.filled = number_of("filled", filled);
  attention.rows = query.size(0);
  attention.length = query.size(1);
  attention.heads = query.size(2);
  attention.kv_heads = key_cache.size(1);
  attention.capacity = key_cache.size(2);
  attention.head_dim = head_dim;
  FUSEOPT_CHECK(attention.kv_heads > 0 && attention.heads % attention.kv_heads == 0 &&
                    value_cache.size(1) == attention.kv_heads && value_cache.size(2) == attention.capacity,
                "fuseopt::", kOp, ": value_cache must have key_cache's sizes, and kv_heads must divide query's heads");
  FUSEOPT_CHECK(attention.capacity <= kMaxSlots, "fuseopt::", kOp, ": the caches must have ", kMaxSlots,
                " slots at most");
  FUSEOPT_CHECK(window >= 0, "fuseopt::", kOp, ": window must not be negative");
  attention.window = std::min(window, attention.capacity);
  attention.scale = scale;
  attention.pdl = guard.allowed();
  Tensor output = allocate(query, {attention.rows, attention.length, attention.heads * head_dim}, type);
  attention.output = output.data_ptr();
  launch.check(fuseopt_prefix_attention(attention, launch.stream()));
  return output;
}

constexpr auto kPrefixAttention = arguments("prefix_attention", {{"query", kHalves},
                                                                 {"key_cache", kHalves, "query"},
                                                                 {"value_cache", kHalves, "query"},
                                                                 {"start", kOnlyLong},
                                                                 {"filled", kOnlyLong}});

}  // namespace
}  // namespace fuseopt::prefix_attention_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::prefix_attention_binding;
  library.impl("prefix_attention", TORCH_BOX((fuseopt::checked<prefix_attention, kPrefixAttention>)));
}
