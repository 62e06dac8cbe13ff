#include "cuda/decode/attention/decode_attention_binding.h"
#include "shared_arguments.h"

namespace fuseopt::decode_attention_binding {
namespace {

// Whether a kernel can load 8 elements of 16 bits at once.
bool is_aligned(const DecodeAttention::Heads& heads) {
  return reinterpret_cast<uintptr_t>(heads.data) % 16 == 0 && heads.row_stride % 8 == 0 && heads.head_stride % 8 == 0;
}

// Pointers and strides of [rows, heads, head_dim] with head_dim contiguous.
DecodeAttention::Heads heads_of(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1)};
}

// What only decode_attention_ has.
struct Update {
  Tensor key, value;
  std::optional<Tensor> ancestry;
  RotationArguments rotation;
  int64_t window;
  double softcap;
};

void add_scales(const char* op, const Scales& scales, PdlGuard& guard, DecodeAttention& attention) {
  for (const Tensor& of : {scales.keys, scales.values}) {
    FUSEOPT_CHECK(attention.key.data == nullptr || of.is_contiguous(), "fuseopt::", op,
                  ": the scales must be contiguous, as they are written to");
  }
  FUSEOPT_CHECK(attention.dtype == kFloat16 || attention.dtype == kBFloat16, "fuseopt::", op,
                ": query must be float16 or bfloat16");
  FUSEOPT_CHECK(attention.head_dim % 16 == 0, "fuseopt::", op, ": head_dim must be a multiple of 16, not ",
                attention.head_dim);
  attention.cache_dtype = scales.dtype;
  attention.key_scales = static_cast<float*>(guard.contiguous(scales.keys).data_ptr());
  attention.value_scales = static_cast<float*>(guard.contiguous(scales.values).data_ptr());
  for (const DecodeAttention::Heads& heads : {attention.query, attention.key, attention.value,
                                              DecodeAttention::Heads{attention.key_cache, 0, 0},
                                              DecodeAttention::Heads{attention.value_cache, 0, 0}}) {
    FUSEOPT_CHECK(is_aligned(heads), "fuseopt::", op, ": query, key, value and the caches must begin at multiples of 16 ",
                  "bytes, and strides of the former must be multiples of 8");
  }
}

// The guard keeps copies.
void add_update(const char* op, const Update& update, const Tensor& key_cache, const Tensor& value_cache,
                PdlGuard& guard, DecodeAttention& attention) {
  const int64_t sizes[] = {attention.rows, attention.kv_heads, attention.head_dim};
  for (const Tensor& vectors : {update.key, update.value}) {
    const auto own = vectors.sizes();
    FUSEOPT_CHECK(std::equal(own.begin(), own.end(), std::begin(sizes), std::end(sizes)), "fuseopt::", op,
                  ": key and value must be [rows, kv_heads, head_dim] of query and key_cache");
  }
  FUSEOPT_CHECK(key_cache.size(0) == attention.rows, "fuseopt::", op, ": the caches must have a row for each of the ",
                attention.rows, " rows");
  FUSEOPT_CHECK(key_cache.is_contiguous() && value_cache.is_contiguous(), "fuseopt::", op,
                ": the caches must be contiguous, as they are written to");
  attention.key = heads_of(guard.with_unit_stride(update.key));
  attention.value = heads_of(guard.with_unit_stride(update.value));
  const auto ancestry = guard.contiguous(update.ancestry);
  FUSEOPT_CHECK(!ancestry.has_value() || ancestry->numel() == attention.rows * attention.capacity, "fuseopt::", op,
                ": ancestry must be [", attention.rows, ", ", attention.capacity, "]");
  attention.ancestry = static_cast<const int*>(data_of(ancestry));
  attention.rotation = rotation_of(op, update.rotation, attention.head_dim, attention.rows, guard);
  attention.window = update.window;
  attention.softcap = update.softcap;
}

