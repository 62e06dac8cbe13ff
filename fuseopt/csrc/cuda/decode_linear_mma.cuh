// decode_linear for 16-bit weights, on the tensor cores: m16n8k16 with the rows as M. A step of decoding has 1 to 16
// rows, so all of them cost one instruction, and the weight is what has to be fetched in time.
//
// A block takes strips of 8 to 32 output columns and splits K over its warps. A warp copies its part of the weight into
// a ring of its own in shared memory (16-byte asynchronous copies, the first of them before it waits for the kernel
// ahead). The input goes through shared memory, normalised by all warps together. After that a warp needs no other until
// the sums at the end of a strip, which are added in the order of the warps. Both layouts of a weight come out of shared memory as the same fragments: [N, K]
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
constexpr int kMinBlocks = kNorm ? 3 : 2;
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
      : mma_(mma), ring_(ring), first_k_(first_k), strip_(blockIdx.x) {
    begin_strip();
  }

  // Starts the copies of the next chunk, if there is one.
  __device__ void fetch() {
    if (strip_ < mma_.strips && mma_.chunks > 0) {
      fetch_chunk();
      fetched_ = (fetched_ + 1) % kStages<kTiles>;
      if (++chunk_ == mma_.chunks) {
        chunk_ = 0;
        strip_ += gridDim.x;
        if (strip_ < mma_.strips) begin_strip();
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

  // Copy i of a chunk is 8 elements a lane, from this k of the chunk on. Of a transposed weight neighbouring lanes take
  // neighbouring tiles, so that an access reaches whole sectors.
  __device__ int lane_k(int i) const {
    const int lane = threadIdx.x % kWarpSize;
    return mma_.layer.weights_are_transposed ? (i * kWarpSize + lane) / kTiles : lane % 4 * kLaneValues;
  }
  __device__ int lane_tile(int i) const {
    return mma_.layer.weights_are_transposed ? threadIdx.x % kWarpSize % kTiles : i;
  }

  __device__ void begin_strip() {
    const DecodeLinear& layer = mma_.layer;
    const Strip strip(layer, strip_, kTiles * kTileColumns / (layer.gated ? 2 : 1));
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int tile = lane_tile(i), k = first_k_ + lane_k(i);
      const int column = strip.column + (layer.gated ? tile / 2 : tile) * kTileColumns +
                         (layer.weights_are_transposed ? 0 : threadIdx.x % kWarpSize / 4);
      outputs_left_[i] = static_cast<int>(layer.outputs) - column;
      source_[i] = static_cast<const T*>(layer.weights[layer.gated ? tile % 2 : strip.weight]) +
                   (layer.weights_are_transposed ? k * layer.weight_stride + column : column * layer.weight_stride + k);
    }
  }

  __device__ void fetch_chunk() {
    const bool transposed = mma_.layer.weights_are_transposed;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int j = lane_k(i), slot = transposed ? j % 8 / 2 * 8 + j / 8 * 2 + j % 2 : threadIdx.x % kWarpSize;
      const int columns_left = static_cast<int>(mma_.layer.columns) - (first_k_ + chunk_ * kChunk + j);
      const int valid = transposed ? (columns_left > 0 ? outputs_left_[i] : 0)
                                   : (outputs_left_[i] > 0 ? columns_left : 0);
      copy(place(fetched_, lane_tile(i)) + slot * kAccessBytes, source_[i], valid);
      source_[i] += transposed ? kChunk * mma_.layer.weight_stride : kChunk;
    }
  }

  // 8 elements; zeros past the first `valid`.
  __device__ void copy(void* shared, const T* source, int valid) const {
    const int count = min(max(valid, 0), kLaneValues);
    if (mma_.weights_aligned) {
      const void* const address = count > 0 ? source : mma_.layer.weights[0];
      copy_async(shared, address, count * static_cast<int>(sizeof(T)));
    } else {
      Vector<T> values = {};
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        if (i < count) values.values[i] = source[i];
      }
      *static_cast<Vector<T>*>(shared) = values;
    }
  }

  const MmaLayer& mma_;
  char* const ring_;
  const int first_k_;
  const T* source_[kTiles];   // of the lane's copies of the chunk to fetch next
  int outputs_left_[kTiles];  // from the lane's column on
  unsigned strip_;            // of that chunk
  int chunk_ = 0;
  int fetched_ = 0, read_ = 0;  // stages to fetch into and to read next
};

