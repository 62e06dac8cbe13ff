// Softmax of scale * input + mask over the last dimension, and its gradient.
//
// Rows that fit stay in the registers of half a warp, a warp or a block. Wider rows are read once into the shared memory
// of a block, or of a cluster of blocks, the maximum and the sum being kept up as they pass (online softmax: Milakov and
// Gimelshein, 2018); rows too wide for that as well are read twice. Rows of odd length still move in 16-byte vectors,
// those of the whole matrix: see RowSpan.
#include <cuda_pipeline.h>

#include "launch.cuh"
#include "math.cuh"
#include "vector.cuh"

namespace fuseopt {
namespace {

constexpr int kBlockElements = 32;  // of a row in the registers of a thread, where a block has the row
constexpr int kFewRowsThreads = 256;  // a row at most, where there are few
constexpr int kMaxWideThreads = 1024;
constexpr int kWideLoads = 4;  // 16-byte loads in flight a thread
constexpr int kMaxClusterBlocks = 8;
constexpr int kMaxHoldingBlocks = 2;     // that hold a row between them, where there are rows enough
constexpr int kWideStaticShared = 2048;  // at least what the kernels for wide rows declare
constexpr int kAnyThreads = 256;

// Where a row of a contiguous matrix lies: in whole vectors of the matrix, and up to kWidth - 1 elements before and
// after those, of which each lane of the team takes at most one.
template <int kWidth>
struct RowSpan {
  int64_t begin;  // element
  int64_t first;  // whole vector
  int vectors;    // whole vectors
  int64_t edge;   // this lane's element outside the whole vectors, or kNone
  static constexpr int64_t kNone = -1;

  __device__ RowSpan(int64_t row, int columns, int lane) : begin(row * columns) {
    const int64_t end = begin + columns;
    first = (begin + kWidth - 1) / kWidth;
    vectors = static_cast<int>(max(end / kWidth - first, int64_t{0}));
    const int64_t head_end = vectors > 0 ? first * kWidth : end;
    const int64_t tail_begin = vectors > 0 ? (first + vectors) * kWidth : end;
    edge = begin + lane < head_end ? begin + lane : tail_begin + lane - (head_end - begin);
    if (edge >= end) edge = kNone;
  }

  __device__ int64_t column(int v) const { return (first + v) * kWidth - begin; }
};

// A mask whose rows are found without dividing.
struct IndexedMask : SoftmaxMask {
  uint64_t reciprocals[kMaxDims];  // 2^64 / size, rounded up; 0 for a size of one

  explicit IndexedMask(const SoftmaxMask& mask) : SoftmaxMask(mask) {
    for (int dim = 0; dim < dims; ++dim) reciprocals[dim] = UINT64_MAX / static_cast<uint64_t>(sizes[dim]) + 1;
  }

  // Exact for 32 bits (Lemire, Kaser and Kurz, 2019).
  __device__ uint32_t divide(uint32_t index, int dim) const {
    return reciprocals[dim] == 0 ? index : static_cast<uint32_t>(__umul64hi(reciprocals[dim], index));
  }
  __device__ int64_t divide(int64_t index, int dim) const { return index / sizes[dim]; }

  template <typename Index>
  __device__ int64_t offset_of(Index row) const {
    int64_t offset = 0;
    for (int dim = dims - 1; dim > 0; --dim) {
      const Index rest = divide(row, dim);
      offset += static_cast<int64_t>(row - rest * static_cast<Index>(sizes[dim])) * strides[dim];
      row = rest;
    }
    return dims > 0 ? offset + static_cast<int64_t>(row) * strides[0] : 0;
  }

  // The offset of a row's first element.
  __device__ int64_t row_offset(int64_t row) const {
    return row <= UINT32_MAX ? offset_of(static_cast<uint32_t>(row)) : offset_of(row);
  }
};

// The additive mask of one row, of elements M; void where there is none.
template <typename M>
struct RowMask {
  const M* row;
  int64_t column_stride;

  __device__ RowMask(const IndexedMask& mask, int64_t row_index)
      : row(static_cast<const M*>(mask.values.data) + mask.row_offset(row_index)),
        column_stride(mask.column_stride) {}

