// decode_linear for 16-bit weights, on the tensor cores: m16n8k16 with the rows as M. A step of decoding has 1 to 16
// rows, so all of them cost one instruction, and the weight is what has to be fetched in time.
//
// A block has a strip of 8 to 32 output columns and splits K over its warps. A warp copies its part of the weight into a
// ring of its own in shared memory (16-byte asynchronous copies, as many as fit before it waits for the kernel ahead),
// holds its part of the input in registers, and needs no other warp until the sums at the end, which are added in the
// order of the warps. Both layouts of a weight come out of shared memory as the same fragments: [N, K] by plain loads,
// [K, N] by transposing ones. The order of k within a chunk is chosen so that a lane reads 8 neighbouring inputs.
#include "decode_linear.cuh"

namespace fuseopt {
namespace {

constexpr int kChunk = 32;      // values of k for which a warp copies one tile: 16 bytes a lane
constexpr int kTileBytes = 512;
constexpr int kStages = 16;     // chunks of a warp under way
constexpr int kRowsPerHalf = 8;
template <bool kNorm>
constexpr int kMaxThreads = kNorm ? 256 : 512;
constexpr int kLaneValues = 8;  // of a row in a lane, for each chunk

struct MmaLayer {
  DecodeLinear layer;
  int chunks;  // of K, for each warp
  bool weights_aligned, input_aligned;
};

__device__ inline void copy_async(void* shared, const void* global, int bytes) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline uint4 load_transposed(const void* shared) {
  uint4 words;
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}

// sums += rows (low, high: the two halves of 16 rows) x columns, over 16 values of k.
template <typename T>
__device__ inline void multiply(float (&sums)[4], uint2 low, uint2 high, unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(low.x), "r"(high.x), "r"(low.y), "r"(high.y), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(low.x), "r"(high.x), "r"(low.y), "r"(high.y), "r"(b0), "r"(b1));
  }
}

// A warp's part of the weight: chunks [0, chunks) of its own, from `first_k` on.
template <typename T, int kTiles>
class WeightRing {
 public:
  __device__ WeightRing(const MmaLayer& mma, const Strip& strip, char* ring, int64_t first_k)
      : mma_(mma), strip_(strip), ring_(ring), first_k_(first_k) {}

  __device__ char* tile(int chunk, int t) const { return ring_ + (chunk % kStages * kTiles + t) * kTileBytes; }

  __device__ void fetch(int chunk) const {
    const DecodeLinear& layer = mma_.layer;
    const int lane = threadIdx.x % kWarpSize;
    const int64_t k = first_k_ + chunk * kChunk;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (layer.weights_are_transposed) {
        // Neighbouring lanes take neighbouring tiles of one k, so that an access reaches whole sectors.
        const int t = (i * kWarpSize + lane) % kTiles, j = (i * kWarpSize + lane) / kTiles;
        const int slot = j % 8 / 2 * 8 + j / 8 * 2 + j % 2;
        const int64_t column = column_of(t);
        copy(tile(chunk, t) + slot * kAccessBytes, weight_of(t), (k + j) * layer.weight_stride + column,
             k + j < layer.columns ? layer.outputs - column : 0);
      } else {
        const int64_t column = column_of(i) + lane / 4, lane_k = k + lane % 4 * kLaneValues;
        copy(tile(chunk, i) + lane * kAccessBytes, weight_of(i), column * layer.weight_stride + lane_k,
             column < layer.outputs ? layer.columns - lane_k : 0);
      }
    }
  }

  // Two fragments: words x, y and z, w.
  __device__ uint4 load(int chunk, int t) const {
    const char* const address = tile(chunk, t) + threadIdx.x % kWarpSize * kAccessBytes;
    return mma_.layer.weights_are_transposed ? load_transposed(address) : *reinterpret_cast<const uint4*>(address);
  }

 private:
  __device__ const T* weight_of(int t) const {
    return static_cast<const T*>(mma_.layer.weights[mma_.layer.gated ? t % 2 : strip_.weight]);
  }
  __device__ int64_t column_of(int t) const {
    return strip_.column + (mma_.layer.gated ? t / 2 : t) * kTileColumns;
  }

  // 8 elements from `element` on; zeros past the first `valid`.
  __device__ void copy(void* shared, const T* weight, int64_t element, int64_t valid) const {
    const int count = static_cast<int>(valid < 0 ? 0 : valid < kLaneValues ? valid : kLaneValues);
    if (mma_.weights_aligned) {
      copy_async(shared, count > 0 ? weight + element : weight, count * static_cast<int>(sizeof(T)));
    } else {
      Vector<T> values = {};
      for (int i = 0; i < count; ++i) values.values[i] = weight[element + i];
      *static_cast<Vector<T>*>(shared) = values;
    }
  }

  const MmaLayer& mma_;
  const Strip& strip_;
  char* const ring_;
  const int64_t first_k_;
};

