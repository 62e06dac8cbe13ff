// decode_linear of one row for 16-bit weights [K, N] too large to wait in registers for the kernel ahead. A block has one
// strip of output columns; its warps, and where strips are few the blocks of a cluster, share out K. All that a warp reads
// is on its way before the wait: the first stages in registers, the others in shared memory, whose reading takes longest of
// what is left to do after it. As in decode_linear_strips.cuh each instruction behind the wait counts.
//
// A norm is a part of the products. With xhat = (x - mean) * rstd and g, b the norm's weight and bias,
//   sum_k w * (xhat * g + b) = rstd * (sum_k w * (x * g) - mean * sum_k w * g) + sum_k w * b.
// A product on the tensor cores has room for eight rows of factors, so all three sums are made at once. x * g goes in as two
// numbers of T, the second what the first has lost in rounding: of a mean that is many deviations from zero little is lost.
#pragma once

#include "cluster.cuh"
#include "decode_linear_places.cuh"
#include "line_stream.cuh"

namespace fuseopt {

// Stages in shared memory and in registers, which together are all of a warp's.
template <int kRing, int kHeld>
struct GemvStages {
  static constexpr int kInRing = kRing, kInRegisters = kHeld, kAll = kRing + kHeld;
  static constexpr int kOfK = kAll * kLineK;
  static_assert(kOfK <= kWarpSize * kLaneValues, "a lane has 8 values of the row");
  // Of rows of factors, in values: an odd number of 32 bytes, so that they start in banks of their own.
  static constexpr int kFactorStride = (kAll + 1 - kAll % 2) * kLineK;
};

__device__ inline void add(float& total, float other) { total += other; }
__device__ inline void add(float4& total, const float4& other) {
  total = {total.x + other.x, total.y + other.y, total.z + other.z, total.w + other.w};
}

// Rows of factors of a norm: x * g as two numbers, g, and b.
enum GemvFactor { kGemvHigh, kGemvLow, kGemvScale, kGemvShift, kGemvFactors };

template <typename T, bool kNorm, Input kInput, typename Stages>
__global__ void __launch_bounds__(kLineThreads, 1) decode_linear_gemv_kernel(const __grid_constant__ LineLayer<T> layer) {
  constexpr bool kLooksUp = kInput == Input::kEmbedded;
  static_assert(kInput == Input::kStored || (kLooksUp && kNorm));
  using Piece = Vector<T, kLaneValues>;
  using Sum = std::conditional_t<kNorm, float4, float>;  // of a norm, of w with g, b, and the two parts of x * g
  constexpr int kRing = Stages::kInRing, kHeld = Stages::kInRegisters, kStride = Stages::kFactorStride;
  constexpr int kRows = kNorm ? kGemvFactors : 1;
  constexpr float kRoom = std::is_same_v<T, __half> ? 1 / 256.f : 1.f;  // keeps x * g in the range of T
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, columns = layer.columns;
  const int rank = cluster_rank(), blocks = cluster_size(), strip = static_cast<int>(cluster_index());
  const auto first_stage_of = [&](int part) {
    const unsigned all = (columns + kLineK - 1) / kLineK;
    return static_cast<int>(part * all / (blocks * kLineWarps));
  };
  const int part = rank * kLineWarps + warp, first_stage = first_stage_of(part);
  const int stages = first_stage_of(part + 1) - first_stage;

  // A ring [kRing] for each warp, in the end its sums [kLineColumns]; each warp's factors [kRows][kStride]; sums of the
  // cluster's other blocks [blocks - 1][kLineColumns], and of a norm a Deviations of each, as a float4.
  extern __shared__ __align__(kRingAlignment) char shared[];
  __shared__ __align__(16) Deviations deviations_of[kLineWarps];
  __shared__ Mailbox mailbox;
  char* const ring = shared + warp * kRing * kLineBytes;
  T* const factors = reinterpret_cast<T*>(shared + kLineWarps * kRing * kLineBytes) + warp * kRows * kStride;
  Sum* const inbox = reinterpret_cast<Sum*>(factors + (kLineWarps - warp) * kRows * kStride);
  float4* const deviations_inbox = reinterpret_cast<float4*>(inbox + (blocks - 1) * kLineColumns);
  const auto sums_of = [&](int w) { return reinterpret_cast<Sum*>(shared + w * kRing * kLineBytes); };

  LineStream<T> weight(layer, strip, first_stage, stages);
#pragma unroll 1
  for (int s = 0; s < kRing; ++s) weight.fetch_or_clear(ring + s * kLineBytes);
  // The first layer of a step that overlaps the one ahead: attention reads what that wrote before it waits.
  const bool lets_start_late = kLooksUp && layer.overlaps;
  if (!lets_start_late) let_successor_start();
  if (blocks > 1) {
    if (rank == 0) mailbox.open((blocks - 1) * (sizeof(Sum) * kLineColumns + (kNorm ? sizeof(float4) : 0)));
    arrive_relaxed_at_cluster_barrier();
  }

  const int own_k = lane * kLaneValues, k = first_stage * kLineK + own_k;
  const bool has_factors = own_k < Stages::kOfK, has_values = own_k < stages * kLineK && k < columns;
  uint4 scale = {}, shift = {};
  if constexpr (kNorm) {
    scale = {kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>};
    if (has_values && layer.norm_weight != nullptr) scale = load_once<uint4>(layer.norm_weight + k);
    if (has_values && layer.norm_bias != nullptr) shift = load_once<uint4>(layer.norm_bias + k);
    if (has_factors) {
      *reinterpret_cast<uint4*>(factors + kGemvScale * kStride + own_k) = scale;
      *reinterpret_cast<uint4*>(factors + kGemvShift * kStride + own_k) = shift;
    }
  }
  const int column = strip * kLineColumns + threadIdx.x;
  const bool is_column = threadIdx.x < kLineColumns && column < layer.outputs;
  float offset = 0.f;
  if (is_column && layer.biases[blockIdx.y] != nullptr) offset = to_float(layer.biases[blockIdx.y][column]);

  uint4 held[kHeld][kLineTiles / 2];
#pragma unroll
  for (int s = 0; s < kHeld; ++s) {
    char* const place = ring + s % kRing * kLineBytes;
    await_copy_groups<kRing - 1>();
    __syncwarp();
    weight.load(place, held[s]);
    __syncwarp();
    weight.fetch_or_clear(place);
  }
  // From here to the wait: where what follows it finds and puts things.
  const T* input = nullptr;
  Embedding<T> tokens, positions;
  T* sum = nullptr;
  int takes = has_values, puts = has_factors, leaves = 0;
  int factors_from = (lane / 4 % kRows) * kStride + lane % 4 * 4;  // of the warp's
  if constexpr (kLooksUp) {
    tokens = token_embedding(layer, 0).from(k, has_values);
    positions = position_embedding(layer, 0).from(k, has_values);
    sum = settled(layer.sum + k);
    leaves = has_values && layer.sum != nullptr && strip == 0 && blockIdx.y == 0;
    tokens.settle(), positions.settle(), settle(leaves);
  } else {
    input = settled(static_cast<const T*>(layer.input) + k);
    settle(takes);
  }
  settle(puts), settle(factors_from);
  ColumnPlace<T> place;
  place.find(layer, column, is_column);
  place.settle();
  wait_for_predecessor_settled(columns < 0);
  if (lets_start_late) let_successor_start();

  uint4 words = {};
  if constexpr (kLooksUp) {
    reinterpret_cast<Piece&>(words) = EmbeddedRow<T>(tokens, positions)(0);
  } else {
    if (takes > 0) words = __ldcg(reinterpret_cast<const uint4*>(input));
  }
  place.load_residual();
  const auto& x = reinterpret_cast<const Piece&>(words);
  Deviations deviations;
  if constexpr (kNorm) {
    float scaled[kLaneValues];
    Piece high, low;
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      scaled[i] = x[i] * reinterpret_cast<const Piece&>(scale)[i] * kRoom;
      deviations.sum += x[i], deviations.squares = fmaf(x[i], x[i], deviations.squares);
    }
    store_floats_as<T>(&high, 0, scaled);
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) scaled[i] -= high[i];
    store_floats_as<T>(&low, 0, scaled);
    if (puts > 0) {
      *reinterpret_cast<Piece*>(factors + kGemvHigh * kStride + own_k) = high;
      *reinterpret_cast<Piece*>(factors + kGemvLow * kStride + own_k) = low;
    }
  } else {
    if (puts > 0) *reinterpret_cast<uint4*>(factors + own_k) = words;
  }
  await_copy_groups<0>();
  __syncwarp();
  prefetch_ahead(layer);  // by now all weights are there, and memory has rest

  float sums[2][kLineTiles / 2][4] = {};
