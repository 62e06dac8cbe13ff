// Cache of the runtime's limits and permissions for each kernel and device. Host code only.
#include "cuda/common/shared_memory.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

namespace fuseopt {
namespace {

constexpr size_t kPermittedUnasked = 48 * 1024;       // dynamic and declared
constexpr size_t kReservedForBlock = 1024;            // by the system, of a multiprocessor's memory

// For tests: FUSEOPT_SHARED_MEMORY_LIMIT=101376 makes a larger device choose as one with 99 KB per block does.
size_t limit_of_tests() {
  static const size_t limit = [] {
    const char* const text = std::getenv("FUSEOPT_SHARED_MEMORY_LIMIT");
    return text == nullptr ? SIZE_MAX : static_cast<size_t>(std::strtoull(text, nullptr, 10));
  }();
  return limit;
}

struct KernelMemory {
  size_t declared = 0;
  size_t permitted = 0;  // dynamic
  bool prefers_shared = false;
};

// The cached data of a kernel on the current device, locked for one thread while this object lives.
class Known {
 public:
  explicit Known(const void* kernel) : lock_(mutex()) {
    static auto& kernels = *new std::map<std::pair<const void*, int>, KernelMemory>;  // launches may outlive static objects
    const auto [entry, is_new] = kernels.try_emplace({kernel, current_device()});
    memory_ = &entry->second;
    if (!is_new) return;
    cudaFuncAttributes attributes = {};
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) cudaGetLastError();  // the launch will report it
    memory_->declared = attributes.sharedSizeBytes;
    memory_->permitted = kPermittedUnasked - std::min(kPermittedUnasked, memory_->declared);
  }

  KernelMemory* operator->() const { return memory_; }

 private:
  static std::mutex& mutex() {
    static auto& mutex = *new std::mutex;
    return mutex;
  }

  const std::lock_guard<std::mutex> lock_;
  KernelMemory* memory_;
};

}  // namespace

size_t shared_bytes_of_block() {
  return std::min<size_t>(cached_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(), limit_of_tests());
}

size_t shared_bytes_of_multiprocessor() {
  const size_t bytes = cached_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>();
  return limit_of_tests() < bytes ? limit_of_tests() + kReservedForBlock : bytes;
}

size_t declared_shared_bytes(const void* kernel) { return Known(kernel)->declared; }

cudaError_t permit_shared_bytes(const void* kernel, size_t bytes) {
  const Known memory(kernel);
  if (bytes <= memory->permitted) return cudaSuccess;
  if (memory->declared + bytes > shared_bytes_of_block()) return cudaErrorInvalidValue;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error == cudaSuccess) memory->permitted = bytes;
  return error;
}

cudaError_t prefer_shared_memory(const void* kernel) {
  const Known memory(kernel);
  if (memory->prefers_shared) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                 cudaSharedmemCarveoutMaxShared);
  memory->prefers_shared = error == cudaSuccess;
  return error;
}

}  // namespace fuseopt
