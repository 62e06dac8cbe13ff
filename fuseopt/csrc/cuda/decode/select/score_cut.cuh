// Where the order of a row's values is cut, by count or by probability, found without sorting the row. A histogram says in
// which bin the cut is; the values in that bin, mostly a few hundred, are gathered and compared with each other. If they
// are too many, the bin gets a histogram of its own.
//
// A cluster of blocks has a row, each block a stretch of it. Weights are added up as integers, so the result does not
// depend on the order of additions.
#pragma once

#include <cfloat>

#include "cuda/decode/select/topk_order.cuh"

namespace fuseopt {

// What is added up along the order until the cut: ones, or probabilities. Along kProbability they fall with the order, so
// each bin has a power of two that brings its weights near 1.
enum class CutBy { kCount, kProbability, kUnorderedProbability };

// Which values of a row are left: those above `value`, and of those equal to it those from a place of the row on.
struct ValueCut {
  float value = -FLT_MAX;
  int first_equal = 0;

  __device__ bool keeps(float its_value, int place) const {
    return its_value > value || (its_value == value && place >= first_equal);
  }
};

// `kBlockThreads`: at least 128 of a cluster of 4 blocks, 512 of one block.
template <int kBlockThreads>
class RowCutter {
 public:
  using Weight = unsigned long long;
  static constexpr int kThreads = kBlockThreads, kWarps = kThreads / kWarpSize;
  static constexpr int kMostBlocks = 16;
  static constexpr int kGroups = 256;  // of neighbouring threads of a cluster, whose highest values all blocks get
  static constexpr int kMostPlaces = 1 << 16;   // of a block; more could overflow the sums of a bin
  static constexpr int kFraction = 44;          // binary places of a weight
  static constexpr int kBins = 2 * kThreads, kBinBits = kBins == 1024 ? 10 : 8;
  static_assert(kBins == 1 << kBinBits);

  // A value's key, then what orders equal values, or a weight.
  using Entry = unsigned long long;
  static __device__ Entry entry_of(float value, unsigned low) { return static_cast<Entry>(key_of(value)) << 32 | low; }
  static __device__ float value_of(Entry entry) { return score_of(static_cast<unsigned>(entry >> 32)); }
  static __device__ unsigned low_of(Entry entry) { return static_cast<unsigned>(entry); }

  struct Storage {
    // Other blocks store gathered entries as soon as they have read the parts.
    union {
      unsigned parts[2][kBins];  // this block's histogram: counts, or the lower and upper halves of weights
      Entry entries[kBins];      // gathered
    };
    // What is written here is stored after a barrier of the cluster that follows the last reader.
    union {
      Weight totals[kBins];  // of all blocks
      Entry sorted[kBins];
      Weight weights[kBins];  // of gathered entries
      struct {
        alignas(16) float highest[kGroups];
        float negated_lowest[kMostBlocks * kWarps];
      };
    };
    float reached;
    unsigned counts[2];  // of gathered entries: in the first block, for one round after another
    double inbox_of_sums[2][2][kMostBlocks];
    Weight of_warps[kWarps];
    Weight before;
    Entry cut;
    int bin;
  };

  const int rank, size;  // of this block in its cluster, and of that

  __device__ explicit RowCutter(Storage& storage) : rank(cluster_rank()), size(cluster_size()), storage_(storage) {
    if (threadIdx.x < 2) storage_.counts[threadIdx.x] = 0;
    arrive_at_cluster_barrier();
  }

  // The highest value of the row, and the lowest one, negated, from those of each thread. Called once, first.
  __device__ float2 bounds(float highest, float negated_lowest) {
    const int lanes = size * kThreads / kGroups, thread = rank * kThreads + threadIdx.x;
    negated_lowest = warp_reduce<Max>(negated_lowest);
#pragma unroll 1
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, distance));
    }
    wait_at_cluster_barrier();  // all blocks have started
#pragma unroll 1
    for (int block = thread % lanes; block < size; block += lanes) {
      store_to_block(&storage_.highest[thread / lanes], block, highest);
    }
    const int lane = threadIdx.x % kWarpSize;
    if (lane < size) store_to_block(&storage_.negated_lowest[thread / kWarpSize], lane, negated_lowest);
    cluster_barrier();