  template <int kWidth>
  __device__ void add_to(float (&logits)[kWidth], int64_t column) const {
    float added[kWidth];
    load_floats_as<M>(row, column * column_stride, column_stride, added);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) logits[j] += added[j];
  }
};

template <>
struct RowMask<void> {
  __device__ RowMask(const IndexedMask&, int64_t) {}
  template <int kWidth>
  __device__ void add_to(float (&)[kWidth], int64_t) const {}
};

// scale * x + mask for a vector of the row.
template <int kWidth, typename T, typename Mask>
__device__ void logits_of(float (&logits)[kWidth], const Vector<T, kWidth>& x, float scale, const Mask& mask,
                          int64_t column) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) logits[j] = x[j] * scale;
  mask.add_to(logits, column);
}

// The same for this lane's element outside the vectors; minus infinity, the neutral element, where it has none.
template <int kWidth, typename T, typename Mask>
__device__ float edge_logit(const T* input, const RowSpan<kWidth>& span, float scale, const Mask& mask) {
  if (span.edge == span.kNone) return -INFINITY;
  float logit[1] = {to_float(input[span.edge]) * scale};
  mask.add_to(logit, span.edge - span.begin);
  return logit[0];
}

// The logits of a thread's part of a row. In 16 bits and without a mask they are made anew from the input every time:
// half the registers, so that more rows are on their way, for a multiplication each.
template <typename T, typename M, int kVectors>
struct RowLogits {
  static constexpr int kWidth = kVectorWidth<T>;
  static constexpr bool kRemade = sizeof(T) == 2 && std::is_void_v<M>;
  Vector<T> x[kVectors];
  float values[kRemade ? 1 : kVectors][kWidth];
  float scale;

  template <typename RowTeam>
  __device__ RowLogits(const T* input, const RowSpan<kWidth>& span, const RowTeam& team, float scale) : scale(scale) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v < span.vectors) x[k] = load_vector(input, span.first + v);
    }
  }

  // To be called once before `at`, and late: it waits for the input.
  __device__ void make(int k, const RowMask<M>& mask, int64_t column) {
    if constexpr (!kRemade) logits_of(values[k], x[k], scale, mask, column);
  }

  __device__ float at(int k, int j) const {
    if constexpr (kRemade) return x[k][j] * scale;
    else return values[k][j];
  }
};

template <typename T, typename M, typename Shape>
__global__ void __launch_bounds__(Shape::kMaxThreads)
    softmax_fwd_kernel(const T* __restrict__ input, IndexedMask mask, TypedPointer output, int64_t rows, int columns,
                       float scale) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kVectors = Shape::kElements / kWidth;
  constexpr bool kPrecise = sizeof(T) == 4;
  using Logits = RowLogits<T, M, kVectors>;
  RowTeam<Shape::kTeam> team;

  for (int64_t row = team.index; row < rows; row += team.count) {
    const RowSpan<kWidth> span(row, columns, team.lane);
    Logits logits(input, span, team, scale);
    const RowMask<M> row_mask(mask, row);  // while the input is on its way

    float edge = edge_logit(input, span, scale, row_mask);
    float max = edge;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v >= span.vectors) continue;
      logits.make(k, row_mask, span.column(v));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) max = fmaxf(max, logits.at(k, j));
    }
    max = team.template reduce<Max>(max);

    const auto exponential = [&](int k, int j) { return exp_as<kPrecise>(logits.at(k, j) - max); };
    edge = exp_as<kPrecise>(edge - max);
    float sum = edge;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (team.lane + k * team.size >= span.vectors) continue;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float value = exponential(k, j);
        if constexpr (!Logits::kRemade) logits.values[k][j] = value;
        sum += value;
      }
    }
    sum = team.template reduce<Sum>(sum);
    const float inverse_sum = 1.0f / sum;

    if (span.edge != span.kNone) store_as(output, span.edge, divide<kPrecise>(edge, sum, inverse_sum));
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v >= span.vectors) continue;
      float result[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float value = Logits::kRemade ? exponential(k, j) : logits.at(k, j);
        result[j] = divide<kPrecise>(value, sum, inverse_sum);
      }
      store_floats(output, span.first + v, result);
    }
  }
}

