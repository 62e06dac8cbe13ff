// How the tokens of a row race, and how the first of them are checked: see decode_sample_race.cu.
#pragma once

#include <cassert>

#include "cuda/common/dependent_launch.cuh"
#include "cuda/decode/select/exponential_draw.cuh"
#include "cuda/decode/select/logits_chunk.cuh"
#include "cuda/decode/select/score_candidate.cuh"
#include "cuda/decode/select/typicality.cuh"

namespace fuseopt::decode_sample_race {
namespace {

// TUNED: so that blocks fit beside a head's: sampling without a filter at 1 row 20 -> 13 us over greedy (4b3f965).
constexpr int kThreads = 128, kWarps = kThreads / kWarpSize;
constexpr int kMostBlocks = 16, kMostEntrants = kMostBlocks * kWarps;
constexpr int kOfLane = kMostEntrants / kWarpSize;
constexpr int kMostChecked = 6, kMostPerThread = 32;

// The order in which a filter keeps tokens until what it adds up reaches the cut: descending scores with ones, or with
// weights; typicality with weights. Of equal ones kProbability keeps the last first, the others keep all.
enum class Cut { kNone, kCount, kProbability, kTypicality };

// Scores of a thread whose loads are in flight at once; registers limit them.
// TUNED: measurement not recorded (4b3f965); `fuseopt bench kernels --model gpt2 --sample` measures it again.
template <typename T, Cut kCut>
constexpr int kPerThread = sizeof(T) == sizeof(float) || kCut == Cut::kTypicality ? 16 : 32;
template <typename T, Cut kCut>
constexpr int kChunk = kThreads * kPerThread<T, kCut>;

struct Race {
  DecodeSample of;
  ScoreArithmetic<float> arithmetic;
  int chunks_of_block;
  TorchDraw draw;
};

struct Storage {
  float ratio[kMostEntrants], next[kMostEntrants], score[kMostEntrants], highest[kMostEntrants];
  unsigned token[kMostEntrants];
  double weight[kMostEntrants], moment[kMostEntrants];
  union {
    unsigned marks[2][kMostPerThread * kThreads / kWordBits];  // while scores are loaded
    double before[kMostChecked][kMostEntrants];
  };
  Candidate<float> best;
};

// The fastest token of a thread or warp, and the ratio of the second. None: a negative ratio.
struct Entrant {
  float ratio = -1, next = -1;
  int token = INT_MAX;
  float score = 0;

  __device__ void run(float its_ratio, int its_token) {
    next = fmaxf(next, fminf(its_ratio, ratio));
    if (its_ratio > ratio) ratio = its_ratio, token = its_token;
  }

  __device__ void scale(float factor) {
    if (ratio >= 0) ratio *= factor;
    if (next >= 0) next *= factor;
  }

  // Gives all lanes of the warp the fastest of theirs; returns which lane had it.
  __device__ int take_fastest() {
    const unsigned key = key_of(ratio), fastest = max_of_warp(key);
    const int first = min_of_warp(key == fastest ? token : INT_MAX);
    const bool is_own = key == fastest && token == first;
    const int lane = __ffs(__ballot_sync(kFullWarp, is_own)) - 1;
    next = score_of(max_of_warp(key_of(is_own ? next : ratio)));
    score = __shfl_sync(kFullWarp, score, lane);
    ratio = score_of(fastest), token = first;
    return lane;
  }
};

// Of the tokens of a thread or warp: the highest score, the sum of weights, which are exp(score - highest), and the sum
// of weights times their logarithm.
struct Weights {
  float highest = -INFINITY;
  double sum = 0, moment = 0;