#pragma unroll 2
    for (int i = lane; i < kGroups; i += kWarpSize) {
      highest = fmaxf(highest, storage_.highest[i]);
      if (i < size * kWarps) negated_lowest = fmaxf(negated_lowest, storage_.negated_lowest[i]);
    }
    return {warp_reduce<Max>(highest), warp_reduce<Max>(negated_lowest)};
  }

  // A value that at least `count` values of the row reach, and not many more; at most kGroups / 2.
  __device__ float value_reached_by(int count) {
#pragma unroll 1
    for (int group = threadIdx.x; group < kGroups; group += kThreads) {
      const float own = storage_.highest[group];
      int above = 0;
#pragma unroll 4
      for (int i = 0; i < kGroups; i += 4) {
        const float4 others = *reinterpret_cast<const float4*>(storage_.highest + i);
        above += (others.x > own || (others.x == own && i < group)) + (others.y > own || (others.y == own && i + 1 < group)) +
                 (others.z > own || (others.z == own && i + 2 < group)) + (others.w > own || (others.w == own && i + 3 < group));
      }
      if (above == count - 1) storage_.reached = own;
    }
    __syncthreads();
    return fmaxf(storage_.reached, -FLT_MAX);
  }

  // Adds up over all threads of the block.
  __device__ void add_up_in_block(double (&values)[2]) { team_.template reduce<Sum>(values); }

  // Adds up over all threads of the cluster.
  __device__ void add_up(double (&values)[2]) {
    add_up_in_block(values);
    auto& inbox = storage_.inbox_of_sums[round_++ % 2];
    if (threadIdx.x < size) {
#pragma unroll
      for (int i = 0; i < 2; ++i) store_to_block(&inbox[i][rank], threadIdx.x, values[i]);
    }
    cluster_barrier();
    values[0] = values[1] = 0;
#pragma unroll 1
    for (int block = 0; block < size; ++block) {
      for (int i = 0; i < 2; ++i) values[i] += inbox[i][block];
    }
  }

  // Sends the entries of this block's places that are chosen to `targets` blocks, the first ones. Returns how many all
  // blocks have sent there; storage.entries has them, in any order. 0: more than fit, or than `most`. Between two calls
  // there must be a barrier of the cluster.
  template <typename EntryOf, typename IsChosen>
  __device__ int gather(int places, int targets, int most, IsChosen is_chosen, EntryOf entry_of_place) {
    unsigned* const count = &storage_.counts[gathered_ % 2];
    if (rank == 0 && threadIdx.x == 0) storage_.counts[++gathered_ % 2] = 0;
    else ++gathered_;
#pragma unroll 1
    for (int i = threadIdx.x; i < places; i += kThreads) {
      if (!is_chosen(i)) continue;
      const unsigned slot = add_in_block(count, 0, 1u);
      if (slot >= kBins) continue;
      const Entry entry = entry_of_place(i);
#pragma unroll 1
      for (int block = 0; block < targets; ++block) store_to_block(&storage_.entries[slot], block, entry);
    }
    cluster_barrier();
    const int all = static_cast<int>(load_from_block(count, 0));
    return all <= min(most, kBins) ? all : 0;
  }

  // Sorts `count` entries in descending order, at most kThreads: thread i gets the i-th.
  __device__ Entry sort(int count) {
    const Entry own = threadIdx.x < count ? storage_.entries[threadIdx.x] : 0;
    int above = 0;
#pragma unroll 4
    for (int i = 0; i < count; ++i) above += storage_.entries[i] > own || (storage_.entries[i] == own && i < threadIdx.x);
    if (threadIdx.x < count) storage_.sorted[above] = own;
    __syncthreads();
    return threadIdx.x < count ? storage_.sorted[threadIdx.x] : 0;
  }

  // The i-th of the entries that `sort` has sorted.
  __device__ Entry sorted(int i) const { return storage_.sorted[i]; }

  // The sum of `own` over all threads before this one, and over all threads.
  struct Scanned {
    Weight before;
    Weight total;
  };
  __device__ Scanned scan(Weight own) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    Weight inclusive = own;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const Weight other = __shfl_up_sync(kFullWarp, inclusive, distance);
      if (lane >= distance) inclusive += other;
    }
    if (lane == kWarpSize - 1) storage_.of_warps[warp] = inclusive;
    __syncthreads();
    Scanned scanned = {inclusive - own, 0};
