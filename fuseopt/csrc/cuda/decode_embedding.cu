// The sum of a token's and a position's embedding: a block a token, an element a thread at a time.
#include "dependent_launch.cuh"
#include "dtype.cuh"

namespace fuseopt {
namespace {

constexpr int kThreads = 256;

// Row `index` of a table, or null where it has no such row.
template <typename T>
__device__ const T* row_of(const EmbeddingTable& table, unsigned i, int64_t columns) {
  const int64_t index = table.index_bytes == 4 ? static_cast<const int*>(table.indices)[i]
                                               : static_cast<const int64_t*>(table.indices)[i];
  return index >= 0 && index < table.rows ? static_cast<const T*>(table.weight) + index * columns : nullptr;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) decode_embedding_kernel(const __grid_constant__ DecodeEmbedding embedding) {
  using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;
  let_successor_start();
  wait_for_predecessor();
  const int64_t columns = embedding.columns;
  const T* const token = row_of<T>(embedding.tokens, blockIdx.x, columns);
  const T* const position =
      embedding.positions.weight != nullptr ? row_of<T>(embedding.positions, blockIdx.x, columns) : nullptr;
  T* const output = static_cast<T*>(embedding.output) + blockIdx.x * columns;
  for (int64_t c = threadIdx.x; c < columns; c += kThreads) {
    Acc sum = token != nullptr ? static_cast<Acc>(token[c]) : Acc(0);
    if (position != nullptr) sum += static_cast<Acc>(position[c]);
    output[c] = from_acc<T>(sum);
  }
}

}  // namespace

extern "C" cudaError_t fuseopt_decode_embedding(DecodeEmbedding embedding, cudaStream_t stream) {
  if (embedding.rows == 0 || embedding.columns == 0) return cudaSuccess;
  const LaunchShape shape{static_cast<unsigned>(embedding.rows), kThreads, 0, 1};
  const auto launch = [&](auto kernel) {
    return launch_dependent(kernel, embedding, shape, embedding.overlap, stream);
  };
  switch (embedding.dtype) {
    case kFloat16: return launch(decode_embedding_kernel<__half>);
    case kBFloat16: return launch(decode_embedding_kernel<__nv_bfloat16>);
    case kFloat64: return launch(decode_embedding_kernel<double>);
    default: return launch(decode_embedding_kernel<float>);
  }
}

}  // namespace fuseopt
