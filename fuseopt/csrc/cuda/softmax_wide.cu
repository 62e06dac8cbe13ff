// Softmax of rows wider than a team's registers, in a file of its own for the sake of build time.
#include <cuda_pipeline.h>

#include "softmax.cuh"

namespace fuseopt {
namespace {

constexpr int kMaxWideThreads = 1024;
constexpr int kClusterBlocks = 8;
constexpr int kWideStaticShared = 2048;  // at least what the kernels for wide rows declare

// 16-byte loads in flight a thread: from shared memory, where a block has a row; from global memory as many more as
// there are registers for.
template <Team kTeam, typename M = void>
constexpr int kWideLoads = kTeam == Team::kCluster && std::is_void_v<M> ? 6 : 4;

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

// A block's vectors of a row on their way from `data` to its shared memory: all of them at once and past the registers,
// from sm_80. A thread reads back only what it has sent for itself, so that waiting for its own copies is enough.
template <typename T, int kWidth>
__device__ void fetch_row(Vector<T>* slots, const T* data, const RowSpan<kWidth>& span) {
  for (int v = threadIdx.x; v < span.vectors; v += blockDim.x) {
    const auto source = reinterpret_cast<const Vector<T>*>(data) + span.first + v;
    __pipeline_memcpy_async(slots + v, source, sizeof(Vector<T>));
  }
  __pipeline_commit();
}

// A team a row. A block holds it in shared memory, `slots` vectors of it; where that is none, and in a cluster, the row
// is read twice.
template <typename T, typename M, Team kTeam>
__global__ void __launch_bounds__(kMaxWideThreads)
    softmax_fwd_wide_kernel(const T* __restrict__ input, IndexedMask mask, TypedPointer output, int64_t rows,
                            int columns, float scale, int slots) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr bool kPrecise = sizeof(T) == 4;
  extern __shared__ __align__(kAccessBytes) char shared[];
  Vector<T>* const held = reinterpret_cast<Vector<T>*>(shared);
  const bool holds = kTeam == Team::kBlock && slots > 0;
  RowTeam<kTeam> team;

