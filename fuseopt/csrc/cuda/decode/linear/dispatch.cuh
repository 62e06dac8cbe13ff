// decode_linear for 16-bit weights and up to 16 rows: which tensor core kernel takes a layer, and in which shape. Read
// launch_decode_linear_few_rows at the end first.
#pragma once

#include "cuda/decode/linear/gemv.cuh"
#include "cuda/decode/linear/row_moments.cuh"
#include "cuda/decode/linear/skinny_mma.cuh"
#include "cuda/decode/linear/streamed_kn.cuh"
#include "cuda/decode/linear/streamed_nk.cuh"

namespace fuseopt {

// TUNED: measurement not recorded (709665c); `fuseopt bench kernels --model gpt2-xl` measures it again.
constexpr int kMostTogether = 4;  // blocks of a cluster

// How much of K a block holds at a time.
template <typename T, typename X, int kTiles, int kChunks, int kHalves, bool kLowRank = false>
constexpr int kMostColumns = kMaxLinearWarps<T, X, kTiles, kChunks, kHalves, kLowRank> * kChunks * kChunk;

template <typename T, typename X, Layout kLayout, bool kNorm, bool kGated, int kTiles, int kChunks, int kHalves,
          Along kAlong, bool kActivates, bool kSums = false, bool kLowRank = false, int kBits = 16>
cudaError_t launch_skinny_mma_as(const DecodeLinear& layer, cudaStream_t stream, const PackedShape& packed = {}) {
  constexpr int kColumns = kTiles * kTileColumns, kWidth = kGated ? kColumns / 2 : kColumns;
  const int64_t chunks = ceil_div(layer.in_features, kChunk);
  MmaLayer<T> mma = mma_layer<T>(layer);
  mma.packed = packed;
  const int64_t parts = ceil_div(layer.in_features, kMostColumns<T, X, kTiles, kChunks, kHalves, kLowRank>);
  mma.passes = kAlong == Along::kInPasses ? static_cast<int>(parts) : 1;
  constexpr bool kApart = kAlong == Along::kApart;
  if constexpr (kApart) {
    for (int a = 0; a < kSplitK; ++a) mma.weights[a] = mma.weights[0];
  }
  const int64_t warps = ceil_div(chunks, kChunks * (kApart ? kSplitK : parts));
  const int64_t blocks = kAlong == Along::kTogether ? parts : 1;  // of a cluster
  size_t shared_bytes = sizeof(float) * mma.rows * (summed_warps(static_cast<int>(warps), kSummedWarps) * kColumns + kRowGap);
  if (kNorm) shared_bytes += sizeof(Deviations) * warps * mma.rows + sizeof(float) * 2 * warps * kColumns;
  shared_bytes += sizeof(float4) * (blocks - 1) * finished_pairs(mma.rows, kWidth);
  const LaunchShape shape{static_cast<unsigned>(ceil_div(layer.out_features, kWidth) * blocks),
                          static_cast<unsigned>(warps * kWarpSize), shared_bytes, static_cast<unsigned>(blocks),
                          kGated ? 1u : static_cast<unsigned>(kApart ? kSplitK : layer.weight_count)};
  mma.share_prefetch(shape);
  if (kLowRank) mma.share_ranks(ceil_div(layer.widths[0], kWidth) * blocks);
  mma.finishing = static_cast<int>(ceil_div(finished_pairs(mma.rows, kWidth), kWarpSize) * kWarpSize);
  const auto kernel =
      decode_linear_skinny_mma_kernel<T, X, kLayout, kNorm, kGated, kTiles, kChunks, kHalves, kAlong, kActivates, kSums,
                                      kLowRank, kBits>;
  return launch_dependent(kernel, mma, shape, layer.pdl, stream);
}

inline int64_t tiles_of(const DecodeLinear& layer) {
  return ceil_div(output_columns(layer), kTileColumns) * (layer.gated ? 2 : 1);
}

// Whether a layer with a norm has enough strips of 64 columns.
inline bool has_widest_strips(const DecodeLinear& layer) {
  return tiles_of(layer) >= 8 * (multiprocessor_count() / tuning().decode_linear_wide_strips_divisor);
}

// Wide strips read a weight [K, N] in longer pieces, and few blocks leave multiprocessors to the next kernels, since no
// other block fits beside one of many warps. Narrow strips spread the work over more blocks. A K too long for wide strips is
// split over a cluster, or read in narrow strips: of a weight [N, K], with up to decode_linear_max_narrow_rows rows.
// Activations without a norm have narrow strips.
template <typename T, Layout kLayout, bool kNorm, bool kGated, int kHalves, bool kLowRank = false>
cudaError_t launch_skinny_mma_for(const DecodeLinear& layer, cudaStream_t stream) {
  const int64_t tiles = tiles_of(layer), few_blocks = multiprocessor_count() / tuning().decode_linear_few_blocks_divisor;
  const bool is_plain = layer.activation == kIdentity;
  const bool are_narrow_rows = layer.rows <= tuning().decode_linear_max_narrow_rows;
  const auto launch = [&]<int kTiles, int kChunks>(bool is_enough, cudaError_t& error) {
    constexpr bool kHasOthers = kNorm || kTiles == 2;
    constexpr bool kHasPlain = !(kLowRank && kHasOthers) && !kGated && (!kNorm || (kHalves == 1 && kTiles >= 4));
    if (!is_enough || layer.in_features > kMostColumns<T, T, kTiles, kChunks, kHalves, kLowRank>) return false;
    if (!kHasOthers && !is_plain) return false;
    const auto launch_as = [&]<bool kActivates>() {
      return launch_skinny_mma_as<T, T, kLayout, kNorm, kGated, kTiles, kChunks, kHalves, Along::kAtOnce, kActivates, false,
                                  kLowRank>(layer, stream);
    };
    error = kHasPlain && is_plain ? launch_as.template operator()<!kHasPlain>()
                                  : launch_as.template operator()<kHasOthers>();
    return true;
  };
  cudaError_t error = cudaSuccess;
  if constexpr (!kNorm && !kGated && kLayout == Layout::kColMajorKN && !kLowRank) {
    if (layer.is_split_k) {
      return launch_skinny_mma_as<T, T, kLayout, false, false, 4, 4, kHalves, Along::kApart, false>(layer, stream);
    }
  }
  if constexpr (kNorm && kLayout == Layout::kColMajorKN && kHalves == 1 && !kLowRank) {
    if (layer.split_k_partials != nullptr) {
      return launch_skinny_mma_as<T, T, kLayout, true, false, 8, 2, 1, Along::kAtOnce, false, true>(layer, stream);
    }
  }
  if constexpr (kNorm && !kGated) {
    if (launch.template operator()<8, 2>(has_widest_strips(layer), error)) return error;
  }
  if (launch.template operator()<4, 4>(kGated || tiles >= (kNorm ? 4 : 2) * few_blocks, error)) return error;
  if constexpr (!kGated) {
    if (launch.template operator()<2, 4>(true, error)) return error;
  }
  if constexpr (!kNorm && !kGated && kLayout == Layout::kRowMajorNK && kHalves == 1) {
    if (launch.template operator()<2, 8>(are_narrow_rows, error)) return error;
  }
  if constexpr (!kNorm && !kGated) {
    const bool gains = kLayout == Layout::kColMajorKN || !are_narrow_rows;
    if (is_sm90_or_newer() && is_plain && gains && layer.in_features <= kMostTogether * kMostColumns<T, T, 4, 4, kHalves, kLowRank>) {
      return launch_skinny_mma_as<T, T, kLayout, kNorm, kGated, 4, 4, kHalves, Along::kTogether, false, false, kLowRank>(
          layer, stream);
    }
  }
  if constexpr (kNorm && kLowRank) {
    return cudaErrorInvalidValue;  // see takes_low_rank
  } else {
    constexpr int kChunks = kNorm ? 4 : 8;
    return launch_skinny_mma_as<T, T, kLayout, kNorm, kGated, 2, kChunks, kNorm ? 2 : kHalves, Along::kInPasses, true, false,
                                kLowRank>(layer, stream);
  }
}

template <typename T, typename X, Layout kLayout, bool kNorm, bool kGated>
cudaError_t launch_skinny_mma(const DecodeLinear& layer, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, X>) {
    return layer.rows <= kHalfRows ? launch_skinny_mma_for<T, kLayout, kNorm, kGated, 1>(layer, stream)
                                   : launch_skinny_mma_for<T, kLayout, kNorm, kGated, 2>(layer, stream);
  } else {
    return launch_skinny_mma_as<T, X, kLayout, kNorm, kGated, 2, 4, 2, Along::kInPasses, true>(layer, stream);
  }
}

