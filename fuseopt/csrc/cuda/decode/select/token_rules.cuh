// Rules that ban some tokens, or all but some, while sequences have certain lengths.
#pragma once

#include "cuda/common/launchers.h"

namespace fuseopt {

// The rules that hold at a sequence's length. A forcing rule cancels those before it.
struct RulesInForce {
  unsigned bans = 0;
  unsigned forced = 0;  // the bit of the last forcing rule, or 0

  RulesInForce() = default;
  __device__ RulesInForce(const TokenRules& rules, int64_t length) {
    for (int r = 0; r < rules.count; ++r) {
      if (length < rules.bounds[2 * r] || length >= rules.bounds[2 * r + 1]) continue;
      const unsigned rule = 1u << r;
      if (rules.forcing & rule) forced = rule, bans = 0;
      else bans |= rule;
    }
  }
  __device__ bool any() const { return (bans | forced) != 0; }
  // A token's score: as it is, 0 if it is forced, or -inf.
  __device__ float edited(float score, unsigned rules_of_token) const {
    return ban(rules_of_token) ? -INFINITY : forced != 0 ? 0.f : score;
  }
  __device__ bool ban(unsigned rules_of_token) const {
    return (rules_of_token & bans) != 0 || (forced != 0 && (rules_of_token & forced) == 0);
  }
};

}  // namespace fuseopt