Tensor attend(const char* op, const Tensor& query, const std::optional<Update>& update, const Tensor& key_cache,
              const Tensor& value_cache, const std::optional<Scales>& scales, const Tensor& lengths,
              const std::optional<Tensor>& starts, const std::optional<Tensor>& mask, const std::optional<Tensor>& bias,
              double scale, bool pdl) {
  constexpr int64_t kMaxHeadDim = 256;
  FUSEOPT_CHECK(query.dim() == 3 && key_cache.dim() == 4 && value_cache.dim() == 4, "fuseopt::", op,
                ": query must be [rows, heads, head_dim], the caches [batch, kv_heads, capacity, head_dim]");
  FUSEOPT_CHECK(query.size(2) <= kMaxHeadDim, "fuseopt::", op, ": head_dim must be ", kMaxHeadDim, " at most, not ",
                query.size(2));
  const int64_t rows = query.size(0), batch = key_cache.size(0);
  FUSEOPT_CHECK(rows == 0 || (batch > 0 && rows % batch == 0), "fuseopt::", op, ": ", rows,
                " rows cannot be divided among ", batch, " rows of the cache");
  const int64_t heads = query.size(1), kv_heads = key_cache.size(1), capacity = key_cache.size(2);
  FUSEOPT_CHECK((heads == 0 || (kv_heads > 0 && heads % kv_heads == 0)) && key_cache.size(3) == query.size(2),
                "fuseopt::", op, ": key_cache must have query's head_dim, and a divisor of its ", heads, " heads");
  check_same(op, "value_cache", value_cache, key_cache);
  FUSEOPT_CHECK(!mask.has_value() || mask->numel() == batch * capacity, "fuseopt::", op, ": mask must be [", batch, ", ",
                capacity, "]");
  FUSEOPT_CHECK(!bias.has_value() || (bias->dim() == 2 && bias->size(0) == heads && bias->size(1) > 0), "fuseopt::", op,
                ": bias must be [", heads, ", distances]");
  const Launch launch(op, query);
  PdlGuard guard(pdl);
  const Tensor q = guard.with_unit_stride(query);

  DecodeAttention attention = {};
  attention.dtype = dtype_code(op, dtype_of(query));
  attention.query = heads_of(q);
  attention.rows = rows;
  attention.heads = heads;
  attention.kv_heads = kv_heads;
  attention.head_dim = query.size(2);
  attention.capacity = capacity;
  attention.group = heads == 0 ? 1 : heads / kv_heads;
  attention.queries_per_kv = (rows == 0 ? 1 : rows / batch) * attention.group;
  attention.lengths = integers_of(op, "lengths", lengths, batch);
  attention.starts = integers_of(op, "starts", starts, batch);
  const Tensor keys = guard.contiguous(key_cache), values = guard.contiguous(value_cache);
  attention.key_cache = keys.data_ptr();
  attention.value_cache = values.data_ptr();
  if (update.has_value()) add_update(op, *update, key_cache, value_cache, guard, attention);
  if (scales.has_value()) add_scales(op, *scales, guard, attention);
  const auto places = guard.contiguous(mask);
  attention.mask = static_cast<const bool*>(data_of(places));
  const auto distances = guard.contiguous(bias);
  attention.bias = pointer(op, distances);
  attention.bias_columns = distances.has_value() ? distances->size(1) : 0;
  attention.scale = scale;
  attention.pdl = guard.allowed();
  Tensor output = allocate(q, {rows, attention.heads * attention.head_dim}, dtype_of(query));
  attention.output = output.data_ptr();
  std::optional<Tensor> workspace;
  if (const int64_t floats = fuseopt_decode_attention_workspace(attention); floats > 0) {
    workspace = allocate(q, {floats}, ScalarType::Float);
    attention.workspace = static_cast<float*>(workspace->data_ptr());
  }
  launch.check(fuseopt_decode_attention(attention, launch.stream()));
  return output;
}

Tensor decode_attention(Tensor query, Tensor key_cache, Tensor value_cache, std::optional<Tensor> key_scales,
                        std::optional<Tensor> value_scales, Tensor lengths, std::optional<Tensor> starts,
                        std::optional<Tensor> mask, std::optional<Tensor> bias, double scale, bool pdl) {
  constexpr const char* op = "decode_attention";
  const auto scales = scales_of(op, query, key_cache, key_scales, value_scales);
  return attend(op, query, std::nullopt, key_cache, value_cache, scales, lengths, starts, mask, bias, scale, pdl);
}

Tensor decode_attention_(Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor value_cache,
                         std::optional<Tensor> key_scales, std::optional<Tensor> value_scales, Tensor positions,
                         std::optional<Tensor> starts, std::optional<Tensor> mask, std::optional<Tensor> bias,
                         std::optional<Tensor> ancestry, double scale, std::optional<Tensor> rotary,
                         std::optional<Tensor> row_positions, bool interleaved, std::optional<Tensor> q_norm,
                         std::optional<Tensor> k_norm, double norm_eps, double norm_offset, int64_t window,
                         double softcap, bool pdl) {
  constexpr const char* op = "decode_attention_";
  const RotationArguments rotation{rotary, row_positions, interleaved, q_norm, k_norm, norm_eps, norm_offset};
  const Update update{key, value, ancestry, rotation, window, softcap};
  const auto scales = scales_of(op, query, key_cache, key_scales, value_scales);
  return attend(op, query, update, key_cache, value_cache, scales, positions, starts, mask, bias, scale, pdl);
}

}  // namespace
}  // namespace fuseopt::decode_attention_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_attention_binding;
  namespace declared = fuseopt::declared;
  library.impl("decode_attention", TORCH_BOX((fuseopt::checked<decode_attention, declared::kDecodeAttention>)));
  library.impl("decode_attention_", TORCH_BOX((fuseopt::checked<decode_attention_, declared::kDecodeAttentionInPlace>)));
}
