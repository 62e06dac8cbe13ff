// decode_linear's kernel for float32 weights, in a file of its own for the sake of build time.
#include "cuda/decode/linear/fma.cuh"

namespace fuseopt {

template <>
bool launch_decode_linear_few_rows<float>(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error) {
  if (!suits_fma(layer)) return false;
  const FmaPlan plan = fma_plan(layer);
  if (!plan.fits()) return false;
  const bool has_norm = layer.norm != kNoNorm;
  if (layer.weights_are_transposed) {
    error = has_norm ? launch_fma<Layout::kColMajorKN, true>(layer, plan, stream)
                     : launch_fma<Layout::kColMajorKN, false>(layer, plan, stream);
  } else {
    error = has_norm ? launch_fma<Layout::kRowMajorNK, true>(layer, plan, stream)
                     : launch_fma<Layout::kRowMajorNK, false>(layer, plan, stream);
  }
  return true;
}

template <>
int64_t decode_linear_parts<float>(const DecodeLinear& layer) {
  if (layer.norm == kNoNorm || layer.weight_count > 1 || !suits_fma(layer)) return 0;
  const FmaPlan plan = fma_plan(layer);
  return plan.fits() && layer.rows <= plan.kernel_rows ? plan.blocks : 0;
}

// From twice the K of a ring on: less is in shared memory before the wait.
template <>
bool emits_partials<float>(const DecodeLinear& layer) {
  const bool is_plain = layer.weight_count == 1 && !layer.gated && layer.norm == kNoNorm &&
                        layer.activation == kIdentity && layer.residual.data == nullptr;
  if (!is_plain || !suits_fma(layer) || layer.in_features < 2 * kFmaStages * FmaShape<4>::kStageK) return false;
  DecodeLinear split = layer;
  split.is_split_k = true;
  const FmaPlan plan = fma_plan(split);
  return plan.fits() && layer.rows <= plan.kernel_rows;
}

template <>
bool accepts_partials<float>(const DecodeLinear& layer) {
  if (layer.weight_count > 1 || layer.gated || layer.norm == kNoNorm || layer.residual.data != nullptr) return false;
  if (!suits_fma(layer)) return false;
  const FmaPlan plan = fma_plan(layer);
  return plan.fits() && layer.rows <= plan.kernel_rows;
}

}  // namespace fuseopt
