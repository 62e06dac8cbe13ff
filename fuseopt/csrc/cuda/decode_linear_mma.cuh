// decode_linear for 16-bit weights, on the tensor cores: m16n8k16 with the rows as M. A step of decoding has 1 to 16
// rows, so all of them cost one instruction, and the weight is what has to be fetched in time.
//
// A block takes strips of 8 to 32 output columns and splits K over its warps. A warp copies its part of the weight into
// a ring of its own in shared memory (16-byte asynchronous copies, the first of them before it waits for the kernel
// ahead), holds its part of the input in registers, and needs no other warp until the sums at the end of a strip, which
// are added in the order of the warps. Both layouts of a weight come out of shared memory as the same fragments: [N, K]
// by plain loads, [K, N] by transposing ones. The order of k within a chunk is such that a lane reads 8 neighbouring
// inputs.
#pragma once

#include "decode_linear.cuh"
#include "tensor_core.cuh"

namespace fuseopt {

constexpr int kChunk = 32;  // values of k for which a warp copies one tile: 16 bytes a lane
constexpr int kTileBytes = kWarpSize * kAccessBytes;
constexpr int kRowsPerHalf = 8;
constexpr int kLaneValues = 8;  // of a row in a lane, for each chunk

template <int kTiles>
constexpr int kStages = 16 / kTiles;  // chunks of a warp under way

template <bool kNorm>
constexpr int kMaxThreads = kNorm ? 256 : 512;

// Blocks a multiprocessor is to have room for, by their registers: kernels that overlap need it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <bool kNorm>
constexpr int kMinBlocks = 1;
#else
template <bool kNorm>
constexpr int kMinBlocks = kNorm ? 3 : 1;
#endif

struct MmaLayer {
  DecodeLinear layer;
  int chunks;  // of K, for each warp
  unsigned strips, blocks;
  bool weights_aligned, input_aligned;
};

// Stages that a warp's ring has: no more than it has chunks in all.
template <int kTiles>
__host__ __device__ inline int ring_stages(const MmaLayer& mma) {
  const bool once = mma.strips <= mma.blocks && mma.chunks < kStages<kTiles>;
  return once ? mma.chunks : kStages<kTiles>;
}

// A warp's part of the weight, strip after strip: chunks [0, chunks) of its own, from `first_k` on.
template <typename T, int kTiles>
class WeightRing {
 public:
  __device__ WeightRing(const MmaLayer& mma, char* ring, int first_k)
      : mma_(mma), ring_(ring), first_k_(first_k), strip_(blockIdx.x) {}

  // Starts the copies of the next chunk, if there is one.
  __device__ void fetch() {
    if (strip_ < mma_.strips && mma_.chunks > 0) {
      fetch_chunk();
      fetched_ = (fetched_ + 1) % kStages<kTiles>;
      if (++chunk_ == mma_.chunks) {
        chunk_ = 0;
        strip_ += gridDim.x;
      }
    }
    commit_copies();
  }

  // Waits for the chunk that is next in turn.
  __device__ void await() const {
    wait_for_copies<kStages<kTiles> - 1>();
    __syncwarp();
  }

  // Two fragments of a tile of that chunk: words x, y and z, w.
  __device__ uint4 load(int tile) const {
    const char* const address = place(read_, tile) + threadIdx.x % kWarpSize * kAccessBytes;
    return mma_.layer.weights_are_transposed ? load_transposed(address) : *reinterpret_cast<const uint4*>(address);
  }

  // Gives its memory back.
  __device__ void release() {
    __syncwarp();
    read_ = (read_ + 1) % kStages<kTiles>;
    fetch();
  }

 private:
  __device__ char* place(int stage, int tile) const { return ring_ + (stage * kTiles + tile) * kTileBytes; }