// grad_input = scale * y * (g - sum(g * y)).
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kMaxThreads)
    softmax_bwd_kernel(const T* __restrict__ grad_output, const T* __restrict__ output, TypedPointer grad_input,
                       int64_t rows, int columns, float scale) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kVectors = Shape::kElements / kWidth;
  RowTeam<Shape::kTeam> team;

  for (int64_t row = team.index; row < rows; row += team.count) {
    const RowSpan<kWidth> span(row, columns, team.lane);
    Vector<T> y[kVectors] = {}, g[kVectors] = {};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v < span.vectors) {
        y[k] = load_vector(output, span.first + v);
        g[k] = load_vector(grad_output, span.first + v);
      }
    }
    const bool has_edge = span.edge != span.kNone;
    const float edge_y = has_edge ? to_float(output[span.edge]) : 0.0f;
    const float edge_g = has_edge ? to_float(grad_output[span.edge]) : 0.0f;

    float dot = edge_g * edge_y;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dot += g[k][j] * y[k][j];
    }
    dot = team.template reduce<Sum>(dot);

    if (has_edge) store_as(grad_input, span.edge, scale * edge_y * (edge_g - dot));
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      float values[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = scale * y[k][j] * (g[k][j] - dot);
      const int v = team.lane + k * team.size;
      if (v < span.vectors) store_floats(grad_input, span.first + v, values);
    }
  }
}

// A thread's maximum of the logits it has seen, and their sum of exp(logit - origin): the origin is that maximum, or
// zero before any finite logit.
template <bool kPrecise>
struct OnlineSum {
  float max = -INFINITY;
  float origin = 0;
  float sum = 0;

  template <int kWidth>
  __device__ void add(const float (&logits)[kWidth]) {
    float largest = logits[0];
#pragma unroll
    for (int j = 1; j < kWidth; ++j) largest = fmaxf(largest, logits[j]);
    if (largest > max) {
      sum *= exp_as<kPrecise>(max - largest);
      max = origin = largest;
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += exp_as<kPrecise>(logits[j] - origin);
  }
};

// Calls `visit(v, loaded)` for this thread's vectors v of a row, where `load(v)` loads, kLoads of them ahead.
template <int kLoads, int kWidth, typename RowTeam, typename Load, typename Visit>
__device__ void visit_row(const RowSpan<kWidth>& span, const RowTeam& team, Load load, Visit visit) {
  for (int first = team.lane; first < span.vectors; first += kLoads * team.size) {
    decltype(load(0)) loaded[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (first + k * team.size < span.vectors) loaded[k] = load(first + k * team.size);
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (first + k * team.size < span.vectors) visit(first + k * team.size, loaded[k]);
    }
  }
}

// A thread's vectors lane, lane + size ... of a row on their way from `data` to its block's shared memory: all of them
// at once and past the registers, from sm_80. A thread reads back only what it has sent for itself, so that waiting for
// its own copies is enough.
template <typename T, Team kTeam>
struct RowStage {
  Vector<T>* slots;

  __device__ Vector<T>& slot(int v, const RowTeam<kTeam>& team) const {
    if constexpr (kTeam == Team::kCluster) return slots[v / team.size * blockDim.x + threadIdx.x];
    else return slots[v];
  }

  template <int kWidth>
  __device__ void fill(const T* data, const RowSpan<kWidth>& span, const RowTeam<kTeam>& team) const {
    for (int v = team.lane; v < span.vectors; v += team.size) {
      const auto source = reinterpret_cast<const Vector<T>*>(data) + span.first + v;
      __pipeline_memcpy_async(&slot(v, team), source, sizeof(Vector<T>));
    }
    __pipeline_commit();
  }
};

// A team a row. Without shared memory for a row (`slots` is 0, else how many vectors a block holds of it) the row is
// read twice.
template <typename T, typename M, Team kTeam>
__global__ void __launch_bounds__(kMaxWideThreads)
    softmax_fwd_wide_kernel(const T* __restrict__ input, IndexedMask mask, TypedPointer output, int64_t rows,
                            int columns, float scale, int slots) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr bool kPrecise = sizeof(T) == 4;
  extern __shared__ __align__(kAccessBytes) char shared[];
  const RowStage<T, kTeam> stage{reinterpret_cast<Vector<T>*>(shared)};
  const bool staged = slots > 0;
  RowTeam<kTeam> team;

