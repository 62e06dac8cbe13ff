// decode_linear for 16-bit weights and more rows than decode_linear_mma.cuh takes. A step still waits for latency, not
// for arithmetic, so the means are the same: a block has a strip of the weight in registers before it waits for the
// kernel ahead, and then all rows of its tile on their way at once. Other tiles of rows are other blocks, for which the
// weight is in the L2 cache. Warps share out K; where K is long, so do the blocks of a cluster, through shared memory.
#pragma once

#include "async_copy.cuh"
#include "cluster.cuh"
#include "decode_linear_mma.cuh"
#include "many_rows_norm.cuh"
#include "sum_quad.cuh"

namespace fuseopt {

constexpr int kManyRowsWarps = 16;
constexpr int kManyRowsChunks = 3;  // of K, for each warp: 768 values take 8 warps
constexpr int kManyRowsTiles = 4;   // of 8 columns, in a block's strip
constexpr int kRowGroups = 4;       // of 8 rows, in a block's tile
constexpr int kTileRows = kRowGroups * kHalfRows;
constexpr int kManyRowsStride = kManyRowsTiles * kTileColumns + 4;  // of rows of sums, in banks of their own
// Of shared memory, in floats, for a warp's part of a group of rows, and its sums in the same place after that.
constexpr int kGroupSize = kManyRowsChunks * kWarpSize * kAccessBytes / static_cast<int>(sizeof(float));
static_assert(kHalfRows * kManyRowsStride <= kGroupSize);

// Whether rows go to shared memory on their way. With a weight [N, K] the compiler would else ask for a few of them at
// a time, for want of registers; with one [K, N] they are there sooner without.
template <Layout kLayout>
constexpr bool kCopiesRows = kLayout == Layout::kRows;

template <typename T>
struct ManyRowsLayer {
  MmaLayer<T> layer;
  int parts;      // of K: the blocks of a cluster
  int tile_rows;  // of a block
};

template <typename T, Layout kLayout, bool kNorm, bool kGated>
__global__ void __launch_bounds__(kManyRowsWarps* kWarpSize)
    decode_linear_many_rows_kernel(const __grid_constant__ ManyRowsLayer<T> argument) {
  constexpr int kTiles = kManyRowsTiles, kChunks = kManyRowsChunks, kPart = kChunks * kChunk;
  constexpr int kProducts = kGated ? 2 : 1, kColumns = kTiles * kTileColumns, kWidth = kColumns / kProducts;
  constexpr int kQuads = kWidth / kQuad;
  constexpr unsigned kOnes = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
  const MmaLayer<T>& layer = argument.layer;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int parts = kNorm ? 1 : argument.parts, part = blockIdx.x % parts, strip = blockIdx.x / parts * kWidth;
  const int columns = layer.columns, tile_rows = argument.tile_rows, first_row = blockIdx.z * tile_rows;
  // There is room for no more than the tile has, or for any tile, if places are better known to the compiler.
  const int groups = kCopiesRows<kLayout> ? tile_rows / kHalfRows : kRowGroups;
  const int kept_rows = kCopiesRows<kLayout> ? tile_rows : kTileRows;
  const int rows = min(layer.rows - first_row, tile_rows);
  const int first_k = (part * warps + warp) * kPart + lane % 4 * kLaneValues;

  // Rows and then sums of each warp [warps][groups][kGroupSize]; what does not depend on the input [2][kColumns]; of a
  // norm, sums of each warp's part of the rows and of their squares [warps][kept_rows], mean and 1 / deviation of rows
  // [kept_rows]; of a cluster, sums of each block for the rows that this one finishes [parts][kept_rows / parts]
  // [kColumns], and the mailbox that they come by.
  extern __shared__ __align__(16) char shared[];
  float* const sums_of = reinterpret_cast<float*>(shared);
  // Of each column under a LayerNorm: a product is rstd * (sum - mean * slope) + offset.
  float *const slopes = sums_of + warps * groups * kGroupSize, *const offsets = slopes + kColumns;
  float2 *const moments = reinterpret_cast<float2*>(offsets + kColumns), *const norms = moments + warps * kept_rows;
  float* const received = offsets + kColumns;
  Mailbox& mailbox = *reinterpret_cast<Mailbox*>(received + kept_rows * kColumns);

  let_successor_start();
  WeightPart<T, kLayout, kGated, kTiles, kChunks> weight;
  weight.load(layer, strip, first_k);
  if (blockIdx.z == 0) prefetch_ahead(layer);
  const int share = tile_rows / parts;  // of a tile's rows
  if (parts > 1) {
    mailbox.open((parts - 1) * share * kColumns * sizeof(float));
    arrive_relaxed_at_cluster_barrier();
  }

  // Four neighbouring outputs of a row are finished by one thread, always of the same columns.
  const int place = threadIdx.x % kQuads * kQuad, column = strip + place;
  const int end = column < layer.outputs ? min((part + 1) * share, rows) : 0;
  int row = part * share + threadIdx.x / kQuads;
  Vector<T, kQuad> biases[kProducts] = {}, residual = {};
#pragma unroll
  for (int p = 0; p < kProducts; ++p) {
    if (layer.biases[0] == nullptr || column >= layer.outputs) continue;
    biases[p] = *reinterpret_cast<const Vector<T, kQuad>*>(layer.biases[kGated ? p : blockIdx.y] + column);
  }
  const auto output_index = [&] {
    return (first_row + row) * layer.output_stride + blockIdx.y * layer.outputs + column;
  };
  const auto load_residual = [&] {
    if (layer.residual == nullptr || row >= end) return;
    residual = *reinterpret_cast<const Vector<T, kQuad>*>(static_cast<const T*>(layer.residual) + output_index());
  };

  const auto sums_at = [&](int w, int r, int p) {
    return sums_of + (w * groups + r / kHalfRows) * kGroupSize + r % kHalfRows * kManyRowsStride + p;
  };
  // The lane's sums of a group of rows, in the order of columns.
  const auto store_sums = [&](const float(&sums)[kTiles / 2][4], int group) {
    float* const at = sums_at(warp, group * kHalfRows + lane % 4 * 2, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kLayout == Layout::kLines) {
        Vector<float, kTiles> line;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) line.values[t] = sums[t / 2][t % 2 * 2 + i];
        *reinterpret_cast<Vector<float, kTiles>*>(at + i * kManyRowsStride + lane / 4 * kTiles) = line;
      } else {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          at[i * kManyRowsStride + t * kTileColumns + lane / 4] = sums[t / 2][t % 2 * 2 + i];
        }
      }
    }
  };
  const auto sum_of_warps = [&](int r, int p) {
    SumQuad total = {};
#pragma unroll 4
    for (int w = 0; w < warps; ++w) add_quad(total, sums_at(w, r, p));
    return total;
  };

  if constexpr (kNorm) {
    // As in decode_linear_mma.cuh: sums of w * g and w * b as two rows of products, and w scaled by g.
    const unsigned ones = lane / 4 == 0 ? kOnes : 0u;
    float constant_sums[kTiles / 2][4] = {};
    if constexpr (kLayout == Layout::kLines) weight.pair_lines();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int k = first_k + c * kChunk;
      if (layer.norm_bias != nullptr) {
        uint4 shift = {};
        if (lane / 4 == 1 && k < columns) shift = load_once<uint4>(layer.norm_bias + k);
        weight.multiply_add(constant_sums, c, shift);
      }
      if (layer.norm_weight != nullptr && k < columns) weight.scale(c, load_once<uint4>(layer.norm_weight + k));
      if (layer.is_layer_norm) weight.multiply_add(constant_sums, c, {ones, ones, ones, ones});
    }
    if (layer.is_layer_norm) {
      store_sums(constant_sums, 0);
      __syncthreads();
      for (int i = threadIdx.x; i < 2 * kColumns / kQuad; i += blockDim.x) {
        const int r = i / (kColumns / kQuad), p = i % (kColumns / kQuad) * kQuad;
        *reinterpret_cast<SumQuad*>((r == 0 ? slopes : offsets) + p) = sum_of_warps(r, p);
      }
      __syncthreads();
    }
  }
  wait_for_predecessor();

  // Chunk c of group g: a lane copies what it reads itself.
  const auto copy_of = [&](int g, int c) {
    return reinterpret_cast<uint4*>(sums_of + (warp * groups + g) * kGroupSize) + c * kWarpSize + lane;
  };
  uint4 loaded[kRowGroups][kChunks];
