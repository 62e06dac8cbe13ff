// decode_linear for 16-bit weights and 1 to 16 rows, on the tensor cores. At this size the time is latency and reading the
// weight. So a block loads its part of the weight into registers before it waits for the previous kernel, and does little
// after the wait. Each instruction runs once a block, so fetching instructions takes longer than running them: addresses
// and conditions are computed before the wait, what differs between launches is a template argument, and rare code is not
// inlined.
//
// A block computes a strip of output columns; its warps split K. Products are m16n8k16 with 16 output columns as M and 8
// input rows as N, so nothing is padded. A lane loads 16 bytes of a weight [N, K], or kTiles neighbours in each of 8 lines
// of a weight [K, N], and 8 neighbouring inputs. The order of k within a chunk is the same for both operands, so it does
// not matter; nor does the order of columns until the sums are written. A norm needs no pass of its own (row_moments.cuh).
//
// The weight loads are issued first. With one row, one warp of a block computes the outputs, and the other warps skip what
// serves only that: all warps of a multiprocessor share its instruction issue, which is the bottleneck.
#pragma once

#include "cuda/common/block_barrier.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/decode/linear/epilogue.cuh"
#include "cuda/decode/linear/input_rows.cuh"
#include "cuda/decode/linear/low_bit/packed_part.cuh"
#include "cuda/decode/linear/low_rank.cuh"
#include "cuda/decode/linear/row_moments.cuh"
#include "cuda/decode/linear/skinny_shape.cuh"
#include "cuda/decode/linear/weight_fragments.cuh"