  for (int64_t row = team.index; row < rows; row += team.count) {
    const RowSpan<kWidth> span(row, columns, team.lane);
    const RowMask<M> row_mask(mask, row);
    if (staged) stage.fill(input, span, team);

    OnlineSum<kPrecise> online;
    const float edge = edge_logit(input, span, scale, row_mask);
    online.add({edge});
    if (staged) __pipeline_wait_prior(0);
    const auto load = [&](int v) { return staged ? stage.slot(v, team) : load_vector(input, span.first + v); };
    visit_row<kWideLoads>(span, team, load, [&](int v, const Vector<T>& x) {
      float logits[kWidth];
      logits_of(logits, x, scale, row_mask, span.column(v));
      online.add(logits);
    });
    const float row_max = team.template reduce<Max>(online.max);
    const float row_origin = row_max == -INFINITY ? 0.0f : row_max;
    const float row_sum = team.template reduce<Sum>(online.sum * exp_as<kPrecise>(online.origin - row_origin));
    const float inverse_sum = 1.0f / row_sum;

    if (span.edge != span.kNone) {
      store_as(output, span.edge, divide<kPrecise>(exp_as<kPrecise>(edge - row_origin), row_sum, inverse_sum));
    }
    visit_row<kWideLoads>(span, team, load, [&](int v, const Vector<T>& x) {
      float values[kWidth];
      logits_of(values, x, scale, row_mask, span.column(v));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        values[j] = divide<kPrecise>(exp_as<kPrecise>(values[j] - row_origin), row_sum, inverse_sum);
      }
      store_floats(output, span.first + v, values);
    });
  }
}

template <typename T, Team kTeam>
__global__ void __launch_bounds__(kMaxWideThreads)
    softmax_bwd_wide_kernel(const T* __restrict__ grad_output, const T* __restrict__ output, TypedPointer grad_input,
                            int64_t rows, int columns, float scale, int slots) {
  constexpr int kWidth = kVectorWidth<T>;
  struct Pair {
    Vector<T> y, g;
  };
  extern __shared__ __align__(kAccessBytes) char shared[];
  const RowStage<T, kTeam> stage_y{reinterpret_cast<Vector<T>*>(shared)};
  const RowStage<T, kTeam> stage_g{stage_y.slots + slots};
  const bool staged = slots > 0;
  RowTeam<kTeam> team;

  for (int64_t row = team.index; row < rows; row += team.count) {
    const RowSpan<kWidth> span(row, columns, team.lane);
    if (staged) {
      stage_y.fill(output, span, team);
      stage_g.fill(grad_output, span, team);
    }
    const bool has_edge = span.edge != span.kNone;
    const float edge_y = has_edge ? to_float(output[span.edge]) : 0.0f;
    const float edge_g = has_edge ? to_float(grad_output[span.edge]) : 0.0f;
    if (staged) __pipeline_wait_prior(0);
    const auto load = [&](int v) {
      if (staged) return Pair{stage_y.slot(v, team), stage_g.slot(v, team)};
      return Pair{load_vector(output, span.first + v), load_vector(grad_output, span.first + v)};
    };

    float dot = edge_g * edge_y;
    visit_row<kWideLoads / 2>(span, team, load, [&](int, const Pair& pair) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dot += pair.g[j] * pair.y[j];
    });
    dot = team.template reduce<Sum>(dot);

    if (has_edge) store_as(grad_input, span.edge, scale * edge_y * (edge_g - dot));
    visit_row<kWideLoads / 2>(span, team, load, [&](int v, const Pair& pair) {
      float values[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = scale * pair.y[j] * (pair.g[j] - dot);
      store_floats(grad_input, span.first + v, values);
    });
  }
}

// An element at a time, a block a row: float64 and unaligned tensors.
template <typename Acc>
__global__ void __launch_bounds__(kAnyThreads)
    softmax_fwd_any_kernel(TypedPointer input, IndexedMask mask, TypedPointer output, int64_t rows, int64_t columns,
                           Acc scale) {
  RowTeam<Team::kBlock, Acc> team;
  for (int64_t row = team.index; row < rows; row += team.count) {
    const int64_t mask_offset = mask.row_offset(row);
    const auto logit = [&](int64_t c) {
      const Acc x = scale * load_as<Acc>(input, row * columns + c);
      return mask.values.data != nullptr ? x + load_as<Acc>(mask.values, mask_offset + c * mask.column_stride) : x;
    };
    Acc max = -INFINITY, sum = 0;
    for (int64_t c = team.lane; c < columns; c += team.size) max = fmax(max, logit(c));
    max = team.template reduce<Max>(max);
    for (int64_t c = team.lane; c < columns; c += team.size) sum += exp(logit(c) - max);
    sum = team.template reduce<Sum>(sum);
    for (int64_t c = team.lane; c < columns; c += team.size)
      store_as(output, row * columns + c, exp(logit(c) - max) / sum);
  }
}

