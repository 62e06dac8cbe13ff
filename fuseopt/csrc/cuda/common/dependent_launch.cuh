// Programmatic dependent launch (PDL): a kernel starts while the previous kernel on the stream still runs, does work
// that does not depend on it, then waits for it to end. Before sm_90 kernels run one after the other.
//
// A chain of such kernels is safe because every block of every kernel waits: when a kernel has ended, all kernels
// before it have ended too.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/common/launch.cuh"
#include "cuda/common/shared_memory.h"

namespace fuseopt {

// Returns once the previous kernel has ended and its results can be read. Before this call a kernel must not write, and
// must not read what earlier kernels write.
__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same as a loop that runs once. ptxas moves no computation across a loop; in straight-line code it moves them to
// their use, after the wait. `never` is false, but opaque to the compiler.
__device__ inline void wait_for_predecessor_settled(bool never) {
#pragma unroll 1
  do {
    wait_for_predecessor();
  } while (never);
}

// Makes the compiler compute a value here and not at its use. ptxas may still move it.
__device__ inline void settle(unsigned& value) { asm volatile("" : "+r"(value)); }
__device__ inline void settle(int& value) { asm volatile("" : "+r"(value)); }
template <typename T>
__device__ inline void settle(T*& value) {
  asm volatile("" : "+l"(value));
}
template <typename V, int kCount>
__device__ inline void settle(V (&values)[kCount]) {
#pragma unroll
  for (V& value : values) settle(value);
}

template <typename T>
__device__ inline T* settled(T* address) {
  settle(address);
  return address;
}

// Allows the next kernel to start once every block of this kernel has called this.
__device__ inline void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// For kernels that read nothing before the wait; called first. It hides only the launch latency. All earlier kernels have
// ended when the next one starts, so the next kernel may rely on them as after an ordinary launch.
__device__ inline void follow_predecessor() {
  wait_for_predecessor();
  let_successor_start();
}

// Called by one thread of each block: prefetches the block's share of global memory from `data` to `end` into the L2
// cache. Addresses and the bytes of a share are multiples of 16.
__device__ inline void prefetch_share(const void* data, const void* end, int share) {
#if __CUDA_ARCH__ >= 900
  const char* at = static_cast<const char*>(data) + static_cast<int64_t>(share) * (blockIdx.y * gridDim.x + blockIdx.x);
  const int64_t bytes = min(static_cast<int64_t>(share), static_cast<const char*>(end) - at);
  if (bytes <= 0) return;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(static_cast<unsigned>(bytes)));
#endif
}

// Whether the current device has programmatic dependent launch and clusters of blocks.
inline bool is_sm90_or_newer() { return compute_capability_major() >= 9; }

// Unused shared memory for the blocks of a grid that is resident all at once: so much that no multiprocessor takes more
// blocks than its even share. Blocks start where those of the previous kernel end, and without this would crowd where
// these end first.
class EvenShare {
 public:
  // Bytes per block.
  template <typename Kernel>
  size_t operator()(Kernel kernel, unsigned blocks, unsigned threads) {
    constexpr int kLeast = 5;             // for smaller shares blocks would need permission
    constexpr int kMost = 31;             // at most so many blocks fit on a multiprocessor
    constexpr int64_t kOthers = 2 * 1024;  // bytes of a block that the system and static arrays take
    const int processors = multiprocessor_count();
    const int64_t share = ceil_div(blocks, processors);
    if (share < kLeast || share > kMost || !is_sm90_or_newer()) return 0;
    if (resident_(kernel, static_cast<int>(threads), 0) <= share * processors) return 0;
    return shared_bytes_of_multiprocessor() / share - kOthers;
  }

 private:
  ResidentBlocks resident_;
};

// Prefetches the cache line of a global address, or of none, into the L2 cache.
__device__ inline void prefetch_line(const void* address) {
  if (address != nullptr) asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

struct LaunchShape {
  unsigned blocks;
  unsigned threads;
  size_t shared_bytes;
  unsigned cluster_blocks;  // neighbours in x; 1: no clusters
  unsigned blocks_y = 1, blocks_z = 1, threads_y = 1;
};

using DriverLaunch = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);

