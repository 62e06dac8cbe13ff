// decode_linear for float32 weights and 1 to 16 rows, in multiply-adds: the tensor cores have no product of float32, and
// at so few rows reading the weight takes longer than the multiply-adds. A block computes strips of output columns, one
// after another; its warps split K. Each warp copies its own part of the weight into a ring of shared memory, from before
// the wait for the previous kernel on. A ring is small enough for a block of the next kernel to fit beside it and load
// meanwhile.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/decode/linear/params.cuh"
#include "cuda/decode/select/score_candidate.cuh"
#include "cuda/decode/select/token_rules.cuh"

namespace fuseopt {

constexpr int kFmaThreads = 256, kFmaWarps = kFmaThreads / kWarpSize;
constexpr int kFmaMostRows = 16;
// Of what a thread multiplies at a time: so many columns and so many k, one 16-byte access each in either layout.
constexpr int kFmaTile = 4;
// TUNED: measurement not recorded; `fuseopt bench kernels --model gpt2` measures it.
constexpr int kFmaStages = 6;
constexpr int kFmaStageBytes = kFmaThreads * kFmaTile * kAccessBytes;

struct FmaLayer : MmaLayer<float> {
  int stages;       // of K, in a strip
  int slots;        // of the ring: stages that it holds
  int copy_groups;  // of a stage, for those of all slots to be kFmaStages
  int held_k;       // of each row in shared memory: whole stages
  int share;        // of K, of each y of the grid if split_k: in_features otherwise
  bool is_gated, is_split_k;
  Candidate<float>* best;  // of each row, for each block: its highest output; or null
  TokenRules rules;        // by which outputs are compared
  const int64_t* sequence_length;
};

// How lanes share a stage of the weight. kColumnLanes: neighbouring lanes have neighbouring columns, the others K.
template <int kColumnLanes>
struct FmaShape {
  static constexpr int kColumns = kColumnLanes * kFmaTile;  // of a strip, half of them each weight's if gated
  static constexpr int kWarpK = kWarpSize / kColumnLanes * kFmaTile;
  static constexpr int kStageK = kFmaWarps * kWarpK;
};

// A warp's way through a weight: its part of each stage, of one strip after another. Lanes copy neighbouring pieces of
// memory, and multiply others (`load`).
template <Layout kLayout, int kColumnLanes>
class FmaStream {
  using Shape = FmaShape<kColumnLanes>;
  static constexpr bool kIsKN = kLayout == Layout::kColMajorKN;
  // 16-byte pieces of a line, which is of k of a weight [K, N], else a column; and lines that a warp copies at a time.
  static constexpr int kLinePieces = kIsKN ? kColumnLanes : kWarpSize / kColumnLanes, kLines = kWarpSize / kLinePieces;

 public:
  // `outputs`: columns of the weight; `columns`: of K.
  __device__ FmaStream(const FmaLayer& layer, int strip, int outputs, int columns)
      : layer_(layer), outputs_(outputs), columns_(columns), width_(layer.is_gated ? Shape::kColumns / 2 : Shape::kColumns) {
    const int place = kIsKN ? piece() * kFmaTile : line(0);  // of the strip
    const bool is_gate = place >= width_;
    k_ = warp() * Shape::kWarpK + (kIsKN ? line(0) : piece() * kFmaTile);
    first_column_ = strip * width_;
    column_ = first_column_ + (is_gate ? place - width_ : place);
    from_ = layer.weights[is_gate ? 1 : blockIdx.y] + (kIsKN ? offset(k_) + column_ : offset(column_) + k_);
    to_gate_ = layer.is_gated && !kIsKN ? layer.weights[1] - layer.weights[0] - offset(width_) : 0;
  }

  // Starts the copies of the next stage; groups of none at the end.
  __device__ void fetch(char* stage) {
    if (first_column_ < outputs_) {
#pragma unroll
      for (int i = 0; i < kFmaTile; ++i) {
        const int further = i * kLines;
        const bool is_gate = !kIsKN && layer_.is_gated && i >= kFmaTile / 2;
        const int column = column_ + (kIsKN ? 0 : further) - (is_gate ? width_ : 0), k = k_ + (kIsKN ? further : 0);
        const float* const from = from_ + offset(further) + (is_gate ? to_gate_ : 0);
        copy_async(stage + place_of(line(i), piece()), from, column < outputs_ && k < columns_);
      }
      k_ += Shape::kStageK;
      from_ += along_k(Shape::kStageK);
      if (++stage_ == layer_.stages) {
        const int back = layer_.stages * Shape::kStageK, columns = static_cast<int>(gridDim.x) * width_;
        stage_ = 0;
        k_ -= back;
        first_column_ += columns, column_ += columns;
        from_ += (kIsKN ? static_cast<int64_t>(columns) : offset(columns)) - along_k(back);
      }
    }
#pragma unroll 1
    for (int g = 0; g < layer_.copy_groups; ++g) end_copy_group();
  }

