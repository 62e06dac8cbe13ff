// Gated activations (Shazeer, 2020): activation(gate) * up. The activation is rounded in between, as it would be if
// stored as a tensor.
#include "cuda/common/dependent_launch.cuh"
#include "cuda/elementwise/gelu.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/common/vector_grid.cuh"

namespace fuseopt::gated_activation {
namespace {

constexpr int kThreads = kVectorGridThreads;
// TUNED: measurement not recorded (9f339f7); `fuseopt bench ops --op gated_activation` measures it again.
constexpr int kFwdLoads = 2;  // 16-byte loads in flight per thread, of each of two tensors
constexpr int kBwdLoads = 1;  // of each of three tensors

// x * sigmoid(x). Value and gradient are written as in torch's kernels, so that they are bitwise equal.
struct SiluOfAnyPrecision {
  template <typename Acc>
  __device__ static Acc value(Acc x) {
    return x / (1 + exp(-x));
  }

  template <typename Acc>
  __device__ static Acc backward(Acc grad_output, Acc x) {
    const Acc sigmoid = 1 / (1 + exp(-x));
    return grad_output * sigmoid * (1 + x * (1 - sigmoid));
  }
};

struct ReluOfAnyPrecision {
  template <typename Acc>
  __device__ static Acc value(Acc x) {
    return x <= 0 ? 0 : x;
  }

  template <typename Acc>
  __device__ static Acc backward(Acc grad_output, Acc x) {
    return x <= 0 ? 0 : grad_output;
  }
};

template <bool kPrecise>
using Silu = SiluOfAnyPrecision;
template <bool kPrecise>
using Relu = ReluOfAnyPrecision;

// Row strides of the inputs, in vectors.
struct RowStrides {
  int64_t gate;
  int64_t up;
};

// A is the dtype that the activation is rounded to: T, or float; it is the result's dtype too.
template <typename T, typename A, typename Activation, int kWidth, int kVectors>
__global__ void __launch_bounds__(kThreads)
    gated_activation_fwd_kernel(const T* gate, const T* up, A* __restrict__ output,
                                VectorGrid grid, RowStrides strides) {
  const int64_t first_row = grid.first_row(kVectors);
  const int64_t column = grid.column();
  if (column >= grid.vectors_in_row) return;
  follow_predecessor();

  Vector<T, kWidth> x[kVectors], factor[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (grid.vector(first_row + k) < grid.vectors) {
      x[k] = load_vector<T, kWidth>(gate, (first_row + k) * strides.gate + column);
      factor[k] = load_vector<T, kWidth>(up, (first_row + k) * strides.up + column);
    }
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result[j] = Activation::value(x[k][j]);
    round_floats_as<A>(result);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result[j] *= factor[k][j];
    const int64_t v = grid.vector(first_row + k);
    if (v < grid.vectors) store_floats_as<A>(output, v, result);
  }
}

template <typename T, typename A, typename Activation, int kWidth, int kVectors>
__global__ void __launch_bounds__(kThreads)
    gated_activation_bwd_kernel(const A* grad_output, const T* gate,
                                const T* up, T* __restrict__ grad_gate, T* __restrict__ grad_up,
                                VectorGrid grid, RowStrides strides) {
  const int64_t first_row = grid.first_row(kVectors);
  const int64_t column = grid.column();
  if (column >= grid.vectors_in_row) return;
  follow_predecessor();

  Vector<T, kWidth> x[kVectors], factor[kVectors];
  Vector<A, kWidth> grad[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t v = grid.vector(first_row + k);
    if (v < grid.vectors) {
      x[k] = load_vector<T, kWidth>(gate, (first_row + k) * strides.gate + column);
      factor[k] = load_vector<T, kWidth>(up, (first_row + k) * strides.up + column);
      grad[k] = reinterpret_cast<const Vector<A, kWidth>*>(grad_output)[v];
    }
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float result[kWidth], grad_activation[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      result[j] = Activation::value(x[k][j]);
      grad_activation[j] = grad[k][j] * factor[k][j];
    }
    round_floats_as<A>(result);
    round_floats_as<A>(grad_activation);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      result[j] *= grad[k][j];
      grad_activation[j] = Activation::backward(grad_activation[j], x[k][j]);
    }
    const int64_t v = grid.vector(first_row + k);
    if (v < grid.vectors) {
      store_floats_as<T>(grad_up, v, result);
      store_floats_as<T>(grad_gate, v, grad_activation);
    }
  }
}

struct Gradients {
  TypedPointer gate;
  TypedPointer up;
};

// One element at a time: for float64, mixed dtypes, unaligned tensors, odd rows with gaps, and elements [begin,
// elements), which fill no vector. Without `grad_output` it is the forward.
template <typename Acc, typename Activation>
__global__ void __launch_bounds__(kThreads)
    gated_activation_any_kernel(TypedPointer grad_output, StridedRows gate, StridedRows up, TypedPointer output,
                                Gradients grads, int activation_dtype, int64_t begin, int64_t elements,
                                int64_t columns) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = begin + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < elements; i += step) {
    const int64_t row = i / columns, column = i % columns;
    const Acc x = load_as<Acc>(gate.values, row * gate.row_stride + column);
    const Acc factor = load_as<Acc>(up.values, row * up.row_stride + column);
    const Acc activated = round_to(activation_dtype, Activation::value(x));
    if (grad_output.data == nullptr) {
      store_as(output, i, activated * factor);
    } else {
      const Acc grad = load_as<Acc>(grad_output, i);
      store_as(grads.up, i, grad * activated);
      store_as(grads.gate, i, Activation::backward(round_to(activation_dtype, grad * factor), x));
    }
  }
}

