// Arguments of the kernels of decode steps and prompts. `pdl`: the kernel may start before the previous kernel on the
// stream has ended.
#pragma once

#include "cuda/common/kernel_arguments.h"

namespace fuseopt {

// Rows `indices` of `weight`, [rows, columns]. An absent table has `weight == nullptr`.
struct EmbeddingTable {
  const void* weight;
  int64_t rows;
  const void* indices;
  int index_bytes;  // bytes of an index, 4 or 8
};

// residual + activation(norm(input) x weight + bias), for up to three weights side by side, or a gated pair of them.
struct DecodeLinear {
  static constexpr int kMaxWeights = 3;
  static constexpr int kSplitK = 2;
  static constexpr int kLowRankRows = 8;  // the most that have `low_rank_a`
  static constexpr int kExchangeHeader = 2, kExchangeCopies = 4;
  TypedPointer input;  // [rows, in_features]
  int64_t rows;
  int64_t in_features;
  const void* weights[kMaxWeights];  // [widths[i], in_features]
  int weight_count;
  int weight_dtype;             // DType
  int64_t weight_stride;        // stride of the dimension whose stride is not 1
  bool weights_are_transposed;  // that dimension is `in_features`
  int64_t widths[kMaxWeights];
  int64_t out_features;  // the largest of `widths`; of a gated pair each
  TypedPointer biases[kMaxWeights];
  TypedPointer residual;  // like `output`
  TypedPointer norm_weight;
  TypedPointer norm_bias;
  int norm;  // Norm
  double eps;
  int activation;  // Activation
  bool gated;
  bool pdl;         // may start before the previous kernel on the stream has ended
  const void* prefetch[kMaxWeights];  // weights to prefetch into the L2 cache, or null
  int64_t prefetch_bytes[kMaxWeights];
  TypedPointer output;  // [rows, sum of widths], or [rows, out_features] if gated
  const float* split_k_partials;  // [kSplitK, rows, in_features] to be added to `input`; or null
  void* sum;  // with `split_k_partials`: that sum, [rows, in_features] of the input's dtype
  bool is_split_k;         // `output` is [kSplitK, rows, out_features] float32, yet to be added up
  void* best;           // [rows, fuseopt_decode_linear_parts]: DecodeSelect's candidate of each part; or null
  TokenRules rules;     // applied before comparing for `best`
  const int64_t* sequence_length;  // determines which rules hold
  // Weight i is `weights[i] + low_rank_b[i] x` the next low_ranks[i] rows of `low_rank_a`, [all of them, in_features]; or
  // null. Only if fuseopt_takes_low_rank returns true.
  const void* low_rank_a;
  const void* low_rank_b[kMaxWeights];  // [widths[i], low_ranks[i]]
  int64_t low_ranks[kMaxWeights];
  // [kExchangeHeader + kExchangeCopies * kLowRankRows * all ranks]; the first word differs from call to call.
  uint64_t* exchange;
};

// A DecodeLinear whose weights are packed integers (cuda/decode/linear/low_bit/packed_weight.cuh). Its `weight_dtype` is the
// input's, its `weight_stride` is `in_features`.
struct PackedLinear {
  DecodeLinear layer;
  int bits;       // 8 or 4
  int64_t group;  // with 4 bits 32, 64 or 128
  bool has_zeros;
};

inline int64_t output_columns(const DecodeLinear& layer) {
  int64_t columns = 0;
  for (const int64_t width : layer.widths) columns += width;
  return layer.gated ? layer.out_features : columns;
}

inline bool has_one_width(const DecodeLinear& layer) {
  bool has_one = true;
  for (int i = 1; i < layer.weight_count; ++i) has_one &= layer.widths[i] == layer.widths[0];
  return has_one;
}

// One integer for all rows, or one for each.
struct Integers {
  const void* data;  // null: zeros
  int bytes;         // bytes of an integer, 4 or 8
  int64_t stride;    // 0 if one serves all rows
};

// RMS norm and rotation of heads' vectors, [head_dim] each: see fuseopt/ops/decode/head_rotation.py.
struct HeadRotation {
  const float* table;  // [positions, rotated]: cosines, then sines; null: no rotation
  int64_t positions;
  int rotated;
  bool interleaved;  // pairs are neighbours, else `rotated` / 2 apart
  Integers row_positions;
  TypedPointer q_norm, k_norm;  // [head_dim]; absent: no norm
  double eps, offset;
};

// One query per row and head, [rows, heads, head_dim], over places [starts, lengths) of the caches, [rows of the caches,
// kv_heads, capacity, head_dim]. If there is a `key`, it and `value`, [rows, kv_heads, head_dim], are first written to
// the last of these places.
struct DecodeAttention {
  struct Heads {
    const void* data;
    int64_t row_stride;
    int64_t head_stride;
  };
  int dtype;  // DType
  Heads query;
  Heads key;
  Heads value;
  void* key_cache;
  void* value_cache;
  CacheDType cache_dtype;
  float* key_scales;  // [rows of the caches, kv_heads, capacity] if the caches have 8 bits an element, else null
  float* value_scales;
  int64_t rows;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t capacity;
  int64_t queries_per_kv;  // queries of one head of an item of the cache: its rows x `group`
  int64_t group;           // heads / kv_heads
  Integers lengths;  // if there is a `key`, without it
  Integers starts;
  const bool* mask;  // [rows of the caches, capacity], or null
  TypedPointer bias;  // [heads, bias_columns]
  int64_t bias_columns;
  const int* ancestry;  // [rows, capacity]: the row of the caches that holds an earlier place; null: the row itself
  HeadRotation rotation;
  int64_t window;  // places that are attended to, from the last one back; 0: all
  double softcap;  // 0: none
  double scale;
  bool pdl;  // may start before the previous kernel on the stream has ended
  void* output;  // [rows, heads, head_dim]
  float* workspace;  // fuseopt_decode_attention_workspace floats, written before they are read
  float score_scale;  // `scale` for scores in powers of two; set by the launcher

