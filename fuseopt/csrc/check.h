// FUSEOPT_CHECK(condition, parts...): refuses bad arguments with a std::runtime_error, which Python sees as RuntimeError.
//
// It stands in for STD_TORCH_CHECK, whose message goes through std::ostringstream. A compiler that links libstdc++
// statically gives the library stream facets beside those of the process, and formatting a number then crashes.
#pragma once

#include <concepts>
#include <stdexcept>
#include <string>

#include <torch/headeronly/core/ScalarType.h>

namespace fuseopt {

inline std::string to_text(const char* text) { return text; }
inline std::string to_text(const std::string& text) { return text; }
inline std::string to_text(std::integral auto number) { return std::to_string(number); }
inline std::string to_text(torch::headeronly::ScalarType type) { return torch::headeronly::toString(type); }

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error((to_text(parts) + ...));
}

}  // namespace fuseopt

#define FUSEOPT_CHECK(condition, ...)                            \
  do {                                                           \
    if (!(condition)) [[unlikely]] ::fuseopt::fail(__VA_ARGS__); \
  } while (false)