  // The lane's part of a stage: lines of k of a weight [K, N], else columns.
  static __device__ void load(const char* stage, float4 (&lines)[kFmaTile]) {
    const int lane = threadIdx.x % kWarpSize, column_lane = lane % kColumnLanes, k_lane = lane / kColumnLanes;
#pragma unroll
    for (int i = 0; i < kFmaTile; ++i) {
      const int line = (kIsKN ? k_lane : column_lane) * kFmaTile + i, piece = kIsKN ? column_lane : k_lane;
      lines[i] = *reinterpret_cast<const float4*>(stage + place_of(line, piece));
    }
  }

 private:
  static __device__ int warp() { return threadIdx.x / kWarpSize; }
  static __device__ int piece() { return threadIdx.x % kWarpSize % kLinePieces; }
  static __device__ int line(int i) { return threadIdx.x % kWarpSize / kLinePieces + i * kLines; }
  // Swizzled: 8 neighbouring lanes, whose pieces are accessed together, meet no bank twice, in copies or in `load`.
  static __device__ int place_of(int line, int piece) {
    constexpr int kTogether = 8 / kColumnLanes;  // pieces of a column, or lines, that `load` reads at a time
    const int tile = line / kFmaTile;
    const int place = kIsKN ? (line ^ tile % kTogether) * kLinePieces + piece
                            : line * kLinePieces + (piece ^ tile % kColumnLanes * kTogether);
    return (warp() * kFmaTile * kWarpSize + place) * kAccessBytes;
  }
  __device__ int64_t offset(int lines) const { return static_cast<int64_t>(lines) * layer_.weight_stride; }
  __device__ int64_t along_k(int k) const { return kIsKN ? offset(k) : k; }

  const FmaLayer& layer_;
  const int outputs_, columns_, width_;
  int k_, first_column_, column_, stage_ = 0;
  const float* from_;
  int64_t to_gate_;  // of the same place in the strip
};

// Adds up kCount values over lanes kDistance and further apart. Each lane keeps the sums of a part of the values: those
// from `first` on, in the place of the first ones. Where lanes outnumber values, `is_owner` is left to one of each.
template <int kCount, int kDistance>
__device__ inline void sum_over_lanes(float* values, int& first, bool& is_owner) {
  if constexpr (kDistance < kWarpSize) {
    const bool is_upper = (threadIdx.x & kDistance) != 0;
    if constexpr (kCount > 1) {
      constexpr int kHalf = kCount / 2;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float given = is_upper ? values[i] : values[i + kHalf], kept = is_upper ? values[i + kHalf] : values[i];
        values[i] = kept + __shfl_xor_sync(kFullWarp, given, kDistance);
      }
      if (is_upper) first += kHalf;
      sum_over_lanes<kHalf, 2 * kDistance>(values, first, is_owner);
    } else {
      values[0] += __shfl_xor_sync(kFullWarp, values[0], kDistance);
      is_owner = is_owner && !is_upper;
      sum_over_lanes<1, 2 * kDistance>(values, first, is_owner);
    }
  }
}

// Of a row: sums of its values and of their squares; or, behind a norm, what is subtracted and multiplied.
struct RowSums {
  float sum = 0.f, squares = 0.f;

  __device__ void add(const float4& x) {
    sum += (x.x + x.y) + (x.z + x.w);
    squares = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, fmaf(x.w, x.w, squares))));
  }
  __device__ void add(const RowSums& others) { sum += others.sum, squares += others.squares; }
  __device__ void add_lanes() {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      add(RowSums{__shfl_xor_sync(kFullWarp, sum, distance), __shfl_xor_sync(kFullWarp, squares, distance)});
    }
  }
};

