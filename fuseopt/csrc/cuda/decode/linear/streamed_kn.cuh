// decode_linear for 16-bit weights [K, N] that exceed the registers (exceeds_registers). A block computes one strip of output
// columns; its warps, and with few strips the blocks of a cluster, split K. What matters is how much has been loaded when
// the previous kernel ends, so a ring holds all that its warp reads, or as much as fits.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/decode/linear/line_stream.cuh"
#include "cuda/decode/linear/row_moments.cuh"

namespace fuseopt {

constexpr int kLineSumsStride = kLineColumns + 4;  // 4: rows of sums start in different banks
constexpr int kLineRowGap = kLineK;                // so do rows of the input

template <typename T, bool kNorm, int kHalves, int kStages>
__global__ void __launch_bounds__(kLineThreads, kHalves == 1 ? 3 : 2)
    decode_linear_streamed_kn_kernel(const __grid_constant__ LineLayer<T> layer) {
  using Piece = Vector<T, kLaneValues>;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int rows = layer.rows, columns = layer.in_features, slots = 1 << layer.slot_bits;
  const int rank = cluster_rank(), blocks = cluster_size(), strip = static_cast<int>(cluster_index());
  const auto first_k_of = [&](int part) {
    const unsigned all = (columns + kLineK - 1) / kLineK;
    return static_cast<int>(part * all / (blocks * kLineWarps)) * kLineK;
  };
  const int part = rank * kLineWarps + warp, first_k = first_k_of(part);
  const int stages = (first_k_of(part + 1) - first_k) / kLineK;
  // A norm takes the rows as a whole.
  const int held_k = kNorm ? 0 : first_k_of(rank * kLineWarps), held = layer.held_columns;
  const int row_stride = held + kLineRowGap;

  // A ring [kStages] for each warp, in the end its sums [rows][kLineSumsStride]; rows [kHalves][slots][row_stride];
  // sums of the cluster's other blocks [blocks - 1][rows][kLineSumsStride].
  extern __shared__ __align__(kRingAlignment) char rings[];
  struct Part {
    Deviations deviations;
    float pivot;
  };
  __shared__ Part parts[kHalves][kLineWarps];  // of a norm's rows
  __shared__ Mailbox mailbox;
  char* const ring = rings + warp * kStages * kLineBytes;
  T* const held_rows = reinterpret_cast<T*>(rings + kLineWarps * kStages * kLineBytes);
  float* const inbox = reinterpret_cast<float*>(held_rows + kHalves * slots * row_stride);
  const auto sums_of = [&](int w) { return reinterpret_cast<float*>(rings + w * kStages * kLineBytes); };

  LineStream<T> weight(layer, strip, first_k / kLineK, stages);
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) weight.fetch(ring + s * kLineBytes);
  let_successor_start();
  if (blocks > 1) {
    if (rank == 0) mailbox.open((blocks - 1) * rows * kLineColumns * sizeof(float));
    arrive_relaxed_at_cluster_barrier();
  }
  prefetch_next_weights(layer);

  // Of the norm, for the lane's first values of the warp's part of K.
  uint4 scale = {}, shift = {};
  const int end_k = min(first_k + stages * kLineK, columns);
  const auto load_norm = [&](int k) {
    if (k < end_k && layer.norm_weight != nullptr) scale = load_once<uint4>(layer.norm_weight + k);
    if (k < end_k && layer.norm_bias != nullptr) shift = load_once<uint4>(layer.norm_bias + k);
  };
  if constexpr (kNorm) load_norm(first_k + lane * kLaneValues);

  // What the thread finishes first.
  const auto column_of = [&](int i) { return strip * kLineColumns + i % kLineColumns; };
  const auto output_index = [&](int i) {
    return static_cast<int64_t>(i / kLineColumns) * layer.output_stride + blockIdx.y * layer.out_features + column_of(i);
  };
  const auto is_output = [&](int i) { return i < rows * kLineColumns && column_of(i) < layer.out_features; };
  const T* const biases = layer.biases[blockIdx.y];
  T bias = from_acc<T>(0.f);
  if (biases != nullptr && column_of(threadIdx.x) < layer.out_features) bias = biases[column_of(threadIdx.x)];

