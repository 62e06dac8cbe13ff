// The pairwise interaction of features [batch, n, d] and its gradient by tensor cores, a sample a warp, in float32,
// float16 or bfloat16. Fragments are loaded from global memory as 16 bytes a lane: the sum over k may be taken in any
// order, and the same registers serve as rows of A and as columns of B. Takes n <= 32 and rows of whole 16 bytes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <type_traits>

#include "new_tensor.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr int kWarps = 4;

// The words of a lane's 16 bytes as one register array.
union Words {
  uint4 all;
  uint32_t word[4];
};

// Streamed loads in half precision take the forward of bfloat16 from 19.1 to 17.7 us on an H200, float32's from 39.2 to
// 40.7.
template <bool kStreamed = false, typename T>
__device__ Words load(const T* row, bool is_inside) {
  const uint4* vector = reinterpret_cast<const uint4*>(row);
  Words words;
  words.all = !is_inside ? uint4{0, 0, 0, 0} : kStreamed ? __ldcs(vector) : *vector;
  return words;
}

// a b + c of a 16 x 8 tile; k is 8 in tf32, 16 in half precision.
template <typename T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4]) {
#define MMA(SHAPE_AND_TYPES)                                                                                      \
  asm("mma.sync.aligned." SHAPE_AND_TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};" \
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                            \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]))
  if constexpr (sizeof(T) == 4) {
    MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
  } else if constexpr (std::is_same_v<T, __half>) {
    MMA("m16n8k16.row.col.f32.f16.f16.f32");
  } else {
    MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  }
#undef MMA
}

// Registers of an operand; of float32 as the sum of two numbers in tf32, of which tensor cores read 11 bits each.
template <typename T, int kSize>
struct Operand {
  uint32_t high[kSize], low[kSize];

  __device__ explicit Operand(const uint32_t (&words)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      high[i] = sizeof(T) == 4 ? (words[i] + 0x1000) & 0xffffe000 : words[i];  // rounded to nearest
      low[i] = sizeof(T) == 4 ? __float_as_uint(__uint_as_float(words[i]) - __uint_as_float(high[i])) : 0;
    }
  }
};

template <typename T>
__device__ void multiply(float (&sums)[4], const Operand<T, 4>& a, const Operand<T, 2>& b) {
  if constexpr (sizeof(T) == 4) {
    mma<T>(sums, a.low, b.high, sums);
    mma<T>(sums, a.high, b.low, sums);
  }
  mma<T>(sums, a.high, b.high, sums);
}

// Place of the product of features i and j < i after the first feature's d numbers.
__device__ int pair_place(int i, int j) { return i * (i - 1) / 2 + j; }

template <typename T>
__global__ void __launch_bounds__(32 * kWarps, sizeof(T) == 4 ? 4 : 5)
    interaction_kernel(const T* features, T* output, int64_t batch, int n, int d, int width) {
  constexpr int kVector = 16 / sizeof(T), kStages = 2;
  extern __shared__ uint4 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, place = lane % 4;
  const int64_t sample = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (sample >= batch) return;
  T* row = reinterpret_cast<T*>(shared) + warp * width;
  const T* first = features + sample * n * d;
  float sums[6][4] = {};  // tiles (0, 0), (0, 1), (1, 0) ... (1, 3) of 16 x 8: those below the diagonal
  for (int start = 0; start < d; start += kStages * 4 * kVector) {
    Words words[kStages][4];  // features group + 8 r
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const int column = start + (4 * stage + place) * kVector;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int feature = group + 8 * r;
        words[stage][r] = load<sizeof(T) == 2>(first + feature * d + column, feature < n && column < d);
      }
    }
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      const int column = start + (4 * stage + place) * kVector;
      if (group == 0 && column < d) {
        const T* numbers = reinterpret_cast<const T*>(&words[stage][0]);
#pragma unroll
        for (int i = 0; i < kVector; ++i) row[column + i] = numbers[i];
      }
      // Tensor cores cut off what they add up: short sums keep the accuracy of float32.
      float short_sums[6][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[2][4], b[4][2];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int k = 0; k < 2; ++k) a[r / 2][2 * k + r % 2] = b[r][k] = words[stage][r].word[2 * half + k];
        }
        const Operand<T, 4> rows[2] = {Operand<T, 4>(a[0]), Operand<T, 4>(a[1])};
        const Operand<T, 2> columns[4] = {Operand<T, 2>(b[0]), Operand<T, 2>(b[1]), Operand<T, 2>(b[2]),
                                          Operand<T, 2>(b[3])};
#pragma unroll
        for (int tile = 0; tile < 6; ++tile) {
          auto& into = sizeof(T) == 4 ? short_sums[tile] : sums[tile];
          multiply<T>(into, rows[tile > 1], columns[tile > 1 ? tile - 2 : tile]);
        }
      }
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < 24; ++i) sums[i / 4][i % 4] += short_sums[i / 4][i % 4];
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < 6; ++tile) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int i = (tile > 1 ? 16 : 0) + 8 * (c / 2) + group, j = 8 * (tile > 1 ? tile - 2 : tile) + 2 * place + c % 2;
      if (j < i && i < n) row[d + pair_place(i, j)] = T(sums[tile][c]);
    }
  }
  __syncwarp();
  for (int i = lane; i < width; i += 32) output[sample * width + i] = row[i];
}

// Columns of a chunk are dealt to the lanes so that loads take 128 bytes of a row together, and stores 64.
__device__ int dealt(int n) { return n / 2 + 4 * (n % 2); }

