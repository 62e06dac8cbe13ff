// decode_linear of one row for 16-bit weights [K, N] that exceed the registers of skinny_mma. A block computes one strip of
// output columns; its warps, and with few strips the blocks of a cluster, split K. All loads of a warp are issued before the
// wait: the first stages go to registers, the others stay in shared memory, since reading that takes most of the time after
// the wait. As in skinny_mma.cuh each instruction after the wait counts.
//
// The norm is part of the products. With xhat = (x - mean) * rstd and g, b the norm's weight and bias,
//   sum_k w * (xhat * g + b) = rstd * (sum_k w * (x * g) - mean * sum_k w * g) + sum_k w * b.
// A tensor core product takes eight rows of factors, so all three sums are computed at once. x * g is passed as two numbers
// of T, the second being the rounding error of the first, so little is lost if the mean is many deviations from zero.
// float16 lacks the range for that, so each warp scales its x * g by a power of two, chosen by the largest value.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/decode/linear/epilogue.cuh"
#include "cuda/decode/linear/input_rows.cuh"
#include "cuda/decode/linear/line_stream.cuh"
#include "cuda/decode/linear/row_moments.cuh"

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

// A power of two that brings numbers of up to `bound` close to the largest float16, and its reciprocal.
struct Float16Range {
  float factor, reciprocal;

  __device__ explicit Float16Range(float bound) {
    constexpr unsigned kMantissaBits = 23, kBias = 127, kLargest = 14;  // 2^14 <= bound * factor < 2^15
    // Where no number can be as small a factor of a normal one is, and of what is infinite or no number any.
    const unsigned exponent = max(__float_as_uint(bound) >> kMantissaBits, kLargest + 1);
    factor = __uint_as_float((2 * kBias + kLargest - exponent) << kMantissaBits);
    reciprocal = __uint_as_float((exponent - kLargest) << kMantissaBits);
  }
};

// What a warp has of the products of the row with a strip of columns, its part of K, and what its block makes of them. In
// the order in which to call it: all up to `settle` before the wait.
template <typename T, bool kNorm, typename Stages>
class GemvStrip {
  static constexpr int kRing = Stages::kInRing, kHeld = Stages::kInRegisters, kStride = Stages::kFactorStride;
  static constexpr int kRows = kNorm ? kGemvFactors : 1;
  static constexpr bool kHasRange = kNorm && std::is_same_v<T, __half>;

 public:
  using Sum = std::conditional_t<kNorm, float4, float>;  // of a norm, of w with g, b, and the two parts of x * g
  // A ring [kRing] for each warp, in the end its sums [kLineColumns]; each warp's factors [kRows][kStride].
  static constexpr size_t kSharedBytes = kLineWarps * (kRing * kLineBytes + kRows * kStride * sizeof(T));

  // `part` is the calling warp's of all `parts` of K; `deviations` is in shared memory, for each warp of the block.
  __device__ GemvStrip(const LineLayer<T>& layer, int strip, int part, int parts, char* shared,
                       Deviations (&deviations)[kLineWarps])
      : layer_(layer),
        shared_(shared),
        first_stage_(first_stage_of(layer, part, parts)),
        stages_(first_stage_of(layer, part + 1, parts) - first_stage_),
        deviations_of_(deviations),
        weight_(layer, strip, first_stage_, stages_) {
    const int own_k = lane() * kLaneValues;
    puts_ = own_k < Stages::kOfK, takes_ = own_k < stages_ * kLineK && k() < layer.in_features;
  }

  // The first value of the row that the lane is to `put`, with the 7 behind it, if it has any.
  __device__ int k() const { return first_stage_ * kLineK + lane() * kLaneValues; }
  __device__ int has_values() const { return takes_; }

  __device__ void fetch() {
#pragma unroll 1
    for (int s = 0; s < kRing; ++s) weight_.fetch_or_clear(ring() + s * kLineBytes);
  }

  __device__ void load_norm() {
    if constexpr (kNorm) {
      scale_ = {kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>};
      uint4 shift = {};
      if (takes_ && layer_.norm_weight != nullptr) scale_ = load_once<uint4>(layer_.norm_weight + k());
      if (takes_ && layer_.norm_bias != nullptr) shift = load_once<uint4>(layer_.norm_bias + k());
      if (puts_) {
        *reinterpret_cast<uint4*>(factors_of_lane(kGemvScale)) = scale_;
        *reinterpret_cast<uint4*>(factors_of_lane(kGemvShift)) = shift;
      }
      if constexpr (kHasRange) largest_scale_ = largest_of_warp(takes_ ? scale_ : uint4{});
    }
  }