// 8 values of a row of the input from `k` on, zeros past its end.
template <typename X>
__device__ inline Vector<X, kLaneValues> load_input(const MmaLayer& mma, int row, int k) {
  const int columns = static_cast<int>(mma.layer.columns);
  const X* const input = static_cast<const X*>(mma.layer.input.data) + row * mma.layer.columns + k;
  Vector<X, kLaneValues> values = {};
  if (mma.input_aligned) {
    if (k < columns) values = *reinterpret_cast<const Vector<X, kLaneValues>*>(input);
  } else {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      if (k + i < columns) values.values[i] = input[i];
    }
  }
  return values;
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
    store_floats_as<float>(shared + k, 0, values);
  }
}

// Makes the compiler widen the values again where they are read next, rather than keep them in twice the registers.
template <typename X, int kCount>
__device__ inline void forget_widened(Vector<X, kLaneValues> (&vectors)[kCount]) {
#pragma unroll
  for (auto& vector : vectors) {
    constexpr int kWords = sizeof(vector) / sizeof(unsigned);
    unsigned(&words)[kWords] = reinterpret_cast<unsigned(&)[kWords]>(vector);
#pragma unroll
    for (unsigned& word : words) asm volatile("" : "+r"(word));
  }
}

// Mean and sum of squared deviations of a part of a row.
struct Moments {
  float count, mean, squares;

  // Chan, Golub and LeVeque 1979.
  __device__ void merge(const Moments& other) {
    const float total = count + other.count;
    if (other.count == 0.f) return;
    const float difference = other.mean - mean, share = other.count / total;
    mean += difference * share;
    squares += other.squares + difference * difference * count * share;
    count = total;
  }
};

// Leaves the rows, normalised and rounded to T, in shared memory: `stride` values apart, with zeros from K to
// `padded_columns`. The block's warps share out the rows, and a row where there are more warps than rows. All threads
// of the block must call; a barrier follows.
template <typename T, typename X>
__device__ inline void normalise_rows(const MmaLayer& mma, int padded_columns, const float* weight, const float* bias,
                                      T* output, int stride) {
  constexpr int kHeld = 4 / sizeof(X);  // vectors of a lane that stay in registers
  constexpr int kWarps = kMaxThreads<true> / kWarpSize;
  __shared__ Moments moments[kWarps];
  const DecodeLinear& layer = mma.layer;
  const int rows = static_cast<int>(layer.rows), columns = static_cast<int>(layer.columns);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warps_a_row = rows == 1 ? kWarps : rows == 2 ? kWarps / 2 : rows <= 4 ? kWarps / 4 : 1;
  const int first = (warp % warps_a_row * kWarpSize + lane) * kLaneValues;
  const int step = warps_a_row * kWarpSize * kLaneValues;
  const bool is_rms = layer.norm == kT5RmsNorm;
  const int teams = kWarps / warps_a_row;
  for (int row = warp / warps_a_row; row < (rows + teams - 1) / teams * teams; row += teams) {
    const bool exists = row < rows;
    Vector<X, kLaneValues> held[kHeld];
    Moments own = {};
    for (int begin = 0; begin < columns; begin += kHeld * step) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        held[i] = load_input<X>(mma, exists ? row : 0, first + begin + i * step);
      }
      int count = 0;  // of the warp
      float sum = 0.f, squares = 0.f;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int warp_first = first - lane * kLaneValues + begin + i * step;
        count += min(max(columns - warp_first, 0), kWarpSize * kLaneValues);
#pragma unroll
        for (int j = 0; j < kLaneValues; ++j) sum += held[i][j];
      }
      const float mean = warp_reduce<Sum>(sum) / max(count, 1);
      forget_widened(held);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int left = columns - (first + begin + i * step);
#pragma unroll
        for (int j = 0; j < kLaneValues; ++j) {
          const float deviation = held[i][j] - mean;
          if (j < left) squares = fmaf(deviation, deviation, squares);
        }
      }
      own.merge({static_cast<float>(count), mean, warp_reduce<Sum>(squares)});
    }
    if (warps_a_row > 1) {
      if (lane == 0) moments[warp] = own;
      __syncthreads();
      const Moments* const parts = moments + warp / warps_a_row * warps_a_row;
      float sum = 0.f, squares = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += w < warps_a_row ? parts[w].mean * parts[w].count : 0.f;
      const float mean = sum / columns;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (w >= warps_a_row) continue;
        const float difference = parts[w].mean - mean;
        squares += parts[w].squares + difference * difference * parts[w].count;
      }
      own = {static_cast<float>(columns), mean, squares};
    }
    if (!exists) continue;
    const float shift = is_rms ? 0.f : own.mean;
    const float rstd = rsqrtf(own.squares / columns + (is_rms ? own.mean * own.mean : 0.f) + layer.eps);
    const bool is_held = columns <= kHeld * step;
    forget_widened(held);
    for (int begin = 0; begin < padded_columns; begin += kHeld * step) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int k = first + begin + i * step;
        if (k >= padded_columns) continue;
        const auto vector = is_held && begin == 0 ? held[i] : load_input<X>(mma, row, k);
        float x[kLaneValues];
