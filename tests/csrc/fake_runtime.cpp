// A CUDA runtime that prints launches in place of making them.
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

int capability, multiprocessors, block_bytes, multiprocessor_bytes;

namespace {

std::map<const void*, std::string>& kernel_names() {
  static std::map<const void*, std::string> names;
  return names;
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  kernel_names()[host] = name;
}

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) { return *attributes = {}, cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  if (which == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = block_bytes;
  if (which == cudaDevAttrMaxSharedMemoryPerMultiprocessor) *value = multiprocessor_bytes;
  if (which == cudaDevAttrMultiProcessorCount) *value = multiprocessors;
  if (which == cudaDevAttrComputeCapabilityMajor) *value = capability / 10;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  int status = 0;
  char* const name = abi::__cxa_demangle(kernel_names()[kernel].c_str(), nullptr, nullptr, &status);
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
  }
  std::printf("%s grid %u,%u,%u threads %u cluster %u shared %zu;", status == 0 ? name : "?", config->gridDim.x,
              config->gridDim.y, config->gridDim.z, config->blockDim.x, cluster, config->dynamicSmemBytes);
  std::free(name);
  return cudaSuccess;
}

}  // extern "C"
