// Softmax of rows wider than a team's registers. It has a file of its own to shorten the build.
#include "cuda/common/wide_row.cuh"

namespace fuseopt {
namespace {

constexpr int kMaxWideThreads = 1024;
// TUNED: float32 backward over a vocabulary, several blocks per multiprocessor (3dd9334).
constexpr int kClusterBlocks = 8;

// 16-byte vectors of each tensor in a thread's registers. The thread finds the others in shared memory if a block has
// the row, and else reads them again.
// TUNED: 2 in 16 bits; 8 in float32, as exponentials: 8% less at 50257 columns (59663b8). In a cluster of 256 threads 8
// take up to 33% off (8130f78).
constexpr int kFewHeld = 2;
constexpr int kMostHeld = 8;
template <typename T, typename M, Team kTeam>
constexpr int kFwdHeld = !std::is_void_v<M> ? 1 : sizeof(T) == 4 && kTeam == Team::kBlock ? kMostHeld : kFewHeld;
template <Team kTeam>
constexpr int kBwdHeld = kTeam == Team::kBlock ? 2 : 1;

// Loads of those others that are in flight per thread. Loads from shared memory need few; kMostHeld leaves registers
// for one.
// TUNED: measurement not recorded (8130f78); `fuseopt bench ops --op softmax` measures it again.
template <typename M, Team kTeam, int kHeld>
constexpr int kWideLoads = kHeld == kMostHeld ? 1 : kTeam == Team::kBlock ? 2 : std::is_void_v<M> ? 6 : 4;

// A team has a row. A block holds it in registers and shared memory, `slots` vectors of it in the latter. Without
// slots, and in a cluster, whatever registers do not hold is read twice. `kThreads`: threads of a block, or 0 if known
// only at run time.
template <typename T, typename M, Team kTeam, int kThreads = 0, int kHeld = kFwdHeld<T, M, kTeam>>
__global__ void __launch_bounds__(kMaxWideThreads)
    softmax_fwd_wide_kernel(const T* __restrict__ input, typename RowMask<M>::Source mask, TypedPointer output,
                            int columns, float scale, int slots) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr bool kPrecise = sizeof(T) == 4;
  using Logits = RowLogits<T, M, kHeld>;
  extern __shared__ __align__(kAccessBytes) char shared[];
  Vector<T>* const staged = reinterpret_cast<Vector<T>*>(shared);
  const bool stages = kTeam == Team::kBlock && slots > 0;
  if constexpr (kThreads > 0) __builtin_assume(blockDim.x == kThreads);
  RowTeam<kTeam> team;
  const int64_t row = team.index;
  const int first_staged = kHeld * team.size;

  const LineSpan<kWidth> span(row, columns, team.lane);
  const float factor = factor_of_input<M>(scale);
  const ScaledExp<kPrecise> exponential(factor_of_difference<M>(scale));
  Logits held;
  held.factor = factor;
  held.load(input, span, team);
  if (stages) fetch_row(staged, input, span, first_staged);
  const RowMask<M> row_mask(mask, row);
  held.load(row_mask, span, team);
  const auto visit_held = [&](auto visit) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (span.has(team.lane + k * team.size)) visit(k);
    }
  };

  const float edge = edge_logit(input, span, factor, row_mask);
  float held_max = edge;
  visit_held([&](int k) {
    held.make(k);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) held_max = fmaxf(held_max, held.at(k, j));
  });
  OnlineSum<kPrecise> online(held_max, exponential);
  online.sum = exponential(edge - online.origin);
  visit_held([&](int k) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float value = exponential(held.at(k, j) - online.origin);
      held.keep(k, j, value);
      online.sum += value;
    }
  });
  if (stages) await_row();
  const auto load = [&](int v) {
    return stages ? staged[v - first_staged] : load_vector(input, span.first + v);
  };
  visit_row<kWideLoads<M, kTeam, kHeld>>(span, team, kHeld, load, [&](int v, const Vector<T>& x) {
    float logits[kWidth];
    row_mask.logits_of(logits, x, factor, span.column(v));
    online.add(logits);
  });
  const float row_max = team.template reduce<Max>(online.max);
  const float row_origin = row_max == -INFINITY ? 0.0f : row_max;
  // Relative to the maximum and not to the origin, which is far above the row's logits if a thread has seen no finite
  // one.
  const float row_sum = team.template reduce<Sum>(online.sum * exponential(online.max - row_origin));
  const float inverse_sum = 1.0f / row_sum;
  const auto share = [&](float value) { return divide<kPrecise>(value, row_sum, inverse_sum); };

  if (span.edge != span.kNone) store_as(output, span.edge, share(exponential(edge - row_origin)));
  visit_row<kWideLoads<M, kTeam, kHeld>>(span, team, kHeld, load, [&](int v, const Vector<T>& x) {
    float values[kWidth];
    row_mask.logits_of(values, x, factor, span.column(v));
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = share(exponential(values[j] - row_origin));
    store_floats(output, span.first + v, values);
  });
  const float shrink = exponential(held_max - row_origin);
  visit_held([&](int k) {
    float values[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      values[j] = share(Logits::kRemade ? exponential(held.at(k, j) - row_origin) : held.kept(k, j) * shrink);
    }
    store_floats(output, span.first + team.lane + k * team.size, values);
  });
}

