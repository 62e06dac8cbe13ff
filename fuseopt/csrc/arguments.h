// What the tensors of an op must be. It is declared beside the op's registration and checked before every call.
//
//   constexpr auto kArguments = arguments("op", {{"input", kFloats}, {"lengths", kIntegers}});
//   library.impl("op", TORCH_BOX((checked<op, kArguments>)));
//
// All tensors must be on the device of the first one, which must be of the library's kind. A function with more or
// fewer tensors than its declaration does not compile. The ops check shapes and layouts.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"

namespace fuseopt {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A set of dtypes, one bit each.
using Dtypes = uint64_t;

constexpr Dtypes set_of(ScalarType type) { return Dtypes{1} << static_cast<int>(type); }

constexpr Dtypes kHalves = set_of(ScalarType::Half) | set_of(ScalarType::BFloat16);
constexpr Dtypes kOnlyFloat = set_of(ScalarType::Float);
constexpr Dtypes kOnlyDouble = set_of(ScalarType::Double);
constexpr Dtypes kUpToFloat = kHalves | kOnlyFloat;
constexpr Dtypes kFloats = kUpToFloat | kOnlyDouble;
constexpr Dtypes kOnlyLong = set_of(ScalarType::Long);
constexpr Dtypes kOnlyInt = set_of(ScalarType::Int);
constexpr Dtypes kIntegers = kOnlyLong | kOnlyInt;
constexpr Dtypes kOnlyBool = set_of(ScalarType::Bool);
constexpr Dtypes kOnlyByte = set_of(ScalarType::Byte);
constexpr Dtypes kOnlyChar = set_of(ScalarType::Char);

struct NamedType {
  ScalarType type;
  const char* name;
};

constexpr NamedType kNamedTypes[] = {
    {ScalarType::BFloat16, "bfloat16"}, {ScalarType::Float, "float32"}, {ScalarType::Half, "float16"},
    {ScalarType::Long, "int64"},        {ScalarType::Int, "int32"},     {ScalarType::Byte, "uint8"},
    {ScalarType::Bool, "bool"},         {ScalarType::Double, "float64"}, {ScalarType::Char, "int8"}};

// torch's numbers of `kNamedTypes`.
inline const auto& known_numbers() {
  static const std::array<int32_t, std::size(kNamedTypes)> numbers = {
      aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float32(), aoti_torch_dtype_float16(), aoti_torch_dtype_int64(),
      aoti_torch_dtype_int32(),    aoti_torch_dtype_uint8(),   aoti_torch_dtype_bool(),    aoti_torch_dtype_float64(), aoti_torch_dtype_int8()};
  return numbers;
}

// The same as Tensor::scalar_type, which in every call asks torch for the numbers of the dtypes one by one.
inline ScalarType scalar_type_of(const Tensor& tensor) {
  int32_t number = 0;
  FUSEOPT_CHECK(aoti_torch_get_dtype(tensor.get(), &number) == TORCH_SUCCESS, "fuseopt: a tensor without a dtype");
  for (size_t i = 0; i < std::size(kNamedTypes); ++i) {
    if (known_numbers()[i] == number) return kNamedTypes[i].type;
  }
  return tensor.scalar_type();
}

struct Argument {
  const char* name;
  Dtypes dtypes;
  const char* like = nullptr;  // an argument before it, whose dtype it must have; of one that is absent, nothing follows
};

template <size_t kCount>
struct Arguments {
  const char* op;
  std::array<Argument, kCount> list;
};

template <size_t kCount>
constexpr Arguments<kCount> arguments(const char* op, const Argument (&list)[kCount]) {
  return {op, std::to_array(list)};
}

// The arguments of `first`, then those of `second`.
template <size_t kFirst, size_t kSecond>
constexpr Arguments<kFirst + kSecond> operator+(const Arguments<kFirst>& first, const Argument (&second)[kSecond]) {
  Arguments<kFirst + kSecond> both{first.op, {}};
  for (size_t i = 0; i < kFirst; ++i) both.list[i] = first.list[i];
  for (size_t i = 0; i < kSecond; ++i) both.list[kFirst + i] = second[i];
  return both;
}

inline std::string name_of(ScalarType type) {
  for (const auto& [known, name] : kNamedTypes) {
    if (known == type) return name;
  }
  return torch::headeronly::toString(type);
}

inline std::string names_of(Dtypes dtypes) {
  std::string names;
  for (const auto& [type, name] : kNamedTypes) {
    if ((dtypes & set_of(type)) != 0) names += (names.empty() ? "" : " or ") + std::string(name);
  }
  return names;
}

inline std::string kind_text(int32_t device_type) {
  if (device_type == aoti_torch_device_type_cpu()) return "cpu";
  return device_type == aoti_torch_device_type_cuda() ? "cuda" : "another kind of device";
}

struct Place {
  int32_t type;
  int32_t index;

