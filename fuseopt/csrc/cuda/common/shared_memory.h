// Shared memory: how much the current device has, and permission for a kernel to use more than 48 KB of it. This is the
// only place that asks the CUDA runtime about either. A launcher asks whether a kernel fits before it chooses it.
#pragma once

#include "cuda/common/device.h"

namespace fuseopt {

// Every kernel may have this much dynamic shared memory without permission: of 48 KB, what it declares counts as well.
constexpr size_t kUnaskedSharedBytes = 44 * 1024;

// Every device of compute capability 8.0 or newer has at least this much for a block, with permission (8.6, 8.9, 12.0).
constexpr size_t kLeastSharedBytesOfSm80 = 99 * 1024;

// The most that a block of the current device may have with permission, dynamic and declared.
size_t shared_bytes_of_block();

// What the blocks on one multiprocessor of the current device share; the system takes 1 KB of it for each of them.
size_t shared_bytes_of_multiprocessor();

// What a kernel declares.
size_t declared_shared_bytes(const void* kernel);

// Permits launches of `kernel` on the current device with `bytes` of dynamic shared memory. The permission only ever
// grows, so another thread's launch with more bytes stays permitted. An error where the device has not as much.
cudaError_t permit_shared_bytes(const void* kernel, size_t bytes);

// Has the current device divide a multiprocessor's memory in favour of shared memory while `kernel` runs.
cudaError_t prefer_shared_memory(const void* kernel);

template <typename... Arguments>
bool fits_block(void (*kernel)(Arguments...), size_t bytes) {
  return declared_shared_bytes(reinterpret_cast<const void*>(kernel)) + bytes <= shared_bytes_of_block();
}

// How many blocks of one kernel fit on the whole device at once. The driver's answer costs more than a launch, so it is
// kept for each device and block size, together with the bytes of shared memory that it holds for. Declare one (static)
// beside each kernel's launch.
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
  Cached<uint64_t> answers_[kMaxDevices][kMostWarps + 1] = {};  // shared bytes, blocks
};

}  // namespace fuseopt
