// decode_linear for float32 weights and 1 to 16 rows, in multiply-adds: the tensor cores have no product of float32, and
// at so few rows reading the weight takes longer than the multiply-adds. A block computes strips of output columns, one
// after another; its warps split K, and the blocks of a cluster split a long one. Each warp copies its own part of the weight into a ring of shared memory, from before
// the wait for the previous kernel on. A ring is small enough for a block of the next kernel to fit beside it and load
// meanwhile.
#pragma once

#include "cuda/decode/linear/fma_plan.cuh"
#include "cuda/decode/linear/fma_rows.cuh"
#include "cuda/decode/select/token_rules.cuh"

namespace fuseopt {

// Where a block has what in shared memory, in floats behind its ring: rows [kRows][held_k]; of a norm, its weight and bias
// [2][held_k]; sums of each warp [2][kFmaWarps][kRows][kColumns]; sums of warps over a row [2][kFmaWarps]; of a cluster's
// first block, the sums of the others [parts - 1][kRows][kColumns].
template <bool kNorm, int kRows, int kColumnLanes>
struct FmaPlaces {
  int params, sums, teams, received;

  __host__ __device__ explicit FmaPlaces(int held_k)
      : params(kRows * held_k),
        sums(params + (kNorm ? 2 * held_k : 0)),
        teams(sums + 2 * kFmaWarps * kRows * FmaShape<kColumnLanes>::kColumns),
        received(teams + 2 * kFmaWarps) {}
};

template <Layout kLayout, FmaInput kInput, int kRows, int kColumnLanes>
__global__ void __launch_bounds__(kFmaThreads, kRows <= 4 ? 3 : 2)
    decode_linear_fma_kernel(const __grid_constant__ FmaLayer layer) {
  using Shape = FmaShape<kColumnLanes>;
  constexpr bool kNorm = kInput == FmaInput::kNormalised;
  constexpr int kColumns = Shape::kColumns, kKLanes = kWarpSize / kColumnLanes;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, rows = layer.rows, held = layer.held_k;
  const int parts = kNorm ? 1 : layer.parts, part = kNorm ? 0 : static_cast<int>(blockIdx.x) % parts;
  const int first_k = part * layer.share, columns = min(layer.in_features - first_k, layer.share);
  const int outputs = layer.is_gated ? layer.out_features : layer.widths[blockIdx.y];
  const int own_k = warp * Shape::kWarpK + lane / kColumnLanes * kFmaTile, own_place = lane % kColumnLanes * kFmaTile;

  extern __shared__ __align__(kRingAlignment) char shared[];
  float* const x = reinterpret_cast<float*>(shared + layer.slots * kFmaStageBytes);
  const FmaPlaces<kNorm, kRows, kColumnLanes> places(held);
  float *const scale = x + places.params, *const shift = scale + held;
  const auto sums_at = [&](int turn, int w, int r) {
    return x + places.sums + ((turn * kFmaWarps + w) * kRows + r) * kColumns;
  };

  let_successor_start();
  const int step = static_cast<int>(gridDim.x) / parts;
  int strip = static_cast<int>(blockIdx.x) / parts;
  FmaStream<kLayout, kColumnLanes> weight(layer, strip, step, outputs, first_k, columns);
#pragma unroll 1
  for (int k = threadIdx.x * kFmaTile; kNorm && k < held; k += kFmaThreads * kFmaTile) {
    copy_async(scale + k, layer.norm_weight + k, layer.norm_weight != nullptr && k < columns);
    copy_async(shift + k, layer.norm_bias + k, layer.norm_bias != nullptr && k < columns);
  }
  end_copy_group();
#pragma unroll 1
  for (int s = 0; s < layer.slots; ++s) weight.fetch(shared + s * kFmaStageBytes);
#pragma unroll 1
  for (int g = layer.slots * layer.copy_groups; g < kFmaStages; ++g) end_copy_group();

  __shared__ Mailbox mailbox;
  if (parts > 1) {
    if (part == 0) mailbox.open((parts - 1) * kRows * kColumns * sizeof(float));
    arrive_relaxed_at_cluster_barrier();
  }

  // What the thread finishes of each strip: one output.
  static_assert(kRows * kColumns <= kFmaThreads);
  const int width = layer.is_gated ? kColumns / 2 : kColumns, strips = (outputs + width - 1) / width;
  const int own_row = threadIdx.x / width, own_column = threadIdx.x % width;
  const int64_t output_row = layer.first_outputs[blockIdx.y] + own_row * static_cast<int64_t>(layer.output_stride);
  float bias = 0.f, gate_bias = 0.f, residual = 0.f;
  unsigned rules_of_column = 0;
  const auto load_parameters = [&] {
    const int column = strip * width + own_column;
    if (own_row >= rows || column >= outputs || part > 0) return;
    const float* const biases = layer.biases[layer.is_gated ? 0 : blockIdx.y];
    if (biases != nullptr) bias = biases[column];
    if (layer.is_gated && layer.biases[1] != nullptr) gate_bias = layer.biases[1][column];
    if (kNorm && layer.rules.of_tokens != nullptr) rules_of_column = layer.rules.of_tokens[column];
  };
  const auto load_residual = [&] {
    const int column = strip * width + own_column;
    if (layer.residual == nullptr || own_row >= rows || column >= outputs || part > 0) return;
    residual = __ldcg(static_cast<const float*>(layer.residual) + output_row + column);
  };
  load_parameters();
  wait_for_predecessor();

  load_residual();
  RulesInForce rules;
  if (kNorm && layer.rules.of_tokens != nullptr) rules = RulesInForce(layer.rules, *layer.sequence_length);
  constexpr int kTeamWarps = kRows < kFmaWarps ? kFmaWarps / kRows : 1;
  constexpr int kStep = kTeamWarps * kWarpSize * kFmaTile;
  // TUNED: measurement not recorded; `fuseopt bench kernels --model gpt2` measures it.
  constexpr int kLoads = 8 / kTeamWarps > 2 ? 8 / kTeamWarps : 2;  // of a lane, in flight

  const int member_k = (warp % kTeamWarps * kWarpSize + lane) * kFmaTile;
#pragma unroll 1
  for (int r = warp / kTeamWarps; r < kRows; r += kFmaWarps) {
    const float* const from = static_cast<const float*>(layer.input) + static_cast<int64_t>(r) * layer.in_features + first_k;
    const auto loaded = [&](int k) { return __ldcg(reinterpret_cast<const float4*>(from + k)); };
    float* const row = x + r * held;
    const int there = r < rows ? columns : 0;
    float4 values[kLoads];
    RowSums sums;
#pragma unroll 1
    for (int first = member_k; first < held; first += kLoads * kStep) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        values[i] = {};
        if (first + i * kStep < there) values[i] = loaded(first + i * kStep);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int k = first + i * kStep;
        if constexpr (kInput == FmaInput::kSoftmax) {
          static_assert(kWarpSize * kFmaTile == kSoftmaxGroup);  // a warp has a whole group
          if (k < there) values[i] = softmax_of_warp(values[i]);
        }
        if (k < held) *reinterpret_cast<float4*>(row + k) = values[i];
        if constexpr (kNorm) sums.add(values[i]);
      }
    }
    if constexpr (kNorm) {
      auto* const teams = reinterpret_cast<RowSums*>(x + places.teams);
      sums.add_lanes();
      if (kTeamWarps > 1 && lane == 0) teams[warp] = sums;
      if (r < kFmaWarps) {
        await_copy_groups<kFmaStages>();
        __syncthreads();  // scale and shift are there, and the team's rows and sums
      }
      if constexpr (kTeamWarps > 1) {
        sums = {};
#pragma unroll
        for (int w = 0; w < kTeamWarps; ++w) sums.add(teams[warp / kTeamWarps * kTeamWarps + w]);
      }
      const RowSums norm = normalisation_of(sums, loaded, r < rows ? columns : 0, layer);
      const float more = layer.norm_weight == nullptr || layer.adds_one ? 1.f : 0.f;
      const bool are_loaded = held <= kLoads * kStep;
#pragma unroll 1
      for (int first = member_k; first < columns; first += kLoads * kStep) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int k = first + i * kStep;
          if (k >= columns) continue;
          if (!are_loaded) values[i] = *reinterpret_cast<const float4*>(row + k);
          float4 factor = *reinterpret_cast<const float4*>(scale + k);
          factor = {factor.x + more, factor.y + more, factor.z + more, factor.w + more};
          const float4& term = *reinterpret_cast<const float4*>(shift + k);
          *reinterpret_cast<float4*>(row + k) = normalised(values[i], norm, factor, term);
        }
      }
    }
  }
  __syncthreads();

  char* stage = shared;
  char* const end_of_ring = shared + layer.slots * kFmaStageBytes;
  Candidate<float> best;