#pragma unroll
  for (int s = 0; s < Stages::kAll; ++s) {
    uint4 of_stage[kLineTiles / 2];
    const auto& stage = s < kHeld ? held[std::min(s, kHeld - 1)] : of_stage;
    if (s >= kHeld) weight.load(ring + s % kRing * kLineBytes, of_stage);
    const auto factor = *reinterpret_cast<const uint2*>(factors + factors_from + s * kLineK);
#pragma unroll
    for (int j = 0; j < kLineTiles / 2; ++j) {
      multiply<T>(sums[s % 2][j], {stage[j].x, stage[j].z}, {stage[j].y, stage[j].w}, factor.x, factor.y);
    }
    // An exchange with each of the last stages, as products hide its time.
    constexpr int kExchanges = 5;
    if (kNorm && s >= Stages::kAll - kExchanges) deviations.add_other_lane(1 << (s + kExchanges - Stages::kAll));
  }
  // Lanes with lane % 4 == 0 have the sums of the first two rows of factors, and those with 1 of the others.
  const int pair = lane % 4;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kLineTiles; ++i) {
    const float first = sums[0][i / 2][i % 2 * 2] + sums[1][i / 2][i % 2 * 2];
    const float second = sums[0][i / 2][i % 2 * 2 + 1] + sums[1][i / 2][i % 2 * 2 + 1];
    Sum* const at = sums_of(warp) + i * kTileColumns + lane / 4;
    if constexpr (kNorm) {
      if (pair < 2) reinterpret_cast<float2*>(at)[1 - pair] = {first, second};
    } else {
      if (pair == 0) *at = first;
    }
  }
  if constexpr (kNorm) {
    if (lane == 0) deviations_of[warp] = deviations;
  }
  if constexpr (kLooksUp) {
    if (leaves > 0) *reinterpret_cast<uint4*>(sum) = words;
  }
  __syncthreads();

  if (blocks > 1) wait_at_cluster_barrier();  // the first block has started
  if (rank > 0) {
    constexpr int kVectors = kLineColumns * sizeof(Sum) / sizeof(float4);
    if (threadIdx.x < kVectors) {
      float4 total = {};
#pragma unroll
      for (int w = 0; w < kLineWarps; ++w) add(total, reinterpret_cast<const float4*>(sums_of(w))[threadIdx.x]);
      mailbox.send(reinterpret_cast<float4*>(inbox + (rank - 1) * kLineColumns) + threadIdx.x, total);
    }
    if (kNorm && threadIdx.x == 0) {
      Deviations all;
      for (const Deviations& of_warp : deviations_of) all.add(of_warp);
      mailbox.send(deviations_inbox + rank - 1, {all.sum, all.squares, 0.f, 0.f});
    }
    return;
  }
  if (threadIdx.x >= kLineColumns) return;
  Sum total = {};
  Deviations all;