// A lane's part of the input: of rows lane / 4 (+ 8), 8 values in each of kHeld chunks.
template <typename X, int kHalves, int kHeld>
struct Held {
  Vector<X, kLaneValues> values[kHalves][kHeld];

  __device__ void load(const MmaLayer& mma, int64_t first_k, int chunk, int chunks) {
    const DecodeLinear& layer = mma.layer;
    const X* const input = static_cast<const X*>(layer.input.data);
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int64_t row = lane / 4 + h * kRowsPerHalf;
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        const int64_t k = first_k + (chunk + c) * kChunk + lane % 4 * kLaneValues;
        values[h][c] = {};
        if (row >= layer.rows || chunk + c >= chunks || k >= layer.columns) continue;
        const X* const address = input + row * layer.columns + k;
        if (mma.input_aligned) {
          values[h][c] = *reinterpret_cast<const Vector<X, kLaneValues>*>(address);
        } else {
          for (int i = 0; i < kLaneValues && k + i < layer.columns; ++i) values[h][c].values[i] = address[i];
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
        unsigned(&words)[sizeof(values[h][c]) / 4] = reinterpret_cast<unsigned(&)[sizeof(values[h][c]) / 4]>(values[h][c]);
#pragma unroll
        for (unsigned& word : words) asm volatile("" : "+r"(word));
      }
    }
  }
};