  // Refers them to another highest score, at least as high. Returns what weights are multiplied with.
  __device__ float refer_to(float other) {
    if (highest == -INFINITY) {
      highest = other;
      return 1;
    }
    const float difference = highest - other, factor = expf(difference);
    moment = factor * (moment + sum * difference);
    sum *= factor;
    highest = other;
    return factor;
  }
};

template <typename T, Cut kCut>
struct Runner {
  static constexpr int kPerThread = decode_sample_race::kPerThread<T, kCut>, kChunk = kThreads * kPerThread;
  // Tokens at a time. A top-k may keep few: more are checked, so that fewer rounds follow. Else registers limit them.
  static constexpr int kChecked = kCut == Cut::kCount ? kMostChecked : kCut == Cut::kProbability ? 4 : 3;
  const Race& race;
  Storage& storage;
  const int64_t row;
  float* const slots;  // of this block's tokens: first their numbers, then their scores
  const int begin;     // the token of the first slot
  const int rank, entrants;  // of the block; of the row
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  Entrant own;
  Weights weights;
  Typicality typicality;
  Entrant fastest[kChecked];
  // What was found not to be kept, and all after it in the filter's order, runs no more.
  float floor = -INFINITY;
  int floor_token = -1;

  __device__ bool is_token(int token) const { return token >= 0 && token < race.of.select.vocabulary; }

  // The number of a token, by `draw` unless numbers are given.
  __device__ ExponentialDraw draw() const { return ExponentialDraw(race.of.random, race.draw); }
  __device__ float number_of(int token, const ExponentialDraw& draw) const {
    const int64_t element = row * race.of.select.vocabulary + token;
    return race.of.random == nullptr ? race.of.select.divisors[element] : draw(static_cast<unsigned>(element));
  }

  __device__ bool is_likely(float weight) const { return weight >= static_cast<float>(race.of.min_p); }

  // The place of a score in the filter's order; higher ones come first.
  __device__ float order_of(float score) const {
    return kCut == Cut::kTypicality ? typicality(score) : score;
  }

  // Numbers of a chunk's tokens. A warp reads later what it writes here.
  __device__ void draw_numbers(int chunk) {
    const ExponentialDraw draw = this->draw();
    const int first = chunk * kChunk + warp * kWarpSize * kPerThread + lane;
#pragma unroll 1
    for (int n = 0; n < kPerThread; ++n) {
      const int slot = first + n * kWarpSize;
      slots[slot] = is_token(begin + slot) ? number_of(begin + slot, draw) : 1;
    }
  }
  __device__ void load_numbers(int chunk) {
    // TUNED: in flight; measurement not recorded (4b3f965); `fuseopt bench kernels --model gpt2 --sample` measures it again.
    constexpr int kLoads = 8;
    const float* const divisors = race.of.select.divisors + row * race.of.select.vocabulary;
    const int first = chunk * kChunk + warp * kWarpSize * kPerThread + lane;
#pragma unroll 1
    for (int n = 0; n < kPerThread; n += kLoads) {
      float numbers[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int slot = first + (n + i) * kWarpSize;
        numbers[i] = is_token(begin + slot) ? divisors[begin + slot] : 1;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) slots[first + (n + i) * kWarpSize] = numbers[i];
    }
  }