namespace fuseopt {

constexpr int kConstantsBarrier = 1;

// kTiles: of 8 columns, in a strip; kChunks: of K, for each warp in one pass; kHalves: of 16 rows; kActivates: whether
// there may be an activation; kSums: whether the input is a sum with split-K partials; kLowRank: whether weights have
// updates; kBits: of a stored value of the weight, packed below 16.
template <typename T, typename X, Layout kLayout, bool kNorm, bool kGated, int kTiles, int kChunks, int kHalves,
          Along kAlong, bool kActivates, bool kSums, bool kLowRank, int kBits = 16>
__global__ void __launch_bounds__(kMaxLinearWarps<T, X, kTiles, kChunks, kHalves, kLowRank>* kWarpSize, 1)
    decode_linear_skinny_mma_kernel(const __grid_constant__ MmaLayer<T> layer) {
  constexpr bool kLoops = kAlong == Along::kInPasses, kShares = kAlong == Along::kTogether;
  constexpr bool kApart = kAlong == Along::kApart;
  static_assert(!(kShares || kApart) || (!kNorm && !kGated));
  static_assert(!kSums || (kNorm && kHalves == 1 && kAlong == Along::kAtOnce && std::is_same_v<T, X>));
  constexpr int kProducts = kGated ? 2 : 1;
  constexpr int kColumns = kTiles * kTileColumns, kWidth = kColumns / kProducts, kPairs = kWidth / 2;
  constexpr int kPart = kChunks * kChunk;
  constexpr bool kWide = !std::is_same_v<T, X>;  // has to be normalised before it can be multiplied
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int blocks = kShares ? cluster_size() : 1, rank = kShares ? cluster_rank() : kApart ? blockIdx.y : 0;
  const int rows = layer.rows, columns = layer.in_features, strip = blockIdx.x / blocks * kWidth;
  const int passes = kLoops ? layer.passes : 1;
  const auto first_k = [&](int pass) { return ((pass + rank) * warps + warp) * kPart; };
  const int own = lane % 4 * kLaneValues;

  // Sums of each warp [rows][summed_warps][kColumns], zeros where there is no warp; of a norm, deviations [rows][warps]
  // and sums of each warp that do not depend on the input [2][warps][kColumns]; of a cluster, the other blocks' sums
  // [blocks - 1][pairs].
  extern __shared__ __align__(16) char shared[];
  float* const sums_of = reinterpret_cast<float*>(shared);
  const int all_summed = summed_warps(warps, kSummedWarps), row_stride = all_summed * kColumns + kRowGap;
  Deviations* const deviations_of = reinterpret_cast<Deviations*>(sums_of + rows * row_stride);
  float* const constants = reinterpret_cast<float*>(deviations_of + rows * warps);
  float4* const inbox = reinterpret_cast<float4*>(sums_of + rows * row_stride);
  const auto sums_at = [&](int r, int w) { return sums_of + r * row_stride + w * kColumns; };

  let_successor_start();
  if (kLayout == Layout::kRowMajorNK && strip >= layer.widths[blockIdx.y]) return;  // weights differ in width
  std::conditional_t<kBits == 16, WeightPart<T, kLayout, kGated, kTiles, kChunks>,
                     PackedPart<T, kGated, kTiles, kChunks, kBits == 16 ? 8 : kBits>>
      weight;
  weight.load(layer, strip, first_k(0) + own);

  const bool finishes = warp * kWarpSize < layer.finishing;  // any of the block's outputs
  // What the thread finishes first: of a row, and of the one 8 rows below, a pair of columns. An output is
  // rstd * (sum - mean * slope) + offset.
  const int pairs = finished_pairs(rows, kWidth);
  using Pair = Pair<kLayout, kGated, kTiles>;
  int row = threadIdx.x / kPairs;
  const Pair pair(threadIdx.x % kPairs);
  const auto is_column = [&](int i) { return strip + pair.column + i * Pair::kNext < layer.widths[blockIdx.y]; };
  const auto own_row = [&](int h) { return min(row + h * kHalfRows, rows - 1); };
  T biases[kProducts][2];
  const auto load_biases = [&] {
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
      const T* const bias = layer.biases[kGated ? p : blockIdx.y];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        biases[p][i] = from_acc<T>(0.f);
        if (finishes && bias != nullptr && is_column(i)) biases[p][i] = bias[strip + pair.column + i * Pair::kNext];
      }
    }
  };
  if constexpr (!kLoops) load_biases();

  // Of a norm: w scaled by g, and sums of w * g and w * b as two rows of products.
  uint4 scales[kChunks], shifts[kChunks];
  float constant_sums[kTiles / 2][4] = {};
  const auto load_norm = [&](int pass, int c) {
    const int k = first_k(pass) + c * kChunk + own;
    scales[c] = shifts[c] = {};
    if (layer.norm_weight != nullptr && k < columns) scales[c] = load_once<uint4>(layer.norm_weight + k);
    if (layer.norm_bias != nullptr && lane / 4 == 1 && k < columns) shifts[c] = load_once<uint4>(layer.norm_bias + k);
  };
  if constexpr (kNorm && !kLoops) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) load_norm(0, c);
  }
  prefetch_next_weights(layer);

  const auto fold_norm = [&](int pass) {
    const unsigned ones = lane / 4 == 0 ? kOnes<T> : 0u;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if constexpr (kLoops) load_norm(pass, c);
      if (layer.norm_bias != nullptr) weight.multiply_add(constant_sums, c, shifts[c]);
      if (layer.norm_weight != nullptr) weight.scale(c, scales[c], layer.adds_one);
      if (layer.is_layer_norm) weight.multiply_add(constant_sums, c, {ones, ones, ones, ones});
    }
  };
  float slopes[kProducts][2] = {}, offsets[kProducts][2] = {};
  const auto share_constants = [&] {
    for_sums<kTiles>(constant_sums, [&](int place, int r, float sum) {
      if (r < 2) constants[(r * warps + warp) * kColumns + place] = sum;
    });
    if (!finishes) {
      arrive_at_barrier(kConstantsBarrier, blockDim.x);
      return;
    }
    wait_at_barrier(kConstantsBarrier, blockDim.x);
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
      const float* const of_pair = constants + pair.place + p * kTileColumns;
#pragma unroll 4
      for (int w = 0; w < warps; ++w) {
        const auto slope = *reinterpret_cast<const float2*>(of_pair + w * kColumns);
        const auto offset = *reinterpret_cast<const float2*>(of_pair + (warps + w) * kColumns);
        slopes[p][0] += slope.x, slopes[p][1] += slope.y, offsets[p][0] += offset.x, offsets[p][1] += offset.y;
      }
    }
  };
  const auto add_biases = [&] {
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
#pragma unroll
      for (int i = 0; i < 2; ++i) offsets[p][i] += to_float(biases[p][i]);
    }
  };
  if constexpr (!kLoops && kLayout == Layout::kColMajorKN) weight.pair_lines(columns, first_k(0) + own);
  if constexpr (!kLoops && kBits != 16) weight.expand();
  if constexpr (kNorm && !kLoops) {
    fold_norm(0);
    if (layer.is_layer_norm) share_constants();
  }
  if constexpr (!kLoops && kLayout == Layout::kRowMajorNK) weight.arrange(rows < 0 ? 1 : 0);
  if constexpr (!kLoops) add_biases();
  for (int i = threadIdx.x; i < rows * (all_summed - warps) * kColumns; i += blockDim.x) {
    const int r = i / ((all_summed - warps) * kColumns);
    sums_at(r, warps)[i - r * (all_summed - warps) * kColumns] = 0.f;
  }
  __shared__ Mailbox mailbox;
  if constexpr (kShares) {
    if (rank == 0) mailbox.open((blocks - 1) * pairs * sizeof(float4));
    arrive_relaxed_at_cluster_barrier();
  }
  // From here to the wait: addresses and conditions of what follows it. Each instruction after the wait counts.
  const X* inputs[kHalves];
  int sums_to[kHalves][2];  // of two neighbouring rows, from sums_of on
  bool takes[kHalves][kChunks], leaves[kHalves][2];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    inputs[h] = static_cast<const X*>(layer.input) + (lane / 4 + h * kHalfRows) * columns + first_k(0) + own;
    settle(inputs[h]);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      takes[h][c] = lane / 4 + h * kHalfRows < rows && first_k(0) + own + c * kChunk < columns;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane % 4 * 2 + h * kHalfRows + i;
      sums_to[h][i] = r * row_stride + warp * kColumns + lane / 4;
      leaves[h][i] = r < rows;
      settle(sums_to[h][i]);
    }
  }
  SummedInputs<T, kChunks> summed;
  if constexpr (kSums) {
    summed.find(layer, first_k(0) + own, layer.sum != nullptr && blockIdx.x == 0 && blockIdx.y == 0);
    summed.settle();
  }
  static_assert(!kLowRank || (kHalves == 1 && !kWide && !kApart && !kSums));
  BlockUpdates<T, kNorm, 1, kColumns> updates;
  const auto column_of = [&](int place) -> OutputColumn {
    const int column = strip + Pair::column_at(place), weight = kGated ? Pair::weight_at(place) : blockIdx.y;
    return {weight, column, rank == 0 && place < kColumns && column < layer.widths[weight]};
  };
  if constexpr (kLowRank) updates.load(layer, blockIdx.y * gridDim.x + blockIdx.x, column_of);
  OutputPlaces<T, kHalves> places;
  int summed_from[kHalves] = {}, deviations_from[kHalves] = {};  // from sums_of and deviations_of on
  constexpr int kLanes = kPairs < kMostWarps ? kPairs : kMostWarps;  // that share a row's deviations
  const auto find_places = [&] {
    places.find(layer, row, strip + pair.column, Pair::kNext, kApart ? rank * (rows - 1) * layer.out_features : 0);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      summed_from[h] = own_row(h) * row_stride + pair.place;
      deviations_from[h] = own_row(h) * warps + lane % kLanes;
    }
  };
  if constexpr (kLoops) {
    wait_for_predecessor();
  } else {
    if (finishes) find_places();
    places.settle();
    settle(summed_from);
    if constexpr (kNorm && !kWide) settle(deviations_from);
    wait_for_predecessor_settled(rows < 0);
  }

  Vector<X, kLaneValues> x[kHalves][kChunks];
  const auto load_inputs = [&](int pass) {
    if constexpr (kSums) {
      summed.load(reinterpret_cast<uint4(&)[kChunks]>(x[0]));
      return;
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        x[h][c] = {};
        if (kLoops ? lane / 4 + h * kHalfRows < rows && first_k(pass) + own + c * kChunk < columns : takes[h][c]) {
          x[h][c] = load_fresh(inputs[h] + pass * warps * kPart + c * kChunk);
        }
      }
    }
  };
  const float reciprocal = layer.reciprocal;
  float2 wide_norm[kHalves];
  if constexpr (kWide) {
    const auto is_there = [&](int pass, int c) { return first_k(pass) + own + c * kChunk < columns; };
    normalise_in_passes(layer, passes, x, load_inputs, is_there, deviations_of, wide_norm);
  }

  float sums[kHalves][kTiles / 2][4] = {};
  RowPowers<T> powers[kHalves];
  for (int pass = 0; pass < passes; ++pass) {
    if (kLoops && pass > 0) weight.load(layer, strip, first_k(pass) + own);
    load_inputs(pass);
    if constexpr (!kLoops) places.load_residuals();
    if constexpr (kLowRank) {
      if (pass == 0) {
        updates.fetch(layer);
        updates.leave_products(layer, kNorm, sums_at);
      }
    }
    if constexpr (kLoops) {
      weight.not_before_here();
      if constexpr (kBits != 16) weight.expand();
      if constexpr (kLayout == Layout::kColMajorKN) weight.pair_lines(columns, first_k(pass) + own);
    }
    if constexpr (kNorm && kLoops) fold_norm(pass);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if constexpr (kWide) {
          float values[kLaneValues];
#pragma unroll
          for (int i = 0; i < kLaneValues; ++i) values[i] = (x[h][c][i] - wide_norm[h].x) * wide_norm[h].y;
          uint4 words;
          store_floats_as<T>(&words, 0, values);
          weight.multiply_add(sums[h], c, words);
        } else {
          const auto& words = reinterpret_cast<const uint4&>(x[h][c]);
          weight.multiply_add(sums[h], c, words);
          if constexpr (kNorm) powers[h].add(words);
        }
      }
    }
  }
  if constexpr (kLoops) {
    load_biases();
    if constexpr (kNorm) {
      if (layer.is_layer_norm) share_constants();
    }
    add_biases();
    find_places();
    places.load_residuals();
  }

