// The backwards of RMSNorm and LayerNorm: how blocks walk the rows, and the column sums of the weights' gradients.
//
// As many teams as the device holds walk the rows. A thread has the same columns in every row and sums their weight
// gradients in registers. Few rows have a launch of their own (norm_bwd_few_rows.cu).
#pragma once

#include "cuda/common/column_sums.cuh"
#include "cuda/common/row_ring.cuh"
#include "cuda/norm/norm.cuh"

namespace fuseopt {

// Elements of a row that each thread holds if a block has the row. Few, since it holds two rows and column sums.
// TUNED: measurement not recorded (67a7ceb); `fuseopt bench ops --op rms_norm` measures it again.
constexpr int kBwdBlockElements = 16;

// In the backward a block writes one row of partial sums, however many warps it has. So its blocks are larger than the
// forward's, and there are no more of them per multiprocessor than memory bandwidth needs.
// TUNED: measurement not recorded (67a7ceb, 137dad5); `fuseopt bench ops --op rms_norm` measures it again. Short rows:
// 4 blocks in place of 2, with parts of a warp, take 50% off 64 columns of 16 bits and 40% off 128 (6aa03a2).
constexpr int kBwdWarpTeamBlock = 256;
constexpr int kBwdWarpTeamBlocksPerProcessor = 2;
// More blocks if a thread has few loads of a row in flight.
template <typename T>
constexpr int kBwdShortRowsBlocksPerProcessor = sizeof(T) == 2 ? 4 : 3;
constexpr int kBwdThreadsPerProcessor = 1024;
constexpr int kPartialsPerProcessor = 8;
constexpr int kBwdStaticShared = 2048;  // upper bound of a block's static shared memory, without weight and ring

template <typename Shape>
constexpr int kBwdMaxThreads = Shape::kWithinWarp ? kBwdWarpTeamBlock : kMaxBlockTeam;

// Whether the kernels that hold rows in registers may take the dtypes.
inline bool has_fast_dtypes(const NormBwd& call) {
  return call.rows > 0 && !any_has(kFloat64, {call.weight}) &&
         have_dtype(call.input.dtype, {call.grad_output, call.grad_sum});
}

inline bool are_vectors(const NormBwd& call) {
  const auto matrices = {call.grad_output, call.grad_sum, call.input, call.grad_input};
  return are_vectors(call.input.dtype, call.columns, matrices);
}

// Calls `launch(RowShape, IntTag<kWidth>, threads)` for a backward; returns false if no shape holds the rows.
// `Elementwise` is the first shape of dispatch_elementwise_row.
template <typename T, typename Elementwise, typename Launch>
bool dispatch_bwd_row(int64_t columns, bool vectors, Launch launch) {
  const auto launch_shape = [&](auto shape, auto width, int threads) {
    launch(shape, width, decltype(shape)::kWithinWarp ? kBwdWarpTeamBlock : threads);
  };
  if (!vectors) return dispatch_elementwise_row<Elementwise>(columns, launch_shape);
  return dispatch_shape<RowShape<kShortElements, Team::kQuarterWarp>, RowShape<kShortElements, Team::kHalfWarp>,
                        RowShape<kShortElements, Team::kWarp>, RowShape<16, Team::kWarp>, NarrowRow,
                        RowShape<kBwdBlockElements, Team::kBlock>>(
      columns, [&](auto shape, int threads) { launch_shape(shape, IntTag<kVectorWidth<T>>{}, threads); });
}

// Calls `launch(TypeTag<T>, RowShape, IntTag<kWidth>, has_grad_sum, threads)` for a backward in a fast dtype, if a shape
// holds the rows.
template <typename Elementwise, typename Launch>
void dispatch_bwd(const NormBwd& call, bool vectors, Launch launch) {
  dispatch_fast_dtype(call.input.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_bwd_row<T, Elementwise>(call.columns, vectors, [&](auto shape, auto width, int threads) {
      if (call.grad_sum.data != nullptr) launch(tag, shape, width, std::true_type{}, threads);
      else launch(tag, shape, width, std::false_type{}, threads);
    });
  });
}

// How a backward's blocks walk the rows. Shared memory holds the weight and the stages of a RowRing.
struct BwdLaunch {
  int blocks_per_processor;
  int stages;  // 0: no ring
  size_t shared_bytes;

