// Which kernel decode_linear launches for a layer of bfloat16 or float32, and in which shape, on a device that need not
// exist.
//
// Arguments: compute capability (90), multiprocessors, shared memory of a block and of a multiprocessor in bytes, and
// whether layers are of float32.
// Reads a case a line, "K N weights N_of_others is_kn norm activation is_gated has_residual rows", and prints the launch.
#include <cstdio>
#include <cstdlib>

#include "cuda/decode/linear/decode_linear.cu"
#include "cuda/decode/linear/fma.cu"
#include "cuda/decode/linear/many_rows.cuh"
#include "cuda/decode/linear/tiles.cuh"

namespace fuseopt {

template bool launch_decode_linear_few_rows<__nv_bfloat16>(const DecodeLinear&, cudaStream_t, cudaError_t&);
template bool launch_decode_linear_many_rows<__nv_bfloat16>(const DecodeLinear&, cudaStream_t, cudaError_t&);
template bool launch_decode_linear_tiles<__nv_bfloat16>(const DecodeLinear&, cudaStream_t, cudaError_t&);
template bool launch_decode_linear_tiles<float>(const DecodeLinear&, cudaStream_t, cudaError_t&);
template cudaError_t launch_gemv<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);
template cudaError_t launch_streamed_kn<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);
template cudaError_t launch_streamed_nk<__nv_bfloat16>(const DecodeLinear&, cudaStream_t);

}  // namespace fuseopt

extern int capability, multiprocessors, block_bytes, multiprocessor_bytes;  // of fake_runtime.cpp

int main(int, char** arguments) {
  using namespace fuseopt;
  capability = std::atoi(arguments[1]), multiprocessors = std::atoi(arguments[2]);
  block_bytes = std::atoi(arguments[3]), multiprocessor_bytes = std::atoi(arguments[4]);
  const int dtype = std::atoi(arguments[5]) ? kFloat32 : kBFloat16;
  long in_features, out_features, others, rows;
  int weights, is_kn, norm, activation, is_gated, has_residual;
  void* const tensor = reinterpret_cast<void*>(uintptr_t{4096});  // aligned, and never read
  while (std::scanf("%ld %ld %d %ld %d %d %d %d %d %ld", &in_features, &out_features, &weights, &others, &is_kn, &norm,
                    &activation, &is_gated, &has_residual, &rows) == 10) {
    DecodeLinear layer = {};
    layer.input = layer.output = {tensor, dtype};
    layer.rows = rows, layer.in_features = in_features, layer.out_features = out_features;
    layer.weight_count = weights, layer.weight_dtype = dtype;
    for (int i = 0; i < weights; ++i) layer.weights[i] = tensor, layer.widths[i] = i == 0 ? out_features : others;
    layer.weights_are_transposed = is_kn, layer.weight_stride = is_kn ? out_features : in_features;
    if (has_residual) layer.residual = {tensor, dtype};
    if (norm != kNoNorm) layer.norm_weight = {tensor, dtype};
    layer.norm = norm, layer.activation = activation, layer.gated = is_gated, layer.pdl = true;
    fuseopt_decode_linear(layer, nullptr);
    std::printf("\n");
  }
}
