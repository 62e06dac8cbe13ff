// What launchers ask about the current device; the driver is asked once, then the answer is cached.
#pragma once

#include "cuda/common/launchers.h"

namespace fuseopt {

constexpr int kMaxDevices = 64;

inline int current_device() {
  if (device_of_launch != kNoDevice) return device_of_launch;
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

// A value that several threads may write at once, always the same one; zero until then. (Including <atomic> would take
// longer to compile than many kernels.)
template <typename Value>
class Cached {
 public:
  Value get() const { return __atomic_load_n(&value_, __ATOMIC_RELAXED); }
  void set(Value value) { __atomic_store_n(&value_, value, __ATOMIC_RELAXED); }

 private:
  Value value_ = {};
};

// An attribute of the current device; the driver is asked once.
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

}  // namespace fuseopt