  __device__ void fetch_chunk() const {
    const DecodeLinear& layer = mma_.layer;
    const Strip strip(layer, strip_, kTiles * kTileColumns / (layer.gated ? 2 : 1));
    const int lane = threadIdx.x % kWarpSize, columns = static_cast<int>(layer.columns);
    const int outputs = static_cast<int>(layer.outputs), first_k = first_k_ + chunk_ * kChunk;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      // Of a transposed weight neighbouring lanes take neighbouring tiles, so that an access reaches whole sectors.
      const int tile = layer.weights_are_transposed ? (i * kWarpSize + lane) % kTiles : i;
      const T* const weight = static_cast<const T*>(layer.weights[layer.gated ? tile % 2 : strip.weight]);
      const int column = strip.column + (layer.gated ? tile / 2 : tile) * kTileColumns;
      if (layer.weights_are_transposed) {
        const int j = (i * kWarpSize + lane) / kTiles, slot = j % 8 / 2 * 8 + j / 8 * 2 + j % 2;
        copy(place(fetched_, tile) + slot * kAccessBytes, weight, (first_k + j) * layer.weight_stride + column,
             first_k + j < columns ? outputs - column : 0);
      } else {
        const int n = column + lane / 4, k = first_k + lane % 4 * kLaneValues;
        copy(place(fetched_, tile) + lane * kAccessBytes, weight, n * layer.weight_stride + k,
             n < outputs ? columns - k : 0);
      }
    }
  }

  // 8 elements from `element` on; zeros past the first `valid`.
  __device__ void copy(void* shared, const T* weight, int64_t element, int valid) const {
    const int count = min(max(valid, 0), kLaneValues);
    if (mma_.weights_aligned) {
      copy_async(shared, count > 0 ? weight + element : weight, count * static_cast<int>(sizeof(T)));
    } else {
      Vector<T> values = {};
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        if (i < count) values.values[i] = weight[element + i];
      }
      *static_cast<Vector<T>*>(shared) = values;
    }
  }

  const MmaLayer& mma_;
  char* const ring_;
  const int first_k_;
  unsigned strip_;  // of the chunk to fetch next
  int chunk_ = 0;
  int fetched_ = 0, read_ = 0;  // stages to fetch into and to read next
};

// A lane's part of the input: of rows lane / 4 (+ 8), 8 values in each of kHeld chunks.
template <typename X, int kHalves, int kHeld>
struct InputPart {
  Vector<X, kLaneValues> values[kHalves][kHeld];

  __device__ void load(const MmaLayer& mma, int first_k, int chunk) {
    const DecodeLinear& layer = mma.layer;
    const int lane = threadIdx.x % kWarpSize, columns = static_cast<int>(layer.columns);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int row = lane / 4 + h * kRowsPerHalf;
      const X* const input = static_cast<const X*>(layer.input.data) + row * layer.columns;
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        const int k = first_k + (chunk + c) * kChunk + lane % 4 * kLaneValues;
        values[h][c] = {};
        if (row >= layer.rows || chunk + c >= mma.chunks || k >= columns) continue;
        if (mma.input_aligned) {
          values[h][c] = *reinterpret_cast<const Vector<X, kLaneValues>*>(input + k);
        } else {
#pragma unroll
          for (int i = 0; i < kLaneValues; ++i) {
            if (k + i < columns) values[h][c].values[i] = input[k + i];
          }
        }
      }
    }
  }

  // Makes the compiler widen the values again where they are read next, rather than keep them in twice the registers.
  __device__ void forget_widened() {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        constexpr int kWords = sizeof(values[h][c]) / sizeof(unsigned);
        unsigned(&words)[kWords] = reinterpret_cast<unsigned(&)[kWords]>(values[h][c]);
#pragma unroll
        for (unsigned& word : words) asm volatile("" : "+r"(word));
      }
    }
  }
};

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// A norm's weight or bias as floats in shared memory, `absent` where there is none; 8 values a thread at a time.
__device__ inline void stage_parameter(TypedPointer parameter, float absent, float* shared, int columns,
                                       int padded_columns, int thread) {
  for (int k = thread * kLaneValues; k < padded_columns; k += blockDim.x * kLaneValues) {
    float values[kLaneValues];
#pragma unroll
    for (float& value : values) value = absent;
    if (parameter.data != nullptr && k + kLaneValues <= columns) {
      load_floats(parameter, k, values);
    } else if (parameter.data != nullptr) {
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        if (k + i < columns) values[i] = load_as<float>(parameter, k + i);
      }
    }
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) shared[k + i] = values[i];
  }
}

// Mean and sum of squared deviations of a part of a row.
struct Moments {
  float mean, squares;
};

// What the rows of a lane are normalised with: (x - shift) * rstd.
template <int kHalves>
struct Normalisation {
  float shift[kHalves] = {}, rstd[kHalves] = {};