  // Each slot's row has a team of threads.
  const int team = kLineThreads >> layer.slot_bits, step = team * kLaneValues;
  const int slot = (threadIdx.x << layer.slot_bits) / kLineThreads, member_k = (threadIdx.x & team - 1) * kLaneValues;
  const T* const inputs = settled(static_cast<const T*>(layer.input) + static_cast<int64_t>(slot) * columns + held_k);
  wait_for_predecessor_settled(rows < 0);

  unsigned residual = 0;
  if (is_output(threadIdx.x)) residual = layer.load_residual_bits(output_index(threadIdx.x));
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    // TUNED: measurement not recorded (9be0fc3); `fuseopt bench kernels --model gpt2-xl` measures it again.
    constexpr int kLoads = 4;  // on the way at a time
    const T* const from = inputs + static_cast<int64_t>(h) * kHalfRows * columns;
    T* const to = held_rows + (h * slots + slot) * row_stride;
    const int there = slot + h * kHalfRows < rows ? min(held, columns - held_k) : 0;
    // Deviations from any value of the row are small enough for a sum of squares.
    const float pivot = kNorm && there > 0 ? load_fresh(from)[0] : 0.f;
    Deviations deviations;
#pragma unroll 1
    for (int first = member_k; first < held; first += kLoads * step) {
      Piece pieces[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        pieces[i] = {};
        if (first + i * step < there) pieces[i] = load_fresh(from + first + i * step);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int k = first + i * step;
        if (kNorm && k < there) deviations.add(pieces[i], pivot);
        if (k < held) *reinterpret_cast<Piece*>(to + k) = pieces[i];
      }
    }
    if constexpr (kNorm) {
      deviations.add_lanes<kWarpSize>();
      if (lane == 0) parts[h][warp] = {deviations, pivot};
    }
  }
  __syncthreads();

  if constexpr (kNorm) {
    const int parts_of_row = kLineWarps >> layer.slot_bits;
    float2 norms[kHalves];  // of the row in slot `lane`
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      Deviations of_row;
      float pivot = 0.f;
#pragma unroll
      for (int p = 0; p < kLineWarps; ++p) {
        if (p >= parts_of_row) continue;
        const Part& of_part = parts[h][(lane & slots - 1) * parts_of_row + p];
        of_row.add(of_part.deviations);
        pivot = of_part.pivot;
      }
      norms[h] = of_row.normalisation(pivot, __fdividef(1.f, columns), layer.is_layer_norm, layer.eps);
    }
#pragma unroll 1
    for (int warp_k = first_k; warp_k < end_k; warp_k += kWarpSize * kLaneValues) {
      const int k = warp_k + lane * kLaneValues;
      if (warp_k > first_k) load_norm(k);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll 2
        for (int r = 0; r < min(rows - h * kHalfRows, kHalfRows); ++r) {
          const float mean = __shfl_sync(kFullWarp, norms[h].x, r), rstd = __shfl_sync(kFullWarp, norms[h].y, r);
          if (k >= end_k) continue;
          T* const at = held_rows + (h * slots + r) * row_stride + k;
          const Piece x = *reinterpret_cast<const Piece*>(at);
          float values[kLaneValues];
#pragma unroll
          for (int i = 0; i < kLaneValues; ++i) values[i] = (x[i] - mean) * rstd;
          const float one = layer.adds_one ? 1.f : 0.f;
          if (layer.is_rms_norm) round_floats_as<T>(values);
          if (layer.norm_weight != nullptr) {
#pragma unroll
            for (int i = 0; i < kLaneValues; ++i) values[i] *= reinterpret_cast<const Piece&>(scale)[i] + one;
          }
          if (layer.norm_bias != nullptr) {
#pragma unroll
            for (int i = 0; i < kLaneValues; ++i) values[i] += reinterpret_cast<const Piece&>(shift)[i];
          }
          store_floats_as<T>(at, 0, values);
        }
      }
    }
    __syncwarp();
  }

  float sums[kHalves][kLineTiles / 2][4] = {};
  const T* const factors = held_rows + (lane / 4 & slots - 1) * row_stride + first_k - held_k + lane % 4 * 4;
  const auto multiply_stage = [&](int h, int s, const uint4 (&words)[kLineTiles / 2]) {
    const T* const x = factors + h * slots * row_stride + s * kLineK;
    const uint2 factor = *reinterpret_cast<const uint2*>(x);
#pragma unroll
    for (int j = 0; j < kLineTiles / 2; ++j) {
      multiply<T>(sums[h][j], {words[j].x, words[j].z}, {words[j].y, words[j].w}, factor.x, factor.y);
    }
  };
  int stage = 0;
  const auto next = [](int stage) { return stage == (kStages - 1) * kLineBytes ? 0 : stage + kLineBytes; };