#pragma unroll 4
    for (int other = 0; other < kWarps; ++other) {
      if (other < warp) scanned.before += storage_.of_warps[other];
      scanned.total += storage_.of_warps[other];
    }
    __syncthreads();
    return scanned;
  }

  // The order is by descending value(place), of this block's `places`; -inf is no part of it. low(place) orders equal values;
  // with kKeepsEqual all of them are left. log2_weight(value, low) is at most 0. The cut is at the value that brings the
  // weight to `wanted`: a count, or a share of the whole weight. Without a cut everything is left.
  template <CutBy kBy, bool kKeepsEqual, typename ValueOf, typename LowOf, typename Log2WeightOf>
  __device__ ValueCut find(int places, float highest, float lowest, double wanted, ValueOf value, LowOf low,
                           Log2WeightOf log2_weight) {
    // Bins of the first histogram divide the octaves of the weight that the highest value has, up to 2^7.
    const float octaves = fmaxf(fminf((highest - lowest) * kLog2OfE, kMostOctaves), 0x1p-10f);
    const int bin_bits = kBinBits - 1 - (static_cast<int>(__float_as_uint(octaves) >> kMantissaBits) - kExponentBias);
    const float bins_of_one = kLog2OfE * __uint_as_float((kExponentBias + bin_bits) << kMantissaBits);
    bool is_first = true;
    Entry lowest_entry = 0, highest_entry = ~Entry{0};
    int shift = 0, exponent_of_cut = 0;
    const auto bin_of_value = [&](float its_value) {
      return static_cast<int>(fminf((highest - its_value) * bins_of_one, kBins - 1));
    };
    const auto bin_of = [&](int i) {
      const float its_value = value(i);
      if (its_value == -INFINITY) return -1;
      if (is_first) return bin_of_value(its_value);
      const Entry entry = entry_of(its_value, low(i));
      return entry < lowest_entry || entry > highest_entry ? -1 : static_cast<int>((highest_entry - entry) >> shift);
    };
    const auto exponent_of = [&](int bin) {
      return kBy != CutBy::kProbability ? 0 : is_first ? bin >> bin_bits : exponent_of_cut;
    };
    // Weights of a bin of this block add up to less than 2^32, or take two numbers.
    const bool is_wide = kBy == CutBy::kUnorderedProbability || places > kMostNarrowPlaces;
    const int weight_bits = is_wide ? kWideBits : kNarrowBits;
    Weight all_wanted = 0, before = 0;
    while (true) {
#pragma unroll 1
      for (int i = threadIdx.x; i < kBins; i += kThreads) storage_.parts[0][i] = storage_.parts[1][i] = 0;
      __syncthreads();
#pragma unroll 2
      for (int i = threadIdx.x; i < places; i += kThreads) {
        const int bin = bin_of(i);
        if (bin < 0) continue;
        if constexpr (kBy == CutBy::kCount) {
          atomicAdd(&storage_.parts[0][bin], 1u);
        } else {
          const unsigned weight = __float2uint_rn(exp2f(log2_weight(value(i), low(i)) + (exponent_of(bin) + weight_bits)));
          atomicAdd(&storage_.parts[0][bin], is_wide ? weight & 0xffffu : weight);
          if (is_wide) atomicAdd(&storage_.parts[1][bin], weight >> 16);
        }
      }
      cluster_barrier();
      add_up_blocks([&](int bin, Weight sum) {
        return kBy == CutBy::kCount ? sum : sum << (kFraction - weight_bits) >> min(exponent_of(bin), 63) | (sum != 0);
      });
      cluster_barrier();
      const Weight first = storage_.totals[2 * threadIdx.x], second = storage_.totals[2 * threadIdx.x + 1];
      const Scanned scanned = scan(first + second);
      if (is_first) {
        if (kBy == CutBy::kCount && scanned.total <= wanted) return ValueCut();
        const double weight = kBy == CutBy::kCount ? wanted : ceil(static_cast<double>(scanned.total) * wanted);
        all_wanted = max(Weight{1}, static_cast<Weight>(weight));
      }
      // Bins are rounded, so those of a later histogram may add up to less.
      const Weight wanted_here = min(all_wanted - before, scanned.total), middle = scanned.before + first;
      if (scanned.before < wanted_here && wanted_here <= middle + second) {
        storage_.bin = 2 * threadIdx.x + (wanted_here > middle);
        storage_.before = wanted_here > middle ? middle : scanned.before;
      }
      __syncthreads();
      before += storage_.before;
      const int chosen = storage_.bin;
      exponent_of_cut = exponent_of(chosen);
      const int count = gather(places, size, kBins, [&](int i) { return bin_of(i) == chosen; },
                               [&](int i) { return entry_of(value(i), low(i)); });
      if (count > 0) {
        const Entry cut = entry_at(count, all_wanted - before, [&](Entry entry) {
          if (kBy == CutBy::kCount) return Weight{1};
          return fixed_weight(exp2f(log2_weight(value_of(entry), low_of(entry))));
        });
        return {value_of(cut), kKeepsEqual ? 0 : static_cast<int>(low_of(cut))};
      }
      if (is_first) {
        const unsigned first_key = key_where([&](float its_value) { return bin_of_value(its_value) <= chosen; });
        const unsigned end_key = key_where([&](float its_value) { return bin_of_value(its_value) < chosen; });
        lowest_entry = static_cast<Entry>(first_key) << 32;
        highest_entry = (static_cast<Entry>(end_key) << 32) - 1;
      } else {
        highest_entry -= static_cast<Entry>(chosen) << shift;
        lowest_entry = max(lowest_entry, highest_entry - ((Entry{1} << shift) - 1));
      }
      if (kKeepsEqual && lowest_entry >> 32 == highest_entry >> 32) return {value_of(lowest_entry), 0};
      is_first = false;
      shift = max(0, 64 - __clzll(highest_entry - lowest_entry) - kBinBits);
    }
  }

  // At least the smallest one.
  static __device__ Weight fixed_weight(float weight) {
    return max(Weight{1}, static_cast<Weight>(weight * static_cast<float>(Weight{1} << kFraction)));
  }

 private:
  static constexpr int kExponentBias = 127, kMantissaBits = 23;
  static constexpr int kWideBits = 31, kNarrowBits = 17, kMostNarrowPlaces = 1 << 14;
  static constexpr float kLog2OfE = 1.442695041f, kMostOctaves = 125.5f;

  // Each block adds up a share of the bins and gives the result to all blocks.
  template <typename Finish>
  __device__ void add_up_blocks(Finish finish) {
    const int lanes = max(size / 2, 1), lane = threadIdx.x % lanes, share = kBins / size;
#pragma unroll 1
    for (int i = threadIdx.x / lanes; i < share; i += kThreads / lanes) {
      const int bin = rank * share + i;
      Weight sum = 0;
#pragma unroll 1
      for (int block = lane; block < size; block += lanes) {
        sum += load_from_block(&storage_.parts[0][bin], block);
        sum += static_cast<Weight>(load_from_block(&storage_.parts[1][bin], block)) << 16;
      }
#pragma unroll 1
      for (int distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kFullWarp, sum, distance);
      const Weight total = finish(bin, sum);
#pragma unroll 1
      for (int block = lane; block < size; block += lanes) store_to_block(&storage_.totals[bin], block, total);
    }
  }

  // The entry at which the weight of `count` gathered entries, in descending order, reaches `wanted`, or the last one.
  template <typename WeightOf>
  __device__ Entry entry_at(int count, Weight wanted, WeightOf weight_of) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kThreads) storage_.weights[i] = weight_of(storage_.entries[i]);
    __syncthreads();
    // All threads share the comparisons, a power of two of them for an entry.
    int lanes = 1;
    while (lanes < kWarpSize && 2 * lanes * count <= kThreads) lanes *= 2;