  bool fits() const {
    return shared_bytes + kBwdStaticShared <= shared_bytes_of_block();
  }
};

// `ring_threads`: threads per multiprocessor if blocks use a ring. They are fewer than without one, and few enough for
// norm_bwd_min_ring_stages to fit.
template <typename T, typename Shape, int kWidth>
BwdLaunch bwd_launch(int threads, int64_t columns, int tensors, int64_t ring_threads) {
  const size_t weight_bytes = columns * sizeof(float), stage_bytes = columns * sizeof(T) * tensors;
  if (kHasShortRows<Shape>) return {kBwdShortRowsBlocksPerProcessor<T>, 0, weight_bytes};
  if (Shape::kWithinWarp) return {kBwdWarpTeamBlocksPerProcessor, 0, weight_bytes};
  if (kWidth == 1 || sizeof(T) != 2 || !is_sm90_or_newer()) {
    return {std::min(kPartialsPerProcessor, kBwdThreadsPerProcessor / threads), 0, weight_bytes};
  }
  const auto shared = static_cast<int>(shared_bytes_of_multiprocessor());
  const auto stages_of = [&](int blocks) {
    const int64_t room = shared / blocks - kBwdStaticShared - static_cast<int64_t>(weight_bytes);
    return static_cast<int>(std::clamp<int64_t>(room / static_cast<int64_t>(stage_bytes), 1, kMaxRingStages));
  };
  int blocks = static_cast<int>(std::clamp<int64_t>(ring_threads / threads, 1, kPartialsPerProcessor));
  while (blocks > 1 && stages_of(blocks) < tuning().norm_bwd_min_ring_stages) --blocks;
  return {blocks, stages_of(blocks), weight_bytes + stages_of(blocks) * stage_bytes};
}

// Calls `launch(BwdLaunch)` for a Kernel whose blocks walk the rows, after `partials` has a count: the number of its
// blocks. Returns false if its shared memory does not fit.
template <typename T, typename Shape, int kWidth, bool kHasGradSum, typename Kernel, typename Launch>
bool launch_walk(const NormBwd& call, int threads, int64_t ring_threads, Partials<float>& partials, Launch launch) {
  const BwdLaunch form = bwd_launch<T, Shape, kWidth>(threads, call.columns, kHasGradSum ? 3 : 2, ring_threads);
  if (!form.fits()) return false;
  static ResidentBlocks resident;
  constexpr auto kernel = Kernel::kFunction;
  permit_shared_bytes(reinterpret_cast<const void*>(kernel), form.shared_bytes);  // else none is resident
  partials.count = row_blocks<Shape>(call.rows, threads,
                                     std::min<int64_t>(resident(kernel, threads, form.shared_bytes),
                                                       form.blocks_per_processor * multiprocessor_count()));
  launch(form);
  return true;
}

// The rows of a backward's tensors as a team walks them. Where the device can and elements have 16 bits, a block copies
// the next few rows to shared memory meanwhile. Holding them in registers would cost as much as it gains.
template <typename T, int kTensors, bool kInVectors, Team kTeam>
class WalkedRows {
 public:
  static constexpr bool kRing = kHasRowRings && kInVectors && sizeof(T) == 2 && !is_within_warp(kTeam);

  // Contains a block-wide barrier, before anything else. `slots` and `stages` belong to the ring.
  __device__ WalkedRows(const T* const (&tensors)[kTensors], int64_t rows, int columns, char* slots, int stages)
      : rows_(rows), columns_(columns), ring_(slots, columns * static_cast<int>(sizeof(T)), stages) {
#pragma unroll
    for (int t = 0; t < kTensors; ++t) tensors_[t] = tensors[t];
    if constexpr (kRing) {
      if (threadIdx.x == 0) ring_.open();
    }
  }

  __device__ void start(const RowTeam<kTeam>& team) const {
    if constexpr (kRing) {
      for (int s = 0; s < ring_.stages(); ++s) fetch(s, team.index + s * team.count);
    }
  }