// How many values of k below `columns` a warp's `chunks` from `first_k` on hold.
__device__ inline float count_of(int64_t first_k, int64_t chunks, int64_t columns) {
  const int64_t left = columns - first_k;
  return static_cast<float>(left < 0 ? 0 : left < chunks * kChunk ? left : chunks * kChunk);
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// Mean and sum of squared deviations of a part of a row.
struct Moments {
  float mean, squares;
};

template <typename T, typename X, bool kNorm, int kHalves, int kTiles>
__global__ void __launch_bounds__(kMaxThreads<kNorm>, kNorm && kTiles < 4 ? 3 : kNorm ? 2 : 1) decode_linear_mma_kernel(const __grid_constant__ MmaLayer mma) {
  constexpr int kHeld = (kNorm ? 8 : 16) / (kHalves * sizeof(X));  // 16 or 32 registers
  constexpr int kRows = kHalves * kRowsPerHalf;
  const DecodeLinear& layer = mma.layer;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int chunks = mma.chunks, held_stages = chunks < kStages ? chunks : kStages;
  const int ring_bytes = (held_stages > 0 ? held_stages : 1) * kTiles * kTileBytes;
  const int padded_columns = warps * chunks * kChunk;
  const Strip strip(layer, kTiles * kTileColumns / (layer.gated ? 2 : 1));
  const int64_t first_k = static_cast<int64_t>(warp) * chunks * kChunk;

  extern __shared__ __align__(16) char shared[];
  char* const own_ring = shared + warp * ring_bytes;
  float* const norm_weight = reinterpret_cast<float*>(shared + warps * ring_bytes);
  float* const norm_bias = norm_weight + padded_columns;
  __shared__ Moments moments[kNorm ? kMaxThreads<kNorm> / kWarpSize : 1][kRows];

  let_successor_start();
  const WeightRing<T, kTiles> ring(mma, strip, own_ring, first_k);
#pragma unroll 1
  for (int c = 0; c < kStages; ++c) {
    if (c < chunks) ring.fetch(c);
    commit_copies();
  }
  if constexpr (kNorm) {
    for (int k = threadIdx.x; k < padded_columns; k += blockDim.x) {
      const bool exists = k < layer.columns;
      norm_weight[k] = exists && layer.norm_weight.data != nullptr ? load_as<float>(layer.norm_weight, k) : 1.f;
      norm_bias[k] = exists && layer.norm_bias.data != nullptr ? load_as<float>(layer.norm_bias, k) : 0.f;
    }
  }
  Epilogue<float> epilogue(layer, strip, threadIdx.x);
  wait_for_predecessor();

  Held<X, kHalves, kHeld> held;
  held.load(mma, first_k, 0, chunks);
  epilogue.load_residual(layer);

  float shift[kHalves] = {}, rstd[kHalves];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) rstd[h] = 1.f;
  if constexpr (kNorm) {
    Moments own[kHalves] = {};
    float own_count = 0.f;
    for (int first = 0; first < chunks; first += kHeld) {
      if (first > 0) held.load(mma, first_k, first, chunks);
      const int held_chunks = chunks - first < kHeld ? chunks - first : kHeld;
      const float count = count_of(first_k + first * kChunk, held_chunks, layer.columns);
      if (count == 0.f) break;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        float sum = 0.f, squares = 0.f;
#pragma unroll
        for (int c = 0; c < kHeld; ++c) {
#pragma unroll
          for (int i = 0; i < kLaneValues; ++i) sum += held.values[h][c][i];
        }
        const float mean = quad_sum(sum) / count;
        held.forget_widened();
#pragma unroll
        for (int c = 0; c < kHeld; ++c) {
          const int64_t k = first_k + (first + c) * kChunk + lane % 4 * kLaneValues;
#pragma unroll
          for (int i = 0; i < kLaneValues; ++i) {
            const float deviation = held.values[h][c][i] - mean;
            if (c < held_chunks && k + i < layer.columns) squares += deviation * deviation;
          }
        }
        // Chan, Golub and LeVeque 1979: the moments of a union from those of its parts.
        const float total = own_count + count, difference = mean - own[h].mean;
        own[h].squares += quad_sum(squares) + difference * difference * own_count * count / total;
        own[h].mean += difference * count / total;
      }
      own_count += count;
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      if (lane % 4 == 0) moments[warp][lane / 4 + h * kRowsPerHalf] = own[h];
    }
    __syncthreads();
    const float columns = static_cast<float>(layer.columns);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int row = lane / 4 + h * kRowsPerHalf;
      float mean = 0.f, squares = 0.f;
      for (int w = 0; w < warps; ++w) {
        mean += moments[w][row].mean * count_of(static_cast<int64_t>(w) * chunks * kChunk, chunks, layer.columns);
      }
      mean /= columns;
      for (int w = 0; w < warps; ++w) {
        const float difference = moments[w][row].mean - mean;
        squares += moments[w][row].squares + difference * difference *
                   count_of(static_cast<int64_t>(w) * chunks * kChunk, chunks, layer.columns);
      }
      const bool is_rms = layer.norm == kT5RmsNorm;
      rstd[h] = rsqrtf(squares / columns + (is_rms ? mean * mean : 0.f) + layer.eps);
      shift[h] = is_rms ? 0.f : mean;
    }
    if (chunks > kHeld) held.load(mma, first_k, 0, chunks);
    held.forget_widened();
  }

  // The lane's inputs of one chunk, normalised and rounded to the weight's dtype.
  const auto fragment = [&](const Vector<X, kLaneValues>& values, int h, int chunk) {
    if constexpr (kNorm) {
      const int k = static_cast<int>(first_k) + chunk * kChunk + lane % 4 * kLaneValues;
      float x[kLaneValues];
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) x[i] = (values[i] - shift[h]) * rstd[h];
      if (layer.norm == kT5RmsNorm) round_floats_as<T>(x);
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) x[i] = fmaf(x[i], norm_weight[k + i], norm_bias[k + i]);
      uint4 words;
      store_floats_as<T>(&words, 0, x);
      return words;
    } else {
      return reinterpret_cast<const uint4&>(values);
    }
  };

  float sums[kTiles][4] = {};
  for (int first = 0; first < chunks; first += kHeld) {
    if (first > 0) held.load(mma, first_k, first, chunks);
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
      const int chunk = first + c;
      if (chunk >= chunks) break;
      wait_for_copies<kStages - 1>();
      __syncwarp();
      const uint4 low = fragment(held.values[0][c], 0, chunk);
      uint4 high = {};
      if constexpr (kHalves == 2) high = fragment(held.values[kHalves - 1][c], 1, chunk);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4 b = ring.load(chunk, t);
        multiply<T>(sums[t], {low.x, low.y}, {high.x, high.y}, b.x, b.y);
        multiply<T>(sums[t], {low.z, low.w}, {high.z, high.w}, b.z, b.w);
      }
      __syncwarp();
      if (chunk + kStages < chunks) ring.fetch(chunk + kStages);
      commit_copies();
    }
  }

  // Each warp leaves its sums where its ring was; they are added in the order of the warps.
  constexpr int kStripColumns = kTiles * kTileColumns;
  __syncwarp();
  float* const own_sums = reinterpret_cast<float*>(own_ring);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float* const place = own_sums + (lane / 4 + h * kRowsPerHalf) * kStripColumns + t * kTileColumns + lane % 4 * 2;
      place[0] = sums[t][2 * h];
      place[1] = sums[t][2 * h + 1];
    }
  }
  __syncthreads();
  const auto total = [&](int row, int column) {
    float sum = 0.f;
    for (int w = 0; w < warps; ++w) {
      sum += reinterpret_cast<const float*>(shared + w * ring_bytes)[row * kStripColumns + column];
    }
    return sum;
  };
  for (int index = threadIdx.x; index < layer.rows * strip.columns; index += blockDim.x) {
    if (index != threadIdx.x) {
      epilogue = Epilogue<float>(layer, strip, index);
      epilogue.load_residual(layer);
    }
    const int row = index / strip.columns, column = index % strip.columns;
    if (layer.gated) {
      const int tile = column / kTileColumns * 2 * kTileColumns + column % kTileColumns;
      epilogue.store(layer, total(row, tile), total(row, tile + kTileColumns));
    } else {
      epilogue.store(layer, total(row, column), 0.f);
    }
  }
}