// The arguments of one call, forward or backward; tensors that it does not have are absent.
struct Arguments {
  TypedPointer grad_output;
  StridedRows gate;
  StridedRows up;
  TypedPointer output;
  Gradients grads;
  int64_t rows;
  int64_t columns;
  int activation_dtype;
  cudaStream_t stream;

  int64_t elements() const { return rows * columns; }
};

template <typename Activation>
void launch_any(const Arguments& call, int64_t begin) {
  const int64_t needed = ceil_div(call.elements() - begin, kThreads);
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(needed, 16 * multiprocessor_count()));
  const bool wide = call.gate.values.dtype == kFloat64 || call.up.values.dtype == kFloat64 ||
                    call.activation_dtype == kFloat64;
  const auto kernel =
      wide ? gated_activation_any_kernel<double, Activation> : gated_activation_any_kernel<float, Activation>;
  kernel<<<blocks, kThreads, 0, call.stream>>>(call.grad_output, call.gate, call.up, call.output, call.grads,
                                               call.activation_dtype, begin, call.elements(), call.columns);
}

// How many leading elements the vector kernels take: the whole vectors of contiguous tensors; all elements if rows are
// whole vectors; otherwise none.
int64_t vector_elements(const Arguments& call) {
  const int dtype = call.gate.values.dtype;
  if (dtype == kFloat64 || call.up.values.dtype != dtype) return 0;
  if (call.activation_dtype != dtype && call.activation_dtype != kFloat32) return 0;
  if (!is_aligned(call.gate.values.data) || !is_aligned(call.up.values.data)) return 0;
  const int width = kAccessBytes / element_size(static_cast<DType>(dtype));
  if (call.rows == 1) return call.columns / width * width;
  const bool whole = call.columns % width == 0 && call.gate.row_stride % width == 0 && call.up.row_stride % width == 0;
  return whole ? call.elements() : 0;
}

// Calls `launch(VectorGrid, RowStrides, blocks, threads)` for `elements` elements.
template <typename Launch>
void launch_rows(const Arguments& call, int64_t elements, int width, int rows_per_thread, Launch launch) {
  const bool contiguous = call.rows == 1;
  const RowStrides strides = contiguous ? RowStrides{kThreads, kThreads}
                                        : RowStrides{call.gate.row_stride / width, call.up.row_stride / width};
  launch_vectors(elements / width, contiguous ? kThreads : call.columns / width, rows_per_thread,
                 [&](VectorGrid grid, dim3 blocks, int threads) { launch(grid, strides, blocks, threads); });
}

template <typename T, typename A, typename Activation>
void launch_fwd_vectors(const Arguments& call, int64_t elements) {
  dispatch_vector_width<T, kFwdLoads>(elements, [&](auto width, auto vectors) {
    launch_rows(call, elements, width, vectors, [&](VectorGrid grid, RowStrides strides, dim3 blocks, int threads) {
      using Kernel = FollowingKernel<gated_activation_fwd_kernel<T, A, Activation, width, vectors>>;
      Kernel::launch(blocks, threads, 0, call.stream, static_cast<const T*>(call.gate.values.data),
                     static_cast<const T*>(call.up.values.data), static_cast<A*>(call.output.data), grid, strides);
    });
  });
}

