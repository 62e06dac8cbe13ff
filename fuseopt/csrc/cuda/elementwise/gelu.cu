// GELU of input + bias.
#include "cuda/common/column_sums.cuh"
#include "cuda/common/dependent_launch.cuh"
#include "cuda/elementwise/gelu.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/common/vector_grid.cuh"

namespace fuseopt::gelu {
namespace {

constexpr int kThreads = kVectorGridThreads;
// TUNED: measurement not recorded (loads: 9f339f7; threads and few rows of the bias's gradient: 843c4ec);
// `fuseopt bench ops --op gelu` measures it again.
constexpr int kFwdLoads = 2;  // 16-byte loads in flight per thread
constexpr int kBwdLoads = 2;  // of each of two tensors
constexpr int kBiasThreads = 256;
constexpr int kFewRows = 64;

// A bias has type T, the input's dtype, or float32.
template <typename T, int kWidth>
__device__ void load_bias(float (&values)[kWidth], TypedPointer bias, const VectorGrid& grid) {
  if (bias.data != nullptr) {
    load_floats<T, float>(bias, grid.column() * kWidth, values);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = 0;
  }
}

template <typename T, typename Output, typename Gelu, int kWidth, int kVectors>
__global__ void __launch_bounds__(kThreads)
    gelu_fwd_kernel(const T* input, TypedPointer bias, Output* __restrict__ output, VectorGrid grid) {
  const int64_t first_row = grid.first_row(kVectors);
  if (grid.column() >= grid.vectors_in_row) return;
  follow_predecessor();

  Vector<T, kWidth> x[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t v = grid.vector(first_row + k);
    if (v < grid.vectors) x[k] = load_vector<T, kWidth>(input, v);
  }
  float shift[kWidth];
  load_bias<T>(shift, bias, grid);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result[j] = Gelu::value(x[k][j] + shift[j]);
    const int64_t v = grid.vector(first_row + k);
    if (v < grid.vectors) store_floats_as<Output>(output, v, result);
  }
}

template <typename T, typename Gelu, int kWidth, int kVectors>
__global__ void __launch_bounds__(kThreads)
    gelu_bwd_kernel(const T* grad_output, const T* input, TypedPointer bias,
                    T* __restrict__ grad_input, VectorGrid grid) {
  const int64_t first_row = grid.first_row(kVectors);
  if (grid.column() >= grid.vectors_in_row) return;
  follow_predecessor();

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
  load_bias<T>(shift, bias, grid);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result[j] = Gelu::backward(grad[k][j], x[k][j] + shift[j]);
    const int64_t v = grid.vector(first_row + k);
    if (v < grid.vectors) store_floats_as<T>(grad_input, v, result);
  }
}

// The backward with the gradient of the bias. A thread has one column of vectors, in every so many-th row, and sums
// their gradients. A block adds up its rows and writes a row of `partials`, or the result if `partials` is absent.
template <typename T, typename Gelu, int kWidth, int kLanes>
__global__ void __launch_bounds__(kBiasThreads)
    gelu_bias_bwd_kernel(const T* grad_output, const T* input, TypedPointer bias,
                         T* __restrict__ grad_input, float* __restrict__ partials, TypedPointer grad_bias, int64_t rows,
                         int columns) {
  constexpr int kRowLanes = kBiasThreads / kLanes;
  __shared__ Vector<float, kWidth> row_sums[kRowLanes][kLanes];
  const int lane = threadIdx.x % kLanes, row_lane = threadIdx.x / kLanes;
  const int column = blockIdx.x * kLanes + lane, vectors_in_row = columns / kWidth;
  const int64_t step = static_cast<int64_t>(gridDim.y) * kRowLanes;
  follow_predecessor();

  float sums[kWidth] = {};
  if (column < vectors_in_row) {
    float shift[kWidth];
    load_floats<T, float>(bias, column * kWidth, shift);
    for (int64_t first = blockIdx.y * kRowLanes + row_lane; first < rows; first += kBwdLoads * step) {
      Vector<T, kWidth> x[kBwdLoads], grad[kBwdLoads];
#pragma unroll
      for (int k = 0; k < kBwdLoads; ++k) {
        const int64_t row = first + k * step;
        if (row >= rows) continue;
        x[k] = load_vector<T, kWidth>(input, row * vectors_in_row + column);
        grad[k] = load_vector<T, kWidth>(grad_output, row * vectors_in_row + column);
      }
#pragma unroll
      for (int k = 0; k < kBwdLoads; ++k) {
        const int64_t row = first + k * step;
        if (row >= rows) continue;
        float result[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          result[j] = Gelu::backward(grad[k][j], x[k][j] + shift[j]);
          sums[j] += result[j];
        }
        store_floats_as<T>(grad_input, row * vectors_in_row + column, result);
      }
    }
  }
  store_floats_as<float>(row_sums[row_lane], lane, sums);
  __syncthreads();
  for (int i = threadIdx.x; i < kLanes * kWidth; i += kBiasThreads) {
    const int c = blockIdx.x * kLanes * kWidth + i;
    if (c >= columns) break;
    float sum = 0;
#pragma unroll
    for (int r = 0; r < kRowLanes; ++r) sum += row_sums[r][i / kWidth].values[i % kWidth];
    if (partials != nullptr) partials[static_cast<int64_t>(blockIdx.y) * columns + c] = sum;
    else store_as(grad_bias, c, sum);
  }
}

