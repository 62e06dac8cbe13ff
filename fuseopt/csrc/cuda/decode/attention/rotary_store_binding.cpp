#include "cuda/decode/attention/decode_attention_binding.h"

namespace fuseopt::rotary_store_binding {
namespace {

constexpr const char* kOp = "decode_rotary_store_";
constexpr int64_t kMaxHeadDim = 256;

TokenHeads cache_of(const Tensor& cache, const RotaryStore& store) {
  FUSEOPT_CHECK(cache.dim() == 4 && cache.size(0) == store.rows && cache.size(1) == store.kv_heads &&
                    cache.size(2) >= store.length && cache.size(3) == store.head_dim && cache.stride(3) == 1,
                "fuseopt::", kOp, ": the caches must be [rows, kv_heads, capacity, head_dim] of qkv's sizes");
  return {cache.data_ptr(), cache.stride(0), cache.stride(2), cache.stride(1)};
}

Tensor decode_rotary_store_(Tensor qkv, Tensor key_cache, Tensor value_cache, std::optional<Tensor> slot,
                            std::optional<Tensor> rotary, std::optional<Tensor> row_positions, bool interleaved,
                            std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, double norm_eps,
                            double norm_offset, bool pdl) {
  FUSEOPT_CHECK(qkv.dim() == 4 && key_cache.dim() == 4, "fuseopt::", kOp,
                ": qkv must be [rows, length, heads + 2 kv_heads, head_dim]");
  FUSEOPT_CHECK(qkv.size(3) <= kMaxHeadDim, "fuseopt::", kOp, ": head_dim must be ", kMaxHeadDim, " at most, not ",
                qkv.size(3));
  const Launch launch(kOp, qkv);
  PdlGuard guard(pdl);
  const Tensor vectors = guard.with_unit_stride(qkv);
  RotaryStore store = {};
  store.dtype = dtype_code(kOp, dtype_of(qkv));
  store.rows = qkv.size(0);
  store.length = qkv.size(1);
  store.kv_heads = key_cache.size(1);
  store.heads = qkv.size(2) - 2 * store.kv_heads;
  store.head_dim = qkv.size(3);
  FUSEOPT_CHECK(store.heads >= 0, "fuseopt::", kOp, ": qkv has fewer heads than the caches need");
  store.qkv = {vectors.data_ptr(), vectors.stride(0), vectors.stride(1), vectors.stride(2)};
  store.key_cache = cache_of(key_cache, store);
  store.value_cache = cache_of(value_cache, store);
  if (slot.has_value()) {
    FUSEOPT_CHECK(slot->numel() == 1, "fuseopt::", kOp, ": slot must have one element");
    store.slot = static_cast<const int64_t*>(slot->data_ptr());
  }
  const RotationArguments arguments{rotary, guard.contiguous(row_positions), interleaved, q_norm, k_norm, norm_eps,
                                    norm_offset};
  store.rotation = rotation_of(kOp, arguments, store.head_dim, store.rows * store.length, guard);
  store.pdl = guard.allowed();
  Tensor query = allocate(qkv, {store.rows, store.length, store.heads, store.head_dim}, dtype_of(qkv));
  store.query = {query.data_ptr(), query.stride(0), query.stride(1), query.stride(2)};
  launch.check(fuseopt_rotary_store(store, launch.stream()));
  return query;
}

constexpr auto kRotaryStoreInPlace = arguments("decode_rotary_store_", {{"qkv", kFloats},
                                                                        {"key_cache", kFloats, "qkv"},
                                                                        {"value_cache", kFloats, "qkv"},
                                                                        {"slot", kOnlyLong},
                                                                        {"rotary", kOnlyFloat},
                                                                        {"row_positions", kIntegers},
                                                                        {"q_norm", kFloats},
                                                                        {"k_norm", kFloats}});

}  // namespace
}  // namespace fuseopt::rotary_store_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::rotary_store_binding;
  library.impl("decode_rotary_store_", TORCH_BOX((fuseopt::checked<decode_rotary_store_, kRotaryStoreInPlace>)));
}