#pragma unroll
  for (int w = 0; w < kLineWarps; ++w) add(total, sums_of(w)[threadIdx.x]);
  if constexpr (kNorm) {
#pragma unroll
    for (int w = 0; w < kLineWarps; ++w) all.add(deviations_of[w]);
  }
  if (blocks > 1) mailbox.wait();
#pragma unroll 1
  for (int b = 0; b < blocks - 1; ++b) {
    add(total, inbox[b * kLineColumns + threadIdx.x]);
    if constexpr (kNorm) all.add({deviations_inbox[b].x, deviations_inbox[b].y});
  }
  float value;
  if constexpr (kNorm) {
    const auto normalisation = [&](auto row) {
      return normalisation_of<kWarpSize>(all, row, columns, layer.reciprocal, layer.is_layer_norm, layer.eps);
    };
    float2 norm;
    if constexpr (kLooksUp) {
      norm = normalisation(LazyEmbeddedRow<T>{token_embedding(layer, 0), position_embedding(layer, 0)});
    } else {
      norm = normalisation(StoredRow<T>{static_cast<const T*>(layer.input)});
    }
    const float mean = layer.is_layer_norm ? norm.x : 0.f;
    value = norm.y * fmaf(-mean, total.x, (total.z + total.w) * (1 / kRoom)) + total.y + offset;
  } else {
    value = total + offset;
  }
  place.store(activate_quickly(layer.activation, value));
}