// The gradient of the bias for what the vector kernels do not take. A block has as many columns as a warp has lanes.
template <typename Acc, typename Gelu>
__global__ void __launch_bounds__(kBiasThreads)
    gelu_bias_any_kernel(TypedPointer grad_output, TypedPointer input, TypedPointer bias, TypedPointer grad_bias,
                         int64_t rows, int64_t columns) {
  __shared__ Acc warp_sums[kBiasThreads / kWarpSize][kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarpSize + lane;
  Acc sum = 0;
  if (column < columns) {
    const Acc shift = load_as<Acc>(bias, column);
    for (int64_t row = warp; row < rows; row += kBiasThreads / kWarpSize) {
      const int64_t i = row * columns + column;
      sum += Gelu::backward(load_as<Acc>(grad_output, i), load_as<Acc>(input, i) + shift);
    }
  }
  warp_sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
  for (int w = 1; w < kBiasThreads / kWarpSize; ++w) sum += warp_sums[w][lane];
  store_as(grad_bias, column, sum);
}

// One element at a time: for float64, unaligned tensors, biases of odd length, and elements [begin, elements), which
// fill no vector.
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

// Without grad_output it is the forward.
template <typename Gelu>
void launch_any(TypedPointer grad_output, TypedPointer input, TypedPointer bias, TypedPointer output, int64_t begin,
                int64_t elements, int64_t columns, cudaStream_t stream) {
  const unsigned blocks =
      static_cast<unsigned>(std::min<int64_t>(ceil_div(elements - begin, kThreads), 16 * multiprocessor_count()));
  const auto kernel =
      is_float64(input) || is_float64(bias) ? gelu_any_kernel<double, Gelu> : gelu_any_kernel<float, Gelu>;
  kernel<<<blocks, kThreads, 0, stream>>>(grad_output, input, bias, output, begin, elements, columns);
}

// How many leading elements the vector kernels take: all whole vectors, or none.
int64_t vector_elements(TypedPointer input, TypedPointer bias, int64_t elements, int64_t columns) {
  if (input.dtype == kFloat64 || !is_aligned(input.data)) return 0;
  if (bias.data != nullptr && bias.dtype != input.dtype && bias.dtype != kFloat32) return 0;
  const int width = kAccessBytes / element_size(static_cast<DType>(input.dtype));
  if (bias.data != nullptr && columns % width != 0) return 0;
  return elements / width * width;
}

template <template <bool> class Gelu>
cudaError_t launch_fwd(TypedPointer input, TypedPointer bias, TypedPointer output, int64_t elements, int64_t columns,
                       cudaStream_t stream) {
  int64_t done = 0;
  if (is_aligned(output.data) && (output.dtype == input.dtype || output.dtype == kFloat32)) {
    done = vector_elements(input, bias, elements, columns);
  }
  if (done > 0) {
    dispatch_fast_dtype(input.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const auto launch = [&](auto output_tag) {
        using Output = typename decltype(output_tag)::type;
        dispatch_vector_width<T, kFwdLoads>(done, [&](auto width, auto vectors) {
          launch_vectors(done / width, bias.data != nullptr ? columns / width : kThreads, vectors,
                         [&](VectorGrid grid, dim3 blocks, int threads) {
                           using Rounded = Gelu<sizeof(Output) == 4>;
                           using Kernel = FollowingKernel<gelu_fwd_kernel<T, Output, Rounded, width, vectors>>;
                           Kernel::launch(blocks, threads, 0, stream, static_cast<const T*>(input.data), bias,
                                          static_cast<Output*>(output.data), grid);
                         });
        });
      };
      if (output.dtype == kFloat32) launch(TypeTag<float>{});
      else launch(tag);
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
                         using Kernel = FollowingKernel<gelu_bwd_kernel<T, Gelu<sizeof(T) == 4>, width, vectors>>;
                         Kernel::launch(blocks, threads, 0, stream, static_cast<const T*>(grad_output.data),
                                        static_cast<const T*>(input.data), bias, static_cast<T*>(grad_input.data),
                                        grid);
                       });
      });
    });
  }
  if (done < elements) launch_any<Gelu<true>>(grad_output, input, bias, grad_input, done, elements, columns, stream);
  return cudaGetLastError();
}