  // Row `row`, the walk's current one, of each tensor.
  template <int kVectors, int kWidth>
  __device__ void load(RowPart<T, kVectors, kWidth> (&parts)[kTensors], int64_t row, const RowTeam<kTeam>& team,
                       int vectors_in_row) const {
    if constexpr (kRing) ring_.wait();
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      parts[t].load(kRing ? ring_.template row<T>(t) : tensors_[t] + row * columns_, team, vectors_in_row);
    }
  }

  // Call once after all threads have loaded `row`, after a barrier.
  __device__ void advance(int64_t row, const RowTeam<kTeam>& team) {
    if constexpr (kRing) {
      fetch(ring_.stage(), row + ring_.stages() * team.count);
      ring_.advance();
    }
  }

 private:
  __device__ void fetch(int stage, int64_t row) const {
    if (threadIdx.x == 0 && row < rows_) ring_.fetch(stage, tensors_, row);
  }

  const T* tensors_[kTensors];
  int64_t rows_;
  int columns_;
  RowRing<kTensors> ring_;
};

// A weight or bias as floats in shared memory, in the order in which a team reads it: first the first 16 bytes of every
// vector's floats, then the second, so that neighbouring lanes read from neighbouring banks.
template <int kWidth>
class SharedColumns {
 public:
  // Fills `values`, of `columns` floats, with the tensor plus `offset`, or with `absent` plus `offset`. A barrier must
  // follow.
  __device__ SharedColumns(float* values, TypedPointer tensor, float absent, float offset, int columns)
      : parts_(reinterpret_cast<const Vector<float, kPartWidth>*>(values)), vectors_(columns / kWidth) {
    for (int v = threadIdx.x; v < vectors_; v += blockDim.x) {
      Columns<AnyType, kWidth> floats;
      floats.load_or(tensor, v * kWidth, absent);
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        values[(c / kPartWidth * vectors_ + v) * kPartWidth + c % kPartWidth] = floats[c] + offset;
      }
    }
  }

  // The floats of the row's vector v.
  __device__ void load(int v, float (&out)[kWidth]) const {
#pragma unroll
    for (int p = 0; p < kWidth / kPartWidth; ++p) {
      const Vector<float, kPartWidth> part = parts_[p * vectors_ + v];
#pragma unroll
      for (int j = 0; j < kPartWidth; ++j) out[p * kPartWidth + j] = part[j];
    }
  }

 private:
  static constexpr int kPartWidth = std::min(kWidth, kVectorWidth<float>);
  const Vector<float, kPartWidth>* parts_;
  int vectors_;
};

// Adds up the column sums of a block's teams, first within each warp, then over the warps in order, and stores them as
// the block's row of `partials`.
template <int kVectors, int kWidth, Team kTeam>
__device__ inline void store_block_partials(const float (&sums)[kVectors][kWidth], float* partials, int columns,
                                            const RowTeam<kTeam>& team) {
  float* const row = partials + static_cast<int64_t>(blockIdx.x) * columns;
  if constexpr (is_within_warp(kTeam)) {
    constexpr int kWarps = kBwdWarpTeamBlock / kWarpSize, kLanes = kTeamLanes<kTeam>;
    __shared__ Vector<float, kWidth> warp_sums[kWarps][kVectors * kLanes];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        float sum = sums[k][j];
#pragma unroll
        for (int distance = kLanes; distance < kWarpSize; distance *= 2) {
          sum += __shfl_xor_sync(kFullWarp, sum, distance);
        }
        if (threadIdx.x % kWarpSize < kLanes) {
          warp_sums[threadIdx.x / kWarpSize][team.lane + k * kLanes].values[j] = sum;
        }
      }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sum += warp_sums[warp][c / kWidth].values[c % kWidth];
      row[c] = sum;
    }
    __syncthreads();  // before a second tensor's sums overwrite these
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = team.lane + k * team.size;
      if (v * kWidth < columns) store_floats_as<float>(row, v, sums[k]);
    }
  }
}

// A backward over few rows, in vectors, without partial sums. Returns false if the rows are too wide.
bool launch_few_rows_bwd(const NormBwd& call, cudaStream_t stream);

// The gradients of weight and bias in the "any" path.
template <typename Acc>
cudaError_t column_sums_any(const NormBwd& call, cudaStream_t stream);

}  // namespace fuseopt