template <typename Acc>
__global__ void __launch_bounds__(kAnyThreads)
    softmax_bwd_any_kernel(TypedPointer grad_output, TypedPointer output, TypedPointer grad_input, int64_t rows,
                           int64_t columns, Acc scale) {
  RowTeam<Team::kBlock, Acc> team;
  for (int64_t row = team.index; row < rows; row += team.count) {
    Acc dot = 0;
    for (int64_t i = row * columns + team.lane; i < (row + 1) * columns; i += team.size) {
      dot += load_as<Acc>(grad_output, i) * load_as<Acc>(output, i);
    }
    dot = team.template reduce<Sum>(dot);
    for (int64_t i = row * columns + team.lane; i < (row + 1) * columns; i += team.size) {
      store_as(grad_input, i, scale * load_as<Acc>(output, i) * (load_as<Acc>(grad_output, i) - dot));
    }
  }
}

unsigned block_per_row(int64_t rows) { return static_cast<unsigned>(std::min<int64_t>(rows, INT32_MAX)); }

// How a kernel for wide rows is launched.
struct WideShape {
  int blocks;   // a row
  int threads;  // a block
  int slots;    // vectors of a row that a block holds in shared memory, of each tensor; 0: none are
};

// Calls `launch(RowShape, threads)` for rows that a team holds in registers; false for wider ones.
template <typename T, typename Launch>
bool dispatch_softmax_row(int64_t rows, int64_t columns, Launch launch) {
  if (are_few_rows(rows) && columns <= kFewRowsThreads * kVectorWidth<T> &&
      dispatch_shape<RowShape<kVectorWidth<T>, Team::kBlock>>(columns, launch)) return true;
  return dispatch_shape<RowShape<8, Team::kHalfWarp>, RowShape<8, Team::kWarp>, RowShape<16, Team::kWarp>,
                        RowShape<24, Team::kWarp>, RowShape<kBlockElements, Team::kBlock>>(columns, launch);
}

// As few blocks a row as hold it in shared memory, and more where there are too few rows to keep the device busy. A row
// that would take a large cluster is not held, and its second read comes from the L2 cache: blocks that fill a
// multiprocessor's memory load, compute and store one after the other, while others would overlap.
WideShape wide_shape(int64_t rows, int64_t columns, int vector_width, int tensors) {
  const int device = current_device();
  int most_shared = 0, clusters = 0;
  cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device);
  const int64_t room = most_shared - kWideStaticShared;
  const int64_t vectors = columns / vector_width;
  for (int blocks = 1; blocks <= (clusters ? kMaxClusterBlocks : 1); blocks *= 2) {
    if (blocks > kMaxHoldingBlocks && rows * blocks > multiprocessor_count()) break;
    // Two smaller blocks to a multiprocessor, where that has the memory for two: one loads while the other stores.
    for (const int threads : {kMaxWideThreads / 2, kMaxWideThreads}) {
      const int64_t slots = blocks == 1 ? vectors : ceil_div(vectors, blocks * threads) * threads;
      const int64_t bytes = slots * tensors * kAccessBytes;
      const bool fits = bytes <= (threads == kMaxWideThreads ? room : most_shared / 2 - kWideStaticShared);
      const bool idle = clusters && blocks < kMaxClusterBlocks && rows * blocks * 2 <= multiprocessor_count();
      if (fits && !idle) return {blocks, threads, static_cast<int>(slots)};
    }
  }
  return {clusters ? kMaxClusterBlocks : 1, kMaxWideThreads / 2, 0};
}

// Launches the block or the cluster form of a kernel for wide rows, whose last argument is the number of slots.
template <typename... Arguments>
void launch_wide(void (*block_kernel)(Arguments..., int), void (*cluster_kernel)(Arguments..., int), int64_t rows,
                        const WideShape& shape, int tensors, cudaStream_t stream, Arguments... arguments) {
  const auto kernel = shape.blocks > 1 ? cluster_kernel : block_kernel;
  const int shared_bytes = shape.slots * tensors * kAccessBytes;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(shape.blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = block_per_row(std::min<int64_t>(rows, INT32_MAX / shape.blocks) * shape.blocks);
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = shape.blocks > 1;
  cudaLaunchKernelEx(&config, kernel, arguments..., shape.slots);
}

// Calls `launch(TypeTag<M>)` for the mask dtypes compiled for input T: none, T and float32. False for others.
template <typename T, typename Launch>
bool dispatch_mask(const SoftmaxMask& mask, Launch launch) {
  if (mask.values.data == nullptr) launch(TypeTag<void>{});
  else if (mask.values.dtype == kFloat32) launch(TypeTag<float>{});
  else if (mask.values.dtype == kDType<T>) launch(TypeTag<T>{});
  else return false;
  return true;
}

}  // namespace

