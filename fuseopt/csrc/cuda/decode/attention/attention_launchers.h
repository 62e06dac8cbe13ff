// The launchers of decode_attention's kernels that are compiled in files of their own. They return false for what their
// kernels do not take, without an error.
#pragma once

#include "cuda/common/launchers.h"

namespace fuseopt {

struct Int8;
struct Fp8;

// On the tensor cores. One query per head of keys, or several beams'; head sizes 64 and 128.
template <typename T>
bool launch_decode_attention_mma(const DecodeAttention& attention, cudaStream_t stream, cudaError_t& error);

// The same for float32.
bool launch_decode_attention_float32(const DecodeAttention& attention, cudaStream_t stream, cudaError_t& error);

// Floats of `workspace` that the launcher below needs. It takes all options of a DecodeAttention, and head sizes up to 256
// that are multiples of 8; of 16 with a cache that has elements `Stored`, Int8 or Fp8.
template <typename T, typename Stored = T>
int64_t grouped_workspace(const DecodeAttention& attention);

template <typename T, typename Stored = T>
bool launch_decode_attention_grouped(const DecodeAttention& attention, cudaStream_t stream, cudaError_t& error);

}  // namespace fuseopt