#pragma unroll
  for (int g = 0; g < kRowGroups; ++g) {
    const int r = g * kHalfRows + lane / 4;
    const T* const input = static_cast<const T*>(layer.input) + (first_row + r) * columns + first_k;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const bool is_there = r < rows && first_k + c * kChunk < columns;
      if constexpr (kCopiesRows<kLayout>) {
        if (g * kHalfRows < rows) copy_async(copy_of(g, c), input + c * kChunk, is_there);
      } else {
        loaded[g][c] = {};
        if (is_there) loaded[g][c] = *reinterpret_cast<const uint4*>(input + c * kChunk);
      }
    }
  }
  if constexpr (kCopiesRows<kLayout>) end_copy_group();
  load_residual();
  if constexpr (!kNorm) {
    weight.not_before_here();
    if constexpr (kLayout == Layout::kLines) weight.pair_lines();
  }
  if constexpr (kCopiesRows<kLayout>) await_copy_groups<0>();
#pragma unroll
  for (int g = 0; g < kRowGroups; ++g) {
    if (g * kHalfRows >= rows) break;
    uint4 x[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) x[c] = kCopiesRows<kLayout> ? *copy_of(g, c) : loaded[g][c];
    float sums[kTiles / 2][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) weight.multiply_add(sums, c, x[c]);
    if constexpr (kCopiesRows<kLayout>) __syncwarp();  // all lanes have read the rows
    store_sums(sums, g);
    if constexpr (kNorm) {
      // Products of the rows with one another, of which the diagonal counts, and with ones.
      float products[4] = {};
#pragma unroll
      for (const uint4& values : x) {
        multiply<T>(products, {values.x, values.y}, {kOnes, kOnes}, values.x, values.y);
        multiply<T>(products, {values.z, values.w}, {kOnes, kOnes}, values.z, values.w);
      }
      if (lane / 8 == lane % 4) {
        const bool is_odd = lane / 4 % 2;
        moments[warp * kept_rows + g * kHalfRows + lane / 4] = {is_odd ? products[3] : products[2],
                                                                is_odd ? products[1] : products[0]};
      }
    }
  }
  __syncthreads();

  if constexpr (kNorm) {
    find_norms(layer, first_row, rows, moments, kept_rows, norms);
    __syncthreads();
  }
  const auto received_at = [&](int from, int r, int p) {
    return received + (from * share + r % share) * kColumns + p;
  };
  if (parts > 1) {
    wait_at_cluster_barrier();
    for (int i = threadIdx.x; i < tile_rows * kQuads; i += blockDim.x) {
      const int r = i / kQuads, p = i % kQuads * kQuad, to = r / share;
      const SumQuad sums = sum_of_warps(r, p);
      float4* const at = reinterpret_cast<float4*>(received_at(part, r, p));
      if (to == part) *reinterpret_cast<SumQuad*>(at) = sums;
      else mailbox.send(at, reinterpret_cast<const float4&>(sums), to);
    }
    __syncthreads();
    mailbox.wait();
  }
  for (; row < end; row += blockDim.x / kQuads, load_residual()) {
    const float2 norm = kNorm ? norms[row] : float2{0.f, 1.f};
    const auto product = [&](int p, const Vector<T, kQuad>& bias, float(&values)[kQuad]) {
      SumQuad sums = {};
      if (parts == 1) sums = sum_of_warps(row, p);
      else for (int b = 0; b < parts; ++b) add_quad(sums, received_at(b, row, p));
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        values[j] = norm.y * sums.values[j] + bias[j];
        if (kNorm && layer.is_layer_norm) values[j] += offsets[p + j] - norm.y * norm.x * slopes[p + j];
      }
    };
    const int first = kGated ? place / kTileColumns * 2 * kTileColumns + place % kTileColumns : place;
    float values[kQuad];
    product(first, biases[0], values);
