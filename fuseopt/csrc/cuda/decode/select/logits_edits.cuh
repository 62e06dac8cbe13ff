// What transformers' logits processors do to a row of scores: which tokens are penalised or banned, and the arithmetic.
//
// A window of n ids bans its last id if its first n - 1 ids equal the last n - 1 ids of the sequence so far. With
// windows of the sequence that is NoRepeatNGramLogitsProcessor, with windows of the encoder's ids
// EncoderNoRepeatNGramLogitsProcessor. Ids outside the vocabulary are ignored. A score that nothing applies to stays
// bitwise the same.
#pragma once

#include "cuda/decode/select/token_rules.cuh"
#include "cuda/common/vector.cuh"

namespace fuseopt {

constexpr int kWordBits = 32;

// On a GPU torch divides by a number by multiplying with its reciprocal, which is rounded once from float64.
template <typename Score>
struct ScoreArithmetic {
  using Acc = std::conditional_t<std::is_same_v<Score, double>, double, float>;
  Acc penalty;
  Acc inverse_penalty;
  Acc inverse_temperature;

  explicit ScoreArithmetic(const LogitsEdits& edits)
      : penalty(static_cast<Acc>(edits.repetition_penalty)),
        inverse_penalty(static_cast<Acc>(1 / edits.repetition_penalty)),
        inverse_temperature(static_cast<Acc>(1 / edits.temperature)) {}

