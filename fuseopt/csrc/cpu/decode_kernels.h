// Inner loops of decode steps, compiled for several instruction sets; `decode_kernels` picks those for the processor.
//
// One row of inputs is bound by reading weights or caches, so they are read once, in order, in a few streams that the
// hardware prefetcher follows, and converted in registers. Arithmetic is float, or double if the weight or cache is.
#pragma once

#include <cstdint>

#include "dtypes.h"

namespace fuseopt {

/// Products of a few rows with some lines of a weight.
struct Products {
  DType dtype;         // of the weight
  const void* weight;  // `lines` of `length` neighbouring elements
  int64_t lines;
  int64_t length;
  int64_t line_stride;  // in elements
  const void* input;    // float or double
  int64_t rows;
  int64_t input_stride;
  void* output;  // float or double
  int64_t output_stride;
};

/// Products of a few rows with some lines of a quantised weight, whose lines lie one after another.
struct LowBitProducts {
  int bits;            // 8, or 4: see fuseopt/ops/low_bit.py
  const void* values;  // `lines` of `length` elements
  const void* scales;  // [lines, length / group]
  DType scale_type;
  const uint8_t* zeros;  // [lines, length / group], of 4 bits; null: 8
  int64_t group;         // of 8 bits: `length`
  int64_t lines;
  int64_t length;
  const void* input;   // float, or bfloat16 with BFloat16Kernels
  int64_t rows;
  int64_t input_stride;
  float* output;
  int64_t output_stride;
};

/// The products with the lines from `begin` on.
inline LowBitProducts lines_from(const LowBitProducts& p, int64_t begin) {
  LowBitProducts last = p;
  const int64_t groups = p.length / p.group * begin;
  last.values = static_cast<const char*>(p.values) + begin * p.length * p.bits / 8;
  last.scales = static_cast<const char*>(p.scales) + groups * element_size(p.scale_type);
  if (p.zeros != nullptr) last.zeros = p.zeros + groups;
  last.lines = p.lines - begin;
  last.output = p.output + begin;
  return last;
}

/// Attention of queries of one row to the places [begin, end) of one head of a cache.
struct HeadAttention {
  DType dtype;             // of the caches, if `cache_dtype` is kAsQuery
  CacheDType cache_dtype;
  const void* query;  // [queries, head_dim] float or double, scaled
  int64_t queries;
  const void* keys;  // [rows, places, head_dim] of this head; rows are `row_places` places apart
  const void* values;
  const float* key_scales;  // [rows, places], rows `row_places` apart; null if the caches have the query's dtype
  const float* value_scales;
  int64_t head_dim;
  int64_t row_places;
  int64_t row;
  const int* ancestry;  // [places]: the row that holds a place before the last one; null: `row`
  int64_t begin;
  int64_t end;
  const bool* mask;  // [places]; null: all are attended to
  double softcap;    // scores become softcap * tanh(score / softcap); 0: as they are
  const void* bias;  // [queries, distances] float or double, by the distance from the last place; null: none
  int64_t distances;
  void* scores;  // [queries, end - begin] float or double: workspace
  void* output;  // [queries, head_dim] float or double; zeros if no place is attended to
};

/// The most rows for which lines are faster than tiles; kAddLinesRows: with a weight stored as [K, N] without pairs of
/// bfloat16.
constexpr int64_t kLinesRows = 1, kAddLinesRows = 4;
/// Outputs by a multiple of which tiles are shared among threads.
constexpr int64_t kTileOutputs = 64;
/// From this many rows on, quantised weights are widened into tiles; into pairs of bfloat16 if their groups have as many
/// elements.
// TUNED: EPYC 9004, one thread, [2304, 768], before and in tiles. float32, int8: 382 and 504 us with 8 rows, 745 and 724
// with 16; int4: 472 and 487, 880 and 694. Pairs, int8: 207 and 229 with 4 rows, 305 and 270 with 6, 745 and 460 with 16;
// int4 in groups of 128: 880 and 409 with 16; in groups of 32: 880 and 887.
constexpr int64_t kLowBitTileRows = 9, kLowBitPairRows = 5, kSmallestPairedGroup = 64;

struct DecodeKernels {
  /// output[row][line] = input[row] . line; inputs have `length` elements.
  void (*dot_lines)(const Products&);
  /// output[row] = the sum of lines, each times its element of input[row]; inputs have `lines` elements.
  void (*add_lines)(const Products&);
  /// The same, for more rows.
  void (*dot_tiles)(const Products&);
  void (*add_tiles)(const Products&);
  void (*attend)(const HeadAttention&);
  /// output[row][line] = input[row] . line, for any number of rows.
  void (*low_bit)(const LowBitProducts&);
};

const DecodeKernels& decode_kernels();

#if defined(__x86_64__)
/// Whether the processor runs what is compiled for AVX-512.
inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

/// Tiles of bfloat16 weights whose input is bfloat16 too, in rows that zeros fill up to a multiple of kPaddedLength.
struct BFloat16Kernels {
  void (*dot_tiles)(const Products&);
  void (*add_tiles)(const Products&);
  /// With the lines that fill tiles; returns how many those are.
  int64_t (*low_bit_tiles)(const LowBitProducts&);
};
constexpr int64_t kPaddedLength = 32;

/// Null if the processor cannot multiply pairs of bfloat16.
const BFloat16Kernels* bfloat16_kernels();

}  // namespace fuseopt
