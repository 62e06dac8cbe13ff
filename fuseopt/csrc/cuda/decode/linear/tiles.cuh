// decode_linear for so many rows that reading them from the L2 cache counts: of 16-bit weights, and of float32 as the sum
// of three products of TF32, whose errors README.md compares with those of multiply-adds. A block computes a tile of
// 32 to 128 rows x 64 columns, and reads its part of both operands once, through a ring of shared memory. The first stages
// of the weight are loaded before the wait for the previous kernel. A long K is split over the blocks of a cluster. The only
// norms are RMS norms: for a LayerNorm each block would compute sums over its weight again.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/decode/linear/dispatch.cuh"
#include "cuda/decode/linear/tile_products.cuh"
#include "cuda/common/sum_quad.cuh"
#include "cuda/common/tile_ring.cuh"

namespace fuseopt {

template <typename T>
struct TileLayer {
  MmaLayer<T> layer;
  int parts;         // of K: the blocks of a cluster
  int part_columns;  // of K, in each
};

constexpr int kMostTileParts = 8;  // blocks that any cluster may have

// What a block has in shared memory beside its ring, in bytes from its start.
template <typename Shape>
struct TilePlaces {
  static constexpr int kStride = Shape::kColumns + 8;  // of rows of sums, in banks of their own
  static constexpr int kSumBytes = Shape::kPartWarps * Shape::kRows * kStride * static_cast<int>(sizeof(float));
  static_assert(kSumBytes <= Shape::kRingBytes);  // sums lie where the stages did
  // Of a norm: its weight for a part of K, and sums of parts of rows' squares [kPartWarps][kRows].
  int scale = Shape::kRingBytes, squares;
  // Of a cluster: each block's sums for the rows that this one finishes [parts][share][kColumns], those of their
  // squares [parts][kRows], and the mailbox that they come by. With a norm the sums come into the ring, once this block has
  // read its stages: two blocks would not fit on a multiprocessor otherwise.
  int received, received_squares, mailbox, end;

  // Of a tile's rows, that each block of a cluster finishes, but for the last.
  __host__ __device__ static int share(int parts) { return (Shape::kRows + parts - 1) / parts; }