// Whether 16-byte accesses reach all that the kernels read, and rows and dtypes are among those compiled.
template <typename T>
bool suits_mma(const DecodeLinear& layer, int64_t most_rows = 2 * kHalfRows) {
  bool suits = layer.rows <= most_rows && layer.in_features > 0 && layer.in_features % kLaneValues == 0 &&
               layer.weight_stride % kLaneValues == 0 && is_aligned(layer.input.data) &&
               (layer.input.dtype == kDType<T> || (layer.input.dtype == kFloat32 && layer.norm != kNoNorm));
  suits &= std::max(layer.out_features, layer.in_features) * layer.weight_stride <= INT32_MAX;
  for (int i = 0; i < layer.weight_count; ++i) suits &= is_aligned(layer.weights[i]);
  const auto is_kept = [&](const TypedPointer& parameter) {
    return parameter.data == nullptr || parameter.dtype == kDType<T>;
  };
  for (const TypedPointer& bias : layer.biases) suits &= is_kept(bias);
  for (const TypedPointer& parameter : {layer.norm_weight, layer.norm_bias}) {
    suits &= is_kept(parameter) && is_aligned(parameter.data);
  }
  suits &= layer.output.dtype == kDType<T> || layer.output.dtype == kFloat32;
  suits &= layer.residual.data == nullptr || layer.residual.dtype == layer.output.dtype;
  suits &= !layer.weights_are_transposed || (has_one_width(layer) && !layer.gated);
  return suits && (!layer.weights_are_transposed || layer.out_features % kLaneValues == 0);
}

