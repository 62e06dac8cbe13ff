// GELU of input + bias.
#include "gelu.cuh"
#include "vector.cuh"
#include "vector_grid.cuh"

namespace fuseopt {
namespace {

constexpr int kThreads = kVectorGridThreads;
constexpr int kFwdLoads = 2;  // of 16 bytes in flight a thread
constexpr int kBwdLoads = 2;  // of each of two tensors

template <int kWidth>
__device__ void load_bias(float (&values)[kWidth], TypedPointer bias, const VectorGrid& grid) {
  if (bias.data != nullptr) {
    load_floats(bias, grid.column() * kWidth, values);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = 0;
  }
}

template <typename T, typename Gelu, int kWidth, int kVectors>
__global__ void __launch_bounds__(kThreads)
    gelu_fwd_kernel(const T* __restrict__ input, TypedPointer bias, TypedPointer output, VectorGrid grid) {
  const int64_t first_row = grid.first_row(kVectors);
  if (grid.column() >= grid.vectors_in_row) return;

  Vector<T, kWidth> x[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t v = grid.vector(first_row + k);
    if (v < grid.vectors) x[k] = load_vector<T, kWidth>(input, v);
  }
  float shift[kWidth];
  load_bias(shift, bias, grid);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result[j] = Gelu::value(x[k][j] + shift[j]);
    const int64_t v = grid.vector(first_row + k);
    if (v < grid.vectors) store_floats(output, v, result);
  }
}

template <typename T, typename Gelu, int kWidth, int kVectors>
__global__ void __launch_bounds__(kThreads)
    gelu_bwd_kernel(const T* __restrict__ grad_output, const T* __restrict__ input, TypedPointer bias,
                    T* __restrict__ grad_input, VectorGrid grid) {
  const int64_t first_row = grid.first_row(kVectors);
  if (grid.column() >= grid.vectors_in_row) return;

  Vector<T, kWidth> x[kVectors], grad[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t v = grid.vector(first_row + k);
    if (v < grid.vectors) {
      x[k] = load_vector<T, kWidth>(input, v);
      grad[k] = load_vector<T, kWidth>(grad_output, v);
    }
  }
  float shift[kWidth];
  load_bias(shift, bias, grid);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result[j] = Gelu::backward(grad[k][j], x[k][j] + shift[j]);
    const int64_t v = grid.vector(first_row + k);
    if (v < grid.vectors) store_floats_as<T>(grad_input, v, result);
  }
}

// An element at a time: float64, unaligned tensors, biases of odd length, and the elements [begin, elements) that fill
// no vector.
template <typename Acc, typename Gelu>
__global__ void __launch_bounds__(kThreads)
    gelu_any_kernel(TypedPointer grad_output, TypedPointer input, TypedPointer bias, TypedPointer output, int64_t begin,
                    int64_t elements, int64_t columns) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = begin + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    Acc x = load_as<Acc>(input, i);
    if (bias.data != nullptr) x += load_as<Acc>(bias, i % columns);
    store_as(output, i,
             grad_output.data != nullptr ? Gelu::backward(load_as<Acc>(grad_output, i), x) : Gelu::value(x));
  }
}

bool is_float64(TypedPointer tensor) { return tensor.data != nullptr && tensor.dtype == kFloat64; }

// grad_output absent: the forward.
template <typename Gelu>
void launch_any(TypedPointer grad_output, TypedPointer input, TypedPointer bias, TypedPointer output, int64_t begin,
                int64_t elements, int64_t columns, cudaStream_t stream) {
  const unsigned blocks =
      static_cast<unsigned>(std::min<int64_t>(ceil_div(elements - begin, kThreads), 16 * multiprocessor_count()));
  const auto kernel =
      is_float64(input) || is_float64(bias) ? gelu_any_kernel<double, Gelu> : gelu_any_kernel<float, Gelu>;
  kernel<<<blocks, kThreads, 0, stream>>>(grad_output, input, bias, output, begin, elements, columns);
}