#pragma unroll 1
  for (int turn = 0; strip < strips; turn ^= 1) {
    float sums[kRows * kFmaTile] = {};
    const float* own_x = x + own_k;
#pragma unroll 1
    for (int s = 0; s < layer.stages; ++s) {
      await_copy_groups<kFmaStages - 1>();
      __syncwarp();
      float4 lines[kFmaTile];
      weight.load(stage, lines);
      const auto& w = reinterpret_cast<const float(&)[kFmaTile][kFmaTile]>(lines);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const auto& values = *reinterpret_cast<const Vector<float>*>(own_x + r * held);
#pragma unroll
        for (int k = 0; k < kFmaTile; ++k) {
#pragma unroll
          for (int j = 0; j < kFmaTile; ++j) {
            float& sum = sums[r * kFmaTile + j];
            sum = fmaf(values[k], kLayout == Layout::kColMajorKN ? w[k][j] : w[j][k], sum);
          }
        }
      }
      __syncwarp();
      weight.fetch(stage);
      own_x += Shape::kStageK;
      stage = stage + kFmaStageBytes < end_of_ring ? stage + kFmaStageBytes : shared;
    }
    constexpr int kKept = kRows * kFmaTile > kKLanes ? kRows * kFmaTile / kKLanes : 1;
    int first = 0;
    bool is_owner = true;
    sum_over_lanes<kRows * kFmaTile, kColumnLanes>(sums, first, is_owner);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int of = first + i;
      if (is_owner) sums_at(turn, warp, of / kFmaTile)[own_place + of % kFmaTile] = sums[i];
    }
    __syncthreads();

    const auto total = [&](int place, float sum) {
#pragma unroll
      for (int w = 0; w < kFmaWarps; ++w) sum += sums_at(turn, w, own_row)[place];
      return sum;
    };
    if (parts > 1) {  // a cluster has one strip
      wait_at_cluster_barrier();
      float* const received = x + places.received + threadIdx.x;
      if (part > 0) {
        if (own_row < kRows) mailbox.send(received + (part - 1) * kRows * kColumns, total(own_column, 0.f), 0);
        return;
      }
      mailbox.wait();
      for (int p = 1; p < parts && own_row < kRows; ++p) bias += received[(p - 1) * kRows * kColumns];
    }
    const int column = strip * width + own_column;
    if (own_row < rows && column < outputs) {
      float value = activate_quickly(layer.activation, total(own_column, bias));
      if (layer.is_gated) value *= total(own_column + width, gate_bias);
      value += residual;
      static_cast<float*>(layer.output)[output_row + column] = value;
      if (kNorm && layer.best != nullptr) best.consider(rules.edited(value, rules_of_column), column);
    }
    strip += step;
    load_parameters();
    load_residual();
  }
  if (!kNorm || layer.best == nullptr) return;
  best.reduce(kColumns);  // a gated layer has no `best`
  if (own_column == 0 && own_row < rows) layer.best[own_row * gridDim.x + blockIdx.x] = best;
}