template <typename T, Team kTeam, int kHeld = kBwdHeld<kTeam>, int kMostThreads = kMaxWideThreads>
__global__ void __launch_bounds__(kMostThreads)
    softmax_bwd_wide_kernel(const T* __restrict__ grad_output, const T* __restrict__ output, TypedPointer grad_input,
                            int columns, float scale, int slots) {
  constexpr int kWidth = kVectorWidth<T>;
  // TUNED: measurement not recorded (8130f78); `fuseopt bench ops --op softmax` measures it again.
  constexpr int kLoads = kHeld == kMostHeld ? 1 : kTeam == Team::kBlock ? 2 : 3;
  struct Pair {
    Vector<T> y, g;
  };
  extern __shared__ __align__(kAccessBytes) char shared[];
  Vector<T>* const staged_y = reinterpret_cast<Vector<T>*>(shared);
  Vector<T>* const staged_g = staged_y + slots;
  const bool stages = kTeam == Team::kBlock && slots > 0;
  RowTeam<kTeam> team;
  const int first_staged = kHeld * team.size;

  const LineSpan<kWidth> span(team.index, columns, team.lane);
  const auto load_global = [&](int v) {
    return Pair{load_vector(output, span.first + v), load_vector(grad_output, span.first + v)};
  };
  Pair held[kHeld];
  const auto visit_held = [&](auto visit) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int v = team.lane + k * team.size;
      if (span.has(v)) visit(v, held[k]);
    }
  };
  visit_held([&](int v, Pair& pair) { pair = load_global(v); });
  if (stages) {
    fetch_row(staged_y, output, span, first_staged);
    fetch_row(staged_g, grad_output, span, first_staged);
  }
  const bool has_edge = span.edge != span.kNone;
  const float edge_y = has_edge ? to_float(output[span.edge]) : 0.0f;
  const float edge_g = has_edge ? to_float(grad_output[span.edge]) : 0.0f;

  float dot = edge_g * edge_y;
  const auto add = [&](int, const Pair& pair) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) dot += pair.g[j] * pair.y[j];
  };
  visit_held(add);
  if (stages) await_row();
  const auto load = [&](int v) {
    return stages ? Pair{staged_y[v - first_staged], staged_g[v - first_staged]} : load_global(v);
  };
  visit_row<kLoads>(span, team, kHeld, load, add);
  dot = team.template reduce<Sum>(dot);

  if (has_edge) store_as(grad_input, span.edge, scale * edge_y * (edge_g - dot));
  const auto store = [&](int v, const Pair& pair) {
    float values[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = scale * pair.y[j] * (pair.g[j] - dot);
    store_floats(grad_input, span.first + v, values);
  };
  visit_row<kLoads>(span, team, kHeld, load, store);
  visit_held(store);
}

