// Where the order of a row's scores is cut, by count or by probability, found without sorting. A histogram of the
// scores says in which bin the cut is; the scores in that bin get a histogram of their own, until all that are left are
// equal. Rows of 16-bit logits mostly need one histogram, as equal scores fill a bin; others need two.
//
// A cluster of blocks has a row, each block a stretch of it. Weights are added up as integers, so the result does not
// depend on the order of additions.
#pragma once

#include "cuda/decode/select/topk_order.cuh"

namespace fuseopt {

// What is added up along the order until the cut: ones, or exp(score - highest). Along kProbability it falls with the
// order: each bin then has a power of two that brings its weights near 1, and they are kept exactly.
enum class CutBy { kCount, kProbability, kUnorderedProbability };

// Equal scores, at which the order is cut.
struct ScoreCut {
  bool is_cut = false;            // false: there are no more scores than are wanted
  unsigned key = 0;               // of the scores at the cut
  unsigned long long wanted = 0;  // weight to be kept
  unsigned long long before = 0;  // weight of higher scores, less than `wanted`
  int equal = 0;                  // scores at the cut
  int equal_here = 0;             // those of this block
  int equal_later = 0;            // those of blocks after it
};

class RowCutter {
 public:
  using Weight = unsigned long long;
  // TUNED: not measured. Two bins a thread; the blocks are as many as any GPU with clusters takes.
  static constexpr int kThreads = 512;
  static constexpr int kMostBlocks = 8;
  static constexpr int kMostPlaces = 1 << 16;  // of a block; more could overflow the sums of a bin
  static constexpr int kFraction = 44;         // binary places of a weight
  static constexpr float kMostRange = 87;      // between the highest and the lowest score; weights are normal numbers

  struct Storage {
    unsigned parts[2][2 * kThreads];  // this block's histogram: counts, or the lower and upper halves of weights
    Weight totals[2 * kThreads];      // of all blocks
    double inbox[2][3][kMostBlocks];
    Weight of_warps[kThreads / kWarpSize];
    Weight before;
    int bin;
    int places_of_warps[kThreads / kWarpSize];
    int first_place;
  };

  const int rank, size;  // of this block in its cluster, and of that

  __device__ explicit RowCutter(Storage& storage) : rank(cluster_rank()), size(cluster_size()), storage_(storage) {
    arrive_relaxed_at_cluster_barrier();
  }

  // Called once, before the first reduction.
  __device__ void wait_for_blocks() { wait_at_cluster_barrier(); }

  // Reduces over all threads of the cluster.
  template <typename Op>
  __device__ void reduce(double (&values)[2]) {
    team_.template reduce<Op>(values);
    const auto& of_blocks = exchange(values);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      values[i] = of_blocks[i][0];
      for (int block = 1; block < size; ++block) values[i] = Op::combine(values[i], of_blocks[i][block]);
    }
  }

