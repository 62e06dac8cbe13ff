// What follows from the best score of each row at the end of a decode step: tokens, stop flags and counters.
#pragma once

#include <algorithm>

#include "cuda/common/decode_arguments.h"
#include "cuda/common/dependent_launch.cuh"
#include "cuda/decode/select/score_candidate.cuh"

namespace fuseopt {

// Lanes per row: as many as it has chunks, rounded up to a power of two, at most a warp.
__host__ __device__ inline int lanes_for(int64_t chunks) {
  int lanes = 1;
  while (lanes < chunks && lanes < kWarpSize) lanes *= 2;
  return lanes;
}

// Called by one thread, long before end_step: what that will read was last used a step ago.
__device__ inline void prefetch_for_end_of_step(const DecodeSelect& select) {
  prefetch_line(select.length);
  prefetch_line(select.pad);
  prefetch_line(select.eos);
  prefetch_line(select.unfinished);
#pragma unroll 1
  for (int c = 0; c < select.counter_count; ++c) prefetch_line(select.counters[c]);
}

// Called by all threads of one block, after the previous kernel has ended. `candidates` [rows, chunks].
template <typename Acc>
__device__ void end_step(const DecodeSelect& select, const Candidate<Acc>* candidates, int chunks) {
  constexpr int kCandidatesAtOnce = 10;  // loads in flight per thread; as many as candidates of a head's blocks
  const int lanes = lanes_for(chunks), lane = threadIdx.x % lanes, rows_at_once = blockDim.x / lanes;
  // All loads are issued before the first result is used.
  const int64_t column = *select.length, pad = *select.pad, first_eos = select.eos_count > 0 ? select.eos[0] : -1;
  int64_t counts[DecodeSelect::kMaxCounters];
#pragma unroll
  for (int c = 0; c < DecodeSelect::kMaxCounters; ++c) {
    if (c < select.counter_count && threadIdx.x < select.counter_sizes[c]) counts[c] = select.counters[c][threadIdx.x];
  }
  bool going = false;
  for (int64_t first = 0; first < select.rows; first += rows_at_once) {
    const int64_t row = first + threadIdx.x / lanes;
    const bool is_row = row < select.rows;
    bool unfinished = is_row && select.unfinished[row];
    const auto* const of_row = candidates + row * chunks;
    Candidate<Acc> best;
    for (int c = lane; is_row && c < chunks; c += kCandidatesAtOnce * lanes) {
      Candidate<Acc> loaded[kCandidatesAtOnce];
#pragma unroll
      for (int i = 0; i < kCandidatesAtOnce; ++i) {
        if (c + i * lanes < chunks) loaded[i] = of_row[c + i * lanes];
      }
#pragma unroll
      for (const auto& candidate : loaded) best.consider(candidate);
    }
    if (lanes == kWarpSize) best.reduce();
    else best.reduce(lanes);
    if (lane > 0 || !is_row) continue;
    const int64_t token = unfinished ? best.token : pad;
    unfinished = unfinished && (select.eos_count == 0 || token != first_eos);
    for (int64_t i = 1; i < select.eos_count; ++i) unfinished = unfinished && token != select.eos[i];
    select.tokens[row] = token;
    select.unfinished[row] = unfinished;
    if (column >= 0 && column < select.ids_columns) {
      select.ids[row * select.ids_row_stride + column * select.ids_column_stride] = token;
    }
    going = going || unfinished;
  }
  going = __syncthreads_or(going);
  if (threadIdx.x == 0) {
    select.going[std::clamp<int64_t>(column, 0, select.going_count - 1)] = going;
    *select.length = column + 1;
  }
#pragma unroll
  for (int c = 0; c < DecodeSelect::kMaxCounters; ++c) {
    if (c >= select.counter_count) continue;
    if (threadIdx.x < select.counter_sizes[c]) select.counters[c][threadIdx.x] = counts[c] + 1;
    for (int64_t i = threadIdx.x + blockDim.x; i < select.counter_sizes[c]; i += blockDim.x) ++select.counters[c][i];
  }
}

}  // namespace fuseopt