template <Layout kLayout, FmaInput kInput, int kRows, int kColumnLanes>
cudaError_t launch_fma_as(const FmaLayer& layer, const LaunchShape& shape, bool pdl, cudaStream_t stream) {
  return launch_dependent(decode_linear_fma_kernel<kLayout, kInput, kRows, kColumnLanes>, layer, shape, pdl, stream);
}

template <Layout kLayout, FmaInput kInput>
cudaError_t launch_fma(const DecodeLinear& layer, const FmaPlan& plan, cudaStream_t stream) {
  FmaLayer of{mma_layer<float>(layer)};
  of.stages = plan.stages, of.slots = plan.slots, of.copy_groups = plan.copy_groups;
  of.held_k = plan.held_k, of.parts = plan.parts, of.share = plan.share;
  of.is_gated = layer.gated;
  of.best = static_cast<Candidate<float>*>(layer.best);
  of.rules = layer.rules;
  of.sequence_length = layer.sequence_length;
  const LaunchShape shape{static_cast<unsigned>(plan.blocks), kFmaThreads, plan.shared_bytes,
                          static_cast<unsigned>(plan.parts), static_cast<unsigned>(plan.grid_rows(layer))};
  const auto launch = [&]<int kRows>() {
    cudaError_t error = cudaSuccess;
    for (int64_t row = 0; row < layer.rows && error == cudaSuccess; row += kRows) {
      of.rows = static_cast<int>(std::min<int64_t>(layer.rows - row, kRows));
      // Launches for further rows share no data with the first, but write beside it: only that one overlaps.
      const bool pdl = layer.pdl && row == 0;
      error = plan.column_lanes == 2 ? launch_fma_as<kLayout, kInput, kRows, 2>(of, shape, pdl, stream)
                                     : launch_fma_as<kLayout, kInput, kRows, 4>(of, shape, pdl, stream);
      of.input = static_cast<const float*>(of.input) + kRows * layer.in_features;
      of.output = static_cast<float*>(of.output) + kRows * of.output_stride;
      if (of.residual != nullptr) of.residual = static_cast<const float*>(of.residual) + kRows * of.output_stride;
    }
    return error;
  };
  switch (plan.kernel_rows) {
    case 1: return launch.template operator()<1>();
    case 4: return launch.template operator()<4>();
    case 8: return launch.template operator()<8>();
    default: return launch.template operator()<16>();
  }
}

}  // namespace fuseopt