  // The order is by descending score_of(place), of this block's `places`; -inf is no part of it. weight_of(place) is at
  // most 1. The cut is at the scores that bring the weight to `wanted`: a count, or a share of the whole weight.
  template <CutBy kBy, typename ScoreOf, typename WeightOf>
  __device__ ScoreCut find(int places, float highest, float lowest, double wanted, ScoreOf score_of,
                           WeightOf weight_of) {
    const float width = (highest - lowest) / kBins, inverse_width = kBins / (highest - lowest);
    ScoreCut cut;
    bool by_key = false;  // in the first histogram, bins divide the range of scores
    unsigned low = 0, high = 0;
    int shift = 0, exponent_of_cut = 0;
    const auto bin_of = [&](float score) {
      if (score == -INFINITY) return -1;
      // If all scores are equal the product is no number, and the minimum takes the other.
      if (!by_key) return score == highest ? 0 : static_cast<int>(fminf((highest - score) * inverse_width, kBins - 1));
      const unsigned key = key_of(score);
      return key < low || key > high ? -1 : static_cast<int>((high - key) >> shift);
    };
    const auto exponent_of = [&](int bin) {
      constexpr float kLog2OfE = 1.442695041f;
      if (kBy != CutBy::kProbability) return 0;
      return by_key ? exponent_of_cut : static_cast<int>(bin * width * kLog2OfE);
    };
    while (true) {
      for (int i = threadIdx.x; i < kBins; i += kThreads) storage_.parts[0][i] = storage_.parts[1][i] = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < places; i += kThreads) {
        const int bin = bin_of(score_of(i));
        if (bin < 0) continue;
        if constexpr (kBy == CutBy::kCount) {
          atomicAdd(&storage_.parts[0][bin], 1u);
        } else {
          const float scale = __uint_as_float((kExponentBias + exponent_of(bin)) << kMantissaBits);
          const unsigned weight = __float2uint_rn(weight_of(i) * scale * (1u << kWeightBits));
          atomicAdd(&storage_.parts[0][bin], weight & 0xffffu);
          atomicAdd(&storage_.parts[1][bin], weight >> 16);
        }
      }
      cluster_barrier();
      add_up_blocks([&](int bin, Weight sum) {
        if (kBy == CutBy::kCount) return sum;
        return sum << (kFraction - kWeightBits) >> min(exponent_of(bin), 63) | (sum != 0);
      });
      cluster_barrier();
      const Scanned scanned = scan();
      if (!by_key) {
        if (kBy == CutBy::kCount && scanned.total <= wanted) return cut;
        const double weight = kBy == CutBy::kCount ? wanted : ceil(static_cast<double>(scanned.total) * wanted);
        cut.wanted = max(Weight{1}, static_cast<Weight>(weight));
      }
      // Bins are rounded, so those of a later histogram may add up to less.
      choose(scanned, min(cut.wanted - cut.before, scanned.total));
      cut.before += storage_.before;
      const int chosen = storage_.bin;
      double bounds[2] = {0, -INFINITY}, count = 0;
      for (int i = threadIdx.x; i < places; i += kThreads) {
        const float score = score_of(i);
        if (bin_of(score) != chosen) continue;
        const double key = key_of(score);
        bounds[0] = fmax(bounds[0], key), bounds[1] = fmax(bounds[1], -key), ++count;
      }
      team_.template reduce<Max>(bounds);
      count = team_.template reduce<Sum>(count);
      const auto& of_blocks = exchange({bounds[0], bounds[1], count});
      cut.equal = cut.equal_later = 0;
      for (int block = 0; block < size; ++block) {
        bounds[0] = fmax(bounds[0], of_blocks[0][block]), bounds[1] = fmax(bounds[1], of_blocks[1][block]);
        const int equal = static_cast<int>(of_blocks[2][block]);
        cut.equal += equal;
        if (block > rank) cut.equal_later += equal;
        if (block == rank) cut.equal_here = equal;
      }
      exponent_of_cut = exponent_of(chosen);
      by_key = true;
      high = static_cast<unsigned>(bounds[0]), low = static_cast<unsigned>(-bounds[1]);
      if (high == low) break;
      shift = max(0, kKeyBits - __clz(high - low) - kBinBits);
    }
    cut.is_cut = true;
    cut.key = high;
    return cut;
  }

  // The first place from which on `count` of this block's places, at least one and not more than there are, are chosen.
  template <typename Chosen>
  __device__ int first_of_last(int places, int count, Chosen is_chosen) {
    constexpr int kWarps = kThreads / kWarpSize;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, stretch = places / kWarps;
    int of_warp = 0;
    for (int i = 0; i < stretch; i += kWarpSize) {
      of_warp += __popc(__ballot_sync(kFullWarp, is_chosen(warp * stretch + i + lane)));
    }
    if (lane == 0) storage_.places_of_warps[warp] = of_warp;
    __syncthreads();
    int after = 0;
    for (int other = warp + 1; other < kWarps; ++other) after += storage_.places_of_warps[other];
    if (after < count && count <= after + of_warp) {
      for (int i = stretch - kWarpSize; i >= 0; i -= kWarpSize) {
        unsigned chosen = __ballot_sync(kFullWarp, is_chosen(warp * stretch + i + lane));
        if (after + __popc(chosen) < count) {
          after += __popc(chosen);
          continue;
        }
        while (++after < count) chosen ^= 1u << (kWarpSize - 1 - __clz(chosen));
        if (lane == 0) storage_.first_place = warp * stretch + i + kWarpSize - 1 - __clz(chosen);
        break;
      }
    }
    __syncthreads();
    return storage_.first_place;
  }

 private:
  static constexpr int kBinBits = 10, kBins = 1 << kBinBits, kKeyBits = 32;
  static constexpr int kWeightBits = 31, kExponentBias = 127, kMantissaBits = 23;
  static_assert(kBins == 2 * kThreads, "a thread scans two bins");

  // Bins 2 * threadIdx.x and the next one.
  struct Scanned {
    Weight before;  // all bins before them
    Weight first;
    Weight second;
    Weight total;  // all bins
  };

  // Gives the values of each block to all blocks, by block.
  template <int kValues>
  __device__ const double (&exchange(const double (&values)[kValues]))[3][kMostBlocks] {
    auto& inbox = storage_.inbox[round_++ % 2];
    if (threadIdx.x < size) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) store_to_block(&inbox[i][rank], threadIdx.x, values[i]);
    }
    cluster_barrier();
    return inbox;
  }

  // Each block adds up a share of the bins and gives the result to all blocks.
  template <typename Finish>
  __device__ void add_up_blocks(Finish finish) {
    const int share = kBins / size;
    for (int i = threadIdx.x; i < share; i += kThreads) {
      const int bin = rank * share + i;
      Weight lower = 0, upper = 0;
#pragma unroll
      for (int block = 0; block < kMostBlocks; ++block) {
        if (block >= size) continue;
        lower += load_from_block(&storage_.parts[0][bin], block);
        upper += load_from_block(&storage_.parts[1][bin], block);
      }
      const Weight total = finish(bin, lower + (upper << 16));
      for (int block = 0; block < size; ++block) store_to_block(&storage_.totals[bin], block, total);
    }
  }

  __device__ Scanned scan() {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    Scanned scanned = {0, storage_.totals[2 * threadIdx.x], storage_.totals[2 * threadIdx.x + 1], 0};
    const Weight own = scanned.first + scanned.second;
    Weight inclusive = own;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const Weight other = __shfl_up_sync(kFullWarp, inclusive, distance);
      if (lane >= distance) inclusive += other;
    }
    if (lane == kWarpSize - 1) storage_.of_warps[warp] = inclusive;
    __syncthreads();
    scanned.before = inclusive - own;
    for (int other = 0; other < kThreads / kWarpSize; ++other) {
      if (other < warp) scanned.before += storage_.of_warps[other];
      scanned.total += storage_.of_warps[other];
    }
    return scanned;
  }

  // Writes the bin that brings the weight to `wanted`, which is not above the total, and the weight before it.
  __device__ void choose(const Scanned& scanned, Weight wanted) {
    const Weight middle = scanned.before + scanned.first;
    if (scanned.before < wanted && wanted <= middle + scanned.second) {
      storage_.bin = 2 * threadIdx.x + (wanted > middle);
      storage_.before = wanted > middle ? middle : scanned.before;
    }
    __syncthreads();
  }

  Storage& storage_;
  RowTeam<Team::kBlock, double> team_;
  unsigned round_ = 0;
};

}  // namespace fuseopt