// Launch of a kernel for wide rows.
struct WideShape {
  int blocks;   // per row
  int threads;  // per block
  int slots;    // vectors of a row in a block's shared memory, of each tensor; or 0
  bool held_in_cluster = false;  // in registers, up to kMostHeld vectors per thread
};

// A cluster that holds a row in registers if its threads have more than `exceeded` vectors, up to kMostHeld. Registers
// that a thread could fill but does not cost about as much as filled ones; few small blocks cost least.
// TUNED: clusters of 8: 256 threads gain up to 33%, 512 only if nearly all have 8 vectors, 1024 lose 33% (8130f78).
// Backward, H200, in copies' bandwidth, read twice and held: float32 0.92 -> 1.03 with 65,536 columns, 0.91 -> 1.02 with
// 131,072, 0.84 -> 0.91 with 262,144; bfloat16 0.90 -> 1.03 with 131,072, 0.88 -> 1.02 with 262,144.
struct Held {
  int blocks;
  int threads;  // per block, up to kMostHeldThreads
  int exceeded;
};
constexpr int kMostHeldThreads = kMaxWideThreads / 2;
constexpr Held kHeld[] = {{8, kMaxWideThreads / 4, kFewHeld},
                          {16, kMaxWideThreads / 4, kMostHeld - 1},
                          {8, kMaxWideThreads / 2, kMostHeld - 1},
                          {16, kMaxWideThreads / 2, kMostHeld - 1}};
// Before a block that holds the row in shared memory.
// TUNED: float32, H200, in copies' bandwidth: 1.04 -> 1.09 with 16,384 columns, 1.07 -> 1.10 with 32,768; bfloat16: 0.97 ->
// 0.99 with 32,768. A cluster that is three quarters full is slower than a block: 0.96 -> 0.85, bfloat16, 50,257.
constexpr Held kHeldOfManyRows[] = {{2, kMaxWideThreads / 4, kMostHeld - 1}, {4, kMaxWideThreads / 4, kMostHeld - 1}};

// One block per row if a block can hold it. A cluster for wider rows, and if there are too few rows to keep the device
// busy. The cluster holds the row in registers if it may, if two of its blocks fit a multiprocessor, and, for large
// blocks, if its threads are nearly full. Otherwise its second read comes from the L2 cache. Clusters whose blocks hold
// their parts in shared memory are slower, because their exchange waits for their stores.
WideShape wide_shape(int64_t rows, int64_t columns, int vector_width, int tensors, int held,
                     bool may_hold_in_cluster = true) {
  const auto most_shared = static_cast<int64_t>(shared_bytes_of_block());
  const bool has_clusters = cached_attribute<cudaDevAttrClusterLaunch>() != 0;
  const bool are_many = 2 * rows > multiprocessor_count();
  const int64_t vectors = columns / vector_width;
  const auto is_held_by = [&](const Held& held) {
    const int64_t threads = int64_t{held.blocks} * held.threads;
    return may_hold_in_cluster && has_clusters && held.blocks <= tuning().softmax_max_cluster &&
           vectors > threads * held.exceeded && vectors <= threads * kMostHeld;
  };
  for (const Held& held : kHeldOfManyRows) {
    if (are_many && is_held_by(held)) return {held.blocks, held.threads, 0, true};
  }
  if (!has_clusters || are_many) {
    // Two smaller blocks per multiprocessor, if its memory holds both: one loads while the other stores.
    for (const int blocks : {2, 1}) {
      const int threads = kMaxWideThreads / blocks;
      const int64_t slots = std::max<int64_t>(vectors + LineSpan<1>::kLineVectors - held * threads, 1);
      const int64_t bytes = slots * tensors * kAccessBytes;
      if (bytes <= most_shared / blocks - kWideStaticShared) return {1, threads, static_cast<int>(slots)};
    }
  }
  if (!has_clusters) return {1, kMaxWideThreads / 2, 0};
  for (const Held& held : kHeld) {
    if (is_held_by(held)) return {held.blocks, held.threads, 0, true};
  }
  constexpr int kMostOfThread = 16;
  int threads = kMaxWideThreads / 4;
  while (threads < kMaxWideThreads && vectors * tensors > int64_t{kClusterBlocks} * threads * kMostOfThread) threads *= 2;
  return {kClusterBlocks, threads, 0, false};
}

