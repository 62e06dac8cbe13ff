// decode_linear for 16-bit weights and 17 to 256 rows. The time is still latency, not arithmetic, so the means are those of
// skinny_mma.cuh: a block loads a strip of the weight into registers and computes addresses and conditions before it waits
// for the previous kernel, then loads all rows of its tile at once. Other blocks compute other tiles of rows, with the
// weight in the L2 cache. Warps split K; a long K is also split over a cluster, whose blocks exchange sums through shared
// memory.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/decode/linear/dispatch.cuh"
#include "cuda/decode/linear/epilogue.cuh"
#include "cuda/decode/linear/input_rows.cuh"
#include "cuda/decode/linear/row_moments.cuh"

namespace fuseopt {

// TUNED: T5-base with 32 rows: 362 us of kernels a step in place of 407 (7bb6df7); the first three numbers: d87323f.
constexpr int kManyRowsWarps = 16;
constexpr int kManyRowsChunks = 3;  // of K, for each warp: 768 values take 8 warps
constexpr int kManyRowsTiles = 4;   // of 8 columns, in a block's strip
constexpr int kMostRowGroups = 4;   // of 8 rows, in a block's tile
constexpr int kGroupsTogether = 2;  // whose products take turns
constexpr int kManyRowsStride = kManyRowsTiles * kTileColumns + 4;  // of rows of sums, in banks of their own
// Of shared memory, in floats, for a warp's part of a group of rows, and its sums in the same place after that.
constexpr int kGroupSize = kManyRowsChunks * kWarpSize * kAccessBytes / static_cast<int>(sizeof(float));
static_assert(kHalfRows * kManyRowsStride <= kGroupSize);
constexpr int kWarpsSummed = 4;  // at a time

// Whether rows are copied to shared memory. With a weight [N, K] the compiler would otherwise load a few at a time, as it
// lacks registers; with one [K, N] loads to registers are faster.
template <Layout kLayout>
constexpr bool kCopiesRows = kLayout == Layout::kRowMajorNK;

template <typename T>
struct ManyRowsLayer {
  MmaLayer<T> layer;
  int parts;  // of K, a power of two: the blocks of a cluster
};

template <typename T, Layout kLayout, bool kNorm, bool kGated, int kGroups>
__global__ void __launch_bounds__(kManyRowsWarps* kWarpSize)
    decode_linear_many_rows_kernel(const __grid_constant__ ManyRowsLayer<T> argument) {
  constexpr int kTiles = kManyRowsTiles, kChunks = kManyRowsChunks, kPart = kChunks * kChunk;
  constexpr int kProducts = kGated ? 2 : 1, kColumns = kTiles * kTileColumns, kWidth = kColumns / kProducts;
  constexpr int kTileRows = kGroups * kHalfRows, kQuads = kWidth / kQuad;
  constexpr int kTogether = kGroups < kGroupsTogether ? kGroups : kGroupsTogether;
  const MmaLayer<T>& layer = argument.layer;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int parts = kNorm ? 1 : argument.parts, part = blockIdx.x % parts, strip = blockIdx.x / parts * kWidth;
  const int columns = layer.in_features, first_row = blockIdx.z * kTileRows, rows = min(layer.rows - first_row, kTileRows);
  const int first_k = (part * warps + warp) * kPart + lane % 4 * kLaneValues;
  const int share = kTileRows / parts;  // of a tile's rows, that each block of a cluster finishes

  // Rows and then sums of each warp, zeros where there is no warp [summed][kGroups][kGroupSize]; of each column what it
  // has been given by the norm and by the bias [2][kColumns]; of a norm, sums of each warp's part of the rows and of their
  // squares [warps][kTileRows]; of a cluster, the other blocks' sums for the rows that this one finishes [parts - 1]
  // [share][kColumns], and the mailbox that they come by.
  extern __shared__ __align__(16) char shared[];
  float* const sums_of = reinterpret_cast<float*>(shared);
  const int summed = summed_warps(warps, kWarpsSummed);
  // A product is rstd * (sum - mean * slope) + offset.
  float *const slopes = sums_of + summed * kGroups * kGroupSize, *const offsets = slopes + kColumns;
  float* const received = offsets + kColumns;
  Deviations* const deviations_of = reinterpret_cast<Deviations*>(received);
  Mailbox& mailbox = *reinterpret_cast<Mailbox*>(received + (parts - 1) * share * kColumns);

  let_successor_start();
  WeightPart<T, kLayout, kGated, kTiles, kChunks, true> weight;
  weight.load(layer, strip, first_k);
  if (blockIdx.z == 0) prefetch_next_weights(layer);
  if (parts > 1) {
    mailbox.open((parts - 1) * share * kColumns * sizeof(float));
    arrive_relaxed_at_cluster_barrier();
  }

  // Four neighbouring outputs of a row are finished by one thread, always of the same columns. In a cluster the rows of
  // other blocks come first, whose sums they wait for.
  const int quad = threadIdx.x % kQuads, column = strip + quad * kQuad;
  const auto row_of = [&](int i) { return (i / kQuads + (part + 1) * share) % kTileRows; };
  int row = row_of(threadIdx.x);

  // Where the lane puts its sums of a group's rows: of two rows, kTiles neighbouring columns each.
  int sums_to = warp * kGroups * kGroupSize + lane % 4 * 2 * kManyRowsStride + lane / 4 * kTiles;
  const auto store_sums = [&](const float(&sums)[kTiles / 2][4], int group) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Vector<float, kTiles> line;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) line.values[t] = sums[t / 2][t % 2 * 2 + i];
      *reinterpret_cast<Vector<float, kTiles>*>(sums_of + sums_to + group * kGroupSize + i * kManyRowsStride) = line;
    }
  };

  const unsigned zero = layer.rows < 0 ? 1 : 0;  // opaque to ptxas
  if constexpr (kLayout == Layout::kColMajorKN) weight.pair_lines(columns, first_k);
  else weight.arrange(zero);
  if constexpr (kNorm) {
    // As in skinny_mma.cuh: sums of w * g and w * b as two rows of products, and w scaled by g.
    const unsigned ones = lane / 4 == 0 ? kOnes<T> : 0u;
    float constant_sums[kTiles / 2][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int k = first_k + c * kChunk;
      if (layer.norm_bias != nullptr) {
        uint4 shift = {};
        if (lane / 4 == 1 && k < columns) shift = load_once<uint4>(layer.norm_bias + k);
        weight.multiply_add(constant_sums, c, shift);
      }
      if (layer.norm_weight != nullptr && k < columns) weight.scale(c, load_once<uint4>(layer.norm_weight + k), layer.adds_one);
      if (layer.is_layer_norm) weight.multiply_add(constant_sums, c, {ones, ones, ones, ones});
    }
    if (layer.is_layer_norm) {
      store_sums(constant_sums, 0);
      __syncthreads();
    }
  }
  for (int i = threadIdx.x; i < kColumns; i += blockDim.x) {
    const int weight_column = strip + i / kProducts;
    const T* const biases = layer.biases[kGated ? i % kProducts : blockIdx.y];
    float slope = 0.f, offset = 0.f;
    if (biases != nullptr && weight_column < layer.out_features) offset = to_float(biases[weight_column]);
#pragma unroll 4
    for (int w = 0; w < (kNorm && layer.is_layer_norm ? warps : 0); ++w) {
      const float* const of_warp = sums_of + w * kGroups * kGroupSize + i;
      slope += of_warp[0], offset += of_warp[kManyRowsStride];
    }
    slopes[i] = slope, offsets[i] = offset;
  }
  if (kNorm && layer.is_layer_norm) __syncthreads();
  for (int i = threadIdx.x; i < (summed - warps) * kGroups * kGroupSize; i += blockDim.x) {
    sums_of[warps * kGroups * kGroupSize + i] = 0.f;
  }

  // From here to the wait: addresses and conditions of what follows it. Each instruction after the wait counts.
  const T* input = static_cast<const T*>(layer.input) + static_cast<int64_t>(first_row) * columns + first_k;
  int copy_to = warp * kGroups * kGroupSize + lane * (kGroupSize / kChunks / kWarpSize);
  const auto copy_of = [&](int g, int c) {  // what the lane reads itself
    return reinterpret_cast<uint4*>(sums_of + copy_to + (g * kChunks + c) * (kGroupSize / kChunks));
  };
  int offsets_of[kGroups], takes[kChunks];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) offsets_of[g] = min(g * kHalfRows + lane / 4, rows - 1) * columns;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) takes[c] = first_k + c * kChunk < columns;
  QuadPlace<T> place;
  int summed_from, deviations_from;
  const auto find_places = [&](int i) {
    const bool is_own = i >= (kTileRows - share) * kQuads;
    place.find(layer, first_row + row, column, is_own && row < rows && column < layer.out_features);
    summed_from = row / kHalfRows * kGroupSize + row % kHalfRows * kManyRowsStride + quad * kProducts * kQuad;
    deviations_from = quad * kTileRows + row;
  };
  find_places(threadIdx.x);
  place.settle();
  settle(input), settle(copy_to), settle(offsets_of), settle(takes), settle(sums_to), settle(summed_from);
  if constexpr (kNorm) settle(deviations_from);
  wait_for_predecessor_settled(zero > 0);

  uint4 loaded[kCopiesRows<kLayout> ? 1 : kGroups][kChunks];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const T* const from = input + offsets_of[g] + c * kChunk;
      if constexpr (kCopiesRows<kLayout>) {
        copy_async(copy_of(g, c), from, takes[c] > 0);
      } else {
        loaded[g][c] = {};
        if (takes[c] > 0) loaded[g][c] = __ldcg(reinterpret_cast<const uint4*>(from));
      }
    }
  }
  if constexpr (kCopiesRows<kLayout>) end_copy_group();
  place.load_residual();
  if constexpr (kCopiesRows<kLayout>) await_copy_groups<0>();