  for (int64_t row = team.index; row < rows; row += team.count) {
    const RowSpan<kWidth> span(row, columns, team.lane);
    const RowMask<M> row_mask(mask, row);
    if (holds) fetch_row(held, input, span);

    OnlineSum<kPrecise> online;
    const float edge = edge_logit(input, span, scale, row_mask);
    online.add({edge});
    if (holds) __pipeline_wait_prior(0);
    const auto load = [&](int v) { return holds ? held[v] : load_vector(input, span.first + v); };
    visit_row<kWideLoads<kTeam, M>>(span, team, load, [&](int v, const Vector<T>& x) {
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
    visit_row<kWideLoads<kTeam, M>>(span, team, load, [&](int v, const Vector<T>& x) {
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
  Vector<T>* const held_y = reinterpret_cast<Vector<T>*>(shared);
  Vector<T>* const held_g = held_y + slots;
  const bool holds = kTeam == Team::kBlock && slots > 0;
  RowTeam<kTeam> team;

  for (int64_t row = team.index; row < rows; row += team.count) {
    const RowSpan<kWidth> span(row, columns, team.lane);
    if (holds) {
      fetch_row(held_y, output, span);
      fetch_row(held_g, grad_output, span);
    }
    const bool has_edge = span.edge != span.kNone;
    const float edge_y = has_edge ? to_float(output[span.edge]) : 0.0f;
    const float edge_g = has_edge ? to_float(grad_output[span.edge]) : 0.0f;
    if (holds) __pipeline_wait_prior(0);
    const auto load = [&](int v) {
      if (holds) return Pair{held_y[v], held_g[v]};
      return Pair{load_vector(output, span.first + v), load_vector(grad_output, span.first + v)};
    };

    float dot = edge_g * edge_y;
    visit_row<kWideLoads<kTeam> / 2>(span, team, load, [&](int, const Pair& pair) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dot += pair.g[j] * pair.y[j];
    });
    dot = team.template reduce<Sum>(dot);

    if (has_edge) store_as(grad_input, span.edge, scale * edge_y * (edge_g - dot));
    visit_row<kWideLoads<kTeam> / 2>(span, team, load, [&](int v, const Pair& pair) {
      float values[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = scale * pair.y[j] * (pair.g[j] - dot);
      store_floats(grad_input, span.first + v, values);
    });
  }
}

// How a kernel for wide rows is launched.
struct WideShape {
  int blocks;     // a row
  int threads;    // a block
  int slots;      // vectors of a row that a block holds in shared memory, of each tensor; 0: none are
  int64_t teams;  // that walk the rows
};

// A block a row that it can hold in shared memory, and a cluster for wider ones, and where there are too few rows to
// keep the device busy: its second read comes from the L2 cache. Blocks of a cluster that hold their parts take longer:
// what they tell one another has to wait behind what they have stored.
// Where a block has a multiprocessor to itself and float32 arithmetic to do, blocks walk the rows: launching one takes
// long with so much memory. In 16 bits that costs more than it saves.
WideShape wide_shape(int64_t rows, int64_t columns, int vector_width, int tensors) {
  const int device = current_device();
  int most_shared = 0, has_clusters = 0;
  cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaDeviceGetAttribute(&has_clusters, cudaDevAttrClusterLaunch, device);
  const int64_t vectors = columns / vector_width, bytes = vectors * tensors * kAccessBytes;
  const bool are_few = has_clusters && 2 * rows <= multiprocessor_count();
  if (bytes <= most_shared - kWideStaticShared && !are_few) {
    // Two smaller blocks to a multiprocessor, where that has the memory for two: one loads while the other stores.
    const bool fits_two = bytes <= most_shared / 2 - kWideStaticShared;
    const bool walks = vector_width == kVectorWidth<float> && !fits_two;
    return {1, fits_two ? kMaxWideThreads / 2 : kMaxWideThreads, static_cast<int>(vectors),
            walks ? std::min<int64_t>(rows, multiprocessor_count()) : rows};
  }
  if (!has_clusters) return {1, kMaxWideThreads / 2, 0, rows};
  constexpr int kMostOfThread = 16;
  int threads = kMaxWideThreads / 4;
  while (threads < kMaxWideThreads && vectors * tensors > kClusterBlocks * threads * kMostOfThread) threads *= 2;
  return {kClusterBlocks, threads, 0, rows};
}

// Launches the block or the cluster form of a kernel for wide rows, whose last argument is the number of slots.
template <typename... Arguments>
void launch_wide(void (*block_kernel)(Arguments..., int), void (*cluster_kernel)(Arguments..., int),
                 const WideShape& shape, int tensors, cudaStream_t stream, Arguments... arguments) {
  const auto kernel = shape.blocks > 1 ? cluster_kernel : block_kernel;
  const int shared_bytes = shape.slots * tensors * kAccessBytes;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(shape.blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = block_per_row(std::min<int64_t>(shape.teams, INT32_MAX / shape.blocks) * shape.blocks);
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = shape.blocks > 1;
  cudaLaunchKernelEx(&config, kernel, arguments..., shape.slots);
}

}  // namespace

void launch_softmax_fwd_wide(TypedPointer input, const SoftmaxMask& mask, TypedPointer output, int64_t rows,
                             int columns, float scale, cudaStream_t stream) {
  dispatch_fast_dtype(input.dtype, [&](auto input_tag) {
    using T = typename decltype(input_tag)::type;
    dispatch_mask<T>(mask, [&](auto mask_tag) {
      using M = typename decltype(mask_tag)::type;
      launch_wide<const T*, IndexedMask, TypedPointer, int64_t, int, float>(
          softmax_fwd_wide_kernel<T, M, Team::kBlock>, softmax_fwd_wide_kernel<T, M, Team::kCluster>,
          wide_shape(rows, columns, kVectorWidth<T>, 1), 1, stream, static_cast<const T*>(input.data),
          IndexedMask(mask), output, rows, columns, scale);
    });
  });
}

void launch_softmax_bwd_wide(TypedPointer grad_output, TypedPointer output, TypedPointer grad_input, int64_t rows,
                             int columns, float scale, cudaStream_t stream) {
  dispatch_fast_dtype(output.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_wide<const T*, const T*, TypedPointer, int64_t, int, float>(
        softmax_bwd_wide_kernel<T, Team::kBlock>, softmax_bwd_wide_kernel<T, Team::kCluster>,
        wide_shape(rows, columns, kVectorWidth<T>, 2), 2, stream, static_cast<const T*>(grad_output.data),
        static_cast<const T*>(output.data), grad_input, rows, columns, scale);
  });
}

}  // namespace fuseopt
