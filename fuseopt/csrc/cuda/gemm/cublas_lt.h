// The part of cuBLASLt's C interface that is used (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api). It is
// the same in CUDA 12 and 13. It is declared here and looked up in the library that torch has loaded, since a toolkit
// may lack header and library.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "check.h"

namespace fuseopt::cublas_lt {

// cudaDataType_t; cublasComputeType_t with float32 accumulation.
enum DataType : int { kR32F = 0, kR16F = 2, kR16BF = 14 };
constexpr int kCompute32F = 68;

// cublasLtMatmulDescAttributes_t
enum Description : int { kTransposeA = 3, kTransposeB = 4, kEpilogue = 7, kBiasPointer = 8, kAuxPointer = 11, kAuxStride = 12 };

// kAuxStride must be a multiple of this.
constexpr int64_t kAuxMultiple = 8;

// cublasLtEpilogue_t: one of the first three, optionally with a bias, and with storing the activation's input. GELU is
// the tanh approximation.
enum Epilogue : uint32_t { kPlain = 1, kRelu = 2, kGelu = 32, kBias = 4, kAux = 128 };

// cublasLtMatmulPreferenceAttributes_t; masks of cublasLtReductionScheme_t: K is not split, or sums stay in float32.
enum Preference : int { kMaxWorkspace = 1, kReductionSchemes = 3, kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7, kAlignmentD = 8 };
constexpr uint32_t kNoReductions = 0, kFloat32Reductions = 2;

struct Algorithm {
  uint64_t data[8];
};

// cublasLtMatmulHeuristicResult_t
struct Candidate {
  Algorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

using Handle = void*;

class Library {
 public:
  static const Library& get(const char* op) {
    static const Library library(op);
    return library;
  }

  int (*create)(Handle*);
  int (*create_description)(Handle*, int compute_type, int scale_type);
  int (*set_description)(Handle, int attribute, const void* value, size_t bytes);
  int (*destroy_description)(Handle);
  int (*create_layout)(Handle*, int type, uint64_t rows, uint64_t columns, int64_t column_stride);
  int (*destroy_layout)(Handle);
  int (*create_preference)(Handle*);
  int (*set_preference)(Handle, int attribute, const void* value, size_t bytes);
  int (*destroy_preference)(Handle);
  int (*candidates)(Handle library, Handle description, Handle a, Handle b, Handle c, Handle d, Handle preference,
                    int wanted, Candidate* found, int* count);
  int (*matmul)(Handle library, Handle description, const void* alpha, const void* a, Handle a_layout, const void* b,
                Handle b_layout, const void* beta, const void* c, Handle c_layout, void* d, Handle d_layout,
                const Algorithm* algorithm, void* workspace, size_t workspace_bytes, cudaStream_t stream);

 private:
  explicit Library(const char* op) {
    const std::string name = "libcublasLt.so." + std::to_string(CUDART_VERSION / 1000);
    void* file = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    FUSEOPT_CHECK(file != nullptr, "fuseopt::", op, ": torch has not loaded ", name);
    const auto look_up = [&](auto& function, const char* symbol) {
      void* address = dlsym(file, symbol);
      FUSEOPT_CHECK(address != nullptr, "fuseopt::", op, ": ", name, " has no ", symbol);
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
    };
    look_up(create, "cublasLtCreate");
    look_up(create_description, "cublasLtMatmulDescCreate");
    look_up(set_description, "cublasLtMatmulDescSetAttribute");
    look_up(destroy_description, "cublasLtMatmulDescDestroy");
    look_up(create_layout, "cublasLtMatrixLayoutCreate");
    look_up(destroy_layout, "cublasLtMatrixLayoutDestroy");
    look_up(create_preference, "cublasLtMatmulPreferenceCreate");
    look_up(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    look_up(destroy_preference, "cublasLtMatmulPreferenceDestroy");
    look_up(candidates, "cublasLtMatmulAlgoGetHeuristic");
    look_up(matmul, "cublasLtMatmul");
  }
};

}  // namespace fuseopt::cublas_lt
