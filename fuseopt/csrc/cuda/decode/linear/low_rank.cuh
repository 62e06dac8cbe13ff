// Low-rank updates of decode_linear's weights, `weight + b @ a`, inside the layer's own launch.
//
// Early blocks of the grid multiply a row of `a` each with the input, and leave the product in global memory together
// with the call's ticket. Every block reads the products after its own sums over K, when they are there as a rule. A
// block leaves its products before it reads any, and blocks start in the order of the grid, so no block waits for one
// that cannot start. Both factors are loaded before the wait for the previous kernel.
#pragma once

#include "cuda/decode/linear/row_moments.cuh"

namespace fuseopt {

constexpr int kRankPart = 8;  // ranks that a warp takes at a time: 16 bytes of a row of `b`
constexpr int kLowRankRows = DecodeLinear::kLowRankRows;

__device__ inline unsigned ticket_of(const uint64_t* exchange) {
  unsigned ticket;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(ticket) : "l"(exchange) : "memory");
  return ticket;
}

// A word is a value and, above it, the ticket of the call that left it, so that no fence is needed.
__device__ inline void leave_value(uint64_t* word, float value, unsigned ticket) {
  const uint64_t both = static_cast<uint64_t>(ticket) << 32 | __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(both) : "memory");
}

__device__ inline void await_values(const uint64_t* words, unsigned ticket, float (&values)[kRankPart]) {
  constexpr int kMostTries = 1 << 22;  // seconds
  bool is_there = false;
#pragma unroll 1
  for (int tries = 0; !is_there; ++tries) {
    is_there = true;
#pragma unroll
    for (int i = 0; i < kRankPart; i += 2) {
      uint64_t first, second;
      asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(words + i) : "memory");
      values[i] = __uint_as_float(static_cast<unsigned>(first));
      values[i + 1] = __uint_as_float(static_cast<unsigned>(second));
      is_there &= static_cast<unsigned>(first >> 32) == ticket && static_cast<unsigned>(second >> 32) == ticket;
    }
    if (tries == kMostTries) __trap();
  }
}

