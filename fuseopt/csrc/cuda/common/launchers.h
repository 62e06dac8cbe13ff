// The C entry points of the CUDA kernels. They do not use torch, run asynchronously on `stream`, and neither allocate
// nor synchronise, so each can be captured in a CUDA graph. They return the error of their launches. Tensors are
// contiguous unless strides are given; `rows` x `columns` is the input flattened to two dimensions.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/decode_arguments.h"

namespace fuseopt {

constexpr int kNoDevice = -1;
// The current device while a binding launches, which has asked the runtime for it; otherwise kNoDevice. Asking again
// would take longer than everything else that a launcher looks up.
inline thread_local int device_of_launch = kNoDevice;

extern "C" {

cudaError_t fuseopt_decode_beams(DecodeBeams beams, cudaStream_t stream);

// The number of chunks of a row that each produce candidates.
int64_t fuseopt_beam_candidates_chunks(int64_t vocabulary);

cudaError_t fuseopt_beam_candidates(BeamCandidates candidates, cudaStream_t stream);

cudaError_t fuseopt_decode_embedding(DecodeEmbedding embedding, cudaStream_t stream);

// Whether the current device has enough shared memory: the 65 KB of sm_75 are too few for the longest heads in float64.
bool fuseopt_takes_short_attention(int dtype, int64_t length, int64_t head_dim);

cudaError_t fuseopt_short_attention(ShortAttention attention, cudaStream_t stream);

// From sm_80 on.
cudaError_t fuseopt_prompt_attention(PromptAttention attention, cudaStream_t stream);

// From sm_80 on.
cudaError_t fuseopt_prefix_attention(PrefixAttention attention, cudaStream_t stream);

cudaError_t fuseopt_rotary_store(RotaryStore store, cudaStream_t stream);

cudaError_t fuseopt_edit_logits(EditLogits edit, cudaStream_t stream);

// The number of chunks of a row that each produce a candidate.
int64_t fuseopt_decode_select_chunks(int64_t vocabulary);

cudaError_t fuseopt_decode_select(DecodeSelect select, cudaStream_t stream);

// The blocks that share a row; 0: the vocabulary is too large for this device.
int64_t fuseopt_decode_sample_blocks(int64_t rows, int64_t vocabulary);

// Floats of memory that the scores of a row need, where they do not fit in its blocks' shared memory.
int64_t fuseopt_decode_sample_scratch(int64_t rows, int64_t vocabulary);

cudaError_t fuseopt_decode_sample(DecodeSample sample, cudaStream_t stream);

// The number of parts of the layer's outputs that can each produce the highest of a row; 0: none can.
int64_t fuseopt_decode_linear_parts(DecodeLinear layer);

// Whether a layer, of one weight and with nothing around the product, can be left in two parts; and whether one takes
// the sum of such parts and a row for its input.
bool fuseopt_emits_partials(DecodeLinear layer);
bool fuseopt_accepts_partials(DecodeLinear layer);

cudaError_t fuseopt_decode_linear(DecodeLinear layer, cudaStream_t stream);

// Bytes of a line of a packed weight.
int64_t fuseopt_packed_line_bytes(PackedLinear packed);

// From sm_80 on, and with `in_features` a multiple of 8; else cudaErrorNotSupported.
cudaError_t fuseopt_decode_packed_linear(PackedLinear packed, cudaStream_t stream);

// Writes the first weight of `packed` to its output, [out_features, in_features], in `weight_dtype`; as above.
cudaError_t fuseopt_dequantize_packed(PackedLinear packed, cudaStream_t stream);

// Whether one launch computes a layer with `low_rank_a`.
bool fuseopt_takes_low_rank(DecodeLinear layer);

// A DecodeLinear whose input is scores: the softmax of each of `groups` neighbouring parts of a row is multiplied.
// Without norm, bias, activation and gate, and only if fuseopt_takes_decode_softmax_linear returns true.
bool fuseopt_takes_decode_softmax_linear(DecodeLinear layer, int64_t groups);

cudaError_t fuseopt_decode_softmax_linear(DecodeLinear layer, int64_t groups, cudaStream_t stream);

// Floats of `workspace` that the call needs, which may be 0.
int64_t fuseopt_decode_attention_workspace(const DecodeAttention& attention);

cudaError_t fuseopt_decode_attention(DecodeAttention attention, cudaStream_t stream);

// The same for one row whose query, key and value are the layer's outputs, which go only to the attention and the
// caches. Only if fuseopt_takes_qkv_attention returns true. `query`, `key` and `value` are not read.
bool fuseopt_takes_qkv_attention(DecodeLinear layer, DecodeAttention attention);

cudaError_t fuseopt_decode_qkv_attention(DecodeLinear layer, DecodeAttention attention, cudaStream_t stream);

cudaError_t fuseopt_rms_norm_fwd(const NormFwd& call, cudaStream_t stream);
cudaError_t fuseopt_rms_norm_bwd(const NormBwd& call, cudaStream_t stream);
cudaError_t fuseopt_layer_norm_fwd(const NormFwd& call, cudaStream_t stream);
cudaError_t fuseopt_layer_norm_bwd(const NormBwd& call, cudaStream_t stream);

cudaError_t fuseopt_layer_norm_of_sum_bwd(const LayerNormOfSumBwd& call, cudaStream_t stream);

// Bytes of the first stage's column sums, of so many tensors on the current device.
size_t fuseopt_norm_bwd_workspace_bytes(int64_t rows, int64_t columns, int tensors, bool float64);

cudaError_t fuseopt_gelu_fwd(TypedPointer input, TypedPointer bias, TypedPointer output, int64_t elements,
                             int64_t columns, int approximation, cudaStream_t stream);

cudaError_t fuseopt_gelu_bwd(TypedPointer grad_output, TypedPointer input, TypedPointer bias, TypedPointer grad_input,
                             int64_t elements, int64_t columns, int approximation, cudaStream_t stream);

// The same with the gradient of the bias. `workspace` has `fuseopt_gelu_bias_bwd_workspace_bytes`, which may be 0, and
// is written before it is read.
cudaError_t fuseopt_gelu_bias_bwd(TypedPointer grad_output, TypedPointer input, TypedPointer bias,
                                  TypedPointer grad_input, TypedPointer grad_bias, void* workspace, int64_t rows,
                                  int64_t columns, int approximation, cudaStream_t stream);

size_t fuseopt_gelu_bias_bwd_workspace_bytes(int64_t rows, int64_t columns);

// `activation_dtype`: the activation is rounded to it before the product. One row means contiguous tensors.
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

// Writes the edited scores to `output`, which may be `scores`.
cudaError_t fuseopt_process_logits(const LogitsEdits* edits, ScoreMatrix scores, ScoreMatrix output, int64_t rows,
                                   int64_t columns, cudaStream_t stream);

}  // extern "C"

}  // namespace fuseopt