template <template <bool> class Activation>
cudaError_t launch_fwd(const Arguments& call) {
  const int64_t done = vector_elements(call);
  if (done > 0) {
    dispatch_fast_dtype(call.gate.values.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const auto launch = call.activation_dtype == kFloat32 ? launch_fwd_vectors<T, float, Activation<true>>
                                                            : launch_fwd_vectors<T, T, Activation<sizeof(T) == 4>>;
      launch(call, done);
    });
  }
  if (done < call.elements()) launch_any<Activation<true>>(call, done);
  return cudaGetLastError();
}

template <typename T, typename A, typename Activation>
void launch_bwd_vectors(const Arguments& call, int64_t elements) {
  dispatch_vector_width<T, kBwdLoads>(elements, [&](auto width, auto vectors) {
    launch_rows(call, elements, width, vectors, [&](VectorGrid grid, RowStrides strides, dim3 blocks, int threads) {
      using Kernel = FollowingKernel<gated_activation_bwd_kernel<T, A, Activation, width, vectors>>;
      Kernel::launch(blocks, threads, 0, call.stream, static_cast<const A*>(call.grad_output.data),
                     static_cast<const T*>(call.gate.values.data), static_cast<const T*>(call.up.values.data),
                     static_cast<T*>(call.grads.gate.data), static_cast<T*>(call.grads.up.data), grid, strides);
    });
  });
}

// Whether the incoming gradient can be read in groups that match the inputs' vectors.
bool has_vector_gradient(const Arguments& call) {
  const int dtype = call.gate.values.dtype, grad_dtype = call.grad_output.dtype;
  const int bytes =
      kAccessBytes / element_size(static_cast<DType>(dtype)) * element_size(static_cast<DType>(grad_dtype));
  return grad_dtype == call.activation_dtype && reinterpret_cast<uintptr_t>(call.grad_output.data) % bytes == 0;
}

template <template <bool> class Activation>
cudaError_t launch_bwd(const Arguments& call) {
  const int64_t done = has_vector_gradient(call) ? vector_elements(call) : 0;
  if (done > 0) {
    dispatch_fast_dtype(call.gate.values.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      using Rounded = Activation<sizeof(T) == 4>;
      const auto launch = call.grad_output.dtype == kFloat32 ? launch_bwd_vectors<T, float, Rounded>
                                                             : launch_bwd_vectors<T, T, Rounded>;
      launch(call, done);
    });
  }
  if (done < call.elements()) launch_any<Activation<true>>(call, done);
  return cudaGetLastError();
}

}  // namespace

extern "C" cudaError_t fuseopt_gated_activation_fwd(StridedRows gate, StridedRows up, TypedPointer output,
                                                    int64_t rows, int64_t columns, int activation,
                                                    int activation_dtype, cudaStream_t stream) {
  const Arguments call{TypedPointer{}, gate, up, output, Gradients{}, rows, columns, activation_dtype, stream};
  if (call.elements() == 0) return cudaSuccess;
  switch (static_cast<Activation>(activation)) {
    case kGelu: return launch_fwd<ErfGelu>(call);
    case kGeluTanh: return launch_fwd<TanhGelu>(call);
    case kSilu: return launch_fwd<Silu>(call);
    case kRelu: return launch_fwd<Relu>(call);
    case kIdentity: break;
  }
  return cudaErrorInvalidValue;
}

extern "C" cudaError_t fuseopt_gated_activation_bwd(TypedPointer grad_output, StridedRows gate, StridedRows up,
                                                    TypedPointer grad_gate, TypedPointer grad_up, int64_t rows,
                                                    int64_t columns, int activation, int activation_dtype,
                                                    cudaStream_t stream) {
  const Arguments call{grad_output, gate, up, TypedPointer{}, {grad_gate, grad_up}, rows, columns, activation_dtype,
                       stream};
  if (call.elements() == 0) return cudaSuccess;
  switch (static_cast<Activation>(activation)) {
    case kGelu: return launch_bwd<ErfGelu>(call);
    case kGeluTanh: return launch_bwd<TanhGelu>(call);
    case kSilu: return launch_bwd<Silu>(call);
    case kRelu: return launch_bwd<Relu>(call);
    case kIdentity: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace fuseopt::gated_activation
