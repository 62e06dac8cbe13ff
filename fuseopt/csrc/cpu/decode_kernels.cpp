#include "cpu/decode_kernels.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cpu/rows.h"
#include "cpu/vec_math.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The library's own instruction set.
#if defined(__AVX512F__)
#define FUSEOPT_VECTOR_BYTES 64
#elif defined(__AVX__)
#define FUSEOPT_VECTOR_BYTES 32
#else
#define FUSEOPT_VECTOR_BYTES 16
#endif
namespace fuseopt::own {
#include "cpu/decode_kernels_body.h"
#include "cpu/decode_tiles_body.h"
#include "cpu/attention_body.h"
#include "cpu/low_bit_body.h"
#include "cpu/low_bit_tiles_body.h"
#include "cpu/by_dtype_body.h"
constexpr DecodeKernels kKernels = {dot_lines, add_lines, dot_tiles, add_tiles, attend, low_bit};
}
#undef FUSEOPT_VECTOR_BYTES

// A portable library also has kernels for AVX-512.
#if defined(__x86_64__) && !defined(__AVX512F__)
#define FUSEOPT_HAS_AVX512
#define FUSEOPT_VECTOR_BYTES 64
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
namespace fuseopt::avx512 {
#include "cpu/decode_kernels_body.h"
#include "cpu/decode_tiles_body.h"
#include "cpu/attention_body.h"
#include "cpu/low_bit_body.h"
#include "cpu/low_bit_tiles_body.h"
#include "cpu/by_dtype_body.h"
constexpr DecodeKernels kKernels = {dot_lines, add_lines, dot_tiles, add_tiles, attend, low_bit};
}
#include "cpu/target_end.h"
#endif

namespace fuseopt {

const DecodeKernels& decode_kernels() {
#if defined(FUSEOPT_HAS_AVX512)
  static const bool is_supported = has_avx512();
  if (is_supported) return avx512::kKernels;
#endif
  return own::kKernels;
}

}  // namespace fuseopt