// Wide strips read a [K, N] weight in longer pieces and the input less often; narrow ones keep more blocks busy.
int tiles_for(const DecodeLinear& layer) {
  const int64_t columns = layer.outputs * layer.weight_count;
  for (int tiles = 4; tiles > 1; tiles /= 2) {
    if (columns >= static_cast<int64_t>(tiles) * kTileColumns * multiprocessor_count()) return tiles;
  }
  return layer.gated ? 2 : 1;
}

template <typename T, typename X, bool kNorm, int kHalves>
cudaError_t launch_as(const DecodeLinear& layer, cudaStream_t stream) {
  constexpr int kManyColumns = 2048;
  const int warps = !kNorm && layer.columns > kManyColumns ? 16 : 8;
  const int tiles = tiles_for(layer);
  MmaLayer mma{layer, static_cast<int>(ceil_div(ceil_div(layer.columns, kChunk), warps)), true, false};
  for (int i = 0; i < layer.weight_count; ++i) mma.weights_aligned &= is_aligned(layer.weights[i]);
  mma.weights_aligned &= layer.weight_stride * sizeof(T) % kAccessBytes == 0;
  mma.input_aligned = reinterpret_cast<uintptr_t>(layer.input.data) % alignof(Vector<X, kLaneValues>) == 0 &&
                      layer.columns % kLaneValues == 0;
  const int stages = std::clamp(mma.chunks, 1, kStages);
  const size_t norm_bytes = kNorm ? 2 * sizeof(float) * warps * mma.chunks * kChunk : 0;
  const LaunchShape shape{strip_blocks(layer, tiles * kTileColumns / (layer.gated ? 2 : 1)),
                          static_cast<unsigned>(warps * kWarpSize),
                          static_cast<size_t>(warps) * stages * tiles * kTileBytes + norm_bytes, 1};
  const auto launch = [&](auto kernel) { return launch_dependent(kernel, mma, shape, layer.overlap, stream); };
  switch (tiles) {
    case 1: return launch(decode_linear_mma_kernel<T, X, kNorm, kHalves, 1>);
    case 2: return launch(decode_linear_mma_kernel<T, X, kNorm, kHalves, 2>);
    default: return launch(decode_linear_mma_kernel<T, X, kNorm, kHalves, 4>);
  }
}

template <typename T>
bool launch_weight_as(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error) {
  const bool one_half = layer.rows <= kRowsPerHalf;
  if (layer.input.dtype == kDType<T> && layer.norm == kNoNorm) {
    error = one_half ? launch_as<T, T, false, 1>(layer, stream) : launch_as<T, T, false, 2>(layer, stream);
  } else if (layer.input.dtype == kDType<T>) {
    error = one_half ? launch_as<T, T, true, 1>(layer, stream) : launch_as<T, T, true, 2>(layer, stream);
  } else if (layer.input.dtype == kFloat32 && layer.norm != kNoNorm) {
    error = launch_as<T, float, true, 2>(layer, stream);  // T5 in float16 has a residual stream in float32
  } else {
    return false;
  }
  return true;
}

}  // namespace

bool launch_decode_linear_mma(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error) {
  if (layer.weight_dtype == kFloat16) return launch_weight_as<__half>(layer, stream, error);
  if (layer.weight_dtype == kBFloat16) return launch_weight_as<__nv_bfloat16>(layer, stream, error);
  return false;
}

}  // namespace fuseopt