#pragma unroll 1
  for (int s = 0; s < stages; s += 2) {
    const int second = next(stage);
    const bool has_second = s + 1 < stages;
    await_copy_groups<kStages - 2>();
    __syncwarp();
    uint4 words[2][kLineTiles / 2];
    weight.load(ring + stage, words[0]);
    weight.load(ring + second, words[1]);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 0 || has_second) multiply_stage(h, s + i, words[i]);
      }
    }
    __syncwarp();
    weight.fetch(ring + stage);
    weight.fetch(ring + second);
    stage = next(second);
  }
  await_copy_groups<0>();
  __syncwarp();
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int j = 0; j < kLineTiles / 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane % 4 * 2 + i % 2 + h * kHalfRows, place = (2 * j + i / 2) * kTileColumns + lane / 4;
        if (row < rows) sums_of(warp)[row * kLineSumsStride + place] = sums[h][j][i];
      }
    }
  }
  __syncthreads();

  if (blocks > 1) {
    wait_at_cluster_barrier();  // the first block has started
    if (rank > 0) {
      constexpr int kVectors = kLineColumns / 4;
#pragma unroll 1
      for (int i = threadIdx.x; i < rows * kVectors; i += kLineThreads) {
        const int at = i / kVectors * kLineSumsStride + i % kVectors * 4;
        float4 sum = {};
#pragma unroll
        for (int w = 0; w < kLineWarps; ++w) {
          const float4 of_warp = *reinterpret_cast<const float4*>(sums_of(w) + at);
          sum = {sum.x + of_warp.x, sum.y + of_warp.y, sum.z + of_warp.z, sum.w + of_warp.w};
        }
        mailbox.send(reinterpret_cast<float4*>(inbox + (rank - 1) * rows * kLineSumsStride + at), sum);
      }
      return;
    }
    mailbox.wait();
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * kLineColumns; i += kLineThreads) {
    if (!is_output(i)) continue;
    if (i >= kLineThreads) residual = layer.load_residual_bits(output_index(i));
    const int at = i / kLineColumns * kLineSumsStride + i % kLineColumns;
    float sum = to_float(bias);
#pragma unroll
    for (int w = 0; w < kLineWarps; ++w) sum += sums_of(w)[at];
#pragma unroll 1
    for (int b = 0; b < blocks - 1; ++b) sum += inbox[b * rows * kLineSumsStride + at];
    layer.store(output_index(i), activate_quickly(layer.activation, sum) + layer.residual_from(residual));
  }
}

// How a layer's work is shared out.
struct StreamedKNPlan {
  int strips;      // of each weight
  int rows, slot_bits = 0, halves;
  int blocks = 1;  // that share out K
  int stages = 12;
  int held_columns;