template <template <bool> class Gelu>
cudaError_t launch_bias_bwd(TypedPointer grad_output, TypedPointer input, TypedPointer bias, TypedPointer grad_input,
                            TypedPointer grad_bias, void* workspace, int64_t rows, int64_t columns,
                            cudaStream_t stream) {
  const int64_t elements = rows * columns;
  const bool vectors = elements > 0 && columns <= INT32_MAX && is_aligned(grad_output.data) &&
                       is_aligned(grad_input.data) && grad_output.dtype == input.dtype &&
                       vector_elements(input, bias, elements, columns) == elements;
  if (!vectors) {
    if (elements > 0) launch_any<Gelu<true>>(grad_output, input, bias, grad_input, 0, elements, columns, stream);
    const auto kernel = is_float64(input) || is_float64(bias) ? gelu_bias_any_kernel<double, Gelu<true>>
                                                              : gelu_bias_any_kernel<float, Gelu<true>>;
    kernel<<<static_cast<unsigned>(ceil_div(columns, kWarpSize)), kBiasThreads, 0, stream>>>(
        grad_output, input, bias, grad_bias, rows, columns);
    return cudaGetLastError();
  }
  Partials<float> partials{static_cast<float*>(workspace), 1, columns};
  dispatch_fast_dtype(input.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto kernel, int64_t strip, int64_t row_lanes) {
      const int64_t strips = ceil_div(columns, strip);
      if (partials.data != nullptr) {
        const int64_t blocks = tuning().gelu_bias_bwd_blocks * multiprocessor_count();
        partials.count = std::min({ceil_div(rows, row_lanes), max_partials(rows), std::max<int64_t>(1, blocks / strips)});
      }
      kernel.launch(dim3(static_cast<unsigned>(strips), static_cast<unsigned>(partials.count)), kBiasThreads, 0, stream,
                    static_cast<const T*>(grad_output.data), static_cast<const T*>(input.data), bias,
                    static_cast<T*>(grad_input.data), partials.data, grad_bias, rows, static_cast<int>(columns));
    };
    constexpr int kWidth = kVectorWidth<T>;
    constexpr int kFewLanes = kWarpSize, kLanes = kBiasThreads / 2;
    using Rounded = Gelu<sizeof(T) == 4>;
    if (partials.data == nullptr) {
      launch(FollowingKernel<gelu_bias_bwd_kernel<T, Rounded, kFewWidth, kFewLanes>>{}, kFewLanes * kFewWidth,
             kBiasThreads / kFewLanes);
    } else {
      launch(FollowingKernel<gelu_bias_bwd_kernel<T, Rounded, kWidth, kLanes>>{}, kLanes * kWidth,
             kBiasThreads / kLanes);
    }
  });
  if (partials.data == nullptr) return cudaGetLastError();
  return reduce_partials(partials, {grad_bias}, stream);
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

extern "C" size_t fuseopt_gelu_bias_bwd_workspace_bytes(int64_t rows, int64_t columns) {
  return rows <= kFewRows ? 0 : static_cast<size_t>(max_partials(rows) * columns) * sizeof(float);
}

extern "C" cudaError_t fuseopt_gelu_bias_bwd(TypedPointer grad_output, TypedPointer input, TypedPointer bias,
                                             TypedPointer grad_input, TypedPointer grad_bias, void* workspace,
                                             int64_t rows, int64_t columns, int approximation, cudaStream_t stream) {
  if (columns == 0) return cudaSuccess;
  const auto launch = approximation == kTanh ? launch_bias_bwd<TanhGelu> : launch_bias_bwd<ErfGelu>;
  return launch(grad_output, input, bias, grad_input, grad_bias, workspace, rows, columns, stream);
}

}  // namespace fuseopt::gelu
