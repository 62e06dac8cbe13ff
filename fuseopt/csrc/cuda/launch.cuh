// Grid sizes from the device at hand.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "launchers.h"
#include "row_team.cuh"

namespace fuseopt {

constexpr int kMaxDevices = 64;

template <int kValue>
using IntTag = std::integral_constant<int, kValue>;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether a grid has a block for every row. Beyond that the "any" kernels walk the rows.
inline bool fits_grid(int64_t rows) { return rows <= INT32_MAX; }

// Blocks that have a team for every row, or for a grid-stride loop over the rows.
template <typename Shape>
unsigned row_blocks(int64_t rows, int threads, int64_t most_blocks = INT32_MAX) {
  return static_cast<unsigned>(std::min(ceil_div(rows, Shape::rows_per_block(threads)), most_blocks));
}

inline int current_device() {
  if (device_of_launch != kNoDevice) return device_of_launch;
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

// What may be written by several threads at once, each time the same; zero until then. (<atomic> would take longer to
// compile than many a kernel does.)
template <typename Value>
class Cached {
 public:
  Value get() const { return __atomic_load_n(&value_, __ATOMIC_RELAXED); }
  void set(Value value) { __atomic_store_n(&value_, value, __ATOMIC_RELAXED); }

 private:
  Value value_ = {};
};

// An attribute of the current device, asked of the driver once.
template <cudaDeviceAttr kAttribute>
int cached_attribute() {
  static Cached<int> values[kMaxDevices];
  const int device = current_device();
  int value = values[device % kMaxDevices].get();
  if (value == 0) {
    cudaDeviceGetAttribute(&value, kAttribute, device);
    values[device % kMaxDevices].set(value);
  }
  return value;
}

inline int multiprocessor_count() { return cached_attribute<cudaDevAttrMultiProcessorCount>(); }

// Whether each row may have a multiprocessor to itself. What counts then is what a thread does one after the other: a row
// gets a block, and a thread one vector of it.
inline bool are_few_rows(int64_t rows) { return rows <= multiprocessor_count(); }

// Calls `launch(Shape, threads)` with the first of `Shapes` that holds a row of `columns` elements; false when none does.
template <typename... Shapes, typename Launch>
bool dispatch_shape(int64_t columns, Launch launch) {
  const auto consider = [&](auto shape) {
    if (columns == 0 || columns > shape.kMaxRow) return false;
    launch(shape, shape.threads(columns));
    return true;
  };
  return (consider(Shapes{}) || ...);
}

// How many blocks of one kernel fit on the whole device at once. Asked of the driver once a device and block size
// (which settles the shared memory, near enough), since the answer costs more than a launch. Declare one (static)
// beside each kernel's launch.
class ResidentBlocks {
 public:
  template <typename Kernel>
  int operator()(Kernel kernel, int threads, size_t shared_bytes) {
    Cached<int>& cached = blocks_[current_device() % kMaxDevices][threads / kWarpSize];
    int blocks = cached.get();
    if (blocks == 0) {
      int per_multiprocessor = 0;
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, shared_bytes);
      blocks = std::max(1, per_multiprocessor) * multiprocessor_count();
      cached.set(blocks);
    }
    return blocks;
  }

 private:
  Cached<int> blocks_[kMaxDevices][kMaxWarps + 1] = {};
};

}  // namespace fuseopt