  // Waits for the weights that are to be held in registers.
  __device__ void hold() {
#pragma unroll
    for (int s = 0; s < kHeld; ++s) {
      char* const place = ring() + s % kRing * kLineBytes;
      await_copy_groups<kRing - 1>();
      __syncwarp();
      weight_.load(place, held_[s]);
      __syncwarp();
      weight_.fetch_or_clear(place);
    }
  }

  __device__ void settle() {
    factors_from_ = lane() / 4 % kRows * kStride + lane() % 4 * 4;
    fuseopt::settle(takes_), fuseopt::settle(puts_), fuseopt::settle(factors_from_);
  }

  // The lane's values of the row, zeros where it has none.
  __device__ void put(const uint4& words) {
    const auto& x = reinterpret_cast<const Piece&>(words);
    if constexpr (kNorm) {
      float scaled[kLaneValues], factor = 1.f;
      Piece high, low;
      if constexpr (kHasRange) {
        const Float16Range range(largest_of_warp(words) * largest_scale_);
        factor = range.factor, reciprocal_ = range.reciprocal;
      }
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        scaled[i] = x[i] * reinterpret_cast<const Piece&>(scale_)[i] * factor;
        deviations_.sum += x[i], deviations_.squares = fmaf(x[i], x[i], deviations_.squares);
      }
      store_floats_as<T>(&high, 0, scaled);
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) scaled[i] -= high[i];
      store_floats_as<T>(&low, 0, scaled);
      if (puts_ > 0) {
        *reinterpret_cast<Piece*>(factors_of_lane(kGemvHigh)) = high;
        *reinterpret_cast<Piece*>(factors_of_lane(kGemvLow)) = low;
      }
    } else {
      if (puts_ > 0) *reinterpret_cast<uint4*>(factors_of_lane(0)) = words;
    }
  }

  // All groups of the thread's copies but the last kLater are the weights'.
  template <int kLater = 0>
  __device__ void await_weights() {
    await_copy_groups<kLater>();
    __syncwarp();
  }

  // Leaves the warp's sums, and of a norm the deviations of its part of the row, to the block.
  __device__ void multiply() {
    float sums[2][kLineTiles / 2][4] = {};
    const T* const factors = own_factors() + factors_from_;
#pragma unroll
    for (int s = 0; s < Stages::kAll; ++s) {
      uint4 of_stage[kLineTiles / 2];
      const auto& stage = s < kHeld ? held_[std::min(s, kHeld - 1)] : of_stage;
      if (s >= kHeld) weight_.load(ring() + s % kRing * kLineBytes, of_stage);
      const auto factor = *reinterpret_cast<const uint2*>(factors + s * kLineK);
#pragma unroll
      for (int j = 0; j < kLineTiles / 2; ++j) {
        fuseopt::multiply<T>(sums[s % 2][j], {stage[j].x, stage[j].z}, {stage[j].y, stage[j].w}, factor.x, factor.y);
      }
      // An exchange with each of the last stages, as products hide its time.
      constexpr int kExchanges = 5;
      if (kNorm && s >= Stages::kAll - kExchanges) deviations_.add_other_lane(1 << (s + kExchanges - Stages::kAll));
    }
    // Lanes with lane % 4 == 0 have the sums of the first two rows of factors, and those with 1 of the others.
    const int pair = lane() % 4;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kLineTiles; ++i) {
      const float first = sums[0][i / 2][i % 2 * 2] + sums[1][i / 2][i % 2 * 2];
      const float second = sums[0][i / 2][i % 2 * 2 + 1] + sums[1][i / 2][i % 2 * 2 + 1];
      Sum* const at = sums_of(warp()) + i * kTileColumns + lane() / 4;
      if constexpr (kNorm) {
        const float reciprocal = kHasRange && pair == 0 ? reciprocal_ : 1.f;
        if (pair < 2) reinterpret_cast<float2*>(at)[1 - pair] = {first * reciprocal, second * reciprocal};
      } else {
        if (pair == 0) *at = first;
      }
    }
    if constexpr (kNorm) {
      if (lane() == 0) deviations_of_[warp()] = deviations_;
    }
  }

  // When all warps have left theirs.
  __device__ Sum* sums_of(int warp) const { return reinterpret_cast<Sum*>(shared_ + warp * kRing * kLineBytes); }

  __device__ Sum total(int column) const {
    Sum total = {};
#pragma unroll
    for (int w = 0; w < kLineWarps; ++w) add(total, sums_of(w)[column]);
    return total;
  }

  __device__ Deviations deviations() const {
    Deviations all;
#pragma unroll
    for (int w = 0; w < kLineWarps; ++w) all.add(deviations_of_[w]);
    return all;
  }

  // The product with a row whose deviations are `all`, from all sums of a column. By whole warps, for the row is read again
  // where it lies far from zero.
  __device__ float normalised(const Sum& total, const Deviations& all) const {
    const StoredRow<T> row{static_cast<const T*>(layer_.input)};
    const float2 norm = normalisation_of<kWarpSize>(all, row, layer_.in_features, layer_.reciprocal, layer_.is_layer_norm, layer_.eps);
    const float mean = layer_.is_layer_norm ? norm.x : 0.f;
    return norm.y * fmaf(-mean, total.x, total.z + total.w) + total.y;
  }

 private:
  using Piece = Vector<T, kLaneValues>;

  // The largest magnitude of the warp's float16 values. What is no number does not count.
  static __device__ float largest_of_warp(const uint4& words) {
    const auto& pairs = reinterpret_cast<const __half2(&)[kLaneValues / 2]>(words);
    const __half2 largest = __hmax2(__hmax2(__habs2(pairs[0]), __habs2(pairs[1])),
                                    __hmax2(__habs2(pairs[2]), __habs2(pairs[3])));
    const __half of_lane = __hmax(__low2half(largest), __high2half(largest));
    return __half2float(__ushort_as_half(static_cast<unsigned short>(largest_in_warp(__half_as_ushort(of_lane)))));
  }

  static __device__ int warp() { return threadIdx.x / kWarpSize; }
  static __device__ int lane() { return threadIdx.x % kWarpSize; }
  static __device__ int first_stage_of(const LineLayer<T>& layer, int part, int parts) {
    const unsigned all = (layer.in_features + kLineK - 1) / kLineK;
    return static_cast<int>(part * all / parts);
  }

  __device__ char* ring() const { return shared_ + warp() * kRing * kLineBytes; }
  __device__ T* own_factors() const {
    return reinterpret_cast<T*>(shared_ + kLineWarps * kRing * kLineBytes) + warp() * kRows * kStride;
  }
  __device__ T* factors_of_lane(int row) const { return own_factors() + row * kStride + lane() * kLaneValues; }

  const LineLayer<T>& layer_;
  char* const shared_;
  const int first_stage_, stages_;
  Deviations (&deviations_of_)[kLineWarps];
  LineStream<T> weight_;
  int takes_, puts_, factors_from_;
  uint4 scale_, held_[kHeld][kLineTiles / 2];
  float largest_scale_, reciprocal_;  // of float16
  Deviations deviations_;
};

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

// Registers are read at once, shared memory is slower: it holds no more of a strip than keeps memory busy.
using MostGemvStages = GemvStages<4, 9>;
// As many stages, less of them at a time: layers behind a norm start long before their turn, and what they ask for comes in the
// way of what previous kernels do.
using PatientGemvStages = GemvStages<3, 10>;
static_assert(PatientGemvStages::kAll == MostGemvStages::kAll);

// Whether it is an output projection between layers that exceed the registers.
inline bool is_beside_large(const DecodeLinear& layer) {
  return layer.norm == kNoNorm && layer.in_features <= layer.out_features && 
         tuning().decode_linear_gemv_beside_large * weight_bytes(layer) >= most_held_bytes();
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
  return layer.rows == 1 && (exceeds_registers(layer) || is_beside_large(layer)) &&
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

// What `call` says of an instance of the stages for as many of a warp, `Most` the largest of them.
template <typename Most, typename Call>
auto with_gemv_stages(int stages, Call call) {
  if (stages <= GemvStages<4, 4>::kAll) return call(GemvStages<4, 4>{});
  if (stages <= GemvStages<4, 6>::kAll) return call(GemvStages<4, 6>{});
  return call(Most{});
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