  // `columns`: of K, in whole stages.
  __host__ __device__ TilePlaces(int columns, bool has_norm, int parts) {
    constexpr int kFloat = static_cast<int>(sizeof(float)), kRowBytes = Shape::kColumns * kFloat;
    static_assert(kSumBytes + (Shape::kRows + kMostTileParts) * kRowBytes <= Shape::kRingBytes);
    const int squares_bytes = has_norm ? Shape::kRows * kFloat : 0;
    squares = scale + (has_norm ? columns * Shape::kValueBytes : 0);
    received = has_norm ? kSumBytes : Shape::kRingBytes;
    received_squares = squares + Shape::kPartWarps * squares_bytes;
    mailbox = parts == 1 ? received_squares : has_norm ? received_squares + parts * squares_bytes
                                                 : received + parts * share(parts) * kRowBytes;
    end = mailbox + (parts > 1 ? static_cast<int>(sizeof(Mailbox)) : 0);
  }
};

template <typename T, Layout kLayout, bool kNorm, int kRowWarps>
__global__ void __launch_bounds__(kTileThreads, TileShape<T, kRowWarps>::kBlocks)
    decode_linear_tiles_kernel(const __grid_constant__ TileLayer<T> argument) {
  using Shape = TileShape<T, kRowWarps>;
  using Places = TilePlaces<Shape>;
  constexpr int kStages = Shape::kStages, kColumns = Shape::kColumns, kHalf = Shape::kWarpTile / 16;
  const MmaLayer<T>& layer = argument.layer;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int column_warp = warp % Shape::kColumnWarps, row_warp = warp / Shape::kColumnWarps % kRowWarps;
  const int part_warp = warp / (Shape::kColumnWarps * kRowWarps);
  const int parts = argument.parts, part = blockIdx.x % parts, strip = blockIdx.x / parts * kColumns;
  const int first_row = blockIdx.z * Shape::kRows, rows = min(layer.rows - first_row, Shape::kRows);
  const int first_k = part * argument.part_columns, end_k = min(layer.in_features, first_k + argument.part_columns);
  const int stages = max((end_k - first_k + Shape::kStageK - 1) / Shape::kStageK, 0);

  extern __shared__ __align__(kRingAlignment) char shared[];
  const Places places(argument.part_columns, kNorm, parts);
  T* const scale = reinterpret_cast<T*>(shared + places.scale);
  float* const squares = reinterpret_cast<float*>(shared + places.squares);
  float* const received = reinterpret_cast<float*>(shared + places.received);
  float* const received_squares = reinterpret_cast<float*>(shared + places.received_squares);
  Mailbox& mailbox = *reinterpret_cast<Mailbox*>(shared + places.mailbox);
  const auto sums_at = [&](int p, int r, int c) {
    return reinterpret_cast<float*>(shared) + (p * Shape::kRows + r) * Places::kStride + c;
  };

  let_successor_start();
  TileRing<T, kLayout, Shape> ring(layer, shared, first_row, strip, first_k, end_k);
#pragma unroll 1
  for (int s = 0; s < min(kStages - 1, stages); ++s) ring.fetch_weight(s);
  if (blockIdx.z == 0) prefetch_next_weights(layer);
  const int share = Places::share(parts);  // of a tile's rows, that each block of a cluster finishes
  if (parts > 1) {
    const int own = min(share, Shape::kRows - part * share);
    mailbox.open((parts - 1) * own * (kColumns + kNorm) * sizeof(float));
    if (!kNorm) arrive_relaxed_at_cluster_barrier();
  }
  if constexpr (kNorm) {
    for (int k = threadIdx.x * kVectorWidth<T>; k < argument.part_columns; k += kTileThreads * kVectorWidth<T>) {
      const bool is_there = layer.norm_weight != nullptr && first_k + k < end_k;
      *reinterpret_cast<uint4*>(scale + k) =
          is_there ? load_once<uint4>(layer.norm_weight + first_k + k) : uint4{kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>};
    }
  }
  // Four neighbouring outputs of a row are finished by one thread, always of the same columns.
  constexpr int kQuads = kColumns / kQuad, kStep = kTileThreads / kQuads, kMost = Shape::kRows / kStep;
  const int place_of_quad = threadIdx.x % kQuads * kQuad, column = strip + place_of_quad;
  const int first_own = part * share + threadIdx.x / kQuads;
  const int end_own = column < layer.out_features ? min((part + 1) * share, rows) : 0;
  Vector<T, kQuad> bias = {}, residuals[kMost] = {};
  if (layer.biases[0] != nullptr && column < layer.out_features) {
    bias = *reinterpret_cast<const Vector<T, kQuad>*>(layer.biases[blockIdx.y] + column);
  }
  const auto output_index = [&](int row) {
    return (first_row + row) * layer.output_stride + blockIdx.y * layer.out_features + column;
  };
  wait_for_predecessor();

#pragma unroll 1
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < stages) ring.fetch_rows(s);
    end_copy_group();
  }
  float sums[kHalf][2 * kHalf][4] = {};  // of 16 rows and 8 columns
  TileSquares<T> row_squares;            // of 16 rows
  // Of a warp's rows those 16 come first whose squares it finds.
  const auto row_of = [&](int half) { return row_warp * Shape::kWarpTile + (half ^ column_warp) * 16; };
  const auto column_of = [&](int half) { return column_warp * Shape::kWarpTile + half * 16; };
  const bool adds_one = layer.adds_one && layer.norm_weight != nullptr;
  int place = 0, free_place = kStages - 1;
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    await_copy_groups<kStages - 2>();
    __syncthreads();
    if (s + kStages - 1 < stages) {
      ring.fetch_weight(free_place);
      ring.fetch_rows(free_place);
    }
    end_copy_group();
    TileSums<T, kHalf> of_stage(sums);
#pragma unroll
    for (int i = 0; i < Shape::kStageK / Shape::kProductK / Shape::kPartWarps; ++i) {
      const int product = i * Shape::kPartWarps + part_warp;
      uint4 x[kHalf], w[kHalf];
#pragma unroll
      for (int h = 0; h < kHalf; ++h) x[h] = ring.rows(place, row_of(h), product);
#pragma unroll
      for (int h = 0; h < kHalf; ++h) w[h] = ring.columns(place, column_of(h), product);
      if constexpr (kNorm) {
        const T* const scale_at = scale + s * Shape::kStageK + product * Shape::kProductK;
#pragma unroll
        for (uint4& v : w) scale_product<T>(v, scale_at, adds_one);
        row_squares.add(x[0]);
      }
      of_stage.add(x, w);
    }
    of_stage.end(sums);
    place = place + 1 < kStages ? place + 1 : 0;
    free_place = free_place + 1 < kStages ? free_place + 1 : 0;
  }
  if (layer.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int row = first_own + i * kStep;
      if (row >= end_own) continue;
      const T* const at = static_cast<const T*>(layer.residual) + output_index(row);
      residuals[i] = *reinterpret_cast<const Vector<T, kQuad>*>(at);
    }
  }
  await_copy_groups<0>();
  __syncthreads();  // all warps have read the stages
  if (kNorm && parts > 1) arrive_at_cluster_barrier();

