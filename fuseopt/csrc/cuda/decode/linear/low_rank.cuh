// Low-rank updates of decode_linear's weights, `weight + b @ a`, inside the layer's own launch.
//
// The first blocks of the grid multiply a row of `a` each with the input, and leave the products in global memory together
// with the call's ticket. Every block reads the products after its own sums over K, when they are there as a rule. A
// block leaves its products before it reads any, and those that leave some are so few that all of them run at once as a
// rule. Where they do not, a block does not wait for ever for one that cannot start: it computes what it lacks. Both
// factors are loaded before the wait for the previous kernel.
#pragma once

#include "cuda/decode/linear/row_moments.cuh"

namespace fuseopt {

constexpr int kRankPart = 8;  // ranks that a warp takes at a time: 16 bytes of a row of `b`
// Copies of the products, since all multiprocessors read them at once.
constexpr int kExchangeCopies = DecodeLinear::kExchangeCopies;

__device__ inline unsigned ticket_of(const uint64_t* exchange) {
  unsigned ticket;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(ticket) : "l"(exchange) : "memory");
  return ticket;
}

// Of a copy, where the product of a row of the input and a row of `a` is.
template <typename T>
__device__ inline uint64_t* word_of(const MmaLayer<T>& layer, int copy, int row, int rank) {
  constexpr int kFirst = DecodeLinear::kExchangeHeader;
  return layer.exchange + kFirst + (copy * DecodeLinear::kLowRankRows + row) * layer.ranks + rank;
}

// A word is a value and, above it, the ticket of the call that left it, so that no fence is needed.
__device__ inline void leave_value(uint64_t* word, float value, unsigned ticket) {
  const uint64_t both = static_cast<uint64_t>(ticket) << 32 | __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(both) : "memory");
}

// False after some milliseconds: the block that is to leave the value may not run before this one ends.
__device__ inline bool await_value(const uint64_t* word, unsigned ticket, float& value) {
  constexpr int kMostTries = 1 << 14;
#pragma unroll 1
  for (int tries = 0; tries < kMostTries; ++tries) {
    uint64_t both;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(both) : "l"(word) : "memory");
    value = __uint_as_float(static_cast<unsigned>(both));
    if (static_cast<unsigned>(both >> 32) == ticket) return true;
  }
  return false;
}

