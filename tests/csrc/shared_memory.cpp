// The planner of shared memory against a CUDA runtime that records what it is asked: prints a line for each fact.
#include "../../fuseopt/csrc/cuda/common/shared_memory.cu"

#include <atomic>
#include <cstdio>
#include <random>
#include <thread>

namespace {

constexpr int kDevices = 2, kKernels = 2;
thread_local int current = 0;
std::atomic<int> attribute[kDevices][kKernels], lowered, sets;
void first_kernel(int) {}
void second_kernel(int) {}
const void* const kernels[kKernels] = {reinterpret_cast<const void*>(&first_kernel),
                                       reinterpret_cast<const void*>(&second_kernel)};

int index_of(const void* kernel) { return kernel == kernels[0] ? 0 : 1; }

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  if (which == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = device == 0 ? 232448 : 101376;
  if (which == cudaDevAttrMaxSharedMemoryPerMultiprocessor) *value = device == 0 ? 233472 : 102400;
  if (which == cudaDevAttrMultiProcessorCount) *value = 10;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  attributes->sharedSizeBytes = index_of(kernel) == 0 ? 256 : 0;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int value) {
  if (which != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  ++sets;
  if (attribute[current][index_of(kernel)].exchange(value) > value) ++lowered;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t shared_bytes) {
  return *blocks = shared_bytes < 1000 ? 8 : 2, cudaSuccess;
}

}  // extern "C"

int main() {
  using namespace fuseopt;
  std::printf("limits %zu %zu\n", shared_bytes_of_block(), shared_bytes_of_multiprocessor());
  current = 1;
  std::printf("limits of the second device %zu %zu\n", shared_bytes_of_block(), shared_bytes_of_multiprocessor());
  // What GPT-2 large asks for at 17 to 32 rows, and the largest that there is beside 256 declared bytes.
  std::printf("fits %d %d %d\n", fits_block(first_kernel, 102144), fits_block(first_kernel, 101376 - 256),
              fits_block(first_kernel, 101376 - 255));
  std::printf("refused %d, set %d\n", permit_shared_bytes(kernels[0], 102144) != cudaSuccess, sets.load());
  permit_shared_bytes(kernels[0], 40000);
  std::printf("unasked, set %d\n", sets.load());
  permit_shared_bytes(kernels[0], 70000), permit_shared_bytes(kernels[0], 60000);
  std::printf("of the first kernel %d, second %d\n", attribute[1][0].load(), attribute[1][1].load());

  std::atomic<int> refused{0};
  const auto launches = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 20000; ++i) {
      const int bytes = 50000 + static_cast<int>(random() % 150000), kernel = static_cast<int>(random() % kKernels);
      if (permit_shared_bytes(kernels[kernel], bytes) != cudaSuccess) ++refused;
      if (attribute[0][kernel] < bytes) ++refused;  // where the launch is
    }
  };
  std::thread first(launches, 1), second(launches, 2);
  first.join(), second.join();
  std::printf("two threads: refused %d, lowered %d\n", refused.load(), lowered.load());

  ResidentBlocks resident;
  const int few = resident(first_kernel, 128, 50000), many = resident(first_kernel, 128, 0);
  std::printf("resident %d %d %d\n", few, many, resident(first_kernel, 128, 50000));
}
