// Shared memory: how much the current device has, and permission for a kernel to use more than 48 KB. No other file
// asks the CUDA runtime about these. A launcher asks whether a kernel fits before it chooses it.
#pragma once

#include "cuda/common/device.h"

namespace fuseopt {

// Dynamic shared memory that a kernel with at most 4 KB of static arrays may have without permission: 48 KB with these.
constexpr size_t kUnaskedSharedBytes = 44 * 1024;

// Every device of compute capability 8.0 or newer has at least this much per block, with permission (8.6, 8.9, 12.0).
constexpr size_t kLeastSharedBytesOfSm80 = 99 * 1024;

// The most that a block of the current device may have with permission, dynamic and static together.
size_t shared_bytes_of_block();

// The memory that all blocks of a multiprocessor share; the system takes 1 KB of it per block.
size_t shared_bytes_of_multiprocessor();

// A kernel's static shared memory.
size_t declared_shared_bytes(const void* kernel);

// Permits launches of `kernel` on the current device with `bytes` of dynamic shared memory. Every launch with dynamic
// shared memory asks, as its static arrays count too; what is permitted already is a look-up. A permission is never
// lowered, so another thread's launch with more bytes stays permitted. Returns an error if the device has less.
cudaError_t permit_shared_bytes(const void* kernel, size_t bytes);

// Makes the current device prefer shared memory to L1 cache while `kernel` runs.
cudaError_t prefer_shared_memory(const void* kernel);

template <typename... Arguments>
bool fits_block(void (*kernel)(Arguments...), size_t bytes) {
  return declared_shared_bytes(reinterpret_cast<const void*>(kernel)) + bytes <= shared_bytes_of_block();
}

// How many blocks of one kernel fit on the whole device at once. The driver's answer costs more than a launch, so it is
// cached for each device and block size, with the bytes of shared memory that it holds for. Declare a static one beside
// each kernel's launch.
class ResidentBlocks {
  static constexpr int kWarpThreads = 32, kMostWarps = 32;

 public:
  template <typename... Arguments>
  int operator()(void (*kernel)(Arguments...), int threads, size_t shared_bytes) {
    Cached<uint64_t>& cached = answers_[current_device() % kMaxDevices][threads / kWarpThreads];
    const uint64_t answer = cached.get();
    if (answer != 0 && answer >> 32 == shared_bytes) return static_cast<int>(answer & UINT32_MAX);
    int of_multiprocessor = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_multiprocessor, reinterpret_cast<const void*>(kernel), threads,
                                                  shared_bytes);
    const int blocks = (of_multiprocessor > 0 ? of_multiprocessor : 1) * multiprocessor_count();
    cached.set(static_cast<uint64_t>(shared_bytes) << 32 | static_cast<unsigned>(blocks));
    return blocks;
  }

 private:
  Cached<uint64_t> answers_[kMaxDevices][kMostWarps + 1] = {};  // high word: shared bytes; low word: blocks
};

}  // namespace fuseopt