// Registers are read at once, and shared memory takes its time: no more of a strip is there than keeps memory busy.
using MostGemvStages = GemvStages<4, 9>;

// How a layer's work is shared out. A smaller layer than those behind it leaves them multiprocessors to start on.
struct GemvPlan {
  int strips;      // of each weight
  int blocks = 1;  // that share out K
  int stages;      // of a warp

  explicit GemvPlan(const DecodeLinear& layer) : strips(static_cast<int>(ceil_div(layer.outputs, kLineColumns))) {
    const auto share = [&] { stages = static_cast<int>(ceil_div(layer.columns, blocks * kLineWarps * kLineK)); };
    share();
    while (is_sm90_or_newer() && blocks < kMaxLineCluster && (is_large(layer) || stages > MostGemvStages::kAll) &&
           2 * blocks * strips * layer.weight_count <= multiprocessor_count()) {
      blocks *= 2;
      share();
    }
  }
};

// Whether a layer with such a weight is for this kernel: large, or the output projection beside such layers, whose lines
// of half a strip would wait for what these read; and all of a strip has room.
inline bool takes_gemv(const DecodeLinear& layer) {
  const bool is_beside_large =
      layer.norm == kNoNorm && layer.columns <= layer.outputs && 4 * weight_bytes(layer) >= most_held_bytes();
  return layer.rows == 1 && (is_large(layer) || is_beside_large) && GemvPlan(layer).stages <= MostGemvStages::kAll;
}

template <typename T, bool kNorm, Input kInput, typename Stages>
cudaError_t launch_gemv_as(const DecodeLinear& layer, const GemvPlan& plan, cudaStream_t stream) {
  LineLayer<T> of{mma_layer<T>(layer)};
  const size_t sum_bytes = kNorm ? sizeof(float4) : sizeof(float);
  const size_t shared_bytes =
      kLineWarps * (Stages::kInRing * kLineBytes + (kNorm ? kGemvFactors : 1) * Stages::kFactorStride * sizeof(T)) +
      (plan.blocks - 1) * (sum_bytes * kLineColumns + (kNorm ? sizeof(float4) : 0));
  const LaunchShape shape{static_cast<unsigned>(plan.strips * plan.blocks), kLineThreads, shared_bytes,
                          static_cast<unsigned>(plan.blocks), static_cast<unsigned>(layer.weight_count)};
  of.share_ahead(shape);
  return launch_dependent(decode_linear_gemv_kernel<T, kNorm, kInput, Stages>, of, shape, layer.overlap, stream);
}

template <typename T, bool kNorm, Input kInput = Input::kStored>
cudaError_t launch_gemv(const DecodeLinear& layer, cudaStream_t stream) {
  const GemvPlan plan(layer);
  const auto launch = [&]<typename Stages>(Stages) {
    return launch_gemv_as<T, kNorm, kInput, Stages>(layer, plan, stream);
  };
  if (plan.stages <= GemvStages<4, 4>::kAll) return launch(GemvStages<4, 4>{});
  if (plan.stages <= GemvStages<4, 6>::kAll) return launch(GemvStages<4, 6>{});
  return launch(MostGemvStages{});
}

template <typename T>
cudaError_t launch_gemv(const DecodeLinear& layer, cudaStream_t stream) {
  if (layer.norm == kNoNorm) return launch_gemv<T, false>(layer, stream);
  if (layer.tokens.weight != nullptr) return launch_gemv<T, true, Input::kEmbedded>(layer, stream);
  return launch_gemv<T, true>(layer, stream);
}

extern template cudaError_t launch_gemv<__half>(const DecodeLinear&, cudaStream_t);
extern template cudaError_t launch_gemv<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);

}  // namespace fuseopt