// A block's row of `a`, of which a thread has kHeld pieces before the wait. With more blocks than rows of `a`, several
// share out the rows of the input.
template <typename T, bool kNorm, int kHeld>
class RankRow {
 public:
  // `block` of layer.rank_blocks; there is nothing to do for blocks after these.
  __device__ void load(const MmaLayer<T>& layer, int block) {
    row_step_ = max(layer.rank_blocks / layer.ranks, 1);
    const bool is_there = block < min(row_step_ * layer.ranks, layer.rank_blocks);
    rank_ = is_there ? block % layer.ranks : layer.ranks;
    first_row_ = block / layer.ranks;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      a_[i] = {};
      if (is_there && k_of(i) < layer.in_features) a_[i] = load_once<uint4>(row_at(layer, rank_) + k_of(i));
    }
  }

  // After the wait: starts to load the block's first row of the input.
  __device__ void fetch(const MmaLayer<T>& layer) {
    if (rank_ < layer.ranks && first_row_ < layer.rows) fetch_row(layer, first_row_);
  }

  // Leaves the block's products; after a norm, divided by what multiplies the sums over K later if `scales_later`. By all
  // threads of a block. `place(row, warp)`: kSums floats of shared memory.
  template <typename Place>
  __device__ void leave_products(const MmaLayer<T>& layer, bool scales_later, unsigned ticket, Place place) {
    const int warps = blockDim.x / kWarpSize, warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int used = !kNorm ? kProduct + 1 : layer.is_layer_norm ? kSums : kSquares + 1;
#pragma unroll 1
    for (int rank = rank_; rank < layer.ranks; rank += min(layer.rank_blocks, layer.ranks)) {
#pragma unroll 1
      for (int row = first_row_; row < layer.rows; row += row_step_) {
        float sums[kSums] = {};
        const float pivot = pivot_of(layer, row);
        if (rank == rank_) {
#pragma unroll
          for (int i = 0; i < kHeld; ++i) add(sums, layer, pivot, k_of(i), a_[i], x_[i]);
          if (row + row_step_ < layer.rows) fetch_row(layer, row + row_step_);
        }
#pragma unroll 1
        for (int i = rank == rank_ ? kHeld : 0; k_of(i) < layer.in_features; ++i) {
          const Piece x = load_fresh(input_at(layer, row) + k_of(i));
          add(sums, layer, pivot, k_of(i), load_once<uint4>(row_at(layer, rank) + k_of(i)), x);
        }
#pragma unroll
        for (int s = 0; s < (kNorm ? kSums : 1); ++s) {
          if (s >= used) continue;
          sums[s] = warp_reduce<Sum>(sums[s]);
          if (lane == 0) place(row, warp)[s] = sums[s];
        }
      }
      __syncthreads();
      // A warp for each row.
      for (int row = first_row_ + warp * row_step_; row < layer.rows; row += warps * row_step_) {
        float sums[kSums] = {};
#pragma unroll
        for (int s = 0; s < (kNorm ? kSums : 1); ++s) {
          if (s < used && lane < warps) sums[s] = place(row, lane)[s];
        }
#pragma unroll
        for (int s = 0; s < (kNorm ? kSums : 1); ++s) {
          if (s < used) sums[s] = warp_reduce<Sum>(sums[s]);
        }
        const float product = product_of(sums, layer, scales_later);
        if (lane < kExchangeCopies) leave_value(word_of(layer, lane, row, rank), product, ticket);
      }
      __syncthreads();
    }
  }

  // A product as `leave_products` leaves it, by one thread.
  static __device__ __noinline__ float multiply(const MmaLayer<T>& layer, bool scales_later, int row, int rank) {
    float sums[kSums] = {};
    const float pivot = pivot_of(layer, row);
#pragma unroll 1
    for (int k = 0; k < layer.in_features; k += kLaneValues) {
      add(sums, layer, pivot, k, load_once<uint4>(row_at(layer, rank) + k), load_fresh(input_at(layer, row) + k));
    }
    // Only LayerNorm has a mean.
    if (!layer.is_layer_norm) sums[kInput] = sums[kSlope] = sums[kOffset] = 0.f;
    return product_of(sums, layer, scales_later);
  }

 private:
  // Over K: of the row times the norm's weight times the input; of the input's squares, all above a pivot; of the input;
  // of the row times the norm's weight, and times its bias. An RMS norm needs the first two.
  enum { kProduct, kSquares, kInput, kSlope, kOffset, kSums };
  using Piece = Vector<T, kLaneValues>;

  static __device__ int k_of(int piece) { return (piece * blockDim.x + threadIdx.x) * kLaneValues; }
  static __device__ const T* row_at(const MmaLayer<T>& layer, int rank) {
    return layer.low_rank_a + static_cast<int64_t>(rank) * layer.in_features;
  }
  static __device__ const T* input_at(const MmaLayer<T>& layer, int row) {
    return static_cast<const T*>(layer.input) + row * layer.in_features;
  }

  static __device__ float pivot_of(const MmaLayer<T>& layer, int row) {
    return kNorm && layer.is_layer_norm ? to_float(load_fresh(input_at(layer, row))[0]) : 0.f;
  }
  static __device__ float product_of(const float (&sums)[kSums], const MmaLayer<T>& layer, bool scales_later) {
    if constexpr (!kNorm) return sums[kProduct];
    const float above = sums[kInput] * layer.reciprocal;
    const float variance = fmaf(-above, above, sums[kSquares] * layer.reciprocal) + layer.eps;
    const float product = sums[kProduct] - above * sums[kSlope];
    return scales_later ? fmaf(sums[kOffset], sqrtf(variance), product)
                        : fmaf(product, rsqrtf(variance), sums[kOffset]);
  }

  __device__ void fetch_row(const MmaLayer<T>& layer, int row) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      x_[i] = {};
      if (k_of(i) < layer.in_features) x_[i] = load_fresh(input_at(layer, row) + k_of(i));
    }
  }

  static __device__ void add(float (&sums)[kSums], const MmaLayer<T>& layer, float pivot, int k, const uint4& words,
                             const Piece& x) {
    if (k >= layer.in_features) return;
    const auto& a = reinterpret_cast<const Piece&>(words);
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

  int rank_, first_row_, row_step_;
  uint4 a_[kHeld];
  Piece x_[kHeld];
};

// An output column: of which weight, or of none.
struct OutputColumn {
  int weight, column;
  bool is_there;
};

// All that a block does for updates. The warps share out the ranks of `b`, and each adds its share to its own sums over K.
// `column_of(place)`: to which output the sum at a place of a strip belongs; a lane has every 32nd of kPlaces, all of one
// weight. kHeld: as of RankRow.
template <typename T, bool kNorm, int kHeld, int kPlaces>
class BlockUpdates {
 public:
  // Before the wait. `block`: as of RankRow.
  template <typename ColumnOf>
  __device__ void load(const MmaLayer<T>& layer, int block, ColumnOf column_of) {
    row_.load(layer, block);
    load_columns(layer, column_of);
  }

