// The end of a beam search step. A block has an item. Its first warp chooses, with one candidate per lane. Then its
// threads reorder the item's beams, one column each: half of the threads the ids, the other half the ancestry. The last
// block to arrive decides whether the search goes on.
#include "cuda/common/dependent_launch.cuh"
#include "cuda/common/launchers.h"
#include "cuda/decode/select/topk_order.cuh"

namespace fuseopt::decode_beams {
namespace {

constexpr int kMaxBeams = kMaxTaken / 2;  // there are at least twice as many candidates
constexpr int kFewBeams = 4;
constexpr float kOut = -1e9f;             // transformers' penalty for a beam that is excluded

// Flags that the blocks combine by OR: each is set if it holds for any item.
enum Found : int { kImprovable = 1, kGoesOn = 2, kIsNotFull = 4 };

struct Choice {
  int sources[2 * kMaxBeams];  // rows of the flattened [2, rows]: of the running beams, then of the finished ones
  int64_t tokens[2 * kMaxBeams];
};

// The `count` best of `size` scores, one per lane, in torch.topk's order.
__device__ Taken topk(unsigned* keys, int size, int count, Taken* scratch) {
  return in_topk_order(take_highest(keys, size, count), count, scratch);
}

// Runs on the first warp. Returns the item's flags of Found.
__device__ int choose(const DecodeBeams& of, int64_t item, int64_t length, int64_t generated, bool going,
                      Choice& choice) {
  __shared__ unsigned keys[kMaxTaken + kMaxBeams];
  __shared__ Taken scratch[kMaxTaken];
  __shared__ int parents[kMaxTaken];
  __shared__ int64_t tokens[kMaxTaken];
  __shared__ bool finishes[kMaxTaken];
  const int lane = threadIdx.x % kWarpSize, beams = static_cast<int>(of.beams), candidates = of.candidates;
  const int64_t own = item * beams, rows = of.items * beams;
  const bool is_candidate = lane < candidates, is_beam = lane < beams;

  // All loads are issued before the first result is used.
  const float value = is_candidate ? of.values[item * candidates + lane] : 0.0f;
  const int64_t place = is_candidate ? of.places[item * candidates + lane] : 0, limit = *of.limit;
  // On a GPU PyTorch divides by a number by multiplying with its reciprocal, which is rounded once.
  const float inverse_penalty = static_cast<float>(__drcp_rn(of.penalties[generated]));
  const float inverse_best_penalty = static_cast<float>(__drcp_rn(of.best_penalties[generated]));
  const bool was_improvable = of.improvable[item], was_finished = !is_beam || of.is_finished[own + lane];
  const float old_score = is_beam ? of.scores[own + lane] : 0.0f;
  const int64_t old_length = is_beam ? of.lengths[own + lane] : 0;

  bool ends = true;
  if (is_candidate) {
    const int64_t token = place % of.vocabulary;
    ends = length + 1 >= limit;
    for (int64_t i = 0; i < of.eos_count; ++i) ends = ends || token == of.eos[i];
    parents[lane] = static_cast<int>(place / of.vocabulary);
    tokens[lane] = token;
    finishes[lane] = ends && is_beam;
    keys[lane] = key_of(value + (ends ? kOut : -0.0f));
  }
  const bool all_end = __all_sync(kFullWarp, ends);
  __syncwarp();
  const Taken running = topk(keys, candidates, beams, scratch);

  const bool was_full = __all_sync(kFullWarp, was_finished);
  if (is_beam) keys[lane] = key_of(old_score);
  if (is_candidate) {
    float score = __fmul_rn(value, inverse_penalty);
    if (of.stops_when_full) score += was_full ? kOut : -0.0f;
    score += was_improvable ? -0.0f : kOut;
    score += finishes[lane] ? -0.0f : kOut;
    keys[beams + lane] = key_of(score);
  }
  __syncwarp();
  const Taken kept = topk(keys, beams + candidates, beams, scratch);

  const float running_score = score_of(running.key), score = score_of(kept.key);
  const int kept_lane = is_beam && kept.place < beams ? kept.place : 0;
  const bool kept_is_finished = __shfl_sync(kFullWarp, was_finished, kept_lane);
  const int64_t kept_old_length = __shfl_sync(kFullWarp, static_cast<long long>(old_length), kept_lane);
  bool is_finished = true;
  int64_t kept_length = 0;
  if (is_beam) {
    const bool is_new = kept.place >= beams;
    const int candidate = is_new ? kept.place - beams : 0;
    is_finished = is_new ? finishes[candidate] : kept_is_finished;
    kept_length = is_new ? generated : kept_old_length;
    choice.sources[lane] = static_cast<int>(own + parents[running.place]);
    choice.tokens[lane] = tokens[running.place];
    choice.sources[beams + lane] = static_cast<int>(is_new ? own + parents[candidate] : rows + own + kept.place);
    choice.tokens[beams + lane] = is_new ? tokens[candidate] : 0;
  }
  __syncwarp();
  float worst = is_beam ? score : INFINITY;
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(kFullWarp, worst, distance);
    worst = isnan(other) || other < worst ? other : worst;
  }
  const float best = __fmul_rn(__shfl_sync(kFullWarp, running_score, 0), inverse_best_penalty);
  const bool can_improve = __any_sync(kFullWarp, is_beam && best > (is_finished ? worst : kOut));
  const bool is_full = __all_sync(kFullWarp, is_finished);
  if (is_beam) {
    of.running_scores[own + lane] = running_score;
    of.is_finished[own + lane] = is_finished;
    of.tokens[own + lane] = choice.tokens[lane];
    if (going) of.scores[own + lane] = score, of.lengths[own + lane] = kept_length;
  }
  const bool is_improvable = was_improvable && can_improve;
  if (lane == 0) of.improvable[item] = is_improvable;
  return (is_improvable ? kImprovable : 0) | (all_end ? 0 : kGoesOn) | (is_full ? 0 : kIsNotFull);
}

// Copies to every beam of the item the columns [0, end) of the row that it continues from. A thread reads its column of
// all rows before it writes one.
template <int kMostBeams, int kMovers, typename T>
__device__ void move_columns(T* data, int64_t columns, int64_t end, const DecodeBeams& of, int64_t item,
                             const Choice& choice) {
  const int beams = static_cast<int>(of.beams);
  T* const targets[2] = {data + item * beams * columns, data + (of.items + item) * beams * columns};
  for (int64_t column = threadIdx.x % kMovers; column < end; column += kMovers) {
    T values[2 * kMostBeams];
#pragma unroll
    for (int i = 0; i < 2 * kMostBeams; ++i) {
      if (i < 2 * beams) values[i] = data[choice.sources[i] * columns + column];
    }
#pragma unroll
    for (int i = 0; i < 2 * kMostBeams; ++i) {
      if (i < 2 * beams) targets[i >= beams][(i >= beams ? i - beams : i) * columns + column] = values[i];
    }
  }
}

// Threads for each of the two tables. They are fewer for many beams, because moving many rows takes many registers.
template <int kMostBeams>
constexpr int kMoversOf = kMostBeams > kFewBeams ? 128 : 256;

template <int kMostBeams>
__global__ void __launch_bounds__(2 * kMoversOf<kMostBeams>)
    decode_beams_kernel(const __grid_constant__ DecodeBeams of) {
  constexpr int kMovers = kMoversOf<kMostBeams>, kThreads = 2 * kMovers;
  __shared__ Choice choice;
  __shared__ bool is_last;
  const int64_t item = blockIdx.x;
  const int beams = static_cast<int>(of.beams);

  let_successor_start();
  wait_for_predecessor();
  const int64_t length = *of.length, generated = *of.generated + 1, slot = of.counters[0] + (of.advance ? 1 : 0);
  const bool going = of.going[std::clamp<int64_t>(length - 1, 0, of.going_count - 1)];
  int found = 0;
  if (threadIdx.x < kWarpSize) found = choose(of, item, length, generated, going, choice);
  __syncthreads();
  if (going) {
    if (threadIdx.x < kMovers) {
      move_columns<kMostBeams, kMovers>(of.ids, of.ids_columns, min(length, of.ids_columns), of, item, choice);
    } else {
      // After these slots every row is its own ancestor.
      move_columns<kMostBeams, kMovers>(of.ancestry, of.capacity, min(slot, of.capacity), of, item, choice);
    }
    const int i = threadIdx.x;
    if (i < 2 * beams && length < of.ids_columns) {
      const int64_t row = i < beams ? item * beams + i : (of.items + item) * beams + i - beams;
      of.ids[row * of.ids_columns + length] = choice.tokens[i];
    }
  }

  if (threadIdx.x == 0) {
    atomicOr(of.arrived + 1, found);
    __threadfence();
    is_last = atomicAdd(of.arrived, 1) == gridDim.x - 1;
    __threadfence();  // orders the last block's work after that of all other blocks
  }
  __syncthreads();
  if (!is_last) return;
  for (int64_t i = threadIdx.x; of.advance && i < of.items * beams + 1; i += kThreads) ++of.counters[i];
  if (threadIdx.x > 0) return;
  found = atomicExch(of.arrived + 1, 0);
  *of.arrived = 0;
  of.going[std::clamp<int64_t>(length, 0, of.going_count - 1)] =
      going && (found & kImprovable) && (found & kGoesOn) && (!of.stops_when_full || (found & kIsNotFull));
  *of.length = length + 1;
  *of.generated = generated;
}

}  // namespace

extern "C" cudaError_t fuseopt_decode_beams(DecodeBeams beams, cudaStream_t stream) {
  if (beams.items == 0) return cudaSuccess;
  const auto launch = [&](auto kernel, unsigned movers) {
    const LaunchShape shape = {static_cast<unsigned>(beams.items), 2 * movers, 0, 1};
    return launch_dependent(kernel, beams, shape, beams.pdl, stream);
  };
  if (beams.beams <= kFewBeams) return launch(decode_beams_kernel<kFewBeams>, kMoversOf<kFewBeams>);
  return launch(decode_beams_kernel<kMaxBeams>, kMoversOf<kMaxBeams>);
}

}  // namespace fuseopt::decode_beams
