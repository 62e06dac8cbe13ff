// How the streaming kernel reads packed weights. Each warp has a ring of stages in shared memory. Bulk copies fill it from
// sm_90 on (one lane starts them), asynchronous copies of all lanes before.
#pragma once

#include "cuda/common/arrivals.cuh"
#include "cuda/common/async_copy.cuh"
#include "cuda/decode/linear/weight_stream.cuh"

namespace fuseopt {

// How a ring is filled.
enum class Ring { kAsync, kBulk };

// TUNED: version 3 of the kernel, four models, H200, 2026-11-30: 4 and 2 stages differ by less than 3%.
constexpr int kPackedWarps = 8, kStageBlocks = 2;
// TUNED: as above. Stages of a warp's ring: many, or few where two blocks a multiprocessor are faster; fewer if they hold all.
constexpr int kPackedStages = 4, kFewStages = 2;

template <typename T>
struct PackedLayer : StreamLayer<T> {
  int all_strips;
  int groups_bits;   // log2 of the strips that a block computes at a time, each by an equal share of its warps
  int part_blocks;   // blocks of K for each of these warps
  int part_columns;  // columns of the rows that each warp loads
  int stages;        // stages of each warp's ring
  bool has_norm;
};

// Copies `bytes`, a multiple of 16.
  __device__ inline void copy_bulk(void* to, const void* from, int bytes, const Arrivals& arrivals) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(arrivals.address())
                 : "memory");
#endif
  }

// Which outputs a strip has.
struct PackedStrip {
  int index = 0, strip;

  template <typename Layer>
  __device__ PackedStrip(const Layer& layer, int id) : strip(id) {
    while (index + 1 < Layer::kMaxWeights && strip >= layer.strips[index]) strip -= layer.strips[index++];
  }
};

// The order in which a warp reads the weight: its part of K of one strip after another. A strip has kUnits lines, one of each
// weight if gated.
template <typename T, int kBits, int kUnits, bool kBulk>
class PackedStream {
 public:
  // From strip `id` on, every `step`-th one. `ring`: `layer.stages` stages.
  __device__ PackedStream(const PackedLayer<T>& layer, char* ring, Arrivals* arrivals, int id, int step, int part)
      : layer_(layer), ring_(ring), arrivals_(arrivals), id_(id), step_(step) {
    first_ = part * layer.part_blocks;
    count_ = max(min(layer.packed.blocks - first_, layer.part_blocks), 0);
    if (count_ == 0) id_ = layer.all_strips;
    find();
    if constexpr (kBulk) {
      if (threadIdx.x % kWarpSize == 0) {
        for (int s = 0; s < layer.stages; ++s) arrivals[s].open();
        Arrivals::publish();
      }
      __syncwarp();
    }
#pragma unroll 1
    for (int s = 0; s < layer.stages; ++s) fetch(s);
  }

  // Number of blocks of K in a strip.
  __device__ int count() const { return count_; }
  __device__ int first() const { return first_; }

  // Waits for the next stage and returns it.
  __device__ const char* wait() {
    if constexpr (kBulk) {
      arrivals_[stage_].wait<false>(parity_);
    } else {
      if (layer_.stages == kPackedStages) await_copy_groups<kPackedStages - 1>();
      else await_copy_groups<kFewStages - 1>();
      __syncwarp();
    }
    return ring_ + stage_ * stage_bytes();
  }

  // Requests a later part of the weight into the stage that was just read.
  __device__ void next() {
    __syncwarp();
    fetch(stage_);
    if (++stage_ == layer_.stages) stage_ = 0, parity_ ^= 1;
  }

  __device__ int unit_bytes() const { return kStageBlocks * layer_.packed.block_bytes; }
  __device__ int stage_bytes() const { return kUnits * unit_bytes(); }

 private:
  __device__ void find() {
    if (id_ >= layer_.all_strips) return;
    const PackedStrip strip(layer_, id_);
    const int64_t line_bytes = layer_.packed.line_bytes;
    const int line = layer_.is_gated ? strip.strip : strip.strip * kUnits;
    from_ = reinterpret_cast<const char*>(layer_.weights[strip.index]) + line * line_bytes + kLineHeader<kBits> +
            static_cast<int64_t>(first_) * layer_.packed.block_bytes;
    if (layer_.is_gated) apart_ = reinterpret_cast<const char*>(layer_.weights[1]) - reinterpret_cast<const char*>(layer_.weights[0]);
    else apart_ = (line + 1) * kLineOutputs < layer_.widths[strip.index] ? line_bytes : 0;  // 0: the same again, not stored
  }

  __device__ void fetch(int stage) {
    if (id_ < layer_.all_strips) {
      const int bytes = min(kStageBlocks, count_ - block_) * layer_.packed.block_bytes, lane = threadIdx.x % kWarpSize;
      char* const to = ring_ + stage * stage_bytes();
      if constexpr (kBulk) {
        if (lane == 0) {
          arrivals_[stage].expect(kUnits * bytes);
#pragma unroll
          for (int u = 0; u < kUnits; ++u) copy_bulk(to + u * unit_bytes(), from_ + u * apart_, bytes, arrivals_[stage]);
        }
      } else {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
#pragma unroll 1
          for (int i = lane * kAccessBytes; i < bytes; i += kWarpSize * kAccessBytes) {
            copy_async(to + u * unit_bytes() + i, from_ + u * apart_ + i, true);
          }
        }
      }
      from_ += bytes;
      block_ += kStageBlocks;
      if (block_ >= count_) block_ = 0, id_ += step_, find();
    }
    if constexpr (!kBulk) end_copy_group();
  }

  const PackedLayer<T>& layer_;
  char* const ring_;
  Arrivals* const arrivals_;
  const char* from_ = nullptr;
  int64_t apart_ = 0;
  int id_, step_, first_, count_, block_ = 0, stage_ = 0;
  unsigned parity_ = 0;
};

}  // namespace fuseopt
