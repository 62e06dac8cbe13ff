// decode_linear of one row for 16-bit weights [K, N] that exceed the registers of skinny_mma: the kernel and its launch. A
// block computes one strip of output columns (gemv_strip.cuh); its warps, and with few strips the blocks of a cluster, split
// K. As in skinny_mma.cuh each instruction after the wait counts.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/decode/linear/epilogue.cuh"
#include "cuda/decode/linear/gemv_strip.cuh"

namespace fuseopt {

template <typename T, bool kNorm, typename Stages>
__global__ void __launch_bounds__(kLineThreads, 1) decode_linear_gemv_kernel(const __grid_constant__ LineLayer<T> layer) {
  using Strip = GemvStrip<T, kNorm, Stages>;
  using Sum = typename Strip::Sum;
  const int warp = threadIdx.x / kWarpSize, columns = layer.in_features, blocks = layer.blocks_of_k;
  const int rank = blocks > 1 ? cluster_rank() : 0, strip = static_cast<int>(blocks > 1 ? cluster_index() : blockIdx.x);

  // The strip's; sums of the cluster's other blocks [blocks - 1][kLineColumns], and of a norm a Deviations of each, as a
  // float4.
  extern __shared__ __align__(kRingAlignment) char shared[];
  __shared__ __align__(16) Deviations deviations_of[kLineWarps];
  __shared__ Mailbox mailbox;
  Sum* const inbox = reinterpret_cast<Sum*>(shared + Strip::kSharedBytes);
  float4* const deviations_inbox = reinterpret_cast<float4*>(inbox + (blocks - 1) * kLineColumns);

  Strip product(layer, strip, rank * kLineWarps + warp, blocks * kLineWarps, shared, deviations_of);
  product.fetch();
  let_successor_start();
  if (blocks > 1) {
    if (rank == 0) mailbox.open((blocks - 1) * (sizeof(Sum) * kLineColumns + (kNorm ? sizeof(float4) : 0)));
    arrive_relaxed_at_cluster_barrier();
  }
  product.load_norm();
  const int column = strip * kLineColumns + threadIdx.x;
  const bool is_column = threadIdx.x < kLineColumns && column < layer.out_features;
  float offset = 0.f;
  if (is_column && layer.biases[blockIdx.y] != nullptr) offset = to_float(layer.biases[blockIdx.y][column]);
  product.hold();
  // From here to the wait: addresses and conditions of what follows it.
  const T* const input = settled(static_cast<const T*>(layer.input) + product.k());
  int takes = product.has_values();
  settle(takes);
  product.settle();
  ColumnPlace<T> place;
  place.find(layer, column, is_column);
  place.settle();
  wait_for_predecessor_settled(columns < 0);

  uint4 words = {};
  if (takes > 0) words = __ldcg(reinterpret_cast<const uint4*>(input));
  place.load_residual();
  product.put(words);
  product.await_weights();
  prefetch_next_weights(layer);  // all own weights are loaded by now, so memory is idle
  product.multiply();
  __syncthreads();

  if (blocks > 1) wait_at_cluster_barrier();  // the first block has started
  if (rank > 0) {
    constexpr int kVectors = kLineColumns * sizeof(Sum) / sizeof(float4);
    if (threadIdx.x < kVectors) {
      float4 total = {};
#pragma unroll
      for (int w = 0; w < kLineWarps; ++w) {
        add(total, reinterpret_cast<const float4*>(product.sums_of(w))[threadIdx.x]);
      }
      mailbox.send(reinterpret_cast<float4*>(inbox + (rank - 1) * kLineColumns) + threadIdx.x, total);
    }
    if (kNorm && threadIdx.x == 0) {
      const Deviations all = product.deviations();
      mailbox.send(deviations_inbox + rank - 1, {all.sum, all.squares, 0.f, 0.f});
    }
    return;
  }
  if (threadIdx.x >= kLineColumns) return;
  Sum total = product.total(threadIdx.x);
  Deviations all;
  if constexpr (kNorm) all = product.deviations();
  if (blocks > 1) mailbox.wait();
#pragma unroll 1
  for (int b = 0; b < blocks - 1; ++b) {
    add(total, inbox[b * kLineColumns + threadIdx.x]);
    if constexpr (kNorm) all.add({deviations_inbox[b].x, deviations_inbox[b].y});
  }
  float value;
  if constexpr (kNorm) {
    value = product.normalised(total, all);
  } else {
    value = total;
  }
  place.store(activate_quickly(layer.activation, value + offset));
}

// Whether it is an output projection between layers that exceed the registers.
inline bool is_beside_large(const DecodeLinear& layer) {
  return layer.norm == kNoNorm && layer.in_features <= layer.out_features && 
         tuning().decode_linear_gemv_beside_large * weight_bytes(layer) >= most_held_bytes(true);
}

// How a layer's work is shared out. A smaller layer than those behind it leaves them multiprocessors to start on.
struct GemvPlan {
  int strips;      // of each weight
  int blocks = 1;  // that share out K
  int stages;      // of a warp
  int cluster;     // blocks: those, or some that share nothing

