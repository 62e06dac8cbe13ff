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
    error = has_norm ? launch_fma<Layout::kColMajorKN, FmaInput::kNormalised>(layer, plan, stream)
                     : launch_fma<Layout::kColMajorKN, FmaInput::kStored>(layer, plan, stream);
  } else {
    error = has_norm ? launch_fma<Layout::kRowMajorNK, FmaInput::kNormalised>(layer, plan, stream)
                     : launch_fma<Layout::kRowMajorNK, FmaInput::kStored>(layer, plan, stream);
  }
  return true;
}

bool takes_softmax_fma(const DecodeLinear& layer, int64_t groups) {
  return layer.weights_are_transposed && layer.in_features == groups * kSoftmaxGroup && takes_fma(layer);
}

cudaError_t launch_softmax_fma(const DecodeLinear& layer, cudaStream_t stream) {
  return launch_fma<Layout::kColMajorKN, FmaInput::kSoftmax>(layer, fma_plan(layer), stream);
}

template <>
int64_t decode_linear_parts<float>(const DecodeLinear& layer) {
  if (layer.norm == kNoNorm || layer.weight_count > 1 || !suits_fma(layer)) return 0;
  const FmaPlan plan = fma_plan(layer);
  return plan.fits() && layer.rows <= plan.kernel_rows ? plan.blocks : 0;
}

}  // namespace fuseopt