  // Edits scores, puts them into the place of their numbers, and lets them run.
  __device__ void load_and_run(int first_chunk) {
    using Chunk = LogitsChunk<T, kThreads, kPerThread>;
    constexpr int kWidth = Chunk::kWidth;
    const DecodeSelect& select = race.of.select;
    bool is_valid = true;
#pragma unroll 1
    for (int c = 0; c < race.chunks_of_block; ++c) {
      Chunk chunk(select.scores, row, first_chunk + c, select.vocabulary);
      ChunkMarks marks;
      if (select.has_edits) {
        if (c > 0) __syncthreads();
        marks = chunk.mark(select.edits, row, storage.marks[0], storage.marks[1]);
      }
      if (c == 0) wait_for_predecessor();
      chunk.load();
      if (select.divisors != nullptr) load_numbers(c);
      __syncwarp();
      chunk.for_each_vector([&](int place, const auto& vector) {
        const int token = chunk.token_at(place);
        auto& at = *reinterpret_cast<Vector<float, kWidth>*>(slots + c * kChunk + place);
        const Vector<float, kWidth> numbers = at;
        Vector<float, kWidth> scores;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) scores.values[j] = vector[j];
        if (select.has_edits) marks.edit(place, race.arithmetic, scores.values);
        float highest = weights.highest;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          float& score = scores.values[j];
          score = is_token(token + j) ? score + 0.f : -INFINITY;  // 0 and -0 are equal
          is_valid = is_valid && score < INFINITY;
          highest = fmaxf(highest, score);
        }
        at = scores;
        if (highest == -INFINITY) return;
        if (highest > weights.highest) own.scale(weights.refer_to(highest));
        float sum = 0, moment = 0;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float score = scores.values[j], difference = score - highest, weight = expf(difference);
          const bool runs = score > -INFINITY && is_likely(weight);
          own.run(runs ? __fdividef(weight, numbers.values[j]) : -1, token + j);
          sum += weight;
          if (kCut == Cut::kTypicality) moment = fmaf(weight, fmaxf(difference, -FLT_MAX), moment);
        }
        weights.sum += sum;
        if (kCut == Cut::kTypicality) weights.moment += moment;
      });
    }
    assert(is_valid && "probability is inf, nan or negative");
    const float highest = warp_reduce<Max>(weights.highest);
    own.scale(weights.refer_to(highest));
    double sums[2] = {weights.sum, weights.moment};
    warp_reduce<Sum>(sums);
    weights.sum = sums[0], weights.moment = sums[1];
  }

  __device__ bool is_excluded(float order, int token) const {
    return order < floor || (order == floor && (kCut != Cut::kProbability || token <= floor_token));
  }

  // Those that are not excluded run again.
  __device__ void run_again() {
    own = {};
    const ExponentialDraw draw = this->draw();
    static_assert(kPerThread <= kWordBits);
#pragma unroll 1
    for (int c = 0; c < race.chunks_of_block; ++c) {
      const float* const scores = slots + c * kChunk;
      const auto token_of = [&](int i) { return begin + c * kChunk + i * kThreads + static_cast<int>(threadIdx.x); };
      // Mostly few are left, and their numbers take long.
      unsigned left = 0;
#pragma unroll 4
      for (int i = 0; i < kPerThread; ++i) {
        const float score = scores[i * kThreads + threadIdx.x];
        if (score > -INFINITY && !is_excluded(order_of(score), token_of(i))) left |= 1u << i;
      }
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int i = __ffs(left) - 1;
        const float score = scores[i * kThreads + threadIdx.x], weight = expf(score - weights.highest);
        if (is_likely(weight)) own.run(__fdividef(weight, number_of(token_of(i), draw)), token_of(i));
      }
    }
  }

  // Sends the warp's fastest token and its weights to all blocks, then finds the row's fastest ones and weights.
  __device__ void compare(bool is_first) {
    __syncwarp();  // scores of other lanes
    own.take_fastest();
    const float score = own.ratio < 0 ? 0 : slots[own.token - begin];
    const int place = rank * kWarps + warp;
    if (lane < entrants / kWarps) {
      store_to_block(&storage.ratio[place], lane, own.ratio);
      store_to_block(&storage.next[place], lane, own.next);
      store_to_block(&storage.score[place], lane, score);
      store_to_block(&storage.token[place], lane, static_cast<unsigned>(own.token));
      if (is_first) {
        store_to_block(&storage.highest[place], lane, weights.highest);
        store_to_block(&storage.weight[place], lane, weights.sum);
        if (kCut == Cut::kTypicality) store_to_block(&storage.moment[place], lane, weights.moment);
      }
    }
    cluster_barrier();
    Entrant of_lane[kOfLane];
    Weights of_entrants[kOfLane];
    float highest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int at = lane + i * kWarpSize;
      if (at >= entrants) continue;
      of_lane[i].ratio = storage.ratio[at], of_lane[i].next = storage.next[at];
      of_lane[i].score = storage.score[at], of_lane[i].token = static_cast<int>(storage.token[at]);
      if (!is_first) continue;
      of_entrants[i].highest = storage.highest[at], of_entrants[i].sum = storage.weight[at];
      if (kCut == Cut::kTypicality) of_entrants[i].moment = storage.moment[at];
      highest = fmaxf(highest, of_entrants[i].highest);
    }
    if (is_first) {
      weights.highest = warp_reduce<Max>(highest);
      assert(weights.highest > -INFINITY && "probability is inf, nan or negative");
      double sums[2] = {};
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        of_lane[i].scale(of_entrants[i].refer_to(weights.highest));
        sums[0] += of_entrants[i].sum, sums[1] += of_entrants[i].moment;
      }
      if (kCut != Cut::kNone) warp_reduce<Sum>(sums);
      weights.sum = sums[0];
      if (kCut == Cut::kTypicality) typicality = Typicality(weights.highest, sums);
    }