  static __device__ Acc widen(Score x) {
    if constexpr (std::is_same_v<Score, double>) return x;
    else return to_float(x);
  }
  __device__ Score penalised(Score score) const {
    const Acc x = widen(score);
    return from_acc<Score>(x < 0 ? x * penalty : x * inverse_penalty);
  }
  __device__ Score tempered(Score score) const { return from_acc<Score>(widen(score) * inverse_temperature); }
  static __device__ Score banned() { return from_acc<Score>(-static_cast<Acc>(INFINITY)); }
};

// The ids of the sequences at their current length.
__device__ inline TokenIds sequences(const LogitsEdits& edits) {
  TokenIds ids = edits.input_ids;
  if (edits.length != nullptr) ids.length = max(int64_t{0}, min(ids.length, *edits.length));
  return ids;
}

// Calls ban(token) for the last id of every window of `window_row` whose first n - 1 ids are the last ones of row `row`
// of `prefixes`. A thread loads the first two ids of kWindows windows at a time; few windows need more than that.
template <typename Id, int kWindows, typename Ban>
__device__ void for_each_continuation(const TokenIds& windows, int64_t window_row, const TokenIds& prefixes,
                                      int64_t row, int64_t n, int64_t first, int64_t step, Ban ban) {
  const int64_t count = windows.length - n + 1;
  if (n == 0 || count <= 0 || prefixes.length < n - 1) return;
  const Id* const ids = static_cast<const Id*>(windows.data) + window_row * windows.row_stride;
  const Id* const suffix = static_cast<const Id*>(prefixes.data) + row * prefixes.row_stride +
                           (prefixes.length - (n - 1)) * prefixes.column_stride;
  // `alike`: how many of the window's first ids are known to be equal.
  const auto look_at = [&](int64_t window, int64_t alike) {
    int64_t i = alike;
    while (i < n - 1 && ids[(window + i) * windows.column_stride] == suffix[i * prefixes.column_stride]) ++i;
    if (i == n - 1) ban(ids[(window + n - 1) * windows.column_stride]);
  };
  if constexpr (kWindows > 1) {
    for (; n > 1 && first < count; first += kWindows * step) {
      const Id head = suffix[0], next = suffix[n > 2 ? prefixes.column_stride : 0];
      Id heads[kWindows], nexts[kWindows];
#pragma unroll
      for (int k = 0; k < kWindows; ++k) {
        const Id* const window = ids + min(first + k * step, count - 1) * windows.column_stride;
        heads[k] = window[0];
        nexts[k] = window[windows.column_stride];
      }
#pragma unroll
      for (int k = 0; k < kWindows; ++k) {
        const bool is_alike = first + k * step < count && heads[k] == head && (n == 2 || nexts[k] == next);
        if (is_alike) look_at(first + k * step, min(n - 1, int64_t{2}));
      }
    }
  }
  for (; first < count; first += step) look_at(first, 0);
}

template <typename Id, int kWindows = 1, typename Ban>
__device__ void for_each_banned(const LogitsEdits& edits, const TokenIds& ids, int64_t row, int64_t first, int64_t step,
                                Ban ban) {
  for_each_continuation<Id, kWindows>(ids, row, ids, row, edits.ngram_size, first, step, ban);
  for_each_continuation<Id, kWindows>(edits.encoder_input_ids, row / edits.rows_per_encoder_row, ids, row,
                                      edits.encoder_ngram_size, first, step, ban);
  for (int64_t i = first; i < edits.suppressed_count; i += step) ban(edits.suppressed[i]);
}

// Calls visit(token) for the ids of a row that count for the penalty.
template <typename Id, typename Visit>
__device__ void for_each_id(const LogitsEdits& edits, const TokenIds& ids, int64_t row, int64_t first, int64_t step,
                            Visit visit) {
  const Id* const row_ids = static_cast<const Id*>(ids.data) + row * ids.row_stride;
  const int64_t begin = edits.penalty_begin == nullptr ? 0 : edits.penalty_begin[row];
  for (int64_t i = first; i < ids.length; i += step) {
    if (i >= begin) visit(row_ids[i * ids.column_stride]);
  }
}

__device__ inline bool set_bit(unsigned* bits, int64_t i) {
  const unsigned bit = 1u << (i % kWordBits);
  return (atomicOr(bits + i / kWordBits, bit) & bit) == 0;
}

// Run by a block. Marks which of a row's tokens [begin, end) are penalised or banned, as bits in shared memory that
// count from `origin`; they can be read once all threads have returned. Returns whether a rule forces, so that every
// token that is not banned scores 0.
template <typename Id>
__device__ bool mark_tokens(const LogitsEdits& edits, int64_t row, int64_t begin, int64_t end, int64_t origin,
                            unsigned* penalised, unsigned* banned) {
  const TokenIds ids = sequences(edits);
  const RulesInForce rules(edits.rules, ids.length);
  const int threads = blockDim.x, words = static_cast<int>((end - origin + kWordBits - 1) / kWordBits);
  for (int i = threadIdx.x; i < words; i += threads) penalised[i] = banned[i] = 0;
  __syncthreads();
  if (rules.any()) {
    for (int i = threadIdx.x; i < words * kWordBits; i += threads) {
      const int64_t token = origin + i;
      const bool is_banned = token >= begin && token < end && rules.ban(edits.rules.of_tokens[token]);
      const unsigned word = __ballot_sync(kFullWarp, is_banned);
      if (i % kWordBits == 0 && word != 0) atomicOr(banned + i / kWordBits, word);
    }
  }
  if (rules.forced == 0) {
    if (edits.repetition_penalty != 1) {
      for_each_id<Id>(edits, ids, row, threadIdx.x, threads, [&](int64_t token) {
        if (token >= begin && token < end) set_bit(penalised, token - origin);
      });
    }
    for_each_banned<Id>(edits, ids, row, threadIdx.x, threads, [&](int64_t token) {
      if (token >= begin && token < end) set_bit(banned, token - origin);
    });
  }
  __syncthreads();
  return rules.forced != 0;
}

// `kCount` neighbouring bits, which share a word.
template <int kCount>
__device__ unsigned marks(const unsigned* bits, int64_t i) {
  return bits[i / kWordBits] >> (i % kWordBits) & ((1u << kCount) - 1);
}

}  // namespace fuseopt