// cuLaunchKernelEx, or null if the driver lacks it. It is faster than the runtime, which looks its kernel up in every
// launch.
inline DriverLaunch driver_launch() {
  static const DriverLaunch launch = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    constexpr unsigned kVersion = 12000;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuLaunchKernelEx", &found, kVersion, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuLaunchKernelEx", &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) cudaGetLastError();  // otherwise the launch would seem to have failed
    return reinterpret_cast<DriverLaunch>(found);
  }();
  return launch;
}

// A kernel that calls follow_predecessor.
template <auto kKernel, typename Function = std::decay_t<decltype(kKernel)>>
class FollowingKernel;

template <auto kKernel, typename... Parameters>
class FollowingKernel<kKernel, void (*)(Parameters...)> {
 public:
  static constexpr auto kFunction = kKernel;

  // Errors become the runtime's last error, as after any launch: if the driver refuses, the runtime launches again.
  static void launch(dim3 blocks, dim3 threads, size_t shared_bytes, cudaStream_t stream, Parameters... arguments) {
    CUlaunchAttribute attribute;
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config = {};
    config.gridDimX = blocks.x, config.gridDimY = blocks.y, config.gridDimZ = blocks.z;
    config.blockDimX = threads.x, config.blockDimY = threads.y, config.blockDimZ = threads.z;
    config.sharedMemBytes = static_cast<unsigned>(shared_bytes);
    config.hStream = stream;
    config.attrs = &attribute;
    config.numAttrs = is_sm90_or_newer() ? 1 : 0;
    if (shared_bytes > 0) permit_shared_bytes(reinterpret_cast<const void*>(kKernel), shared_bytes);
    const CUfunction handle = driver_handle();
    void* addresses[] = {&arguments...};
    if (handle != nullptr && driver_launch()(&config, handle, addresses, nullptr) == CUDA_SUCCESS) return;
    kKernel<<<blocks, threads, shared_bytes, stream>>>(arguments...);
  }

  // For kernels without dynamic shared memory; uses EvenShare.
  static void launch_evenly(unsigned blocks, unsigned threads, cudaStream_t stream, Parameters... arguments) {
    static EvenShare even_share;
    launch(blocks, threads, even_share(kKernel, blocks, threads), stream, arguments...);
  }

 private:
  // The driver's handle of the kernel on the current device; null without cuLaunchKernelEx.
  static CUfunction driver_handle() {
    static Cached<CUfunction> handles[kMaxDevices];
    Cached<CUfunction>& cached = handles[current_device() % kMaxDevices];
    CUfunction handle = cached.get();
    if (handle == nullptr && driver_launch() != nullptr) {
      cudaGetFuncBySymbol(&handle, reinterpret_cast<const void*>(kKernel));
      cached.set(handle);
    }
    return handle;
  }
};

// Launches kernel(argument). `pdl`: it may start before the previous kernel on the stream has ended.
template <typename Argument>
cudaError_t launch_dependent(void (*kernel)(Argument), const Argument& argument, LaunchShape shape, bool pdl,
                             cudaStream_t stream) {
  // All these kernels ask for the same division of a multiprocessor's memory between L1 cache and shared memory. It has
  // one division at a time, so kernels with different ones could not run beside each other.
  const void* const function = reinterpret_cast<const void*>(kernel);
  cudaError_t error = prefer_shared_memory(function);
  if (error == cudaSuccess && shape.shared_bytes > 0) error = permit_shared_bytes(function, shape.shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shape.blocks, shape.blocks_y, shape.blocks_z);
  config.blockDim = dim3(shape.threads, shape.threads_y);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (pdl && is_sm90_or_newer()) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  constexpr unsigned kPortableCluster = 8;
  if (shape.cluster_blocks > kPortableCluster) {
    error = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  if (shape.cluster_blocks > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {shape.cluster_blocks, 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, argument);
}

}  // namespace fuseopt