  explicit GemvPlan(const DecodeLinear& layer) : strips(static_cast<int>(ceil_div(layer.out_features, kLineColumns))) {
    const auto share = [&] { stages = static_cast<int>(ceil_div(layer.in_features, blocks * kLineWarps * kLineK)); };
    share();
    while (is_sm90_or_newer() && blocks < kMaxLineCluster && (exceeds_registers(layer) || stages > MostGemvStages::kAll) &&
           2 * blocks * strips * layer.weight_count <= multiprocessor_count()) {
      blocks *= 2;
      share();
    }
    // A cluster starts when all of it fits at once, which is later, so it does not delay loads of the previous layer. In
    // GPT-2 XL that pays for the output projection and for query, key and value; the up projection starts late anyway.
    const bool has_norm = layer.norm != kNoNorm, has_activation = layer.activation != kIdentity;
    const int64_t company = !has_norm        ? tuning().decode_linear_gemv_output_cluster
                            : has_activation ? tuning().decode_linear_gemv_up_cluster
                                             : tuning().decode_linear_gemv_qkv_cluster;
    cluster = is_sm90_or_newer() && blocks == 1 && strips % company == 0 ? static_cast<int>(company) : blocks;
  }
};

// Whether a layer with such a weight is for this kernel: large, or the output projection beside such layers, whose lines
// of half a strip would wait for what these read; and all of a strip has room.
inline bool takes_gemv(const DecodeLinear& layer) {
  return layer.rows == 1 && layer.norm != kGemmaRmsNorm && (exceeds_registers(layer) || is_beside_large(layer)) &&
         GemvPlan(layer).stages <= MostGemvStages::kAll;
}

template <typename T, bool kNorm, typename Stages>
cudaError_t launch_gemv_as(const DecodeLinear& layer, const GemvPlan& plan, cudaStream_t stream) {
  LineLayer<T> of{mma_layer<T>(layer)};
  of.blocks_of_k = plan.blocks;
  constexpr size_t kOfStrip = GemvStrip<T, kNorm, Stages>::kSharedBytes;
  constexpr size_t kOfOther = (kNorm ? sizeof(float4) : sizeof(float)) * kLineColumns + (kNorm ? sizeof(float4) : 0);
  constexpr size_t kDeclared = kLineWarps * sizeof(Deviations) + sizeof(Mailbox);
  static_assert(kOfStrip + (kMaxLineCluster - 1) * kOfOther + kDeclared <= kLeastSharedBytesOfSm80);
  const size_t shared_bytes = kOfStrip + (plan.blocks - 1) * kOfOther;
  const LaunchShape shape{static_cast<unsigned>(plan.strips * plan.blocks), kLineThreads, shared_bytes,
                          static_cast<unsigned>(plan.cluster), static_cast<unsigned>(layer.weight_count)};
  of.share_prefetch(shape);
  return launch_dependent(decode_linear_gemv_kernel<T, kNorm, Stages>, of, shape, layer.pdl, stream);
}

template <typename T, bool kNorm>
cudaError_t launch_gemv(const DecodeLinear& layer, cudaStream_t stream) {
  const GemvPlan plan(layer);
  const auto launch = [&]<typename Stages>(Stages) { return launch_gemv_as<T, kNorm, Stages>(layer, plan, stream); };
  return with_gemv_stages<std::conditional_t<kNorm, PatientGemvStages, MostGemvStages>>(plan.stages, launch);
}

template <typename T>
cudaError_t launch_gemv(const DecodeLinear& layer, cudaStream_t stream) {
  return layer.norm == kNoNorm ? launch_gemv<T, false>(layer, stream) : launch_gemv<T, true>(layer, stream);
}

extern template cudaError_t launch_gemv<__half>(const DecodeLinear&, cudaStream_t);
extern template cudaError_t launch_gemv<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);

}  // namespace fuseopt