  // Chan, Golub and LeVeque 1979: the moments of a union from those of its parts; here chunks, then warps. `part` holds
  // the first chunks of the warp's input already. All threads of the block must call.
  template <typename X, int kHeld>
  __device__ Normalisation(const MmaLayer& mma, InputPart<X, kHalves, kHeld>& part, int first_k) {
    __shared__ Moments moments[kMaxThreads<true> / kWarpSize][kHalves * kRowsPerHalf];
    const DecodeLinear& layer = mma.layer;
    const int lane = threadIdx.x % kWarpSize, columns = static_cast<int>(layer.columns);
    const int warps = blockDim.x / kWarpSize, warp_columns = mma.chunks * kChunk;
    Moments own[kHalves] = {};
    float own_count = 0.f;
    for (int first = 0; first < mma.chunks; first += kHeld) {
      if (first > 0) part.load(mma, first_k, first);
      const int begin = first_k + first * kChunk;
      const float count = min(columns - begin, min(mma.chunks - first, kHeld) * kChunk);
      if (count <= 0.f) break;
      const float total = own_count + count;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        float sum = 0.f, squares = 0.f;
#pragma unroll
        for (int c = 0; c < kHeld; ++c) {
#pragma unroll
          for (int i = 0; i < kLaneValues; ++i) sum += part.values[h][c][i];
        }
        const float mean = quad_sum(sum) / count;
        part.forget_widened();
#pragma unroll
        for (int c = 0; c < kHeld; ++c) {
          const int k = c * kChunk + lane % 4 * kLaneValues;
#pragma unroll
          for (int i = 0; i < kLaneValues; ++i) {
            const float deviation = part.values[h][c][i] - mean;
            if (k + i < count) squares = fmaf(deviation, deviation, squares);
          }
        }
        const float difference = mean - own[h].mean;
        own[h].squares += quad_sum(squares) + difference * difference * own_count * count / total;
        own[h].mean += difference * count / total;
      }
      own_count = total;
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      if (lane % 4 == 0) moments[threadIdx.x / kWarpSize][lane / 4 + h * kRowsPerHalf] = own[h];
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int row = lane / 4 + h * kRowsPerHalf;
      float sum = 0.f, squares = 0.f;
#pragma unroll 8
      for (int w = 0; w < warps; ++w) {
        sum += moments[w][row].mean * max(min(columns - w * warp_columns, warp_columns), 0);
      }
      const float mean = sum / columns;
#pragma unroll 8
      for (int w = 0; w < warps; ++w) {
        const float difference = moments[w][row].mean - mean;
        squares += moments[w][row].squares +
                   difference * difference * max(min(columns - w * warp_columns, warp_columns), 0);
      }
      const bool is_rms = layer.norm == kT5RmsNorm;
      rstd[h] = rsqrtf(squares / columns + (is_rms ? mean * mean : 0.f) + static_cast<float>(layer.eps));
      shift[h] = is_rms ? 0.f : mean;
    }
    part.forget_widened();
  }

  // 8 values of a row, normalised and rounded to the weight's dtype.
  template <typename T, typename X>
  __device__ uint4 apply(const Vector<X, kLaneValues>& values, int h, const float* weight, const float* bias,
                         bool is_rms) const {
    float x[kLaneValues];
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) x[i] = (values[i] - shift[h]) * rstd[h];
    if (is_rms) round_floats_as<T>(x);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) x[i] = fmaf(x[i], weight[i], bias[i]);
    uint4 words;
    store_floats_as<T>(&words, 0, x);
    return words;
  }
};

template <>
struct Normalisation<0> {};