#pragma unroll
  for (int first = 0; first < kGroups; first += kTogether) {
    float sums[kTogether][kTiles / 2][4] = {};
    RowPowers<T> powers[kTogether];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        uint4 x;
        if constexpr (kCopiesRows<kLayout>) x = *copy_of(first + i, c);
        else x = loaded[first + i][c];
        weight.multiply_add(sums[i], c, x);
        if constexpr (kNorm) powers[i].add(x);
      }
    }
    if constexpr (kCopiesRows<kLayout>) __syncwarp();  // all lanes have read the rows
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      store_sums(sums[i], first + i);
      if (!kNorm || !RowPowers<T>::has_row()) continue;
      deviations_of[warp * kTileRows + (first + i) * kHalfRows + lane / 4] = powers[i].of_row();
    }
  }
  __syncthreads();
  if (parts > 1) wait_at_cluster_barrier();  // the others have started

#pragma unroll 1
  for (int i = threadIdx.x; i < layer.finishing; i += blockDim.x) {
    SumQuad totals[kProducts] = {};
    Deviations all;
    if constexpr (kNorm) {
#pragma unroll
      for (int w = 0; w < kManyRowsWarps; w += kQuads) {
        if (quad + w < warps) all.add(deviations_of[deviations_from + w * kTileRows]);
      }
    }
#pragma unroll 1
    for (int first_warp = 0; first_warp < summed; first_warp += kWarpsSummed) {
      const float* const of_warps = sums_of + summed_from + first_warp * kGroups * kGroupSize;
#pragma unroll
      for (int w = 0; w < kWarpsSummed; ++w) {
#pragma unroll
        for (int p = 0; p < kProducts; ++p) add_quad(totals[p], of_warps + w * kGroups * kGroupSize + p * kQuad);
      }
    }
    if (parts > 1) {
      const int to = row / share;
      const auto place_of = [&](int from) {
        const int slot = (from - to - 1) & parts - 1;
        return received + (slot * share + row % share) * kColumns + quad * kQuad;
      };
      if (to != part) {
        mailbox.send(reinterpret_cast<float4*>(place_of(part)), reinterpret_cast<const float4&>(totals[0]), to);
      }
      __syncwarp();  // no lane waits before all have sent
      if (to == part) {
        mailbox.wait();
#pragma unroll 1
        for (int b = 1; b < parts; ++b) add_quad(totals[0], place_of(part + b));
      }
    }
    float2 norm = {0.f, 1.f};
    if constexpr (kNorm) {
      all.template add_lanes<kQuads>();
      const StoredRow<T> own{static_cast<const T*>(layer.input) + (first_row + min(row, rows - 1)) * columns};
      norm = normalisation_of<kQuads>(all, own, columns, layer.reciprocal, layer.is_layer_norm, layer.eps);
    }
    const auto product = [&](int n) {
      const int at = quad * kProducts * kQuad + n;
      const float sum = totals[n / kQuad].values[n % kQuad];
      return kNorm ? fmaf(norm.y, fmaf(-norm.x, slopes[at], sum), offsets[at]) : sum + offsets[at];
    };
    float values[kQuad];
#pragma unroll
    for (int j = 0; j < kQuad; ++j) values[j] = product(j * kProducts);
    activate_quickly(layer.activation, values);
    if constexpr (kGated) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) values[j] *= product(j * kProducts + 1);
    }
    place.store(values);
    if (i + blockDim.x >= layer.finishing) break;
    row = row_of(i + blockDim.x);
    find_places(i + blockDim.x);
    place.load_residual();
  }
}

