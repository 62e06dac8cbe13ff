#include "cuda/common/binding.h"

namespace fuseopt::short_attention_binding {
namespace {

constexpr const char* kOp = "short_attention";
constexpr int64_t kMaxLength = 32, kMaxHeadDim = 128;

Tensor with_unit_stride(const Tensor& tensor) {
  return tensor.size(3) <= 1 || tensor.stride(3) == 1 ? tensor : torch::stable::contiguous(tensor);
}

ShortAttention::Heads heads_of(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

bool takes_short_attention(Tensor query) {
  return fuseopt_takes_short_attention(dtype_code(kOp, dtype_of(query)), query.size(2), query.size(3));
}

Tensor short_attention(Tensor query, Tensor key, Tensor value, bool causal, double scale) {
  FUSEOPT_CHECK(query.dim() == 4 && query.size(2) <= kMaxLength && query.size(3) <= kMaxHeadDim, "fuseopt::", kOp,
                ": query must be [batch, heads, length, head_dim] with a length of ", kMaxLength,
                " and a head_dim of ", kMaxHeadDim, " at most");
  check_same(kOp, "key", key, query);
  check_same(kOp, "value", value, query);
  const Launch launch(kOp, query);
  const Tensor q = with_unit_stride(query), k = with_unit_stride(key), v = with_unit_stride(value);
  ShortAttention attention = {};
  attention.dtype = dtype_code(kOp, dtype_of(query));
  attention.query = heads_of(q);
  attention.key = heads_of(k);
  attention.value = heads_of(v);
  attention.batch = query.size(0);
  attention.heads = query.size(1);
  attention.length = query.size(2);
  attention.head_dim = query.size(3);
  attention.causal = causal;
  attention.scale = scale;
  Tensor output = allocate(q, {attention.batch, attention.length, attention.heads, attention.head_dim}, dtype_of(q));
  attention.output = output.data_ptr();
  launch.check(fuseopt_short_attention(attention, launch.stream()));
  return output;
}

constexpr auto kTakesShortAttention = arguments("takes_short_attention", {{"query", kFloats}});
constexpr auto kShortAttention = arguments("short_attention", {
    {"query", kFloats}, {"key", kFloats, "query"}, {"value", kFloats, "query"}});

}  // namespace
}  // namespace fuseopt::short_attention_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::short_attention_binding;
  library.impl("takes_short_attention", TORCH_BOX((fuseopt::checked<takes_short_attention, kTakesShortAttention>)));
  library.impl("short_attention", TORCH_BOX((fuseopt::checked<short_attention, kShortAttention>)));
}
