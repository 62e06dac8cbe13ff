#include "cuda/decode/linear/decode_linear_binding.h"

namespace fuseopt::decode_linear_addends_binding {
namespace {

constexpr const char* kLeaves = "decode_linear_addends";
constexpr const char* kTakes = "decode_linear_of_sum";
constexpr int64_t kAddends = DecodeLinear::kAddends;

LinearCall leaving(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, Overlap& overlap,
                   const std::vector<Tensor>& ahead) {
  return linear_call(kLeaves, input, {weight}, as_list(bias), std::nullopt, "", std::nullopt, std::nullopt, 0, "", false,
                     overlap, ahead);
}

LinearCall taking(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const std::string& norm,
                  const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias, double eps,
                  Overlap& overlap, const std::vector<Tensor>& ahead) {
  return linear_call(kTakes, input, {weight}, as_list(bias), std::nullopt, norm, norm_weight, norm_bias, eps, "", false,
                     overlap, ahead);
}

bool leaves_addends(Tensor input, Tensor weight, std::optional<Tensor> bias) {
  Overlap none(false);
  return fuseopt_leaves_addends(leaving(input, weight, bias, none, {}).layer);
}

bool takes_addends(Tensor input, Tensor weight, std::optional<Tensor> bias, std::string norm,
                   std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias) {
  Overlap none(false);
  return fuseopt_takes_addends(taking(input, weight, bias, norm, norm_weight, norm_bias, 0, none, {}).layer);
}

Tensor decode_linear_addends(Tensor input, Tensor weight, std::optional<Tensor> bias, bool overlap,
                             std::vector<Tensor> ahead) {
  Overlap overlapping(overlap);
  LinearCall call = leaving(input, weight, bias, overlapping, ahead);
  FUSEOPT_CHECK(fuseopt_leaves_addends(call.layer), "fuseopt::", kLeaves, ": the kernel does not take such a layer");
  const auto sizes = call.output.sizes();
  std::vector<int64_t> addend_sizes(sizes.begin(), sizes.end());
  addend_sizes.insert(addend_sizes.begin(), kAddends);
  const Tensor addends = allocate(input, addend_sizes, ScalarType::Float);
  const Launch launch(kLeaves, addends);
  call.layer.output = pointer(kLeaves, addends);
  call.layer.is_apart = true;
  launch.check(fuseopt_decode_linear(call.layer, launch.stream()));
  return addends;
}

std::tuple<Tensor, Tensor> decode_linear_of_sum(Tensor input, Tensor addends, Tensor weight,
                                                std::optional<Tensor> bias, std::string norm,
                                                std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias,
                                                double eps, bool overlap, std::vector<Tensor> ahead) {
  Overlap overlapping(overlap);
  LinearCall call = taking(input, weight, bias, norm, norm_weight, norm_bias, eps, overlapping, ahead);
  add_to_input(kTakes, call, input, addends, overlapping);
  const Tensor sum = allocate_like(input, dtype_of(input));
  const Launch launch(kTakes, call.output);
  call.layer.sum = sum.data_ptr();
  launch.check(fuseopt_decode_linear(call.layer, launch.stream()));
  return {call.output, sum};
}

constexpr auto kLeavesAddends = arguments("leaves_addends", {
    {"input", kFloats}, {"weight", kFloats}, {"bias", kFloats}});
constexpr auto kTakesAddends = arguments("takes_addends", {
    {"input", kFloats}, {"weight", kFloats}, {"bias", kFloats}, {"norm_weight", kFloats}, {"norm_bias", kFloats}});
constexpr auto kDecodeLinearAddends = arguments("decode_linear_addends", {
    {"input", kFloats}, {"weight", kFloats}, {"bias", kFloats}, {"ahead", kFloats}});
constexpr auto kDecodeLinearOfSum = arguments("decode_linear_of_sum", {
    {"input", kFloats}, {"addends", kOnlyFloat}, {"weight", kFloats}, {"bias", kFloats}, {"norm_weight", kFloats},
    {"norm_bias", kFloats}, {"ahead", kFloats}});

}  // namespace
}  // namespace fuseopt::decode_linear_addends_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_linear_addends_binding;
  library.impl("leaves_addends", TORCH_BOX((fuseopt::checked<leaves_addends, kLeavesAddends>)));
  library.impl("takes_addends", TORCH_BOX((fuseopt::checked<takes_addends, kTakesAddends>)));
  library.impl("decode_linear_addends", TORCH_BOX((fuseopt::checked<decode_linear_addends, kDecodeLinearAddends>)));
  library.impl("decode_linear_of_sum", TORCH_BOX((fuseopt::checked<decode_linear_of_sum, kDecodeLinearOfSum>)));
}