  // Of another strip.
  template <typename ColumnOf>
  __device__ void load_columns(const MmaLayer<T>& layer, ColumnOf column_of) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const OutputColumn of = column_of(place(i));
      b_[i] = {};
      if (of.is_there && first() < layer.low_ranks[of.weight]) b_[i] = load_once<uint4>(row_at(layer, of) + first());
    }
  }

  // After the wait.
  __device__ void fetch(const MmaLayer<T>& layer) {
    ticket_ = ticket_of(layer.exchange);
    row_.fetch(layer);
  }

  // After `fetch`: as RankRow.
  template <typename Sums>
  __device__ void leave_products(const MmaLayer<T>& layer, bool scales_later, Sums sums_at) {
    scales_later_ = scales_later;
    row_.leave_products(layer, scales_later, ticket_, sums_at);
  }

  // Adds each warp's share to its sums, which its lanes have stored: `sums_at(row, warp)`, by place. `weight`: of the
  // block's columns; the first of two if there is a gate.
  template <typename ColumnOf, typename Sums>
  __device__ void add(const MmaLayer<T>& layer, int weight, bool is_gated, ColumnOf column_of, Sums sums_at) {
    __syncwarp();
    if (first() >= layer.low_ranks[weight] && !(is_gated && first() < layer.low_ranks[weight + 1])) return;
    if (!has_products_) {
      has_products_ = true;
      take_products(layer, weight, products_[0]);
      if (is_gated) take_products(layer, weight + 1, products_[1]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll 1
      for (int r = 0; r < kRowsOfLanes && r + h * kRowsOfLanes < layer.rows; ++r) {
        float products[kRankPart];
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
          const OutputColumn of = column_of(place(i));
          const auto& b = reinterpret_cast<const Vector<T, kRankPart>&>(b_[i]);
          float sum = 0.f;
#pragma unroll
          for (int j = 0; j < kRankPart; ++j) {
            if (i == 0) {
              const float first = __shfl_sync(kFullWarp, products_[0][h], r * kRankPart + j);
              const float second = __shfl_sync(kFullWarp, products_[1][h], r * kRankPart + j);
              products[j] = of.weight == weight ? first : second;
            }
            sum = fmaf(b[j], products[j], sum);
          }
          if (!of.is_there) continue;
          const int row = r + h * kRowsOfLanes;
          sums_at(row, warp())[place(i)] += sum + of_further_ranks(layer, of, row);
        }
      }
    }
  }

 private:
  using Row = RankRow<T, kNorm, kHeld>;
  static constexpr int kOfLane = (kPlaces + kWarpSize - 1) / kWarpSize, kRowsOfLanes = kWarpSize / kRankPart;
  static_assert(DecodeLinear::kLowRankRows == 2 * kRowsOfLanes);
  static __device__ int warp() { return threadIdx.x / kWarpSize; }
  static __device__ int place(int i) { return threadIdx.x % kWarpSize + i * kWarpSize; }
  static __device__ int first() { return warp() * kRankPart; }
  static __device__ int copy() { return blockIdx.x % kExchangeCopies; }
  static __device__ const T* row_at(const MmaLayer<T>& layer, OutputColumn of) {
    return layer.low_rank_b[of.weight] + static_cast<int64_t>(of.column) * layer.low_ranks[of.weight];
  }

  // `rank`: of all. A product that is computed here is left for the blocks that start later.
  __device__ float product_of(const MmaLayer<T>& layer, int row, int rank) const {
    uint64_t* const word = word_of(layer, copy(), row, rank);
    float product;
    if (!await_value(word, ticket_, product)) {
      product = Row::multiply(layer, scales_later_, row, rank);
      leave_value(word, product, ticket_);
    }
    return product;
  }

  // The products of the warp's ranks with rows lane / 8 and 4 below it, of rank lane % 8.
  __device__ void take_products(const MmaLayer<T>& layer, int weight, float (&products)[2]) const {
    const int lane = threadIdx.x % kWarpSize, rank = first() + lane % kRankPart;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / kRankPart + h * kRowsOfLanes;
      if (row >= layer.rows || rank >= layer.low_ranks[weight]) continue;
      products[h] = product_of(layer, row, layer.first_ranks[weight] + rank);
    }
  }

  // Of ranks that are more than the block's warps take at a time: none as a rule.
  __device__ float of_further_ranks(const MmaLayer<T>& layer, OutputColumn of, int row) const {
    float sum = 0.f;
    const int step = blockDim.x / kWarpSize * kRankPart;
#pragma unroll 1
    for (int rank = first() + step; rank < layer.low_ranks[of.weight]; rank += step) {
      const auto b = load_once<uint4>(row_at(layer, of) + rank);
#pragma unroll 1
      for (int i = 0; i < kRankPart; ++i) {
        const float product = product_of(layer, row, layer.first_ranks[of.weight] + rank + i);
        sum = fmaf(reinterpret_cast<const Vector<T, kRankPart>&>(b)[i], product, sum);
      }
    }
    return sum;
  }

  Row row_;
  uint4 b_[kOfLane];
  unsigned ticket_;
  bool scales_later_ = false, has_products_ = false;
  float products_[2][2] = {};
};

}  // namespace fuseopt