  explicit StreamedKNPlan(const DecodeLinear& layer)
      : strips(static_cast<int>(ceil_div(layer.out_features, kLineColumns))),
        rows(static_cast<int>(layer.rows)),
        halves(rows > kHalfRows ? 2 : 1) {
    while (1 << slot_bits < std::min(rows, kHalfRows)) ++slot_bits;
    const int64_t all_strips = strips * layer.weight_count, all_stages = ceil_div(layer.in_features, kLineK);
    while (is_sm90_or_newer() && blocks < kMaxLineCluster && 2 * blocks * all_strips <= multiprocessor_count()) {
      blocks *= 2;
    }
    held_columns = static_cast<int>(layer.norm != kNoNorm ? all_stages : ceil_div(all_stages, blocks)) * kLineK;
    const int64_t of_warp = ceil_div(all_stages, blocks * kLineWarps);
    for (const int fewer : {8, 6, 4}) {
      if (of_warp <= fewer || per_multiprocessor() < 1) stages = fewer;
    }
    if (halves == 2) stages = 3;
  }

  size_t shared_bytes() const {
    return kLineWarps * stages * kLineBytes +
           (halves * (held_columns + kLineRowGap) << slot_bits) * sizeof(uint16_t) +
           rows * (blocks - 1) * kLineSumsStride * sizeof(float);
  }

  int per_multiprocessor() const {
    constexpr size_t kReserved = 1024 + 2 * kRingAlignment;  // for each block, by system and kernel
    return static_cast<int>(shared_bytes_of_multiprocessor() / (shared_bytes() + kReserved));
  }
};

// Whether a layer with such a weight is for this kernel: large, and with strips, shared out or not, for half a device.
inline bool takes_streamed_kn(const DecodeLinear& layer) {
  const StreamedKNPlan plan(layer);
  return exceeds_registers(layer) && plan.per_multiprocessor() > 0 &&
         2 * plan.blocks * plan.strips * layer.weight_count >= multiprocessor_count();
}

template <typename T, bool kNorm, int kHalves, int kStages>
cudaError_t launch_streamed_kn_as(const DecodeLinear& layer, const StreamedKNPlan& plan, cudaStream_t stream) {
  LineLayer<T> of{mma_layer<T>(layer)};
  of.slot_bits = plan.slot_bits;
  of.held_columns = plan.held_columns;
  const LaunchShape shape{static_cast<unsigned>(plan.strips * plan.blocks), kLineThreads, plan.shared_bytes(),
                          static_cast<unsigned>(plan.blocks), static_cast<unsigned>(layer.weight_count)};
  of.share_prefetch(shape);
  return launch_dependent(decode_linear_streamed_kn_kernel<T, kNorm, kHalves, kStages>, of, shape, layer.pdl, stream);
}

template <typename T, bool kNorm>
cudaError_t launch_streamed_kn(const DecodeLinear& layer, cudaStream_t stream) {
  const StreamedKNPlan plan(layer);
  switch (plan.stages) {
    case 3: return launch_streamed_kn_as<T, kNorm, 2, 3>(layer, plan, stream);
    case 4: return launch_streamed_kn_as<T, kNorm, 1, 4>(layer, plan, stream);
    case 6: return launch_streamed_kn_as<T, kNorm, 1, 6>(layer, plan, stream);
    case 8: return launch_streamed_kn_as<T, kNorm, 1, 8>(layer, plan, stream);
    default: return launch_streamed_kn_as<T, kNorm, 1, 12>(layer, plan, stream);
  }
}

template <typename T>
cudaError_t launch_streamed_kn(const DecodeLinear& layer, cudaStream_t stream) {
  return layer.norm == kNoNorm ? launch_streamed_kn<T, false>(layer, stream) : launch_streamed_kn<T, true>(layer, stream);
}

extern template cudaError_t launch_streamed_kn<__half>(const DecodeLinear&, cudaStream_t);
extern template cudaError_t launch_streamed_kn<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);

}  // namespace fuseopt