// False where the device has not as much shared memory for a block.
template <typename T, Layout kLayout, bool kNorm, bool kGated, int kGroups>
bool launch_many_rows_as(const DecodeLinear& layer, int64_t parts, cudaStream_t stream, cudaError_t& error) {
  constexpr int kColumns = kManyRowsTiles * kTileColumns, kWidth = kGated ? kColumns / 2 : kColumns;
  constexpr int kTileRows = kGroups * kHalfRows;
  const int64_t warps = ceil_div(layer.in_features, parts * kManyRowsChunks * kChunk);
  ManyRowsLayer<T> tiled{mma_layer<T>(layer), static_cast<int>(parts)};
  // No more than the tile needs: attention's blocks leave little, and a block that fits beside them starts before they end.
  size_t shared_bytes = sizeof(float) * summed_warps(static_cast<int>(warps), kWarpsSummed) * kGroups * kGroupSize;
  shared_bytes += sizeof(float) * 2 * kColumns;
  if (kNorm) shared_bytes += sizeof(Deviations) * warps * kTileRows;
  if (parts > 1) shared_bytes += sizeof(float) * (parts - 1) * kTileRows / parts * kColumns + sizeof(Mailbox);
  const auto kernel = decode_linear_many_rows_kernel<T, kLayout, kNorm, kGated, kGroups>;
  if (!fits_block(kernel, shared_bytes)) return false;
  const LaunchShape shape{static_cast<unsigned>(ceil_div(layer.out_features, kWidth) * parts),
                          static_cast<unsigned>(warps * kWarpSize),
                          shared_bytes,
                          static_cast<unsigned>(parts),
                          static_cast<unsigned>(kGated ? 1 : layer.weight_count),
                          static_cast<unsigned>(ceil_div(layer.rows, kTileRows))};
  tiled.layer.share_prefetch(shape);
  const int64_t finished_rows = parts > 1 ? kTileRows : std::min<int64_t>(layer.rows, kTileRows);
  tiled.layer.finishing = static_cast<int>(ceil_div(finished_rows * kWidth / kQuad, kWarpSize) * kWarpSize);
  error = launch_dependent(kernel, tiled, shape, layer.pdl, stream);
  return true;
}