#pragma unroll
        for (int j = 0; j < kLaneValues; ++j) x[j] = (vector[j] - shift) * rstd;
        if (is_rms) round_floats_as<T>(x);
#pragma unroll
        for (int j = 0; j < kLaneValues; ++j) x[j] = k + j < columns ? fmaf(x[j], weight[k + j], bias[k + j]) : 0.f;
        store_floats_as<T>(output + row * stride + k, 0, x);
      }
    }
  }
}

// The same for rows that are taken as they are.
template <typename T>
__device__ inline void copy_rows(const MmaLayer& mma, int padded_columns, T* output, int stride) {
  constexpr int kUnroll = 4;  // loads of a thread under way
  const int vectors = padded_columns / kLaneValues, count = static_cast<int>(mma.layer.rows) * vectors;
  for (int begin = threadIdx.x; begin < count; begin += kUnroll * blockDim.x) {
    Vector<T, kLaneValues> values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = begin + i * blockDim.x;
      if (v < count) values[i] = load_input<T>(mma, v / vectors, v % vectors * kLaneValues);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int v = begin + i * blockDim.x;
      T* const place = output + v / vectors * stride + v % vectors * kLaneValues;
      if (v < count) *reinterpret_cast<Vector<T, kLaneValues>*>(place) = values[i];
    }
  }
}

// In values: rows that a warp reads at the same k lie in different banks.
__host__ __device__ inline int input_stride(int padded_columns) { return padded_columns + kChunk; }