#pragma unroll
    for (Entrant& taken : fastest) {
      int which = 0;
#pragma unroll
      for (int i = 1; i < kOfLane; ++i) {
        const Entrant &best = of_lane[which], &other = of_lane[i];
        if (other.ratio > best.ratio || (other.ratio == best.ratio && other.token < best.token)) which = i;
      }
      taken = of_lane[0];
#pragma unroll
      for (int i = 1; i < kOfLane; ++i) {
        if (which == i) taken = of_lane[i];
      }
      const float next = taken.next;
      const int from = taken.take_fastest();
      taken.next = __shfl_sync(kFullWarp, next, from);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        if (lane == from && which == i) of_lane[i] = {};
      }
    }
  }

  // What comes before each of the fastest in the filter's order, of all blocks.
  __device__ void add_up_before(double (&before)[kChecked]) {
    constexpr int kWidth = kVectorWidth<float>;
    float orders[kChecked];
#pragma unroll
    for (int f = 0; f < kChecked; ++f) orders[f] = order_of(fastest[f].score), before[f] = 0;
#pragma unroll 1
    for (int i = threadIdx.x * kWidth; i < race.chunks_of_block * kChunk; i += kThreads * kWidth) {
      const auto scores = *reinterpret_cast<const Vector<float, kWidth>*>(slots + i);
      float sums[kChecked] = {};
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float score = scores.values[j], order = order_of(score);
        const float weight = kCut == Cut::kCount ? 1 : expf(score - weights.highest);
#pragma unroll
        for (int f = 0; f < kChecked; ++f) {
          const bool is_later_equal =
              kCut == Cut::kProbability && order == orders[f] && begin + i + j > fastest[f].token;
          if (order > orders[f] || is_later_equal) sums[f] += weight;
        }
      }
#pragma unroll
      for (int f = 0; f < kChecked; ++f) before[f] += sums[f];
    }
    warp_reduce<Sum>(before);
    const int place = rank * kWarps + warp;
    if (lane < entrants / kWarps) {
#pragma unroll
      for (int f = 0; f < kChecked; ++f) store_to_block(&storage.before[f][place], lane, before[f]);
    }
    cluster_barrier();
#pragma unroll
    for (int f = 0; f < kChecked; ++f) {
      before[f] = 0;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        if (lane + i * kWarpSize < entrants) before[f] += storage.before[f][lane + i * kWarpSize];
      }
    }
    warp_reduce<Sum>(before);
  }

  // What weights before a token add up to at least, if the filter does not keep it.
  __device__ double cut() const {
    const DecodeSample& of = race.of;
    if constexpr (kCut == Cut::kCount) return static_cast<double>(of.top_k);
    // Upstream removes what has a cumulative probability of at most 1 - top_p, from the lowest score on.
    double share = static_cast<float>(of.typical_p);
    if constexpr (kCut == Cut::kProbability) share = 1 - static_cast<double>(static_cast<float>(1 - of.top_p));
    return share * weights.sum;
  }

  // Whether the fastest token that is kept is known: then `winner` is it.
  __device__ bool decide(Entrant& winner) {
    double before[kChecked] = {};
    if constexpr (kCut != Cut::kNone) add_up_before(before);
    float next = -1;  // of what is not kept, the ratio of some token behind it
#pragma unroll
    for (int f = 0; f < kChecked; ++f) {
      const Entrant& token = fastest[f];
      if (token.ratio < 0) return false;
      const bool is_before_cut = before[f] == 0 || before[f] < cut();
      if (is_before_cut && is_likely(expf(token.score - weights.highest))) {
        winner = token;
        return token.ratio > next;
      }
      next = fmaxf(next, token.next);
      const float order = order_of(token.score);
      if (!is_excluded(order, token.token)) floor = order, floor_token = token.token;
    }
    return false;
  }
};

}  // namespace
}  // namespace fuseopt::decode_sample_race