#pragma unroll
    for (float& value : values) value = activate_quickly(layer.activation, value);
    if constexpr (kGated) {
      float others[kQuad];
      product(first + kTileColumns, biases[1], others);
#pragma unroll
      for (int j = 0; j < kQuad; ++j) values[j] *= others[j];
    }
#pragma unroll
    for (int j = 0; j < kQuad; ++j) values[j] += residual[j];
    store_floats_as<T>(static_cast<T*>(layer.output) + output_index(), 0, values);
  }
}

template <typename T, Layout kLayout, bool kNorm, bool kGated>
cudaError_t launch_many_rows_as(const DecodeLinear& layer, int64_t parts, cudaStream_t stream) {
  constexpr int kColumns = kManyRowsTiles * kTileColumns, kWidth = kGated ? kColumns / 2 : kColumns;
  const int64_t warps = ceil_div(layer.columns, parts * kManyRowsChunks * kChunk);
  const int64_t strips = ceil_div(layer.outputs, kWidth), weights = kGated ? 1 : layer.weight_count;
  // Tiles are halved as long as twice as many blocks are still no more than the device has multiprocessors.
  const auto blocks_of = [&](int tile_rows) { return strips * parts * weights * ceil_div(layer.rows, tile_rows); };
  int tile_rows = kTileRows;
  while (kCopiesRows<kLayout> && tile_rows > kHalfRows && 2 * blocks_of(tile_rows) <= multiprocessor_count()) {
    tile_rows /= 2;
  }
  ManyRowsLayer<T> tiled{mma_layer<T>(layer), static_cast<int>(parts), tile_rows};
  // No more than the tile takes: beside attention's blocks there is little left, and where it suffices a block starts
  // before these end.
  size_t shared_bytes = sizeof(float) * (warps * tile_rows / kHalfRows * kGroupSize + 2 * kColumns);
  if (kNorm) shared_bytes += sizeof(float2) * (warps + 1) * tile_rows;
  if (parts > 1) shared_bytes += sizeof(float) * tile_rows * kColumns + sizeof(Mailbox);
  const LaunchShape shape{static_cast<unsigned>(strips * parts),
                          static_cast<unsigned>(warps * kWarpSize),
                          shared_bytes,
                          static_cast<unsigned>(parts),
                          static_cast<unsigned>(weights),
                          static_cast<unsigned>(ceil_div(layer.rows, tile_rows))};
  tiled.layer.share_ahead(shape);
  const auto kernel = decode_linear_many_rows_kernel<T, kLayout, kNorm, kGated>;
  return launch_dependent(kernel, tiled, shape, layer.overlap, stream);
}

template <typename T>
bool launch_decode_linear_many_rows(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error) {
  constexpr int64_t kMostParts = 8;  // blocks that any cluster may have
  const bool has_norm = layer.norm != kNoNorm;
  const int64_t warps = ceil_div(layer.columns, kManyRowsChunks * kChunk);
  int64_t parts = 1;
  while (!has_norm && parts * kManyRowsWarps / 2 < warps) parts *= 2;
  if (parts > kMostParts || warps > kManyRowsWarps * parts || !suits_many_rows<T>(layer)) return false;
  const auto launch = [&](auto layout) {
    constexpr Layout kLayout = decltype(layout)::value;
    if (has_norm) return launch_many_rows_as<T, kLayout, true, false>(layer, parts, stream);
    return launch_many_rows_as<T, kLayout, false, false>(layer, parts, stream);
  };
  if (layer.gated) error = launch_many_rows_as<T, Layout::kRows, true, true>(layer, parts, stream);
  else if (layer.weights_are_transposed) error = launch(std::integral_constant<Layout, Layout::kLines>{});
  else error = launch(std::integral_constant<Layout, Layout::kRows>{});
  return true;
}

}  // namespace fuseopt
