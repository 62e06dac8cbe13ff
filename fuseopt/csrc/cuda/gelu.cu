// GELU (Hendrycks and Gimpel, 2016) of input + bias: x * Phi(x), Phi exact ("none" in torch) or by its tanh
// approximation.
#include "launch.cuh"
#include "math.cuh"
#include "vector.cuh"

namespace fuseopt {
namespace {

constexpr int kThreads = 128;
constexpr int kFwdVectors = 2;  // 16-byte loads in flight a thread
constexpr int kBwdVectors = 2;  // of each of two tensors

constexpr float kSqrtHalf = 0.70710678118654752f;
constexpr float kInvSqrt2Pi = 0.39894228040143268f;

// Phi(x), for results in float32.
__device__ float normal_cdf_precise(float x) { return 0.5f * (1.0f + erff(x * kSqrtHalf)); }

// Phi(x) to a relative error of 6e-6 for |x| < 6 (beyond that, below 1e-9 absolute), for results rounded to 16 bits: a
// third of erff's instructions. 2^polynomial(|x|) is the upper tail Phi(-|x|); the coefficients are a least-maximum fit
// of its log2 on [0, 6].
__device__ float normal_cdf_16_bit(float x) {
  const float a = fabsf(x);
  float log2_tail = -1.8348145e-06f;
  log2_tail = fmaf(log2_tail, a, 6.1598352e-05f);
  log2_tail = fmaf(log2_tail, a, -9.3052530e-04f);
  log2_tail = fmaf(log2_tail, a, 8.5078925e-03f);
  log2_tail = fmaf(log2_tail, a, -5.3960074e-02f);
  log2_tail = fmaf(log2_tail, a, -4.5846438e-01f);
  log2_tail = fmaf(log2_tail, a, -1.1512511e+00f);
  log2_tail = fmaf(log2_tail, a, -9.9999529e-01f);
  const float tail = exp2_approx(log2_tail);
  return x < 0 ? tail : 1.0f - tail;
}

template <bool kPrecise>
struct ErfGelu {
  __device__ static float cdf(float x) { return kPrecise ? normal_cdf_precise(x) : normal_cdf_16_bit(x); }
  __device__ static double cdf(double x) { return normcdf(x); }

  template <typename Acc>
  __device__ static Acc value(Acc x) {
    return x * cdf(x);
  }

  __device__ static float derivative(float x) { return cdf(x) + x * kInvSqrt2Pi * exp_as<kPrecise>(-0.5f * x * x); }
  __device__ static double derivative(double x) { return cdf(x) + x * 0.39894228040143267794 * exp(-0.5 * x * x); }
};

// 0.5 * (1 + tanh(u)) = sigmoid(z), z = 2u = 2 sqrt(2 / pi) * (x + 0.044715 x^3). Through e = exp(-|z|) and r = 1 / (1
// + e) nothing cancels or overflows: sigmoid(z) is r or e * r by the sign of z, and its derivative e * r * r.
template <bool kPrecise>
struct TanhGelu {
  static constexpr double kTwoSqrt2OverPi = 1.5957691216057308;
  static constexpr double kCubic = 0.044715;

  __device__ static float exp_negative(float x) { return exp_as<kPrecise>(-x); }
  __device__ static double exp_negative(double x) { return exp(-x); }

  __device__ static float reciprocal(float x) {
    const float r = __fdividef(1.0f, x);
    return kPrecise ? fmaf(r, fmaf(-x, r, 1.0f), r) : r;
  }
  __device__ static double reciprocal(double x) { return 1 / x; }

  template <typename Acc>
  __device__ static Acc twice_u(Acc x) {
    return x * (Acc(kTwoSqrt2OverPi) + Acc(kTwoSqrt2OverPi * kCubic) * x * x);
  }

  template <typename Acc>
  __device__ static Acc value(Acc x) {
    const Acc z = twice_u(x);
    const Acc e = exp_negative(fabs(z));
    const Acc r = reciprocal(1 + e);
    return x * (z < 0 ? e * r : r);
  }

  template <typename Acc>
  __device__ static Acc derivative(Acc x) {
    const Acc z = twice_u(x);
    const Acc e = exp_negative(fabs(z));
    const Acc r = reciprocal(1 + e);
    const Acc dz = Acc(kTwoSqrt2OverPi) + Acc(3 * kTwoSqrt2OverPi * kCubic) * x * x;
    return (z < 0 ? e * r : r) + x * dz * (e * r * r);
  }
};

// The input as rows of vectors, of which a thread has one column: with a bias the tensor's own rows, so that a thread
// reads its bias once; without one, any cut of the flattened tensor.
struct VectorGrid {
  int64_t vectors;
  int64_t vectors_in_row;