// The forms of a kernel for wide rows, whose last argument is the number of slots: a cluster per row, a block of the
// maximal size, and a block of half that size.
template <typename... Arguments>
struct WideKernels {
  void (*cluster)(Arguments..., int);
  void (*block)(Arguments..., int);
  void (*half_block)(Arguments..., int);
};

template <typename... Arguments>
void launch_wide(const WideKernels<Arguments...>& kernels, const WideShape& shape, int64_t rows, int tensors,
                 cudaStream_t stream, Arguments... arguments) {
  const auto kernel = shape.blocks > 1                     ? kernels.cluster
                      : shape.threads == kMaxWideThreads ? kernels.block
                                                         : kernels.half_block;
  const int shared_bytes = shape.slots * tensors * kAccessBytes;
  permit_shared_bytes(reinterpret_cast<const void*>(kernel), shared_bytes);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(shape.blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(rows * shape.blocks);
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = shape.blocks > 1;
  if (shape.blocks > kClusterBlocks) {  // more than every device with clusters is sure to have
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  cudaLaunchKernelEx(&config, kernel, arguments..., shape.slots);
}

}  // namespace

void launch_softmax_fwd_wide(TypedPointer input, const SoftmaxMask& mask, TypedPointer output, int64_t rows,
                             int columns, float scale, cudaStream_t stream) {
  dispatch_fast_dtype(input.dtype, [&](auto input_tag) {
    using T = typename decltype(input_tag)::type;
    dispatch_mask<T>(mask, [&](auto mask_tag) {
      using M = typename decltype(mask_tag)::type;
      // Threads known at compile time gain 1%; with a mask that is not worth the compile time.
      constexpr int kThreads = std::is_void_v<M> ? kMaxWideThreads : 0;
      WideKernels<const T*, typename RowMask<M>::Source, TypedPointer, int, float> kernels{
          softmax_fwd_wide_kernel<T, M, Team::kCluster>, softmax_fwd_wide_kernel<T, M, Team::kBlock, kThreads>,
          softmax_fwd_wide_kernel<T, M, Team::kBlock, kThreads / 2>};
      const WideShape shape =
          wide_shape(rows, columns, kVectorWidth<T>, 1, kFwdHeld<T, M, Team::kBlock>, std::is_void_v<M>);
      if constexpr (std::is_void_v<M>) {  // with a mask's vectors there are too few registers
        if (shape.held_in_cluster) kernels.cluster = softmax_fwd_wide_kernel<T, M, Team::kCluster, 0, kMostHeld>;
      }
      launch_wide(kernels, shape, rows, 1, stream, static_cast<const T*>(input.data),
                  typename RowMask<M>::Source(mask), output, columns, scale);
    });
  });
}

void launch_softmax_bwd_wide(TypedPointer grad_output, TypedPointer output, TypedPointer grad_input, int64_t rows,
                             int columns, float scale, cudaStream_t stream) {
  dispatch_fast_dtype(output.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto block = softmax_bwd_wide_kernel<T, Team::kBlock>;
    const WideShape shape = wide_shape(rows, columns, kVectorWidth<T>, 2, kBwdHeld<Team::kBlock>);
    const auto cluster = shape.held_in_cluster
                             ? softmax_bwd_wide_kernel<T, Team::kCluster, kMostHeld, kMostHeldThreads>
                             : softmax_bwd_wide_kernel<T, Team::kCluster>;
    launch_wide(WideKernels<const T*, const T*, TypedPointer, int, float>{cluster, block, block}, shape, rows, 2, stream,
                static_cast<const T*>(grad_output.data), static_cast<const T*>(output.data), grad_input, columns,
                scale);
  });
}

}  // namespace fuseopt
