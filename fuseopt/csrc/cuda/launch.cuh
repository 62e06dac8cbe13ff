// Grid sizes from the device at hand.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "row_team.cuh"

namespace fuseopt {

constexpr int kMaxDevices = 64;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks for a grid-stride loop over rows of which a block of `threads` takes one, or one a warp.
template <typename Shape>
unsigned row_blocks(int64_t rows, int threads, int64_t most_blocks = INT32_MAX) {
  return static_cast<unsigned>(std::min(ceil_div(rows, Shape::kWarpPerRow ? threads / kWarpSize : 1), most_blocks));
}

inline int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

inline int multiprocessor_count() {
  static std::atomic<int> counts[kMaxDevices];
  const int device = current_device();
  int count = counts[device % kMaxDevices].load(std::memory_order_relaxed);
  if (count == 0) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    counts[device % kMaxDevices].store(count, std::memory_order_relaxed);
  }
  return count;
}

// How many blocks of one kernel fit on the whole device at once. Asked of the driver once a device and block size
// (which settles the shared memory, near enough), since the answer costs more than a launch. Declare one (static)
// beside each kernel's launch.
class ResidentBlocks {
 public:
  template <typename Kernel>
  int operator()(Kernel kernel, int threads, size_t shared_bytes) {
    std::atomic<int>& cached = blocks_[current_device() % kMaxDevices][threads / kWarpSize];
    int blocks = cached.load(std::memory_order_relaxed);
    if (blocks == 0) {
      int per_multiprocessor = 0;
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, shared_bytes);
      blocks = std::max(1, per_multiprocessor) * multiprocessor_count();
      cached.store(blocks, std::memory_order_relaxed);
    }
    return blocks;
  }

 private:
  std::atomic<int> blocks_[kMaxDevices][kMaxWarps + 1] = {};
};

}  // namespace fuseopt