template <typename T>
__global__ void __launch_bounds__(32 * kWarps, 4)
    interaction_backward_kernel(const T* features, const T* grad, T* result, int64_t batch, int n, int d, int width) {
  constexpr int kVector = 16 / sizeof(T), kSteps = sizeof(T), kTiles = kVector;
  extern __shared__ uint4 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, place = lane % 4;
  const int64_t sample = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (sample >= batch) return;
  T* row = reinterpret_cast<T*>(shared) + warp * width;
  for (int i = lane; i < width; i += 32) row[i] = grad[sample * width + i];
  __syncwarp();
  // The gradient of feature i is the sum over j of symmetric[i][j] feature j; of the first also what it was copied to.
  const auto symmetric = [&](int i, int j) {
    return i < n && j < n && i != j ? row[d + pair_place(i > j ? i : j, i > j ? j : i)] : T(0.0f);
  };
  // Feature that a lane's k-th number of an operand's register `r` (0 or 1) is of, in step `s`.
  const auto feature_of = [&](int s, int r, int k) {
    return sizeof(T) == 4 ? 8 * s + 4 * r + place : 16 * s + 8 * r + 2 * place + k;
  };
  uint32_t weights[kSteps][2][4];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int m = i / 4, r = i % 4, feature = 16 * m + 8 * (r % 2) + group;
      alignas(4) T numbers[4 / sizeof(T)];
#pragma unroll
      for (int k = 0; k < 4 / sizeof(T); ++k) numbers[k] = symmetric(feature, feature_of(s, r / 2, k));
      weights[s][m][r] = *reinterpret_cast<uint32_t*>(numbers);
    }
  }
  const T* first = features + sample * n * d;
  for (int start = 0; start < d; start += 8 * kVector) {
    const int column = start + kVector * dealt(group);
    Words words[8];  // 8 features: those of `feature_of`, in order
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int feature = sizeof(T) == 4 ? feature_of(i / 2, i % 2, 0) : feature_of(i / 4, i / 2 % 2, i % 2);
      words[i] = load(first + feature * d + column, feature < n && column < d);
    }
    alignas(16) T results[2][4][kVector];  // [column of a pair][feature group + 8 r]
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float sums[2][4] = {};
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint32_t b[2];
        if constexpr (sizeof(T) == 4) {
          b[0] = words[2 * s].word[tile], b[1] = words[2 * s + 1].word[tile];
        } else {  // number `tile` of two features
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            b[r] = __byte_perm(words[4 * s + 2 * r].word[tile / 2], words[4 * s + 2 * r + 1].word[tile / 2],
                               tile % 2 ? 0x7632 : 0x5410);
          }
        }
        const Operand<T, 2> columns(b);
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply<T>(sums[m], Operand<T, 4>(weights[s][m]), columns);
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const int column_of_it = start + kVector * dealt(2 * place + c % 2) + tile;
        const bool takes_dense = c < 2 && group == 0 && column_of_it < d;
        results[c % 2][c / 2][tile] = T(sums[c / 4][c % 4] + (takes_dense ? float(row[column_of_it]) : 0.0f));
      }
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const int feature = group + 8 * (c / 2), to = start + kVector * dealt(2 * place + c % 2);
      if (feature < n && to < d) {
        *reinterpret_cast<uint4*>(result + (sample * n + feature) * d + to) =
            *reinterpret_cast<const uint4*>(results[c % 2][c / 2]);
      }
    }
  }
}

// Calls `launch(T(), blocks, bytes of shared memory, stream)` for the dtype of the features.
template <typename Launch>
void dispatch(const Tensor& features, int64_t width, Launch launch) {
  const int64_t blocks = (features.size(0) + kWarps - 1) / kWarps;
  if (blocks == 0) return;
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(features.get_device_index(), &stream);
  const auto run = [&](auto zero) {
    launch(zero, blocks, kWarps * width * sizeof(zero), static_cast<cudaStream_t>(stream));
  };
  switch (features.scalar_type()) {
    case ScalarType::Float: run(float()); break;
    case ScalarType::Half: run(__half()); break;
    default: run(__nv_bfloat16());
  }
}

}  // namespace

Tensor interaction(Tensor features) {
  const int64_t batch = features.size(0), n = features.size(1), d = features.size(2), width = d + n * (n - 1) / 2;
  Tensor output = fuseopt::new_tensor(features, {batch, width});
  dispatch(features, width, [&](auto zero, int64_t blocks, size_t bytes, cudaStream_t stream) {
    using T = decltype(zero);
    interaction_kernel<T><<<blocks, 32 * kWarps, bytes, stream>>>(static_cast<const T*>(features.const_data_ptr()),
                                                                  static_cast<T*>(output.mutable_data_ptr()), batch, n,
                                                                  d, width);
  });
  return output;
}

Tensor interaction_backward(Tensor features, Tensor grad) {
  const int64_t batch = features.size(0), n = features.size(1), d = features.size(2), width = d + n * (n - 1) / 2;
  Tensor result = fuseopt::new_tensor_like(features);
  dispatch(features, width, [&](auto zero, int64_t blocks, size_t bytes, cudaStream_t stream) {
    using T = decltype(zero);
    interaction_backward_kernel<T><<<blocks, 32 * kWarps, bytes, stream>>>(
        static_cast<const T*>(features.const_data_ptr()), static_cast<const T*>(grad.const_data_ptr()),
        static_cast<T*>(result.mutable_data_ptr()), batch, n, d, width);
  });
  return result;
}