#pragma unroll
  for (int h = 0; h < kHalf; ++h) {
#pragma unroll
    for (int j = 0; j < 2 * kHalf; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = row_of(h) + lane / 4 + i * 8, c = column_of(j / 2) + j % 2 * 8 + lane % 4 * 2;
        float* const at = sums_at(part_warp, r, c);
        *reinterpret_cast<float2*>(at) = {sums[h][j][2 * i], sums[h][j][2 * i + 1]};
      }
    }
  }
  if constexpr (kNorm) row_squares.leave(squares + part_warp * Shape::kRows + row_of(0) + lane / 4);
  __syncthreads();
  const auto sum_of = [&](const float* first, int count, int stride) {
    SumQuad total = {};
#pragma unroll 2
    for (int i = 0; i < count; ++i) add_quad(total, first + i * stride);
    return total;
  };
  const auto sum_of_warps = [&](int r, int c) {
    return sum_of(sums_at(0, r, c), Shape::kPartWarps, Shape::kRows * Places::kStride);
  };
  const auto square_sum = [&](const float* first, int count, int row) {
    float sum = 0.f;
#pragma unroll 4
    for (int p = 0; p < count; ++p) sum += first[p * Shape::kRows + row];
    return sum;
  };
  const auto received_at = [&](int from, int r, int c) { return received + (from * share + r % share) * kColumns + c; };
  if (parts > 1) {
    wait_at_cluster_barrier();
    for (int r = threadIdx.x / kQuads; r < Shape::kRows; r += kStep) {
      const int to = r / share;
      const SumQuad quad = sum_of_warps(r, place_of_quad);
      float4* const at = reinterpret_cast<float4*>(received_at(part, r, place_of_quad));
      if (to == part) *reinterpret_cast<SumQuad*>(at) = quad;
      else mailbox.send(at, reinterpret_cast<const float4&>(quad), to);
    }
    if (kNorm && threadIdx.x < Shape::kRows) {
      const int r = threadIdx.x;
      float* const at = received_squares + part * Shape::kRows + r;
      const float sum = square_sum(squares, Shape::kPartWarps, r);
      if (r / share == part) *at = sum;
      else mailbox.send(at, sum, r / share);
    }
    __syncthreads();
    mailbox.wait();
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int row = first_own + i * kStep;
    if (row >= end_own) continue;
    SumQuad quad = parts == 1 ? sum_of_warps(row, place_of_quad)
                              : sum_of(received_at(0, row, place_of_quad), parts, share * kColumns);
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        float& sum = quad.values[j];
        if (!isfinite(sum)) sum = slow_product<kLayout>(layer, first_row + row, column + j);
      }
    }
    float factor = 1.f;
    if constexpr (kNorm) {
      const float sum = parts == 1 ? square_sum(squares, Shape::kPartWarps, row) : square_sum(received_squares, parts, row);
      factor = rsqrtf(__fdividef(sum, layer.in_features) + layer.eps);
    }
    float values[kQuad];
#pragma unroll
    for (int j = 0; j < kQuad; ++j) values[j] = factor * quad.values[j] + bias[j];
    activate_quickly(layer.activation, values);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) values[j] += residuals[i][j];
    store_floats_as<T>(static_cast<T*>(layer.output) + output_index(row), 0, values);
  }
}

// How many tiles a layer has, and into how many parts of K each is split, to fill the device.
template <typename T, int kRowWarps>
struct TileGrid {
  using Shape = TileShape<T, kRowWarps>;
  static constexpr bool kIsFloat = std::is_same_v<T, float>;
  int64_t strips, row_tiles, tiles, parts = 1, stages;  // the latter of each part

  explicit TileGrid(const DecodeLinear& layer)
      : strips(ceil_div(layer.out_features, Shape::kColumns)),
        row_tiles(ceil_div(layer.rows, Shape::kRows)),
        tiles(strips * layer.weight_count * row_tiles) {
    const bool splits = layer.norm == kNoNorm || kIsFloat;
    const int64_t least_bytes = tuning().decode_linear_tiles_min_k_of_block * sizeof(uint16_t);  // of K, of a part
    // TUNED: float32 clusters of any size, of 7/8 of the blocks that fit, as they do not fill all groups of multiprocessors:
    // H200, 72 tiles in 3 parts (216 of 264 blocks) 13.1 us, in 2 17.4; 48 tiles in 5 parts 10.0, in 4 6.9 (cf7dc85).
    const auto next = [&] { return kIsFloat ? parts + 1 : parts * 2; };
    const int64_t resident = Shape::kBlocks * multiprocessor_count(), most_blocks = kIsFloat ? resident * 7 / 8 : resident;
    while (splits && next() <= kMostTileParts && tiles * next() <= most_blocks &&
           layer.in_features * sizeof(T) >= next() * least_bytes) {
      parts = next();
    }
    stages = ceil_div(layer.in_features, parts * Shape::kStageK);
  }