// Mean and 1 / deviation of a row of `columns` values, four of which `row(k)` gives; an RMS norm subtracts no mean. By all
// lanes of a warp.
template <typename Row>
__device__ inline RowSums normalisation_of(const RowSums& all, Row row, int columns, const FmaLayer& layer) {
  const float count = static_cast<float>(layer.in_features), mean = layer.is_layer_norm ? all.sum / count : 0.f;
  float variance = all.squares / count - mean * mean;
  // Squares from zero lose what their mean exceeds the variance by: of rows far from zero, deviations are added up.
  if (!(variance >= mean * mean)) {
    RowSums deviations;
#pragma unroll 1
    for (int k = threadIdx.x % kWarpSize * kFmaTile; k < columns; k += kWarpSize * kFmaTile) {
      const float4 x = row(k);
      deviations.add(float4{x.x - mean, x.y - mean, x.z - mean, x.w - mean});
    }
    deviations.add_lanes();
    variance = deviations.squares / count;
  }
  return {mean, rsqrtf(variance + layer.eps)};
}

__device__ inline float4 normalised(const float4& x, const RowSums& norm, const float4& scale, const float4& shift) {
  const auto of = [&](float x, float scale, float shift) { return fmaf((x - norm.sum) * norm.squares, scale, shift); };
  return {of(x.x, scale.x, shift.x), of(x.y, scale.y, shift.y), of(x.z, scale.z, shift.z), of(x.w, scale.w, shift.w)};
}