  explicit Place(const Tensor& tensor) {
    const bool is_known = aoti_torch_get_device_type(tensor.get(), &type) == TORCH_SUCCESS &&
                          aoti_torch_get_device_index(tensor.get(), &index) == TORCH_SUCCESS;
    FUSEOPT_CHECK(is_known, "fuseopt: a tensor without a device");
  }
  std::string text() const {
    return kind_text(type) + (type == aoti_torch_device_type_cuda() ? ":" + std::to_string(index) : "");
  }
};

template <typename T>
constexpr bool kIsTensor = std::is_same_v<T, Tensor> || std::is_same_v<T, std::optional<Tensor>> ||
                           std::is_same_v<T, std::vector<Tensor>>;

// The check of one call: takes its parameters in order, and throws at the first one that differs from its declaration.
template <size_t kCount>
class ArgumentCheck {
 public:
  ArgumentCheck(const Arguments<kCount>& declared, int32_t device_type)
      : declared_(declared), device_type_(device_type) {}

  // The index of the device of all tensors.
  int32_t device() const { return first_->index; }

  template <typename T>
  void take(const T& parameter) {
    if constexpr (std::is_same_v<T, Tensor>) {
      check(parameter);
    } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
      if (parameter.has_value()) check(*parameter);
    } else if constexpr (std::is_same_v<T, std::vector<Tensor>>) {
      for (const Tensor& tensor : parameter) check(tensor);
    }
    next_ += kIsTensor<T>;
  }

 private:
  void check(const Tensor& tensor) {
    const Argument& argument = declared_.list[next_];
    const ScalarType type = scalar_type_of(tensor);
    const Place place(tensor);
    if (!first_.has_value()) first_ = place;
    Dtypes wanted = argument.dtypes;
    if (argument.like != nullptr) wanted &= dtypes_of(argument.like);
    found_[next_] = set_of(type);
    if (place.type == device_type_ && place.type == first_->type && place.index == first_->index &&
        (wanted & set_of(type)) != 0) [[likely]] {
      return;
    }
    const bool is_of_library = first_->type == device_type_;
    fail("fuseopt::", declared_.op, ": ", argument.name, " must be ", names_of(wanted), " on ",
         is_of_library ? first_->text() : kind_text(device_type_), ", not ", name_of(type), " on ", place.text());
  }

  // The dtype of the argument `name` in this call, as a set; all dtypes if it is absent.
  Dtypes dtypes_of(std::string_view name) const {
    size_t i = 0;
    while (declared_.list[i].name != name) ++i;
    return found_[i] == 0 ? ~Dtypes{0} : found_[i];
  }

  const Arguments<kCount>& declared_;
  const int32_t device_type_;
  std::array<Dtypes, kCount> found_ = {};
  size_t next_ = 0;
  std::optional<Place> first_;
};

// `Library` names the device type of its kernels. Its `Scope` makes a device, given by index, current while it lives.
template <auto function, const auto& declaration, typename Library>
struct Checked;

template <typename Result, typename... Parameters, Result (*function)(Parameters...), const auto& declaration,
          typename Library>
struct Checked<function, declaration, Library> {
  static_assert((size_t{kIsTensor<std::remove_cvref_t<Parameters>>} + ... + 0) == declaration.list.size(),
                "one declaration for each tensor of the function");

  static Result call(Parameters... parameters) {
    ArgumentCheck check(declaration, Library::device_type());
    (check.take(parameters), ...);
    const typename Library::Scope scope(check.device());
    return function(std::forward<Parameters>(parameters)...);
  }
};

}  // namespace fuseopt