  bool has_rotation() const {
    return rotation.table != nullptr || rotation.q_norm.data != nullptr || rotation.k_norm.data != nullptr;
  }
};

// The sum of a token's and a position's embedding.
struct DecodeEmbedding {
  EmbeddingTable tokens;
  EmbeddingTable positions;
  int dtype;  // DType
  int64_t rows;
  int64_t columns;
  bool pdl;  // may start before the previous kernel on the stream has ended
  void* output;  // [rows, columns]
};

// Causal attention of prompts, which also writes their keys and values to the first slots of a cache.
struct PromptAttention {
  struct Cache {
    void* data;  // [rows, heads, capacity, head_dim], head_dim contiguous
    int64_t row_stride;
    int64_t head_stride;
    int64_t slot_stride;
  };
  int dtype;        // kFloat16 or kBFloat16
  const void* qkv;  // [rows, length, 3, heads, head_dim]
  Cache key_cache, value_cache;
  int64_t rows;
  int64_t length;
  int64_t heads;
  int64_t head_dim;  // a multiple of 16, 128 at most
  double scale;
  bool pdl;       // may start before the previous kernel on the stream has ended
  void* output;       // [rows, length, heads, head_dim]
  float score_scale;  // `scale` for scores in powers of two; set by the launcher
};

// Vectors of heads, [head_dim] each.
struct TokenHeads {
  void* data;  // [rows, tokens, heads, head_dim], head_dim contiguous
  int64_t row_stride;
  int64_t token_stride;
  int64_t head_stride;
};

// Rotates a prompt's queries and keys, and writes its keys and values to slots of a cache.
struct RotaryStore {
  int dtype;  // DType
  TokenHeads qkv;  // heads of queries, then of keys, then of values
  TokenHeads key_cache, value_cache;
  TokenHeads query;  // the rotated queries
  const int64_t* slot;  // the first slot written; null for 0
  int64_t rows;
  int64_t length;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  HeadRotation rotation;  // its row positions are by row and token
  bool pdl;               // may start before the previous kernel on the stream has ended
  bool aligned;           // set by the launcher
};

// Causal attention of a prompt's tokens to the slots of a cache up to their own, which already has their keys and
// values.
struct PrefixAttention {
  int dtype;  // kFloat16 or kBFloat16
  TokenHeads query, key_cache, value_cache;
  const int64_t* start;   // slot of the first token; null for 0
  const int64_t* filled;  // slots from here on have padding, whose values count as zeros; null for the last token's end
  int64_t rows;
  int64_t length;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;  // a multiple of 8, 256 at most
  int64_t capacity;
  int64_t window;  // slots that a token attends to, its own included; 0: all
  double scale;
  bool pdl;       // may start before the previous kernel on the stream has ended
  void* output;       // [rows, length, heads, head_dim]
  float score_scale;  // `scale` for scores in powers of two; set by the launcher
};

// Applies `edits`, in their order, to scores of any dtype; the result is float32.
struct EditLogits {
  ScoreMatrix logits;  // [rows, vocabulary]
  int64_t rows;
  int64_t vocabulary;
  LogitsEdits edits;
  bool pdl;   // may start before the previous kernel on the stream has ended
  float* output;  // [rows, vocabulary]
};

// The end of a decode step: argmax of each row of `scores`, `pad` in finished rows, EOS check, and counters + 1.
struct DecodeSelect {
  static constexpr int kMaxCounters = 4;
  static constexpr int kCandidateBytes = 16;
  ScoreMatrix scores;  // [rows, vocabulary]
  int64_t rows;
  int64_t vocabulary;
  int64_t* tokens;  // [rows]
  int64_t* ids;     // [rows, ids_columns]
  int64_t ids_columns;
  int64_t ids_row_stride;
  int64_t ids_column_stride;
  int64_t* length;  // the column of `ids` to write
  bool* unfinished;  // [rows]
  bool* going;       // [going_count], by `length`; its last element also serves all greater lengths
  int64_t going_count;
  const int64_t* pad;
  const int64_t* eos;
  int64_t eos_count;
  int64_t* counters[kMaxCounters];
  int64_t counter_sizes[kMaxCounters];
  int counter_count;
  void* candidates;     // [rows, chunks] of kCandidateBytes, written before they are read
  int64_t chunks;       // fuseopt_decode_select_chunks(vocabulary), or as many as the candidates have
  bool has_candidates;  // the candidates are those of a linear layer's `best`
  bool has_edits;
  LogitsEdits edits;      // of float32 scores, before the argmax
  const float* divisors;  // [rows, vocabulary]: `scores` are probabilities and are divided by these; or null
  bool pdl;           // may start before the previous kernel on the stream has ended
};

// The end of a step that samples: of the scores that `select.edits` and then the filters leave, the one whose probability
// divided by its number is highest. The numbers are `select.divisors`, or those that torch.Tensor.exponential_ would draw.
// Absent filters have the values that are given here.
struct DecodeSample {
  DecodeSelect select;    // `candidates` is [rows]
  const int64_t* random;  // seed and offset of torch's generator, and how many draws came before; null with divisors
  int64_t top_k;        // vocabulary: none
  double top_p;         // 1: none
  double min_p;         // 0: none
  double typical_p;     // 1: none
  int min_tokens;       // of the first in their order, that top_p, min_p and typical_p leave
  int blocks;           // per row, as fuseopt_decode_sample_blocks returns
  float* scratch;       // [rows, fuseopt_decode_sample_scratch]; null if that is 0
  float* kept;          // [rows, vocabulary]: gets the scores that are left, and -inf for others; or null
  float* highest;       // [rows]: gets the highest score; then nothing is drawn, and the step does not end; or null
};

// The `count` best continuations of each item's beams; or, with `highest`, those that torch.multinomial would draw. Scores
// are then float32, without edits or log-softmax.
struct BeamCandidates {
  static constexpr int kMaxCount = 32;  // sorted by one warp
  ScoreMatrix scores;                   // [items * beams, vocabulary]
  int64_t vocabulary;
  float* partial_sums;  // [items * beams * chunks of a row, 2], written before it is read; null: no log-softmax
  bool has_edits;
  LogitsEdits edits;  // of float32 scores, after the log-softmax
  const float* running_scores;  // [items, beams]
  const float* highest;         // of each row of `scores`; or null
  const int64_t* random;        // with `highest`, as of DecodeSample
  int64_t items;
  int64_t beams;
  int count;
  unsigned* chunk_keys;  // [items * beams * chunks of a row, count], written before it is read
  int* chunk_tokens;     // likewise
  float* values;         // [items, count]
  int64_t* places;       // [items, count]
  bool pdl;          // may start before the previous kernel on the stream has ended
};

// The end of a beam search step. Tensors have `items` x `beams` rows, `ids` and `ancestry` two of such.
struct DecodeBeams {
  static constexpr int kMaxCandidates = 32;  // sorted by one warp
  const float* values;                       // [items, candidates]
  const int64_t* places;                     // [items, candidates], in beams x vocabulary
  int64_t items;
  int64_t beams;
  int candidates;  // at least twice the beams
  int64_t vocabulary;
  float* running_scores;
  float* scores;
  bool* is_finished;
  int64_t* lengths;
  bool* improvable;  // [items]
  int64_t* ids;
  int64_t ids_columns;
  int32_t* ancestry;
  int64_t capacity;  // columns of `ancestry`
  int64_t* tokens;
  bool* going;  // [going_count], by `length`; its last element also serves all greater lengths
  int64_t going_count;
  int64_t* length;
  int64_t* generated;
  int64_t* counters;  // [1 + rows]
  int* arrived;       // [2], zeros at the beginning and at the end
  const int64_t* limit;
  const double* penalties;
  const double* best_penalties;
  const int64_t* eos;
  int64_t eos_count;
  bool stops_when_full;
  bool advance;
  bool pdl;  // may start before the previous kernel on the stream has ended
};

}  // namespace fuseopt