// Whether the kernels for more rows can take the layer: all their accesses are of 8 or 16 bytes.
template <typename T>
bool suits_many_rows(const DecodeLinear& layer) {
  bool suits = is_sm90_or_newer() && suits_mma<T>(layer, INT32_MAX) && has_one_width(layer) && layer.out_features % kLaneValues == 0 &&
               layer.input.dtype == kDType<T> && layer.output.dtype == kDType<T> && is_aligned(layer.residual.data) &&
               layer.rows * std::max(layer.in_features, layer.out_features * layer.weight_count) <= INT32_MAX;
  for (const TypedPointer& bias : layer.biases) suits &= is_aligned(bias.data);
  return suits;
}

template <typename T>
bool takes_mma(const DecodeLinear& layer) {
  return compute_capability_major() >= 8 && suits_mma<T>(layer);
}

// Whether the streaming kernel for weights [N, K] takes a layer. It takes any gated pair without a norm.
inline bool takes_streamed_nk(const DecodeLinear& layer) {
  const bool is_large = exceeds_registers(layer) || (layer.gated && layer.norm == kNoNorm);
  return !layer.weights_are_transposed && is_large && StreamedNKPlan(layer).per_multiprocessor() > 0;
}

template <typename T>
int64_t decode_linear_parts(const DecodeLinear& layer) {
  const bool has_best = layer.rows > 0 && layer.rows <= kHalfRows && layer.norm != kNoNorm && layer.weight_count == 1 &&
                        !layer.gated && layer.output.dtype == kDType<T> && takes_mma<T>(layer) && takes_streamed_nk(layer);
  return has_best ? StreamedNKPlan(layer).clusters() : 0;
}

// Whether a layer is one weight [K, N] with nothing after the product but a bias, and no norm of Gemma's.
template <typename T>
bool is_plain_of_lines(const DecodeLinear& layer) {
  return takes_mma<T>(layer) && layer.weights_are_transposed && layer.input.dtype == kDType<T> &&
         layer.weight_count == 1 && layer.activation == kIdentity && layer.norm != kGemmaRmsNorm && !layer.gated && layer.residual.data == nullptr;
}

// Whether skinny_mma takes it.
template <typename T>
bool takes_strips_of_lines(const DecodeLinear& layer) {
  return is_plain_of_lines<T>(layer) && !takes_gemv(layer) && !takes_streamed_kn(layer);
}

template <typename T>
bool emits_partials(const DecodeLinear& layer) {
  constexpr int64_t kMost = kMostColumns<T, T, 4, 4, 1>;
  return is_sm90_or_newer() && takes_strips_of_lines<T>(layer) && layer.norm == kNoNorm && layer.rows <= kHalfRows &&
         layer.in_features > kMost && layer.in_features <= kSplitK * kMost;
}

// Whether skinny_mma adds partial sums to its input.
template <typename T>
bool takes_sums_by_strips(const DecodeLinear& layer) {
  return layer.norm != kNoNorm && layer.rows <= kHalfRows && takes_strips_of_lines<T>(layer) &&
         has_widest_strips(layer) && layer.in_features <= kMostColumns<T, T, 8, 2, 1>;
}