// Tiles are halved while twice as many blocks still have a multiprocessor each, and where a block lacks shared memory for a
// whole one: 32 normalised rows of more than 1152 values, if it has 99 KB.
template <typename T, Layout kLayout, bool kNorm, bool kGated>
bool launch_many_rows(const DecodeLinear& layer, int64_t parts, cudaStream_t stream, cudaError_t& error) {
  constexpr int kWidth = kManyRowsTiles * kTileColumns / (kGated ? 2 : 1);
  const int64_t strips = ceil_div(layer.out_features, kWidth) * parts * (kGated ? 1 : layer.weight_count);
  const auto are_few = [&](int groups) {
    return kCopiesRows<kLayout> && strips * ceil_div(layer.rows, groups * kHalfRows) <= multiprocessor_count();
  };
  const auto launch = [&](auto groups) {
    return launch_many_rows_as<T, kLayout, kNorm, kGated, groups>(layer, parts, stream, error);
  };
  if (!are_few(1)) {
    if (!are_few(2) && launch(IntTag<kMostRowGroups>{})) return true;
    if constexpr (kNorm || kCopiesRows<kLayout>) {
      if (launch(IntTag<2>{})) return true;
    }
  }
  if constexpr (kCopiesRows<kLayout>) return launch(IntTag<1>{});
  return false;
}

template <typename T>
bool launch_decode_linear_many_rows(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error) {
  constexpr int64_t kMostParts = 8;  // blocks that any cluster may have
  const bool has_norm = layer.norm != kNoNorm;
  const int64_t warps = ceil_div(layer.in_features, kManyRowsChunks * kChunk);
  int64_t parts = 1;
  while (!has_norm && parts * kManyRowsWarps / 2 < warps) parts *= 2;
  if ((layer.gated && !has_norm) || parts > kMostParts || warps > kManyRowsWarps * parts || !suits_many_rows<T>(layer)) return false;
  const auto launch = [&](auto layout) {
    constexpr Layout kLayout = decltype(layout)::value;
    return has_norm ? launch_many_rows<T, kLayout, true, false>(layer, parts, stream, error)
                    : launch_many_rows<T, kLayout, false, false>(layer, parts, stream, error);
  };
  if (layer.gated) return launch_many_rows<T, Layout::kRowMajorNK, true, true>(layer, parts, stream, error);
  return layer.weights_are_transposed ? launch(std::integral_constant<Layout, Layout::kColMajorKN>{})
                                      : launch(std::integral_constant<Layout, Layout::kRowMajorNK>{});
}

}  // namespace fuseopt
