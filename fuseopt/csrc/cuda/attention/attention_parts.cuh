// Partial results of attention, one per warp of a block or cluster, each over a part of the keys; and their merge.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/dtype.cuh"
#include "cuda/common/partial_softmax.cuh"

namespace fuseopt {

// Each warp's partial result for each query: the largest score (in powers of two), the sum of exponentials, and the
// values weighted by these. All are stored in the shared memory of the first block, which merges them.
class Parts {
 public:
  // `dims`: a multiple of what a lane stores at once.
  static size_t bytes_of_part(size_t queries, size_t dims) { return queries * (dims * sizeof(float) + sizeof(Stats)); }
  static size_t bytes(size_t parts, size_t queries, size_t dims) {
    return sizeof(Header) + parts * bytes_of_part(queries, dims);
  }

  __device__ Parts(void* shared, int queries, int dims)
      : header_(*static_cast<Header*>(shared)),
        blocks_(cluster_size()),
        rank_(cluster_rank()),
        count_(blocks_ * (blockDim.x / kWarpSize)),
        own_(rank_ * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize),
        queries_(queries),
        dims_(dims),
        values_(reinterpret_cast<float*>(&header_ + 1)),
        stats_(reinterpret_cast<Stats*>(values_ + count_ * queries * dims)) {
    if (blocks_ == 1) return;
    if (rank_ == 0) {
      const int others = (count_ - blockDim.x / kWarpSize) * queries;
      header_.mailbox.open(others * (dims * sizeof(float) + sizeof(Stats)));
    }
    arrive_relaxed_at_cluster_barrier();
  }

  // The number of parts, and the index of the calling warp's part.
  __device__ int count() const { return count_; }
  __device__ int own() const { return own_; }

  // Call once before the first `leave_*`.
  __device__ void await_first_block() {
    if (blocks_ > 1) wait_at_cluster_barrier();
  }

  // 4 or 8 neighbouring dimensions.
  template <int kWidth>
  __device__ void leave_values(int query, int dim, const float (&values)[kWidth]) {
    leave(values_ + (own_ * queries_ + query) * dims_ + dim, values);
  }

  __device__ void leave_stats(int query, float largest, float sum) {
    const float stats[] = {largest, sum, 0, 0};
    leave(&stats_[own_ * queries_ + query].largest, stats);
  }

  // Returns true in the first block, once all parts have arrived.
  __device__ bool gather() {
    if (rank_ != 0) return false;
    __syncthreads();
    if (blocks_ > 1) header_.mailbox.wait();
    return true;
  }

  // One dimension of a query's attention over the keys of the first `filled` warps; 0 if they saw no key.
  __device__ float merged(int query, int dim, int filled) const {
    constexpr int kTogether = 4;
    const int rounded = (filled + kTogether - 1) / kTogether * kTogether;  // there are at least so many warps
    const auto stats_of = [&](int part) {
      const Stats& stats = stats_[part * queries_ + query];
      return PartStats{stats.largest, stats.sum};
    };
    float merged[1];
    merge_parts<1, kTogether>(rounded, stats_of,
                              [&](int part) { return values_ + (part * queries_ + query) * dims_ + dim; }, merged);
    return merged[0];
  }

 private:
  struct alignas(16) Header {
    Mailbox mailbox;
  };
  struct alignas(16) Stats {
    float largest, sum, unused[2];
  };

  template <int kCount>
  __device__ void leave(float* to, const float (&values)[kCount]) {
    constexpr int kVectors = kCount * sizeof(float) / sizeof(float4);
    const auto vectors = reinterpret_cast<const float4(&)[kVectors]>(values);
    const auto slots = reinterpret_cast<float4*>(to);
    if (rank_ == 0) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) slots[v] = vectors[v];
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) header_.mailbox.send(slots + v, vectors[v]);
    }
  }

  Header& header_;
  const int blocks_, rank_, count_, own_, queries_, dims_;
  float* const values_;
  Stats* const stats_;
};

// The same for one query whose keys are spread over up to 16 warps of one block: each lane of the merging warp has a
// part. It needs no more shared memory than Parts.
template <int kDims>
class OwnParts {
  static constexpr int kLaneDims = kDims / kWarpSize, kMostParts = 16;

 public:
  __device__ OwnParts(void* shared, int, int)
      : own_(threadIdx.x / kWarpSize),
        values_(static_cast<float*>(shared)),
        stats_(reinterpret_cast<float2*>(values_ + count() * kDims)) {}

  __device__ int count() const { return blockDim.x / kWarpSize; }
  __device__ int own() const { return own_; }

  // Stores the calling warp's result, in the order of dimensions that `Attended` has with a Tile.
  template <typename Attended>
  __device__ void leave(const Attended& attended) {
    const int lane = threadIdx.x % kWarpSize;
    if (lane % 4 != 0) return;
    float4* const to = reinterpret_cast<float4*>(values_ + own_ * kDims + lane / 4 * 8);
#pragma unroll
    for (int i = 0; i < kDims / 16; ++i) {  // 2 dimensions each; 4 of them are 8 neighbouring dimensions
      reinterpret_cast<float2*>(to + i / 4 * 16)[i % 4] = {attended.weighted[i][0], attended.weighted[i][2]};
    }
    if (lane == 0) stats_[own_] = {attended.largest[0], attended.sum[0]};
  }

  // The same with a SharedTile.
  template <typename Attended>
  __device__ void leave_of_shared(const Attended& attended) {
    const int lane = threadIdx.x % kWarpSize;
    if (lane % 4 != 0) return;
    float* const to = values_ + own_ * kDims + lane / 4;
#pragma unroll
    for (int i = 0; i < kDims / 8; ++i) to[i * 8] = attended.weighted[i / 2][i % 2 * 2];
    if (lane == 0) stats_[own_] = {attended.largest[0], attended.sum[0]};
  }

  // Call by one warp, after the first `filled` warps have stored theirs; writes zeros if they saw no key.
  template <typename T>
  __device__ void store_merged(T* output, int filled) const {
    const int lane = threadIdx.x % kWarpSize, part = lane % kMostParts;
    const float2 own = part < filled ? stats_[part] : float2{-INFINITY, 0.f};
    const float share = share_of_part<kMostParts>(own.x, own.y);
    float totals[kLaneDims] = {};
    const float* values = values_ + lane * kLaneDims;
    constexpr int kAtATime = 4;
#pragma unroll 1
    for (int first = 0; first < filled; first += kAtATime, values += kAtATime * kDims) {
#pragma unroll
      for (int p = 0; p < kAtATime; ++p) {
        const float of_part = __shfl_sync(kFullWarp, share, first + p);
        if (first + p >= filled) continue;
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d) totals[d] = fmaf(of_part, values[p * kDims + d], totals[d]);
      }
    }
    T rounded[kLaneDims];
#pragma unroll
    for (int d = 0; d < kLaneDims; ++d) rounded[d] = from_acc<T>(totals[d]);
    using Access = std::conditional_t<kLaneDims == 2, unsigned, uint2>;
    reinterpret_cast<Access*>(output)[lane] = reinterpret_cast<const Access&>(rounded);
  }

 private:
  const int own_;
  float* const values_;
  float2* const stats_;
};

}  // namespace fuseopt