template <typename T>
bool accepts_partials(const DecodeLinear& layer) {
  const bool is_streamed = layer.norm != kNoNorm && layer.rows <= kHalfRows && layer.input.dtype == kDType<T> &&
                           takes_mma<T>(layer) && takes_streamed_nk(layer);
  if (!is_streamed) return takes_sums_by_strips<T>(layer);
  // What launch_streamed_nk has a kernel for: each block reads whole rows.
  const StreamedNKPlan plan(layer);
  return plan.blocks == 1 && plan.stages == 3;
}

// Whether the streaming kernel takes a layer with updates: also one behind a norm whose K is too long for skinny_mma's.
template <typename T>
bool streams_low_rank(const DecodeLinear& layer) {
  constexpr int64_t kMostGated = kMostColumns<T, T, 4, 4, 1, true>, kMost = kMostColumns<T, T, 2, 4, 1, true>;
  const bool is_long = layer.norm != kNoNorm && layer.in_features > (layer.gated ? kMostGated : kMost);
  return takes_streamed_nk(layer) ||
         (is_long && !layer.weights_are_transposed && StreamedNKPlan(layer).per_multiprocessor() > 0);
}

template <typename T>
bool takes_low_rank(const DecodeLinear& layer) {
  if (!takes_mma<T>(layer) || layer.rows > DecodeLinear::kLowRankRows || layer.input.dtype != kDType<T>) return false;
  bool suits = is_aligned(layer.low_rank_a);
  int64_t ranks = 0;
  for (int i = 0; i < layer.weight_count; ++i) {
    suits &= is_aligned(layer.low_rank_b[i]) && layer.low_ranks[i] % kRankPart == 0;
    ranks += layer.low_ranks[i];
  }
  suits &= ranks > 0;
  if (streams_low_rank<T>(layer)) return suits;
  const bool has_norm = layer.norm != kNoNorm;
  const int64_t most = layer.gated ? kMostColumns<T, T, 4, 4, 1, true> : kMostColumns<T, T, 2, 4, 1, true>;
  return suits && (has_norm ? layer.in_features <= most : !layer.gated);
}

template <typename T>
cudaError_t launch_low_rank(const DecodeLinear& layer, cudaStream_t stream) {
  constexpr auto kNK = Layout::kRowMajorNK, kKN = Layout::kColMajorKN;
  const bool has_norm = layer.norm != kNoNorm;
  if (streams_low_rank<T>(layer)) return launch_streamed_nk_low_rank<T>(layer, stream);
  if (layer.weights_are_transposed) {
    return has_norm ? launch_skinny_mma_for<T, kKN, true, false, 1, true>(layer, stream)
                    : launch_skinny_mma_for<T, kKN, false, false, 1, true>(layer, stream);
  }
  if (layer.gated) return launch_skinny_mma_for<T, kNK, true, true, 1, true>(layer, stream);
  return has_norm ? launch_skinny_mma_for<T, kNK, true, false, 1, true>(layer, stream)
                  : launch_skinny_mma_for<T, kNK, false, false, 1, true>(layer, stream);
}

template <typename T>
bool launch_decode_linear_few_rows(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error) {
  if (!takes_mma<T>(layer)) return false;
  const bool is_wide = layer.input.dtype != kDType<T>, has_norm = layer.norm != kNoNorm;
  if (is_wide && layer.weights_are_transposed) return false;
  if (layer.gated && !has_norm && !takes_streamed_nk(layer)) return false;
  if (layer.weights_are_transposed && takes_gemv(layer)) {
    error = launch_gemv<T>(layer, stream);
  } else if (layer.weights_are_transposed && takes_streamed_kn(layer)) {
    error = launch_streamed_kn<T>(layer, stream);
  } else if (takes_streamed_nk(layer)) {
    error = launch_streamed_nk<T>(layer, stream);
  } else if (layer.weights_are_transposed) {
    error = has_norm ? launch_skinny_mma<T, T, Layout::kColMajorKN, true, false>(layer, stream)
                     : launch_skinny_mma<T, T, Layout::kColMajorKN, false, false>(layer, stream);
  } else if (is_wide) {  // T5 in float16 has a residual stream in float32
    error = layer.gated ? launch_skinny_mma<T, float, Layout::kRowMajorNK, true, true>(layer, stream)
                        : launch_skinny_mma<T, float, Layout::kRowMajorNK, true, false>(layer, stream);
  } else if (layer.gated) {
    error = launch_skinny_mma<T, T, Layout::kRowMajorNK, true, true>(layer, stream);
  } else {
    error = has_norm ? launch_skinny_mma<T, T, Layout::kRowMajorNK, true, false>(layer, stream)
                     : launch_skinny_mma<T, T, Layout::kRowMajorNK, false, false>(layer, stream);
  }
  return true;
}

}  // namespace fuseopt