// A block's row of `a`, of which a thread has loaded kHeld pieces before the wait.
template <typename T, int kHeld>
class RankRow {
 public:
  __device__ void load(const MmaLayer<T>& layer, int rank) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      held_[i] = {};
      if (rank < layer.ranks && k_of(i) < layer.in_features) held_[i] = load_once<uint4>(row_at(layer, rank) + k_of(i));
    }
  }

  // Leaves the products of rows `rank`, `rank` + `step`, ... of `a` with all rows of the input; after a norm, divided by
  // what multiplies the sums over K later if `scales_later`. By all threads of a block; the first of these rows was
  // loaded. `place(row, warp)`: kSums floats of shared memory.
  template <bool kNorm, typename Place>
  __device__ void leave_products(const MmaLayer<T>& layer, int rank, int step, bool scales_later, Place place) const {
    const unsigned ticket = ticket_of(layer.exchange);
    const int warps = blockDim.x / kWarpSize, warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int first = rank; rank < layer.ranks; rank += step) {
#pragma unroll 1
      for (int row = 0; row < layer.rows; ++row) {
        float sums[kSums] = {};
        const T* const input = static_cast<const T*>(layer.input) + row * layer.in_features;
        const float pivot = kNorm && layer.is_layer_norm ? to_float(load_fresh(input)[0]) : 0.f;
        if (rank == first) {
#pragma unroll
          for (int i = 0; i < kHeld; ++i) add<kNorm>(sums, layer, input, pivot, k_of(i), held_[i]);
        }
#pragma unroll 1
        for (int i = rank == first ? kHeld : 0; k_of(i) < layer.in_features; ++i) {
          add<kNorm>(sums, layer, input, pivot, k_of(i), load_once<uint4>(row_at(layer, rank) + k_of(i)));
        }
#pragma unroll
        for (int s = 0; s < (kNorm ? kSums : 1); ++s) {
          sums[s] = warp_reduce<Sum>(sums[s]);
          if (lane == 0) place(row, warp)[s] = sums[s];
        }
      }
      __syncthreads();
      if (threadIdx.x < layer.rows) {
        float sums[kSums] = {};
#pragma unroll 1
        for (int w = 0; w < warps; ++w) {
#pragma unroll
          for (int s = 0; s < (kNorm ? kSums : 1); ++s) sums[s] += place(threadIdx.x, w)[s];
        }
        float product = sums[kProduct];
        if constexpr (kNorm) {
          const float above = layer.is_layer_norm ? sums[kInput] * layer.reciprocal : 0.f;
          const float variance = fmaf(-above, above, sums[kSquares] * layer.reciprocal) + layer.eps;
          product -= above * sums[kSlope];
          product = scales_later ? fmaf(sums[kOffset], sqrtf(variance), product)
                                 : fmaf(product, rsqrtf(variance), sums[kOffset]);
        }
        leave_value(layer.exchange + kExchanged + threadIdx.x * layer.ranks + rank, product, ticket);
      }
      __syncthreads();
    }
  }

  static constexpr int kExchanged = 2;  // words before the values, the first of them the ticket

 private:
  // Over K: of the row times the norm's weight times the input; of the input's squares, all above a pivot; of the input;
  // of the row times the norm's weight, and times its bias.
  enum { kProduct, kSquares, kInput, kSlope, kOffset, kSums };

  static __device__ int k_of(int piece) { return (piece * blockDim.x + threadIdx.x) * kLaneValues; }
  static __device__ const T* row_at(const MmaLayer<T>& layer, int rank) {
    return layer.low_rank_a + static_cast<int64_t>(rank) * layer.in_features;
  }

  template <bool kNorm>
  static __device__ void add(float (&sums)[kSums], const MmaLayer<T>& layer, const T* input, float pivot, int k,
                             const uint4& words) {
    if (k >= layer.in_features) return;
    using Piece = Vector<T, kLaneValues>;
    const auto& a = reinterpret_cast<const Piece&>(words);
    const Piece x = load_fresh(input + k);
    Piece scale = {}, shift = {};
    if constexpr (kNorm) {
      if (layer.norm_weight != nullptr) scale = *reinterpret_cast<const Piece*>(layer.norm_weight + k);
      if (layer.norm_bias != nullptr) shift = *reinterpret_cast<const Piece*>(layer.norm_bias + k);
    }
    const float one = layer.norm_weight == nullptr || layer.adds_one ? 1.f : 0.f;
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const float value = x[i] - pivot, factor = kNorm ? a[i] * (scale[i] + one) : a[i];
      sums[kProduct] = fmaf(value, factor, sums[kProduct]);
      if constexpr (kNorm) {
        sums[kSquares] = fmaf(value, value, sums[kSquares]);
        sums[kInput] += value, sums[kSlope] += factor;
        sums[kOffset] = fmaf(a[i], shift[i], sums[kOffset]);
      }
    }
  }

  uint4 held_[kHeld];
};

// An output column: of which weight, or of none.
struct OutputColumn {
  int weight, column;
  bool is_there;
};

// A lane's row of `b`: that of one output column. The warps of a block share out the ranks, and each adds its share to its
// own sum over K.
template <typename T>
class RankColumn {
 public:
  __device__ void load(const MmaLayer<T>& layer, OutputColumn of) {
    held_ = {};
    if (of.is_there && first() < layer.low_ranks[of.weight]) held_ = load_once<uint4>(row_at(layer, of) + first());
  }

  // The warp's share of a row's update, of the column that was loaded.
  __device__ float of_row(const MmaLayer<T>& layer, OutputColumn of, int row, unsigned ticket) const {
    const int ranks = of.is_there ? layer.low_ranks[of.weight] : 0;
    const uint64_t* const exchanged = layer.exchange + RankRow<T, 1>::kExchanged + row * layer.ranks;
    float sum = 0.f;
#pragma unroll 1
    for (int rank = first(); rank < ranks; rank += blockDim.x / kWarpSize * kRankPart) {
      const uint4 words = rank == first() ? held_ : load_once<uint4>(row_at(layer, of) + rank);
      const auto& b = reinterpret_cast<const Vector<T, kRankPart>&>(words);
      float values[kRankPart];
      await_values(exchanged + layer.first_ranks[of.weight] + rank, ticket, values);
#pragma unroll
      for (int i = 0; i < kRankPart; ++i) sum = fmaf(b[i], values[i], sum);
    }
    return sum;
  }

 private:
  static __device__ int first() { return threadIdx.x / kWarpSize * kRankPart; }
  static __device__ const T* row_at(const MmaLayer<T>& layer, OutputColumn of) {
    return layer.low_rank_b[of.weight] + static_cast<int64_t>(of.column) * layer.low_ranks[of.weight];
  }

  uint4 held_;
};

}  // namespace fuseopt
