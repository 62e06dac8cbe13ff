// What launchers ask about the current device, from the driver once and from memory after that.
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

}  // namespace fuseopt