template <typename T, typename X, bool kNorm, int kHalves, int kTiles>
__global__ void __launch_bounds__(kMaxThreads<kNorm>, kMinBlocks<kNorm>)
    decode_linear_mma_kernel(const __grid_constant__ MmaLayer mma) {
  constexpr int kRows = kHalves * kRowsPerHalf, kStripColumns = kTiles * kTileColumns;
  const DecodeLinear& layer = mma.layer;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int chunks = mma.chunks, first_k = warp * chunks * kChunk, padded_columns = warps * chunks * kChunk;
  const int width = kStripColumns / (layer.gated ? 2 : 1);
  const int ring_bytes = ring_stages<kTiles>(mma) * kTiles * kTileBytes;

  // The rings, the sums of each warp for two strips in turn, the norm's parameters, the input.
  extern __shared__ __align__(16) char shared[];
  float(*const sums_of)[kRows][kStripColumns] =
      reinterpret_cast<float(*)[kRows][kStripColumns]>(shared + warps * ring_bytes);
  float* const norm_weight = reinterpret_cast<float*>(sums_of + 2 * warps);
  float* const norm_bias = norm_weight + padded_columns;
  T* const input = reinterpret_cast<T*>(kNorm ? norm_bias + padded_columns : norm_weight);
  const int stride = input_stride(padded_columns);

  let_successor_start();
  Strip strip(layer, blockIdx.x, width);
  Epilogue<float> epilogue(layer, strip, threadIdx.x);
  WeightRing<T, kTiles> ring(mma, shared + warp * ring_bytes, first_k);
#pragma unroll 1
  for (int i = 0; i < kStages<kTiles>; ++i) ring.fetch();
  if constexpr (kNorm) {
    const int columns = static_cast<int>(layer.columns);
    stage_parameter(layer.norm_weight, 1.f, norm_weight, columns, padded_columns, threadIdx.x);
    stage_parameter(layer.norm_bias, 0.f, norm_bias, columns, padded_columns, blockDim.x - 1 - threadIdx.x);
    __syncthreads();
  }
  wait_for_predecessor();

  epilogue.load_residual(layer);
  if constexpr (kNorm) normalise_rows<T, X>(mma, padded_columns, norm_weight, norm_bias, input, stride);
  else copy_rows<T>(mma, padded_columns, input, stride);
  __syncthreads();
  // The lane's 8 inputs of one chunk, of a row of the first eight or of the second.
  const auto fragment = [&](int chunk, int half) {
    const int row = lane / 4 + half * kRowsPerHalf, k = first_k + chunk * kChunk + lane % 4 * kLaneValues;
    return row < layer.rows ? *reinterpret_cast<const uint4*>(input + row * stride + k) : uint4{};
  };

  int buffer = 0;
  for (unsigned index = blockIdx.x; index < mma.strips; index += gridDim.x, buffer ^= 1) {
    if (index != blockIdx.x) {
      strip = Strip(layer, index, width);
      epilogue = Epilogue<float>(layer, strip, threadIdx.x);
      epilogue.load_residual(layer);
    }
    float sums[kTiles][4] = {};
#pragma unroll 2
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const uint4 low = fragment(chunk, 0), high = kHalves == 2 ? fragment(chunk, 1) : uint4{};
      ring.await();
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4 b = ring.load(t);
        multiply<T>(sums[t], {low.x, low.y}, {high.x, high.y}, b.x, b.y);
        multiply<T>(sums[t], {low.z, low.w}, {high.z, high.w}, b.z, b.w);
      }
      ring.release();
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

inline DecodeLinear rows_of(const DecodeLinear& layer, int64_t first, int64_t rows) {
  const auto from_row = [&](TypedPointer tensor, int64_t columns) {
    if (tensor.data == nullptr) return tensor;
    const int64_t bytes = first * columns * element_size(static_cast<DType>(tensor.dtype));
    return TypedPointer{static_cast<char*>(tensor.data) + bytes, tensor.dtype};
  };
  const int64_t width = layer.outputs * (layer.gated ? 1 : layer.weight_count);
  DecodeLinear part = layer;
  part.rows = rows;
  part.input = from_row(layer.input, layer.columns);
  part.residual = from_row(layer.residual, width);
  part.output = from_row(layer.output, width);
  return part;
}

// cudaErrorNotSupported, and nothing launched, where not even one row fits.
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
    const int padded_columns = static_cast<int>(warps) * mma.chunks * kChunk;
    const size_t input_bytes =
        layer.rows * input_stride(padded_columns) * sizeof(T) + (kNorm ? 2 * padded_columns * sizeof(float) : 0);
    constexpr size_t kSumsBytes = 2 * kHalves * kRowsPerHalf * kTiles * kTileColumns * sizeof(float);
    return warps * (ring_stages<kTiles>(mma) * kTiles * kTileBytes + kSumsBytes) + input_bytes;
  };
  // A block a strip; or, of more strips than the device has room for, as many to each block.
  constexpr unsigned kMostBlocks = 3;  // on a multiprocessor, by their registers
  const bool once = mma.strips <= kMostBlocks * multiprocessor_count();
  if (once) mma.blocks = mma.strips;
  // More rows than a block has memory for take several launches.
  const size_t most_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (shared_bytes() > most_bytes) {
    if (layer.rows == 1) return cudaErrorNotSupported;
    const int64_t first_rows = layer.rows / 2;
    const cudaError_t error = launch_mma_as<T, X, kNorm, kHalves, kTiles>(rows_of(layer, 0, first_rows), stream);
    if (error != cudaSuccess) return error;
    DecodeLinear rest = rows_of(layer, first_rows, layer.rows - first_rows);
    rest.overlap = false;
    return launch_mma_as<T, X, kNorm, kHalves, kTiles>(rest, stream);
  }
  if (!once) {
    const unsigned by_memory = static_cast<unsigned>(shared_bytes_per_multiprocessor() / shared_bytes());
    const unsigned room = std::clamp(by_memory, 1u, kMostBlocks) * multiprocessor_count();
    mma.blocks = static_cast<unsigned>(ceil_div(mma.strips, ceil_div(mma.strips, room)));
  }
  const LaunchShape shape{mma.blocks, warps * kWarpSize, shared_bytes(), 1};
  const auto kernel = decode_linear_mma_kernel<T, X, kNorm, kHalves, kTiles>;
  return launch_dependent(kernel, mma, shape, layer.overlap, stream);
}

template <typename T, typename X, bool kNorm>
cudaError_t launch_mma_for(const DecodeLinear& layer, cudaStream_t stream) {
  constexpr bool kBothSizes = std::is_same_v<T, X>;  // the rare mixture of dtypes is compiled for 16 rows alone
  const bool one_half = layer.rows <= kRowsPerHalf && kBothSizes;
  if (tiles_for(layer) == 1) {
    return one_half ? launch_mma_as<T, X, kNorm, kBothSizes ? 1 : 2, 1>(layer, stream)
                    : launch_mma_as<T, X, kNorm, 2, 1>(layer, stream);
  }
  return one_half ? launch_mma_as<T, X, kNorm, kBothSizes ? 1 : 2, 2>(layer, stream)
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
  return error != cudaErrorNotSupported;
}

}  // namespace fuseopt
