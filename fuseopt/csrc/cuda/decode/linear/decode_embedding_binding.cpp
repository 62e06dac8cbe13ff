#include "cuda/common/pdl.h"

namespace fuseopt::decode_embedding_binding {
namespace {

constexpr const char* kOp = "decode_embedding";

// Of contiguous tensors, which must stay there until the launch.
EmbeddingTable table_of(const Tensor& weight, const Tensor& indices) {
  return {weight.data_ptr(), weight.size(0), indices.data_ptr(), dtype_of(indices) == ScalarType::Int ? 4 : 8};
}

Tensor decode_embedding(Tensor tokens, Tensor weight, std::optional<Tensor> positions,
                        std::optional<Tensor> position_weight, bool pdl) {
  FUSEOPT_CHECK(weight.dim() == 2, "fuseopt::", kOp, ": weight must be [vocabulary, H]");
  FUSEOPT_CHECK(positions.has_value() == position_weight.has_value(), "fuseopt::", kOp,
                ": positions and position_weight go together");
  PdlGuard guard(pdl);
  const Tensor table = guard.contiguous(weight), indices = guard.contiguous(tokens);
  const Launch launch(kOp, table);
  DecodeEmbedding embedding = {};
  embedding.tokens = table_of(table, indices);
  std::optional<Tensor> second_table, second_indices;
  if (positions.has_value()) {
    second_table = guard.contiguous(*position_weight), second_indices = guard.contiguous(*positions);
    FUSEOPT_CHECK(second_table->dim() == 2 && second_table->size(1) == table.size(1) &&
                      second_indices->numel() == indices.numel(),
                  "fuseopt::", kOp, ": positions and position_weight must be like tokens and weight");
    embedding.positions = table_of(*second_table, *second_indices);
  }
  embedding.dtype = dtype_code(kOp, dtype_of(table));
  embedding.rows = indices.numel();
  embedding.columns = table.size(1);
  embedding.pdl = guard.allowed();
  const auto sizes = indices.sizes();
  std::vector<int64_t> output_sizes(sizes.begin(), sizes.end());
  output_sizes.push_back(embedding.columns);
  Tensor output = allocate(table, output_sizes, dtype_of(table));
  embedding.output = output.data_ptr();
  launch.check(fuseopt_decode_embedding(embedding, launch.stream()));
  return output;
}

constexpr auto kDecodeEmbedding = arguments("decode_embedding", {
    {"tokens", kIntegers}, {"weight", kFloats}, {"positions", kIntegers}, {"position_weight", kFloats, "weight"}});

}  // namespace
}  // namespace fuseopt::decode_embedding_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_embedding_binding;
  library.impl("decode_embedding", TORCH_BOX((fuseopt::checked<decode_embedding, kDecodeEmbedding>)));
}