  __device__ int64_t column() const { return static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; }
  __device__ int64_t vector(int64_t row) const { return row * vectors_in_row + column(); }
};

template <int kWidth>
__device__ void load_bias(float (&values)[kWidth], TypedPointer bias, const VectorGrid& grid) {
  if (bias.data != nullptr) {
    load_floats(bias, grid.column() * kWidth, values);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = 0;
  }
}

template <typename T, typename Gelu>
__global__ void __launch_bounds__(kThreads)
    gelu_fwd_kernel(const T* __restrict__ input, TypedPointer bias, TypedPointer output, VectorGrid grid) {
  constexpr int kWidth = kVectorWidth<T>;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kFwdVectors;
  if (grid.column() >= grid.vectors_in_row) return;

  Vector<T> x[kFwdVectors];
#pragma unroll
  for (int k = 0; k < kFwdVectors; ++k) {
    const int64_t v = grid.vector(first_row + k);
    if (v < grid.vectors) x[k] = load_vector(input, v);
  }
  float shift[kWidth];
  load_bias(shift, bias, grid);
#pragma unroll
  for (int k = 0; k < kFwdVectors; ++k) {
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result[j] = Gelu::value(x[k][j] + shift[j]);
    const int64_t v = grid.vector(first_row + k);
    if (v < grid.vectors) store_floats(output, v, result);
  }
}

template <typename T, typename Gelu>
__global__ void __launch_bounds__(kThreads)
    gelu_bwd_kernel(const T* __restrict__ grad_output, const T* __restrict__ input, TypedPointer bias,
                    T* __restrict__ grad_input, VectorGrid grid) {
  constexpr int kWidth = kVectorWidth<T>;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kBwdVectors;
  if (grid.column() >= grid.vectors_in_row) return;

  Vector<T> x[kBwdVectors], grad[kBwdVectors];
#pragma unroll
  for (int k = 0; k < kBwdVectors; ++k) {
    const int64_t v = grid.vector(first_row + k);
    if (v < grid.vectors) {
      x[k] = load_vector(input, v);
      grad[k] = load_vector(grad_output, v);
    }
  }
  float shift[kWidth];
  load_bias(shift, bias, grid);
#pragma unroll
  for (int k = 0; k < kBwdVectors; ++k) {
    float result[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) result[j] = grad[k][j] * Gelu::derivative(x[k][j] + shift[j]);
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
             grad_output.data != nullptr ? load_as<Acc>(grad_output, i) * Gelu::derivative(x) : Gelu::value(x));
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

// Calls `launch(VectorGrid, blocks, threads)` for `vectors` vectors, `rows_per_thread` of them a thread.
template <typename Launch>
void launch_vectors(int64_t vectors, int64_t vectors_in_row, int rows_per_thread, Launch launch) {
  const int threads = static_cast<int>(std::min<int64_t>(kThreads, ceil_div(vectors_in_row, kWarpSize) * kWarpSize));
  const int64_t rows = ceil_div(vectors, vectors_in_row);
  launch(VectorGrid{vectors, vectors_in_row},
         dim3(static_cast<unsigned>(ceil_div(rows, rows_per_thread)),
              static_cast<unsigned>(ceil_div(vectors_in_row, threads))),
         threads);
}

template <template <bool> class Gelu>
cudaError_t launch_fwd(TypedPointer input, TypedPointer bias, TypedPointer output, int64_t elements, int64_t columns,
                       cudaStream_t stream) {
  int64_t done = 0;
  if (is_aligned(output.data) && output.dtype != kFloat64) done = vector_elements(input, bias, elements, columns);
  if (done > 0) {
    dispatch_fast_dtype(input.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      constexpr int kWidth = kVectorWidth<T>;
      const auto kernel =
          output.dtype == kFloat32 ? gelu_fwd_kernel<T, Gelu<true>> : gelu_fwd_kernel<T, Gelu<sizeof(T) == 4>>;
      launch_vectors(done / kWidth, bias.data != nullptr ? columns / kWidth : kThreads, kFwdVectors,
                     [&](VectorGrid grid, dim3 blocks, int threads) {
                       kernel<<<blocks, threads, 0, stream>>>(static_cast<const T*>(input.data), bias, output, grid);
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
      constexpr int kWidth = kVectorWidth<T>;
      const auto kernel = gelu_bwd_kernel<T, Gelu<sizeof(T) == 4>>;
      launch_vectors(done / kWidth, bias.data != nullptr ? columns / kWidth : kThreads, kBwdVectors,
                     [&](VectorGrid grid, dim3 blocks, int threads) {
                       kernel<<<blocks, threads, 0, stream>>>(static_cast<const T*>(grad_output.data),
                                                              static_cast<const T*>(input.data), bias,
                                                              static_cast<T*>(grad_input.data), grid);
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
