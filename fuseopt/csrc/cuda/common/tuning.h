// Measured numbers by which launchers choose: those of fuseopt/tuning/sm_*.inc, which Python reads too. Numbers that
// are compiled into a kernel are beside the kernel, also after `TUNED:`.
#pragma once

#include "cuda/common/device.h"

namespace fuseopt {

// sm_90.inc has every number.
struct Tuning {
#define TUNED(name, value) int64_t name = value;
#include "../tuning/sm_90.inc"
#undef TUNED
};

// The other files have the differences from it.
#define TUNED(name, value) tuning.name = value;

constexpr Tuning tuning_of_sm_80() {
  Tuning tuning;
#include "../tuning/sm_80.inc"
  return tuning;
}

constexpr Tuning tuning_of_sm_100() {
  Tuning tuning;
#include "../tuning/sm_100.inc"
  return tuning;
}

constexpr Tuning tuning_of_sm_120() {
  Tuning tuning;
#include "../tuning/sm_120.inc"
  return tuning;
}

#undef TUNED

inline constexpr Tuning kTuningOfSm80 = tuning_of_sm_80(), kTuningOfSm90, kTuningOfSm100 = tuning_of_sm_100(),
                        kTuningOfSm120 = tuning_of_sm_120();

inline int compute_capability_major() { return cached_attribute<cudaDevAttrComputeCapabilityMajor>(); }

// The current device's numbers, from the newest file that is not newer than the device; from sm_90.inc for older
// devices.
inline const Tuning& tuning() {
  const int major = compute_capability_major();
  if (major >= 12) return kTuningOfSm120;
  if (major >= 10) return kTuningOfSm100;
  return major == 8 ? kTuningOfSm80 : kTuningOfSm90;
}

}  // namespace fuseopt