// Elements at the front that the vector kernels can take: all whole vectors, or none.
int64_t vector_elements(TypedPointer input, TypedPointer bias, int64_t elements, int64_t columns) {
  if (input.dtype == kFloat64 || is_float64(bias) || !is_aligned(input.data)) return 0;
  const int width = kAccessBytes / element_size(static_cast<DType>(input.dtype));
  if (bias.data != nullptr && columns % width != 0) return 0;
  return elements / width * width;
}

template <template <bool> class Gelu>
cudaError_t launch_fwd(TypedPointer input, TypedPointer bias, TypedPointer output, int64_t elements, int64_t columns,
                       cudaStream_t stream) {
  int64_t done = 0;
  if (is_aligned(output.data) && output.dtype != kFloat64) done = vector_elements(input, bias, elements, columns);
  if (done > 0) {
    dispatch_fast_dtype(input.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      dispatch_vector_width<T, kFwdLoads>(done, [&](auto width, auto vectors) {
        const auto kernel = output.dtype == kFloat32 ? gelu_fwd_kernel<T, Gelu<true>, width, vectors>
                                                     : gelu_fwd_kernel<T, Gelu<sizeof(T) == 4>, width, vectors>;
        launch_vectors(done / width, bias.data != nullptr ? columns / width : kThreads, vectors,
                       [&](VectorGrid grid, dim3 blocks, int threads) {
                         kernel<<<blocks, threads, 0, stream>>>(static_cast<const T*>(input.data), bias, output, grid);
                       });
      });
    });
  }
  if (done < elements) launch_any<Gelu<true>>(TypedPointer{}, input, bias, output, done, elements, columns, stream);
  return cudaGetLastError();
}

template <template <bool> class Gelu>
cudaError_t launch_bwd(TypedPointer grad_output, TypedPointer input, TypedPointer bias, TypedPointer grad_input,
                       int64_t elements, int64_t columns, cudaStream_t stream) {
  int64_t done = 0;
  if (is_aligned(grad_output.data) && is_aligned(grad_input.data) && grad_output.dtype == input.dtype) {
    done = vector_elements(input, bias, elements, columns);
  }
  if (done > 0) {
    dispatch_fast_dtype(input.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      dispatch_vector_width<T, kBwdLoads>(done, [&](auto width, auto vectors) {
        launch_vectors(done / width, bias.data != nullptr ? columns / width : kThreads, vectors,
                       [&](VectorGrid grid, dim3 blocks, int threads) {
                         gelu_bwd_kernel<T, Gelu<sizeof(T) == 4>, width, vectors><<<blocks, threads, 0, stream>>>(
                             static_cast<const T*>(grad_output.data), static_cast<const T*>(input.data), bias,
                             static_cast<T*>(grad_input.data), grid);
                       });
      });
    });
  }
  if (done < elements) launch_any<Gelu<true>>(grad_output, input, bias, grad_input, done, elements, columns, stream);
  return cudaGetLastError();
}

}  // namespace

extern "C" cudaError_t fuseopt_gelu_fwd(TypedPointer input, TypedPointer bias, TypedPointer output, int64_t elements,
                                        int64_t columns, int approximation, cudaStream_t stream) {
  if (elements == 0) return cudaSuccess;
  const auto launch = approximation == kTanh ? launch_fwd<TanhGelu> : launch_fwd<ErfGelu>;
  return launch(input, bias, output, elements, columns, stream);
}

extern "C" cudaError_t fuseopt_gelu_bwd(TypedPointer grad_output, TypedPointer input, TypedPointer bias,
                                        TypedPointer grad_input, int64_t elements, int64_t columns, int approximation,
                                        cudaStream_t stream) {
  if (elements == 0) return cudaSuccess;
  const auto launch = approximation == kTanh ? launch_bwd<TanhGelu> : launch_bwd<ErfGelu>;
  return launch(grad_output, input, bias, grad_input, elements, columns, stream);
}

}  // namespace fuseopt