#pragma unroll 1
    for (int first = 0; first < count; first += kThreads / lanes) {
      const int place = first + threadIdx.x / lanes;
      const Entry own = place < count ? storage_.entries[place] : 0;
      Weight above = 0, reached = 0, all = 0;
#pragma unroll 4
      for (int i = threadIdx.x % lanes; i < count; i += lanes) {
        const Entry other = storage_.entries[i];
        const Weight weight = storage_.weights[i];
        if (other > own) above += weight;
        if (other >= own) reached += weight;
        all += weight;
      }
#pragma unroll 1
      for (int distance = lanes / 2; distance > 0; distance /= 2) {
        above += __shfl_xor_sync(kFullWarp, above, distance);
        reached += __shfl_xor_sync(kFullWarp, reached, distance);
        all += __shfl_xor_sync(kFullWarp, all, distance);
      }
      const Weight target = min(wanted, all);
      if (place < count && above < target && target <= reached) storage_.cut = own;
    }
    __syncthreads();
    return storage_.cut;
  }

  // The lowest key from whose score on `holds`; it holds for all higher ones.
  template <typename Holds>
  static __device__ unsigned key_where(Holds holds) {
    unsigned from = key_of(-FLT_MAX), to = key_of(INFINITY);
#pragma unroll 1
    while (from < to) {
      const unsigned middle = from + (to - from) / 2;
      if (holds(score_of(middle))) to = middle;
      else from = middle + 1;
    }
    return from;
  }

  Storage& storage_;
  RowTeam<Team::kBlock, double> team_;
  unsigned round_ = 0, gathered_ = 0;
};

}  // namespace fuseopt