  // Time of a float32 layer, in hundredths of a microsecond without what every launch takes.
  // TUNED: H200, a stage of a tile of 64 rows takes 0.67 us alone on a multiprocessor and 1.06 beside another one, of 32 rows
  // 0.31 and 0.60: T5-base's layers, 64 and 128 rows (04e8b8d).
  int64_t time() const {
    const bool is_alone = tiles * parts <= multiprocessor_count();
    return stages * (kRowWarps == 1 ? (is_alone ? 31 : 60) : (is_alone ? 67 : 106)) *
           ceil_div(tiles * parts, Shape::kBlocks * multiprocessor_count());
  }
};

template <typename T, Layout kLayout, bool kNorm, int kRowWarps>
cudaError_t launch_tiles_as(const DecodeLinear& layer, cudaStream_t stream) {
  using Shape = TileShape<T, kRowWarps>;
  const TileGrid<T, kRowWarps> grid(layer);
  const int64_t parts = grid.parts;
  const int64_t part_columns = grid.stages * Shape::kStageK;
  TileLayer<T> tiled{mma_layer<T>(layer), static_cast<int>(parts), static_cast<int>(part_columns)};
  const TilePlaces<Shape> places(tiled.part_columns, kNorm, tiled.parts);
  const LaunchShape shape{static_cast<unsigned>(grid.strips * parts),
                          kTileThreads,
                          static_cast<size_t>(places.end),
                          static_cast<unsigned>(parts),
                          static_cast<unsigned>(layer.weight_count),
                          static_cast<unsigned>(grid.row_tiles)};
  tiled.layer.share_prefetch(shape);
  const auto kernel = decode_linear_tiles_kernel<T, kLayout, kNorm, kRowWarps>;
  return launch_dependent(kernel, tiled, shape, layer.pdl, stream);
}

// Whether these kernels take a 16-bit layer: with several weights, which the BLAS library takes one after another, and with
// one of a long K.
inline bool gains_by_tiles(const DecodeLinear& layer) {
  const int64_t work = layer.rows * layer.in_features * layer.out_features * layer.weight_count;
  const bool is_long = layer.norm == kNoNorm && layer.in_features >= 2 * layer.out_features;
  return layer.weight_count == 1 ? is_long && work >= tuning().decode_linear_tiles_min_long_work
                                 : work >= tuning().decode_linear_tiles_min_work;
}

template <typename T>
bool launch_decode_linear_tiles(const DecodeLinear& layer, cudaStream_t stream, cudaError_t& error) {
  constexpr bool kIsFloat = std::is_same_v<T, float>;
  constexpr int64_t kLongestNormalised = 1536;  // as ops/decode/linear.py has it
  constexpr size_t kSharedBytes = 208 * 1024;   // which not every device with clusters has for a block
  const bool has_norm = layer.norm != kNoNorm;
  if (layer.gated || layer.norm == kLayerNorm || (has_norm && layer.in_features > kLongestNormalised) ||
      !(kIsFloat ? layer.rows > 2 * kHalfRows : gains_by_tiles(layer)) || !suits_many_rows<T>(layer) ||
      shared_bytes_of_block() < kSharedBytes) {
    return false;
  }
  const auto launch_as = [&](auto layout, auto norm) {
    constexpr Layout kLayout = decltype(layout)::value;
    constexpr bool kNorm = decltype(norm)::value;
    if constexpr (kIsFloat) {
      const bool is_low =
          layer.rows <= TileShape<T, 1>::kRows || TileGrid<T, 1>(layer).time() < TileGrid<T, 2>(layer).time();
      return is_low ? launch_tiles_as<T, kLayout, kNorm, 1>(layer, stream)
                    : launch_tiles_as<T, kLayout, kNorm, 2>(layer, stream);
    } else {
      const bool is_low = layer.weight_count == 1 || layer.rows <= tuning().decode_linear_tiles_max_low_rows;
      return is_low ? launch_tiles_as<T, kLayout, kNorm, 2>(layer, stream)
                    : launch_tiles_as<T, kLayout, kNorm, 4>(layer, stream);
    }
  };
  const auto launch = [&](auto layout) {
    return has_norm ? launch_as(layout, std::true_type{}) : launch_as(layout, std::false_type{});
  };
  error = layer.weights_are_transposed ? launch(std::integral_constant<Layout, Layout::kColMajorKN>{})
                                       : launch(std::integral_constant<Layout, Layout::kRowMajorNK>{});
  return true;
}

}  // namespace fuseopt