extern "C" cudaError_t fuseopt_softmax_fwd(TypedPointer input, SoftmaxMask mask, TypedPointer output, int64_t rows,
                                           int64_t columns, double scale, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  const IndexedMask indexed(mask);
  bool launched = false;
  if (output.dtype != kFloat64 && is_aligned(input.data) && is_aligned(output.data) && columns <= INT32_MAX) {
    dispatch_fast_dtype(input.dtype, [&](auto input_tag) {
      using T = typename decltype(input_tag)::type;
      launched = dispatch_mask<T>(mask, [&](auto mask_tag) {
        using M = typename decltype(mask_tag)::type;
        const T* const x = static_cast<const T*>(input.data);
        const int row_columns = static_cast<int>(columns);
        const float factor = static_cast<float>(scale);
        const bool narrow = dispatch_softmax_row<T>(rows, columns, [&](auto shape, int threads) {
          using Shape = decltype(shape);
          softmax_fwd_kernel<T, M, Shape>
              <<<row_blocks<Shape>(rows, threads), threads, 0, stream>>>(x, indexed, output, rows, row_columns, factor);
        });
        if (narrow) return;
        launch_wide<const T*, IndexedMask, TypedPointer, int64_t, int, float>(
            softmax_fwd_wide_kernel<T, M, Team::kBlock>, softmax_fwd_wide_kernel<T, M, Team::kCluster>, rows,
            wide_shape(rows, columns, kVectorWidth<T>, 1), 1, stream, x, indexed, output, rows, row_columns, factor);
      });
    });
  }
  if (!launched) {
    const auto launch_any = [&](auto kernel, auto precise_scale) {
      kernel<<<block_per_row(rows), kAnyThreads, 0, stream>>>(input, indexed, output, rows, columns, precise_scale);
    };
    const bool float64 = input.dtype == kFloat64 || (mask.values.data != nullptr && mask.values.dtype == kFloat64);
    if (float64) launch_any(softmax_fwd_any_kernel<double>, scale);
    else launch_any(softmax_fwd_any_kernel<float>, static_cast<float>(scale));
  }
  return cudaGetLastError();
}

extern "C" cudaError_t fuseopt_softmax_bwd(TypedPointer grad_output, TypedPointer output, TypedPointer grad_input,
                                           int64_t rows, int64_t columns, double scale, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  bool launched = false;
  if (grad_input.dtype != kFloat64 && is_aligned(grad_output.data) && is_aligned(output.data) &&
      is_aligned(grad_input.data) && columns <= INT32_MAX) {
    launched = dispatch_fast_dtype(output.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const T* const g = static_cast<const T*>(grad_output.data);
      const T* const y = static_cast<const T*>(output.data);
      const int row_columns = static_cast<int>(columns);
      const float factor = static_cast<float>(scale);
      const bool narrow = dispatch_softmax_row<T>(rows, columns, [&](auto shape, int threads) {
        using Shape = decltype(shape);
        softmax_bwd_kernel<T, Shape>
            <<<row_blocks<Shape>(rows, threads), threads, 0, stream>>>(g, y, grad_input, rows, row_columns, factor);
      });
      if (narrow) return;
      launch_wide<const T*, const T*, TypedPointer, int64_t, int, float>(
          softmax_bwd_wide_kernel<T, Team::kBlock>, softmax_bwd_wide_kernel<T, Team::kCluster>, rows,
          wide_shape(rows, columns, kVectorWidth<T>, 2), 2, stream, g, y, grad_input, rows, row_columns, factor);
    });
  }
  if (!launched) {
    const auto launch_any = [&](auto kernel, auto precise_scale) {
      kernel<<<block_per_row(rows), kAnyThreads, 0, stream>>>(grad_output, output, grad_input, rows, columns,
                                                              precise_scale);
    };
    if (output.dtype == kFloat64) launch_any(softmax_bwd_any_kernel<double>, scale);
    else launch_any(softmax_bwd_any_kernel<float>, static_cast<float>(scale));
  }
  return cudaGetLastError();
}

}  // namespace fuseopt
