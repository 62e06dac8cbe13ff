// The C entry points of the CUDA kernels: torch-free, asynchronous on `stream`, allocating and synchronising nothing,
// so that each can be captured in a CUDA graph. Every one returns what its launches returned. Tensors are contiguous
// unless strides are given; `rows` x `columns` is the input flattened to two dimensions.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "dtypes.h"

namespace fuseopt {

constexpr int kNoDevice = -1;
// The current device, where it is known: while a binding launches, which has asked the runtime for it. To ask again
// takes longer than all else that a launcher looks up.
inline thread_local int device_of_launch = kNoDevice;

// A tensor whose element type is known only at run time. An absent optional tensor has `data == nullptr`.
struct TypedPointer {
  void* data;
  int dtype;  // DType
};

// An additive softmax mask seen through broadcasting: the address of row `r` is found from the leading dimensions of
// the input, of which neighbours that share one stride pattern are merged.
struct SoftmaxMask {
  static constexpr int kMaxDims = 8;
  TypedPointer values;
  int dims;
  int64_t sizes[kMaxDims];
  int64_t strides[kMaxDims];
  int64_t column_stride;
};

// Contiguous rows, `row_stride` elements apart.
struct StridedRows {
  TypedPointer values;
  int64_t row_stride;
};

// Token ids as a strided matrix of int32 or int64.
struct TokenIds {
  const void* data;
  int bytes;  // 4 or 8 an id
  int64_t length;
  int64_t row_stride;
  int64_t column_stride;
};

// Scores as a strided matrix; `dtype` is a DType.
struct ScoreMatrix {
  void* data;
  int dtype;
  int64_t row_stride;
  int64_t column_stride;
};

// What holds for tokens as long as sequences have certain lengths.
struct TokenRules {
  static constexpr int kMost = 8;
  const uint8_t* of_tokens;  // [vocabulary]: bit i of a token's: rule i is about it; null: there are none
  const int64_t* bounds;     // [count, 2]: the first length of sequences at which a rule holds, and the end
  int count;
  unsigned forcing;          // bit i: rule i sets its tokens to 0 and bans all others; any other bans its tokens
};

// What is done to row r of the scores; see logits_edits.cuh.
struct LogitsEdits {
  TokenIds input_ids;          // [rows, length]
  const int64_t* length;       // how many of their columns count; null: all
  TokenIds encoder_input_ids;  // as wide an id as those of `input_ids`; row r belongs to r / rows_per_encoder_row
  int64_t rows_per_encoder_row;
  const int64_t* penalty_begin;  // [rows]: the first id that counts for the penalty; null: the first of the row
  const int64_t* suppressed;     // ids banned in every row
  int64_t suppressed_count;
  TokenRules rules;
  int64_t ngram_size;          // 0: no ban
  int64_t encoder_ngram_size;  // 0: no ban
  double repetition_penalty;   // 1: none
  double temperature;          // 1: none
};

// The backward of a layer_norm over `base` and `addends`, added up one after the other in float32; see
// layer_norm_of_sum_bwd.cu. Matrices are [rows, columns], of T (grad_output's dtype) where no type is given.
struct LayerNormOfSumBwd {
  static constexpr int kMostAddends = 6;
  TypedPointer grad_output;
  const float* grad_sum;
  const float* base;
  const void* addends[kMostAddends];
  int addend_count;
  const float* weight;  // [columns], as `bias`
  const float* bias;
  const float* mean;  // [rows], as `rstd`
  const float* rstd;
  void* output;
  float* grad;
  void* rounded;
  float* grad_weight;  // [columns], as the next two
  float* grad_bias;
  float* grad_columns;
  void* workspace;  // fuseopt_norm_bwd_workspace_bytes, of three tensors
  int64_t rows;
  int64_t columns;  // whole 16 bytes of T, kMostColumns at most
  static constexpr int kMostColumns = 2048;
};

enum GeluApproximation : int { kErf = 0, kTanh = 1 };

enum Activation : int { kGelu = 0, kGeluTanh = 1, kSilu = 2, kRelu = 3, kIdentity = 4 };

// Where the neighbours of a weight [N, K] lie: along K, or along N, as in a contiguous [K, N].
enum class Layout { kRowMajorNK, kColMajorKN };

enum Norm : int { kNoNorm = 0, kLayerNorm = 1, kT5RmsNorm = 2 };

// Rows `indices` of `weight`, [rows, columns]; an absent table has `weight == nullptr`.
struct EmbeddingTable {
  const void* weight;
  int64_t rows;
  const void* indices;
  int index_bytes;  // 4 or 8 an index
};

// residual + activation(norm(input) x weight + bias), for up to three weights side by side, or a gated pair of them.
struct DecodeLinear {
  static constexpr int kMaxWeights = 3;
  static constexpr int kSplitK = 2;
  TypedPointer input;  // [rows, in_features]
  int64_t rows;
  int64_t in_features;
  const void* weights[kMaxWeights];  // [out_features, in_features]
  int weight_count;
  int weight_dtype;             // DType
  int64_t weight_stride;        // of the dimension whose stride is not one
  bool weights_are_transposed;  // which is that of `in_features`
  int64_t out_features;
  TypedPointer biases[kMaxWeights];
  TypedPointer residual;  // like `output`
  TypedPointer norm_weight;
  TypedPointer norm_bias;
  int norm;  // Norm
  double eps;
  int activation;  // Activation
  bool gated;
  bool pdl;         // may start before the previous kernel on the stream has ended
  const void* prefetch[kMaxWeights];  // what is to be brought into the L2 cache, or null
  int64_t prefetch_bytes;             // of each
  TypedPointer output;  // [rows, out_features * weight_count], or [rows, out_features] if gated
  const float* split_k_partials;  // [kSplitK, rows, in_features] to be added to `input`; or null
  EmbeddingTable tokens, positions;  // the input is the sum of their rows, and `input` nothing; or absent, both
  void* sum;                         // with either: that sum, [rows, in_features] of the input's dtype
  bool is_split_k;         // `output` is [kSplitK, rows, out_features] float32, yet to be added up
  void* best;           // [rows, fuseopt_decode_linear_parts] DecodeSelect's candidates: each part's highest; or null
  TokenRules rules;     // of what is compared for `best`
  const int64_t* sequence_length;  // which says what rules hold
};

// One query a row of [rows, heads, head_dim] over places [starts, lengths) of the caches, [rows / queries_per_kv, heads,
// capacity, head_dim]. With a `key`, that and `value` are written into the last of these places first.
struct DecodeAttention {
  struct Heads {
    const void* data;
    int64_t row_stride;
    int64_t head_stride;
  };
  struct Integers {
    const void* data;  // null: zeros
    int bytes;         // 4 or 8 an integer
    int64_t stride;    // 0 where one serves all rows
  };
  int dtype;  // DType
  Heads query;
  Heads key;
  Heads value;
  void* key_cache;
  void* value_cache;
  int64_t rows;
  int64_t heads;
  int64_t head_dim;
  int64_t capacity;
  int64_t queries_per_kv;
  Integers lengths;  // with a `key`: without it
  Integers starts;
  const bool* mask;  // [rows / queries_per_kv, capacity], or null
  TypedPointer bias;  // [heads, bias_columns]
  int64_t bias_columns;
  const int* ancestry;  // [rows, capacity]: the row of the caches in which a place before the last lies; null: its own
  double scale;
  bool pdl;  // may start before the previous kernel on the stream has ended
  void* output;  // [rows, heads, head_dim]
  float score_scale;  // `scale` for scores in powers of two, which the launcher fills in
};

// A token's embedding and a position's, added up.
struct DecodeEmbedding {
  EmbeddingTable tokens;
  EmbeddingTable positions;
  int dtype;  // DType
  int64_t rows;
  int64_t columns;
  bool pdl;  // may start before the previous kernel on the stream has ended
  void* output;  // [rows, columns]
};

// Attention over sequences of up to 32 tokens.
struct ShortAttention {
  struct Heads {
    const void* data;  // [batch, heads, length, head_dim], neighbouring head_dim
    int64_t batch_stride;
    int64_t head_stride;
    int64_t row_stride;
  };
  int dtype;  // DType
  Heads query, key, value;
  int64_t batch;
  int64_t heads;
  int64_t length;
  int64_t head_dim;
  bool causal;
  double scale;
  void* output;  // [batch, length, heads, head_dim]
  // Set by the launcher.
  int pitch;
  bool in_vectors;
};

// Causal attention of prompts, whose keys and values go to the first slots of a cache.
struct PromptAttention {
  struct Cache {
    void* data;  // [rows, heads, capacity, head_dim], neighbouring head_dim
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
  float score_scale;  // `scale` for scores in powers of two, which the launcher fills in
};

// Edited scores of any dtype as float32, in `edits`' order.
struct EditLogits {
  ScoreMatrix logits;  // [rows, vocabulary]
  int64_t rows;
  int64_t vocabulary;
  LogitsEdits edits;
  bool pdl;   // may start before the previous kernel on the stream has ended
  float* output;  // [rows, vocabulary]
};

// Logits against class indices: the loss of each row, and its gradient written over the logits.
struct CrossEntropyGrad {
  TypedPointer logits;  // [rows, width]; zeros past the classes on return
  int64_t rows;
  int64_t width;    // whole vectors of 16 bytes
  int64_t classes;  // at most `width`
  const float* grad_output;  // [rows] that gradients are multiplied by; null: ones
  const int64_t* target;     // [rows]
  float* losses;             // [rows]
  bool* in_range;            // [rows]: whether the target is a class or ignored
  int64_t ignore_index;
  float label_smoothing;
  float z_loss;
  bool writes_gradient;  // else the logits stay
};

// The end of a decoding step: argmax of each row of `scores`, `pad` in finished rows, end of sequence, one more everywhere.
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
  bool* going;       // [going_count], by `length`; the last of them for all from there on
  int64_t going_count;
  const int64_t* pad;
  const int64_t* eos;
  int64_t eos_count;
  int64_t* counters[kMaxCounters];
  int64_t counter_sizes[kMaxCounters];
  int counter_count;
  void* candidates;     // [rows, chunks] of kCandidateBytes, written before they are read
  int64_t chunks;       // fuseopt_decode_select_chunks(vocabulary), or as many as there are
  bool has_candidates;  // they are those of a linear layer's `best`
  bool has_edits;
  LogitsEdits edits;      // of float32 scores, before all that
  const float* divisors;  // [rows, vocabulary] that probabilities are divided by, the scores being those; or null
  bool pdl;           // may start before the previous kernel on the stream has ended
};

// The `count` best of the continuations of each item's beams.
struct BeamCandidates {
  static constexpr int kMaxCount = 32;  // a warp sorts them
  ScoreMatrix scores;                   // [items * beams, vocabulary]
  int64_t vocabulary;
  float* partial_sums;  // [items * beams * chunks of a row, 2], written before it is read; null: no log-softmax
  bool has_edits;
  LogitsEdits edits;  // of float32 scores, after the log-softmax
  const float* running_scores;  // [items, beams]
  int64_t items;
  int64_t beams;
  int count;
  unsigned* chunk_keys;  // [items * beams * chunks of a row, count], written before it is read
  int* chunk_tokens;     // likewise
  float* values;         // [items, count]
  int64_t* places;       // [items, count]
  bool pdl;          // may start before the previous kernel on the stream has ended
};

// The end of a beam search step. Tensors of `items` x `beams` rows, of which `ids` and `ancestry` have two.
struct DecodeBeams {
  static constexpr int kMaxCandidates = 32;  // a warp sorts them
  const float* values;                       // [items, candidates]
  const int64_t* places;                     // [items, candidates], in beams x vocabulary
  int64_t items;
  int64_t beams;
  int candidates;  // twice the beams, or more
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
  bool* going;  // [going_count], by `length`; the last of them for all from there on
  int64_t going_count;
  int64_t* length;
  int64_t* generated;
  int64_t* counters;  // [1 + rows]
  int* arrived;       // [2], zeros when it starts and when it ends
  const int64_t* limit;
  const double* penalties;
  const double* best_penalties;
  const int64_t* eos;
  int64_t eos_count;
  bool stops_when_full;
  bool advance;
  bool pdl;  // may start before the previous kernel on the stream has ended
};

extern "C" {

cudaError_t fuseopt_decode_beams(DecodeBeams beams, cudaStream_t stream);

// How many chunks of a row each give their best.
int64_t fuseopt_beam_candidates_chunks(int64_t vocabulary);

cudaError_t fuseopt_beam_candidates(BeamCandidates candidates, cudaStream_t stream);

cudaError_t fuseopt_decode_embedding(DecodeEmbedding embedding, cudaStream_t stream);

// Whether the current device has the shared memory: 65 KB, on sm_75, is too little for the longest heads in float64.
bool fuseopt_takes_short_attention(int dtype, int64_t length, int64_t head_dim);

cudaError_t fuseopt_short_attention(ShortAttention attention, cudaStream_t stream);

// From sm_80 on.
cudaError_t fuseopt_prompt_attention(PromptAttention attention, cudaStream_t stream);

cudaError_t fuseopt_edit_logits(EditLogits edit, cudaStream_t stream);

// How many chunks of a row each give their best.
int64_t fuseopt_decode_select_chunks(int64_t vocabulary);

cudaError_t fuseopt_decode_select(DecodeSelect select, cudaStream_t stream);

// In how many parts the layer's outputs are that each can give the highest of a row's; 0: they can not.
int64_t fuseopt_decode_linear_parts(DecodeLinear layer);

// Whether a layer, of one weight and with nothing around the product, can be left in two parts; and whether one takes
// the sum of such parts and a row, or of the embeddings that it names, for its input.
bool fuseopt_emits_partials(DecodeLinear layer);
bool fuseopt_accepts_partials(DecodeLinear layer);
bool fuseopt_takes_embeddings(DecodeLinear layer);

cudaError_t fuseopt_decode_linear(DecodeLinear layer, cudaStream_t stream);

// A DecodeLinear whose input are scores: the softmax of each of `groups` neighbouring parts of a row is what is multiplied.
// Without norm, bias, activation and gate, and only where the first of these says so.
bool fuseopt_takes_decode_softmax_linear(DecodeLinear layer, int64_t groups);

cudaError_t fuseopt_decode_softmax_linear(DecodeLinear layer, int64_t groups, cudaStream_t stream);

cudaError_t fuseopt_decode_attention(DecodeAttention attention, cudaStream_t stream);

// The same of one row whose query, key and value are the layer's outputs, and go nowhere but to the attention and into the
// caches; only where the first of these says so. `query`, `key` and `value` are not read.
bool fuseopt_takes_qkv_attention(DecodeLinear layer, DecodeAttention attention);

cudaError_t fuseopt_decode_qkv_attention(DecodeLinear layer, DecodeAttention attention, cudaStream_t stream);

// Normalises `input`, or where there is a `residual` `input + residual`, of the dtype of `sum`, which is written too.
cudaError_t fuseopt_rms_norm_fwd(TypedPointer input, TypedPointer residual, TypedPointer weight, TypedPointer output,
                                 TypedPointer sum, TypedPointer rstd, int64_t rows, int64_t columns, double eps,
                                 double offset, int norm_dtype, cudaStream_t stream);

// `input` is what was normalised; `grad_sum`, which may be absent, is added to its gradient. `grad_weight.data` may be
// null. `workspace` holds `fuseopt_norm_bwd_workspace_bytes` and is written before it is read.
cudaError_t fuseopt_rms_norm_bwd(TypedPointer grad_output, TypedPointer grad_sum, TypedPointer input,
                                 TypedPointer weight, TypedPointer rstd, TypedPointer grad_input,
                                 TypedPointer grad_weight, void* workspace, int64_t rows, int64_t columns,
                                 double offset, cudaStream_t stream);

cudaError_t fuseopt_layer_norm_fwd(TypedPointer input, TypedPointer residual, TypedPointer weight, TypedPointer bias,
                                   TypedPointer output, TypedPointer sum, TypedPointer mean, TypedPointer rstd,
                                   int64_t rows, int64_t columns, double eps, cudaStream_t stream);

// As fuseopt_rms_norm_bwd; `grad_weight.data` and `grad_bias.data` may each be null.
cudaError_t fuseopt_layer_norm_bwd(TypedPointer grad_output, TypedPointer grad_sum, TypedPointer input,
                                   TypedPointer weight, TypedPointer mean, TypedPointer rstd, TypedPointer grad_input,
                                   TypedPointer grad_weight, TypedPointer grad_bias, void* workspace, int64_t rows,
                                   int64_t columns, cudaStream_t stream);

cudaError_t fuseopt_layer_norm_of_sum_bwd(const LayerNormOfSumBwd& call, cudaStream_t stream);

// Room for the first stage of the column sums of so many tensors on the current device.
size_t fuseopt_norm_bwd_workspace_bytes(int64_t rows, int64_t columns, int tensors, bool float64);

cudaError_t fuseopt_gelu_fwd(TypedPointer input, TypedPointer bias, TypedPointer output, int64_t elements,
                             int64_t columns, int approximation, cudaStream_t stream);

cudaError_t fuseopt_gelu_bwd(TypedPointer grad_output, TypedPointer input, TypedPointer bias, TypedPointer grad_input,
                             int64_t elements, int64_t columns, int approximation, cudaStream_t stream);

// The same with the gradient of the bias. `workspace` holds `fuseopt_gelu_bias_bwd_workspace_bytes`, which may be none, and
// is written before it is read.
cudaError_t fuseopt_gelu_bias_bwd(TypedPointer grad_output, TypedPointer input, TypedPointer bias,
                                  TypedPointer grad_input, TypedPointer grad_bias, void* workspace, int64_t rows,
                                  int64_t columns, int approximation, cudaStream_t stream);

size_t fuseopt_gelu_bias_bwd_workspace_bytes(int64_t rows, int64_t columns);

// `activation_dtype` is what the activation is rounded to before the product. One row means contiguous tensors.
cudaError_t fuseopt_gated_activation_fwd(StridedRows gate, StridedRows up, TypedPointer output, int64_t rows,
                                         int64_t columns, int activation, int activation_dtype, cudaStream_t stream);

cudaError_t fuseopt_gated_activation_bwd(TypedPointer grad_output, StridedRows gate, StridedRows up,
                                         TypedPointer grad_gate, TypedPointer grad_up, int64_t rows, int64_t columns,
                                         int activation, int activation_dtype, cudaStream_t stream);

cudaError_t fuseopt_softmax_fwd(TypedPointer input, SoftmaxMask mask, TypedPointer output, int64_t rows,
                                int64_t columns, double scale, cudaStream_t stream);

// `grad_output` and `output` share one dtype.
cudaError_t fuseopt_softmax_bwd(TypedPointer grad_output, TypedPointer output, TypedPointer grad_input, int64_t rows,
                                int64_t columns, double scale, cudaStream_t stream);

cudaError_t fuseopt_cross_entropy_grad(CrossEntropyGrad loss, cudaStream_t stream);

// Writes the edited scores to `output`, which is `scores` to edit in place.
cudaError_t fuseopt_process_logits(const LogitsEdits* edits, ScoreMatrix scores, ScoreMatrix output, int64_t rows,
                                   int64_t columns, cudaStream_t stream);

}  // extern "C"

}  // namespace fuseopt