template <typename T, typename X, bool kNorm, int kHalves, int kTiles>
__global__ void __launch_bounds__(kMaxThreads<kNorm>, kMinBlocks<kNorm>)
    decode_linear_mma_kernel(const __grid_constant__ MmaLayer mma) {
  constexpr int kHeld = (kNorm ? 8 : 16) / (kHalves * sizeof(X));  // 16 or 32 registers
  constexpr int kRows = kHalves * kRowsPerHalf, kStripColumns = kTiles * kTileColumns;
  const DecodeLinear& layer = mma.layer;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int chunks = mma.chunks, first_k = warp * chunks * kChunk, padded_columns = warps * chunks * kChunk;
  const int width = kStripColumns / (layer.gated ? 2 : 1);
  const int ring_bytes = ring_stages<kTiles>(mma) * kTiles * kTileBytes;

  // The rings, the sums of each warp for two strips in turn, the norm's parameters.
  extern __shared__ __align__(16) char shared[];
  float(*const sums_of)[kRows][kStripColumns] =
      reinterpret_cast<float(*)[kRows][kStripColumns]>(shared + warps * ring_bytes);
  float* const norm_weight = reinterpret_cast<float*>(sums_of + 2 * warps);
  float* const norm_bias = norm_weight + padded_columns;

  let_successor_start();
  Strip strip(layer, blockIdx.x, width);
  Epilogue<float> epilogue(layer, strip, threadIdx.x);
  WeightRing<T, kTiles> ring(mma, shared + warp * ring_bytes, first_k);
#pragma unroll 1
  for (int i = 0; i < kStages<kTiles>; ++i) ring.fetch();
  if constexpr (kNorm) {
    stage_parameter(layer.norm_weight, 1.f, norm_weight, static_cast<int>(layer.columns), padded_columns, threadIdx.x);
    stage_parameter(layer.norm_bias, 0.f, norm_bias, static_cast<int>(layer.columns), padded_columns,
                    blockDim.x - 1 - threadIdx.x);
  }
  wait_for_predecessor();

  InputPart<X, kHalves, kHeld> part;
  part.load(mma, first_k, 0);
  epilogue.load_residual(layer);
  uint4 fragments[kHeld][2] = {};  // of rows 0 to 7 and 8 to 15
  const auto make_fragments = [&](const auto& normalisation, int first) {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        if constexpr (kNorm) {
          if (first + c >= chunks) continue;
          const int k = first_k + (first + c) * kChunk + lane % 4 * kLaneValues;
          fragments[c][h] = normalisation.template apply<T>(part.values[h][c], h, norm_weight + k, norm_bias + k,
                                                            layer.norm == kT5RmsNorm);
        } else {
          fragments[c][h] = reinterpret_cast<const uint4&>(part.values[h][c]);
        }
      }
    }
  };
  const auto normalisation = [&] {
    if constexpr (kNorm) return Normalisation<kHalves>(mma, part, first_k);
    else return Normalisation<0>();
  }();
  if (kNorm && chunks > kHeld) part.load(mma, first_k, 0);
  make_fragments(normalisation, 0);

  int buffer = 0;
  for (unsigned index = blockIdx.x; index < mma.strips; index += gridDim.x, buffer ^= 1) {
    if (index != blockIdx.x) {
      strip = Strip(layer, index, width);
      epilogue = Epilogue<float>(layer, strip, threadIdx.x);
      epilogue.load_residual(layer);
    }
    float sums[kTiles][4] = {};
    for (int first = 0; first < chunks; first += kHeld) {
      if (first > 0 || (index != blockIdx.x && chunks > kHeld)) {
        part.load(mma, first_k, first);
        make_fragments(normalisation, first);
      }
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        if (first + c >= chunks) break;
        ring.await();
        const uint4 low = fragments[c][0], high = fragments[c][1];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint4 b = ring.load(t);
          multiply<T>(sums[t], {low.x, low.y}, {high.x, high.y}, b.x, b.y);
          multiply<T>(sums[t], {low.z, low.w}, {high.z, high.w}, b.z, b.w);
        }
        ring.release();
      }
    }

    float(*const strip_sums)[kRows][kStripColumns] = sums_of + buffer * warps;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        float* const place = &strip_sums[warp][lane / 4 + h * kRowsPerHalf][t * kTileColumns + lane % 4 * 2];
        place[0] = sums[t][2 * h];
        place[1] = sums[t][2 * h + 1];
      }
    }
    __syncthreads();
    const auto total = [&](int row, int column) {
      float sum = 0.f;
#pragma unroll 8
      for (int w = 0; w < warps; ++w) sum += strip_sums[w][row][column];
      return sum;
    };
    for (int i = threadIdx.x; i < layer.rows * width; i += blockDim.x) {
      if (i != threadIdx.x) {
        epilogue = Epilogue<float>(layer, strip, i);
        epilogue.load_residual(layer);
      }
      const int row = i / width, column = i % width;
      if (layer.gated) {
        const int gated_column = column / kTileColumns * 2 * kTileColumns + column % kTileColumns;
        epilogue.store(layer, strip, total(row, gated_column), total(row, gated_column + kTileColumns));
      } else {
        epilogue.store(layer, strip, total(row, column), 0.f);
      }
    }
  }
}

