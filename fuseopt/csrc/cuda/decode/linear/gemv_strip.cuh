// A warp's products of one row with a strip of columns of a weight [K, N], for gemv.cuh. All loads of a warp are issued before
// the wait for the previous kernel: the first stages go to registers, the others stay in shared memory, since reading that
// takes most of the time after the wait.
//
// The norm is part of the products. With xhat = (x - mean) * rstd and g, b the norm's weight and bias,
//   sum_k w * (xhat * g + b) = rstd * (sum_k w * (x * g) - mean * sum_k w * g) + sum_k w * b.
// A tensor core product takes eight rows of factors, so all three sums are computed at once. x * g is passed as two numbers
// of T, the second being the rounding error of the first, so little is lost if the mean is many deviations from zero.
// float16 lacks the range for that, so each warp scales its x * g by a power of two, chosen by the largest value.
#pragma once

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

// Registers are read at once, shared memory is slower: it holds no more of a strip than keeps memory busy.
// TUNED: GPT-2 XL, 1 row: 9 in registers in place of 5 take 5% off a step, 8 and 10 are about equal (cf25c77).
using MostGemvStages = GemvStages<4, 9>;
// As many stages, fewer of them at a time: layers with a norm start long before the previous kernels end, and would compete
// with them for memory bandwidth.
// TUNED: GPT-2 XL, 1 row (e2b31b9).
using PatientGemvStages = GemvStages<3, 10>;
static_assert(PatientGemvStages::kAll == MostGemvStages::kAll);

// Calls `call` with the smallest GemvStages that holds a warp's `stages`; `Most` is the largest of them.
template <typename Most, typename Call>
auto with_gemv_stages(int stages, Call call) {
  if (stages <= GemvStages<4, 4>::kAll) return call(GemvStages<4, 4>{});
  if (stages <= GemvStages<4, 6>::kAll) return call(GemvStages<4, 6>{});
  return call(Most{});
}

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

}  // namespace fuseopt
