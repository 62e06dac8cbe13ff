#include "cuda/decode/linear/decode_linear_binding.h"

namespace fuseopt::decode_linear_partials_binding {
namespace {

constexpr const char* kLeaves = "decode_linear_partials";
constexpr const char* kTakes = "decode_linear_of_sum";
constexpr int64_t kSplitK = DecodeLinear::kSplitK;

LinearCall leaving(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, PdlGuard& guard,
                   const std::vector<Tensor>& prefetch) {
  return linear_call(kLeaves, guard, input, {weight}, as_list(bias), std::nullopt, {}, prefetch);
}

LinearCall taking(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, const NormArguments& norm,
                  PdlGuard& guard, const std::vector<Tensor>& prefetch) {
  return linear_call(kTakes, guard, input, {weight}, as_list(bias), std::nullopt, norm, prefetch);
}

bool emits_partials(Tensor input, Tensor weight, std::optional<Tensor> bias) {
  PdlGuard none(false);
  return fuseopt_emits_partials(leaving(input, weight, bias, none, {}).layer);
}

bool accepts_partials(Tensor input, Tensor weight, std::optional<Tensor> bias, std::string norm,
                   std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias) {
  PdlGuard none(false);
  return fuseopt_accepts_partials(taking(input, weight, bias, {norm, norm_weight, norm_bias}, none, {}).layer);
}

Tensor decode_linear_partials(Tensor input, Tensor weight, std::optional<Tensor> bias, bool pdl,
                             std::vector<Tensor> prefetch) {
  PdlGuard guard(pdl);
  LinearCall call = leaving(input, weight, bias, guard, prefetch);
  FUSEOPT_CHECK(fuseopt_emits_partials(call.layer), "fuseopt::", kLeaves, ": the kernel does not take such a layer");
  const auto sizes = call.output.sizes();
  std::vector<int64_t> addend_sizes(sizes.begin(), sizes.end());
  addend_sizes.insert(addend_sizes.begin(), kSplitK);
  const Tensor partials = allocate(input, addend_sizes, ScalarType::Float);
  const Launch launch(kLeaves, partials);
  call.layer.output = pointer(kLeaves, partials);
  call.layer.is_split_k = true;
  launch.check(fuseopt_decode_linear(call.layer, launch.stream()));
  return partials;
}

std::tuple<Tensor, Tensor> decode_linear_of_sum(Tensor input, Tensor partials, Tensor weight,
                                                std::optional<Tensor> bias, std::string norm,
                                                std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias,
                                                double eps, bool pdl, std::vector<Tensor> prefetch) {
  PdlGuard guard(pdl);
  LinearCall call = taking(input, weight, bias, {norm, norm_weight, norm_bias, eps}, guard, prefetch);
  add_to_input(kTakes, call, input, partials, guard);
  const Tensor sum = allocate_like(input, dtype_of(input));
  const Launch launch(kTakes, call.output);
  call.layer.sum = sum.data_ptr();
  launch.check(fuseopt_decode_linear(call.layer, launch.stream()));
  return {call.output, sum};
}

constexpr auto kLeavesAddends = arguments("emits_partials", {
    {"input", kFloats}, {"weight", kFloats}, {"bias", kFloats}});
constexpr auto kTakesAddends = arguments("accepts_partials", {
    {"input", kFloats}, {"weight", kFloats}, {"bias", kFloats}, {"norm_weight", kFloats}, {"norm_bias", kFloats}});
constexpr auto kDecodeLinearAddends = arguments("decode_linear_partials", {
    {"input", kFloats}, {"weight", kFloats}, {"bias", kFloats}, {"prefetch", kFloats}});
constexpr auto kDecodeLinearOfSum = arguments("decode_linear_of_sum", {
    {"input", kFloats}, {"split_k_partials", kOnlyFloat}, {"weight", kFloats}, {"bias", kFloats}, {"norm_weight", kFloats},
    {"norm_bias", kFloats}, {"prefetch", kFloats}});

}  // namespace
}  // namespace fuseopt::decode_linear_partials_binding

STABLE_TORCH_LIBRARY_IMPL(fuseopt, CUDA, library) {
  using namespace fuseopt::decode_linear_partials_binding;
  library.impl("emits_partials", TORCH_BOX((fuseopt::checked<emits_partials, kLeavesAddends>)));
  library.impl("accepts_partials", TORCH_BOX((fuseopt::checked<accepts_partials, kTakesAddends>)));
  library.impl("decode_linear_partials", TORCH_BOX((fuseopt::checked<decode_linear_partials, kDecodeLinearAddends>)));
  library.impl("decode_linear_of_sum", TORCH_BOX((fuseopt::checked<decode_linear_of_sum, kDecodeLinearOfSum>)));
}