__device__ inline float4 operator+(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Where a block has what in shared memory, in floats behind its ring: rows [kRows][held_k]; of a norm, its weight and bias
// [2][held_k]; sums of each warp [2][kFmaWarps][kRows][kColumns]; sums of warps over a row [2][kFmaWarps].
template <bool kNorm, int kRows, int kColumnLanes>
struct FmaPlaces {
  int params, sums, teams, end;

  __host__ __device__ explicit FmaPlaces(int held_k)
      : params(kRows * held_k),
        sums(params + (kNorm ? 2 * held_k : 0)),
        teams(sums + 2 * kFmaWarps * kRows * FmaShape<kColumnLanes>::kColumns),
        end(teams + 2 * kFmaWarps) {}
};

template <Layout kLayout, bool kNorm, int kRows, int kColumnLanes>
__global__ void __launch_bounds__(kFmaThreads, 2) decode_linear_fma_kernel(const __grid_constant__ FmaLayer layer) {
  using Shape = FmaShape<kColumnLanes>;
  constexpr int kColumns = Shape::kColumns, kKLanes = kWarpSize / kColumnLanes;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, rows = layer.rows, held = layer.held_k;
  const int first_k = layer.is_split_k ? blockIdx.y * layer.share : 0;
  const int columns = min(layer.in_features - first_k, layer.share);
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
  int strip = static_cast<int>(blockIdx.x);
  FmaStream<kLayout, kColumnLanes> weight(layer, strip, outputs, columns);
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

  // What the thread finishes of each strip: one output.
  static_assert(kRows * kColumns <= kFmaThreads);
  const int width = layer.is_gated ? kColumns / 2 : kColumns, strips = (outputs + width - 1) / width;
  const bool has_several_strips = strips > static_cast<int>(gridDim.x);
  if (!has_several_strips) prefetch_next_weights(layer);
  const int own_row = threadIdx.x / width, own_column = threadIdx.x % width;
  const int64_t first_output = layer.is_split_k ? blockIdx.y * static_cast<int64_t>(rows) * outputs : layer.first_outputs[blockIdx.y];
  const int64_t output_row = first_output + own_row * static_cast<int64_t>(layer.output_stride);
  float bias = 0.f, gate_bias = 0.f, residual = 0.f;
  unsigned rules_of_column = 0;
  const auto load_parameters = [&] {
    const int column = strip * width + own_column;
    if (own_row >= rows || column >= outputs) return;
    const float* const biases = layer.biases[layer.is_gated ? 0 : blockIdx.y];
    if (biases != nullptr) bias = biases[column];
    if (layer.is_gated && layer.biases[1] != nullptr) gate_bias = layer.biases[1][column];
    if (kNorm && layer.rules.of_tokens != nullptr) rules_of_column = layer.rules.of_tokens[column];
  };
  const auto load_residual = [&] {
    const int column = strip * width + own_column;
    if (layer.residual == nullptr || own_row >= rows || column >= outputs) return;
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
  constexpr int kLoads = 8 / kTeamWarps > 2 ? 8 / kTeamWarps : 2;  // of a lane, on the way at a time

  const int member_k = (warp % kTeamWarps * kWarpSize + lane) * kFmaTile;
#pragma unroll 1
  for (int r = warp / kTeamWarps; r < kRows; r += kFmaWarps) {
    const int64_t at = static_cast<int64_t>(r) * layer.in_features + first_k;
    const float* const from = static_cast<const float*>(layer.input) + at;
    const float* const partials = kNorm ? layer.split_k_partials : nullptr;
    const auto loaded = [&](int k) { return __ldcg(reinterpret_cast<const float4*>(from + k)); };
    const auto with_partials = [&](const float4& value, int k) {
      const auto partial = [&](int a) {
        return __ldcg(reinterpret_cast<const float4*>(partials + a * static_cast<int64_t>(rows) * layer.in_features + at + k));
      };
      return partials == nullptr ? value : partial(0) + partial(1) + value;
    };
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
        if (partials != nullptr && k < there) {
          values[i] = with_partials(values[i], k);
          if (layer.sum != nullptr && blockIdx.x == 0) *reinterpret_cast<float4*>(layer.sum + at + k) = values[i];
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
      const auto again = [&](int k) { return with_partials(loaded(k), k); };
      const RowSums norm = normalisation_of(sums, again, r < rows ? columns : 0, layer);
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
          *reinterpret_cast<float4*>(row + k) = normalised(values[i], norm, factor, *reinterpret_cast<const float4*>(shift + k));
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

    const int column = strip * width + own_column;
    if (own_row < rows && column < outputs) {
      const auto total = [&](int place, float sum) {
#pragma unroll
        for (int w = 0; w < kFmaWarps; ++w) sum += sums_at(turn, w, own_row)[place];
        return sum;
      };
      float value = activate_quickly(layer.activation, total(own_column, bias));
      if (layer.is_gated) value *= total(own_column + width, gate_bias);
      value += residual;
      static_cast<float*>(layer.output)[output_row + column] = value;
      if (kNorm && layer.best != nullptr) best.consider(rules.edited(value, rules_of_column), column);
    }
    strip += gridDim.x;
    load_parameters();
    load_residual();
  }
  if (has_several_strips) prefetch_next_weights(layer);
  if (!kNorm || layer.best == nullptr) return;
  best.reduce(kColumns);  // of a gated layer nobody asks
  if (own_column == 0 && own_row < rows) layer.best[own_row * gridDim.x + blockIdx.x] = best;
}

// How a layer's work is shared out, for up to `most_rows` rows at a time.
struct FmaPlan {
  int kernel_rows = 1;  // that the kernel is compiled for
  int column_lanes, strips, stages, slots, copy_groups = 1, held_k, blocks;
  int shares, share;    // of K
  size_t shared_bytes;

  FmaPlan(const DecodeLinear& layer, int64_t most_rows)
      : shares(layer.is_split_k ? kSplitK : 1),
        share(static_cast<int>(layer.is_split_k ? split_k_share(layer.in_features) : layer.in_features)) {
    for (const int fewer : {4, 8, 16}) {
      if (kernel_rows < std::min(layer.rows, most_rows)) kernel_rows = fewer;
    }
    cover(layer, 4);
    if (!layer.gated && 2 * strips * grid_rows(layer) < multiprocessor_count()) cover(layer, 2);
    // All that a block reads, if it is little; else a ring, and strips enough to share out evenly.
    const auto fit = [&](int most_slots) {
      slots = std::min(most_slots, stages);
      hold(layer);
      blocks = most_blocks(layer) > 0 ? strips : 0;
      if (blocks <= most_blocks(layer) && stages <= most_slots) return;
      slots = most_slots;
      copy_groups = kFmaStages / slots;
      hold(layer);
      const int64_t most = most_blocks(layer);
      blocks = most == 0 ? 0 : static_cast<int>(ceil_div(strips, ceil_div(strips, most)));
    };
    fit(kFmaStages);
    if (blocks == 0) fit(kFmaStages / 2);
  }

  bool fits() const { return blocks > 0; }

  static int64_t split_k_share(int64_t in_features) {  // as ops/decode/linear_partials.py has it
    constexpr int64_t kOfWarp = 128;
    return ceil_div(in_features, kSplitK * kOfWarp) * kOfWarp;
  }
  int grid_rows(const DecodeLinear& layer) const { return layer.gated ? 1 : layer.weight_count * shares; }

 private:
  void cover(const DecodeLinear& layer, int lanes) {
    column_lanes = lanes;
    const int columns = lanes * kFmaTile, stage_k = kFmaWarps * kWarpSize / lanes * kFmaTile;
    strips = static_cast<int>(ceil_div(layer.out_features, layer.gated ? columns / 2 : columns));
    stages = static_cast<int>(ceil_div(share, stage_k));
    held_k = stages * stage_k;
  }
  void hold(const DecodeLinear& layer) {
    const int64_t floats = held_k * (kernel_rows + (layer.norm != kNoNorm ? 2 : 0)) +
                           2 * kFmaWarps * (kernel_rows * column_lanes * kFmaTile + 1);
    shared_bytes = slots * kFmaStageBytes + floats * sizeof(float);
  }
  // That are on the device at a time.
  int64_t most_blocks(const DecodeLinear& layer) const {
    constexpr size_t kReserved = 1024 + kRingAlignment;  // for each block, by the system
    if (shared_bytes + kReserved > shared_bytes_of_block()) return 0;
    const auto of_multiprocessor = static_cast<int64_t>(shared_bytes_of_multiprocessor() / (shared_bytes + kReserved));
    return std::max<int64_t>(multiprocessor_count() * std::min<int64_t>(of_multiprocessor, 2) / grid_rows(layer), 1);
  }
};

template <Layout kLayout, bool kNorm, int kRows, int kColumnLanes>
cudaError_t launch_fma_as(const FmaLayer& layer, const LaunchShape& shape, bool pdl, cudaStream_t stream) {
  return launch_dependent(decode_linear_fma_kernel<kLayout, kNorm, kRows, kColumnLanes>, layer, shape, pdl, stream);
}

template <Layout kLayout, bool kNorm>
cudaError_t launch_fma(const DecodeLinear& layer, const FmaPlan& plan, cudaStream_t stream) {
  FmaLayer of{mma_layer<float>(layer)};
  of.stages = plan.stages, of.slots = plan.slots, of.copy_groups = plan.copy_groups;
  of.held_k = plan.held_k, of.share = plan.share;
  of.is_gated = layer.gated, of.is_split_k = layer.is_split_k;
  if (layer.is_split_k) {
    of.weights[1] = of.weights[0] + plan.share * (kLayout == Layout::kColMajorKN ? layer.weight_stride : 1);
  }
  of.best = static_cast<Candidate<float>*>(layer.best);
  of.rules = layer.rules;
  of.sequence_length = layer.sequence_length;
  const LaunchShape shape{static_cast<unsigned>(plan.blocks), kFmaThreads, plan.shared_bytes, 1,
                          static_cast<unsigned>(plan.grid_rows(layer))};
  of.share_prefetch(shape);
  const auto launch = [&]<int kRows>() {
    cudaError_t error = cudaSuccess;
    for (int64_t row = 0; row < layer.rows && error == cudaSuccess; row += kRows) {
      of.rows = static_cast<int>(std::min<int64_t>(layer.rows - row, kRows));
      // Launches for further rows share no data with the first, but write beside it: only that one overlaps.
      const bool pdl = layer.pdl && row == 0;
      error = plan.column_lanes == 2 ? launch_fma_as<kLayout, kNorm, kRows, 2>(of, shape, pdl, stream)
                                     : launch_fma_as<kLayout, kNorm, kRows, 4>(of, shape, pdl, stream);
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

// The plan with as many rows at a time as a block has room for.
inline FmaPlan fma_plan(const DecodeLinear& layer) {
  FmaPlan plan(layer, kFmaMostRows);
  while (!plan.fits() && plan.kernel_rows > 1) plan = FmaPlan(layer, plan.kernel_rows > 4 ? plan.kernel_rows / 2 : 1);
  return plan;
}

// Whether the layer is in float32 and 16-byte accesses reach all that the kernel reads of weight and input.
inline bool suits_fma(const DecodeLinear& layer) {
  if (compute_capability_major() < 8 || layer.weight_dtype != kFloat32 || layer.rows > kFmaMostRows) return false;
  bool suits = layer.input.dtype == kFloat32 && layer.output.dtype == kFloat32 && is_aligned(layer.input.data) &&
               layer.in_features > 0 && layer.in_features % kFmaTile == 0 && layer.weight_stride % kFmaTile == 0 &&
               layer.weight_stride <= INT32_MAX && output_columns(layer) <= INT32_MAX;
  for (int i = 0; i < layer.weight_count; ++i) {
    suits &= is_aligned(layer.weights[i]) && (!layer.weights_are_transposed || layer.widths[i] % kFmaTile == 0);
  }
  const auto is_float = [](const TypedPointer& tensor) { return tensor.data == nullptr || tensor.dtype == kFloat32; };
  for (const TypedPointer& bias : layer.biases) suits &= is_float(bias);
  for (const TypedPointer& norm : {layer.norm_weight, layer.norm_bias}) suits &= is_float(norm) && is_aligned(norm.data);
  return suits && is_float(layer.residual);
}

inline bool takes_fma(const DecodeLinear& layer) { return suits_fma(layer) && fma_plan(layer).fits(); }

}  // namespace fuseopt