#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // as in for_sums
        if (leaves[h][i % 2]) sums_of[sums_to[h][i % 2] + (2 * j + i / 2) * kTileColumns] = sums[h][j][i];
      }
    }
    if constexpr (kNorm && !kWide) {
      const int r = lane / 4 + h * kHalfRows;
      if (RowPowers<T>::has_row() && r < rows) deviations_of[r * warps + warp] = powers[h].of_row();
    }
  }
  if constexpr (kSums) summed.leave(reinterpret_cast<const uint4(&)[kChunks]>(x[0]));
  if constexpr (kLowRank) updates.add(layer, kGated ? 0 : blockIdx.y, kGated, column_of, sums_at);
  __syncthreads();
  if constexpr (kShares) wait_at_cluster_barrier();  // the first block has started
#pragma unroll 1
  for (int first = threadIdx.x; first < layer.finishing; first += blockDim.x) {
    float products[kHalves][kProducts][2] = {};
    Deviations all[kHalves];
    if constexpr (kNorm && !kWide) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int w = 0; w < kMostWarps; w += kLanes) {
          if (lane % kLanes + w < warps) all[h].add(deviations_of[deviations_from[h] + w]);
        }
      }
    }
#pragma unroll 1
    for (int first_warp = 0; first_warp < all_summed; first_warp += kSummedWarps) {
#pragma unroll
      for (int w = 0; w < kSummedWarps; ++w) {
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const float* const part = sums_of + summed_from[h] + first_warp * kColumns;
#pragma unroll
          for (int p = 0; p < kProducts; ++p) {
            const auto two = *reinterpret_cast<const float2*>(part + w * kColumns + p * kTileColumns);
            products[h][p][0] += two.x, products[h][p][1] += two.y;
          }
        }
      }
    }
    if constexpr (kNorm && !kWide) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) all[h].template add_lanes<kLanes>();
    }
    if constexpr (kShares) {
      const auto& low = products[0][0];
      const auto& high = products[kHalves - 1][0];
      if (rank > 0) {
        if (first < pairs) mailbox.send(inbox + (rank - 1) * pairs + first, {low[0], low[1], high[0], high[1]});
        continue;
      }
      if (first >= pairs) continue;
      mailbox.wait();
      for (int b = 0; b < blocks - 1; ++b) {
        const float4 sums = inbox[b * pairs + first];
        products[0][0][0] += sums.x, products[0][0][1] += sums.y;
        if constexpr (kHalves == 2) products[1][0][0] += sums.z, products[1][0][1] += sums.w;
      }
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float2 norm = {0.f, 1.f};
      if constexpr (kNorm && !kWide) {
        const X* const input = static_cast<const X*>(layer.input) + own_row(h) * columns;
        const auto normalisation = [&](auto of_row) {
          return normalisation_of<kPairs>(all[h], of_row, columns, reciprocal, layer.is_layer_norm, layer.eps);
        };
        if constexpr (kSums) {
          norm = normalisation(SummedRow<X>{input, layer.split_k_partials + own_row(h) * columns, rows * columns});
        } else {
          norm = normalisation(StoredRow<X>{input});
        }
      }
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& product = products[h][p][i];
          if constexpr (kNorm && !kWide) product = norm.y * fmaf(-norm.x, slopes[p][i], product);
          product += offsets[p][i];
        }
      }
      if constexpr (kActivates) activate_quickly(layer.activation, products[h][0]);
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        places.store(h, i, kGated ? products[h][0][i] * products[h][kProducts - 1][i] : products[h][0][i]);
      }
    }
    if (first + blockDim.x >= layer.finishing) break;
    row += blockDim.x / kPairs;
    find_places();
    places.load_residuals();
  }
}

}  // namespace fuseopt
