// The sum of a token's and a position's embedding: a block a token, an access a thread, since one that follows another
// would wait for memory again.
#include <cassert>

#include "cuda/common/dependent_launch.cuh"
#include "cuda/common/vector.cuh"

namespace fuseopt::decode_embedding {
namespace {

constexpr int kThreads = 256;

// The row of a table that the i-th index names. An index outside the table fails an assertion, as in PyTorch.
template <typename T>
__device__ const T* row_of(const EmbeddingTable& table, unsigned i, int64_t columns) {
  const int64_t index = table.index_bytes == 4 ? static_cast<const int*>(table.indices)[i]
                                               : static_cast<const int64_t*>(table.indices)[i];
  assert(index >= 0 && index < table.rows && "index out of range of an embedding");
  return static_cast<const T*>(table.weight) + index * columns;
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) decode_embedding_kernel(const __grid_constant__ DecodeEmbedding embedding) {
  using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
  follow_predecessor();
  const int64_t columns = embedding.columns;
  const T* const token = row_of<T>(embedding.tokens, blockIdx.x, columns);
  const T* const position =
      embedding.positions.weight != nullptr ? row_of<T>(embedding.positions, blockIdx.x, columns) : nullptr;
  T* const output = static_cast<T*>(embedding.output) + blockIdx.x * columns;
  for (int64_t i = threadIdx.x; i < columns / kWidth; i += kThreads) {
    Vector<T, kWidth> of_token = load_vector<T, kWidth>(token, i), of_position = {};
    if (position != nullptr) of_position = load_vector<T, kWidth>(position, i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const Acc sum = static_cast<Acc>(of_token.values[j]) + static_cast<Acc>(of_position.values[j]);
      // Without a position even a negative zero is left as it is.
      if (position != nullptr) of_token.values[j] = from_acc<T>(sum);
    }
    reinterpret_cast<Vector<T, kWidth>*>(output)[i] = of_token;
  }
}

template <typename T>
cudaError_t launch_as(const DecodeEmbedding& embedding, cudaStream_t stream) {
  constexpr int kWidth = kVectorWidth<T>;
  const bool in_vectors = embedding.columns % kWidth == 0 && is_aligned(embedding.tokens.weight) &&
                          is_aligned(embedding.positions.weight) && is_aligned(embedding.output);
  const LaunchShape shape{static_cast<unsigned>(embedding.rows), kThreads, 0, 1};
  return launch_dependent(in_vectors ? decode_embedding_kernel<T, kWidth> : decode_embedding_kernel<T, 1>, embedding,
                          shape, embedding.pdl, stream);
}

}  // namespace

extern "C" cudaError_t fuseopt_decode_embedding(DecodeEmbedding embedding, cudaStream_t stream) {
  if (embedding.rows == 0 || embedding.columns == 0) return cudaSuccess;
  switch (static_cast<DType>(embedding.dtype)) {
    case kFloat16: return launch_as<__half>(embedding, stream);
    case kBFloat16: return launch_as<__nv_bfloat16>(embedding, stream);
    case kFloat64: return launch_as<double>(embedding, stream);
    case kFloat32: return launch_as<float>(embedding, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fuseopt::decode_embedding
