// Arguments of kernels that more than one op has, and of ops outside decode steps. `rows` x `columns` is the input
// flattened to two dimensions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtypes.h"

namespace fuseopt {

// A tensor whose element type is known only at run time. An absent optional tensor has `data == nullptr`.
struct TypedPointer {
  void* data;
  int dtype;  // DType
};

// An additive softmax mask, broadcast to the input. The address of row `r` is computed from the input's leading
// dimensions; neighbours with one stride pattern are merged.
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
  int bytes;  // bytes of an id, 4 or 8
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

// Rules for tokens, each for a range of sequence lengths.
struct TokenRules {
  static constexpr int kMost = 8;
  const uint8_t* of_tokens;  // [vocabulary]: bit i of a token: rule i names it; null: no rules
  const int64_t* bounds;     // [count, 2]: the lengths at which a rule begins and ends to hold
  int count;
  unsigned forcing;          // bit i: rule i sets its tokens to 0 and bans all others; else it bans its own
};

// The edits of row r of the scores; see logits_edits.cuh.
struct LogitsEdits {
  TokenIds input_ids;          // [rows, length]
  const int64_t* length;       // how many of the columns count; null: all
  TokenIds encoder_input_ids;  // ids as wide as `input_ids`; row r uses row r / rows_per_encoder_row
  int64_t rows_per_encoder_row;
  const int64_t* penalty_begin;  // [rows]: index of the first id that is penalised; null: 0
  const int64_t* suppressed;     // ids that are banned in every row
  int64_t suppressed_count;
  TokenRules rules;
  int64_t ngram_size;          // 0: no ban
  int64_t encoder_ngram_size;  // 0: no ban
  double repetition_penalty;   // 1: none
  double temperature;          // 1: none
};

// The forward of a norm over rows of `input`, or of `input + residual`, which is then written to `sum`. Of an RMSNorm
// `bias` and `mean` are absent, of a LayerNorm the last two are as they stand here. `mean` and `rstd` are absent if no
// backward will read them.
struct NormFwd {
  TypedPointer input, residual, weight, bias, output, sum, mean, rstd;
  int64_t rows, columns;
  double eps;
  double offset = 0;          // added to the weight
  int norm_dtype = kFloat32;  // xhat is rounded to it
};

// The backward of a norm of `input`. `grad_sum`, which may be absent, is added to its gradient. Of an RMSNorm `mean` and
// `grad_bias` are absent. Gradients that are not wanted are absent.
struct NormBwd {
  TypedPointer grad_output, grad_sum, input, weight, mean, rstd, grad_input, grad_weight, grad_bias;
  void* workspace;  // fuseopt_norm_bwd_workspace_bytes, written before it is read; null: no gradient of a parameter
  int64_t rows, columns;
  double offset = 0;  // of an RMSNorm
};

// The backward of a layer_norm whose input is `base` plus `addends`, added in order in float32; see
// layer_norm_of_sum_bwd.cu. Matrices are [rows, columns], of T (grad_output's dtype) if no type is given.
struct LayerNormOfSumBwd {
  static constexpr int kMostAddends = 6;
  TypedPointer grad_output;
  const float* grad_sum;
  const float* base;
  const void* addends[kMostAddends];
  int addend_count;
  const float* weight;  // [columns], like `bias`
  const float* bias;
  const float* mean;  // [rows], like `rstd`
  const float* rstd;
  void* output;
  float* grad;
  void* rounded;
  float* grad_weight;  // [columns], like the next two
  float* grad_bias;
  float* grad_columns;
  void* workspace;  // fuseopt_norm_bwd_workspace_bytes for three tensors
  int64_t rows;
  int64_t columns;  // a multiple of 16 bytes of T, at most kMostColumns
  static constexpr int kMostColumns = 2048;
};

enum GeluApproximation : int { kErf = 0, kTanh = 1 };

enum Activation : int { kGelu = 0, kGeluTanh = 1, kSilu = 2, kRelu = 3, kIdentity = 4 };

// The contiguous dimension of a weight [N, K]: K, or N as in a contiguous [K, N].
enum class Layout { kRowMajorNK, kColMajorKN };

enum Norm : int { kNoNorm = 0, kLayerNorm = 1, kRmsNorm = 2, kGemmaRmsNorm = 3 };

// Attention over sequences of up to 32 tokens.
struct ShortAttention {
  struct Heads {
    const void* data;  // [batch, heads, length, head_dim], head_dim contiguous
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

// Logits against class indices: the loss of each row, and its gradient, which overwrites the logits.
struct CrossEntropyGrad {
  TypedPointer logits;  // [rows, width]; zeros past the classes on return
  int64_t rows;
  int64_t width;    // whole vectors of 16 bytes
  int64_t classes;  // at most `width`
  const float* grad_output;  // [rows] by which gradients are multiplied; null: ones
  const int64_t* target;     // [rows]
  float* losses;             // [rows]
  bool* in_range;            // [rows]: whether the target is a class or ignored
  int64_t ignore_index;
  float label_smoothing;
  float z_loss;
  bool writes_gradient;  // if false, the logits are kept
};

}  // namespace fuseopt