// Wide strips read a [K, N] weight in longer pieces and the input less often; narrow ones keep more blocks busy.
inline int tiles_for(const DecodeLinear& layer) {
  const int64_t columns = layer.outputs * layer.weight_count;
  if (columns >= 2 * kTileColumns * multiprocessor_count()) return 2;
  return layer.gated ? 2 : 1;
}

template <typename T, typename X, bool kNorm, int kHalves, int kTiles>
cudaError_t launch_mma_as(const DecodeLinear& layer, cudaStream_t stream) {
  constexpr int kManyColumns = 2048;
  const unsigned warps = !kNorm && layer.columns > kManyColumns ? 16 : 8;
  MmaLayer mma{layer, static_cast<int>(ceil_div(ceil_div(layer.columns, kChunk), warps)),
               strip_count(layer, kTiles * kTileColumns / (layer.gated ? 2 : 1)), 0,
               layer.weight_stride * sizeof(T) % kAccessBytes == 0,
               reinterpret_cast<uintptr_t>(layer.input.data) % alignof(Vector<X, kLaneValues>) == 0 &&
                   layer.columns % kLaneValues == 0};
  for (int i = 0; i < layer.weight_count; ++i) mma.weights_aligned &= is_aligned(layer.weights[i]);
  const auto shared_bytes = [&] {
    const size_t norm_bytes = kNorm ? 2 * sizeof(float) * mma.chunks * kChunk : 0;
    constexpr size_t kSumsBytes = 2 * kHalves * kRowsPerHalf * kTiles * kTileColumns * sizeof(float);
    return warps * (ring_stages<kTiles>(mma) * kTiles * kTileBytes + kSumsBytes + norm_bytes);
  };
  // A block a strip; or, of more strips than the device has room for, as many to each block.
  constexpr unsigned kMostBlocks = 3;  // on a multiprocessor, by their registers
  const unsigned by_memory = static_cast<unsigned>(shared_bytes_per_multiprocessor() / shared_bytes());
  const unsigned room = std::clamp(by_memory, 1u, kMostBlocks) * multiprocessor_count();
  const unsigned strips_per_block = mma.strips <= kMostBlocks * multiprocessor_count() ? 1 : ceil_div(mma.strips, room);
  mma.blocks = static_cast<unsigned>(ceil_div(mma.strips, strips_per_block));
  const LaunchShape shape{mma.blocks, warps * kWarpSize, shared_bytes(), 1};
  const auto kernel = decode_linear_mma_kernel<T, X, kNorm, kHalves, kTiles>;
  return launch_dependent(kernel, mma, shape, layer.overlap, stream);
}

template <typename T, typename X, bool kNorm>
cudaError_t launch_mma_for(const DecodeLinear& layer, cudaStream_t stream) {
  const bool one_half = layer.rows <= kRowsPerHalf && std::is_same_v<T, X>;
  if (tiles_for(layer) == 1) {
    return one_half ? launch_mma_as<T, X, kNorm, std::is_same_v<T, X> ? 1 : 2, 1>(layer, stream)
                    : launch_mma_as<T, X, kNorm, 2, 1>(layer, stream);
  }
  return one_half ? launch_mma_as<T, X, kNorm, std::is_same_v<T, X> ? 1 : 2, 2>(layer, stream)
                  : launch_mma_as<T, X, kNorm, 2, 2>(layer, stream);
}

template <typename T>
bool launch_decode_linear_mma(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error) {
  if (compute_capability_major() < 8) return false;
  if (layer.input.dtype == kDType<T>) {
    error = layer.norm == kNoNorm ? launch_mma_for<T, T, false>(layer, stream)
                                  : launch_mma_for<T, T, true>(layer, stream);
  } else if (layer.input.dtype == kFloat32 && layer.norm != kNoNorm) {
    error = launch_mma_for<T, float, true>(layer, stream);  // T5 in float16 has a residual stream in float32
  } else {
    return false;
  }
  return true;
}

}  // namespace fuseopt
