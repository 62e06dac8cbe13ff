// decode_linear for packed weights of 8 and 4 bits and more than 8 rows, without a norm. A block computes up to 32 rows of a
// tile of 128 outputs. The warp that has a line converts its weights to 16-bit values once, in registers. Rows pass through
// shared memory, a block of K at a time, in the order in which lanes multiply them. Two groups of warps alternate between
// blocks of K. The blocks of a cluster split K and send each other their sums.
#pragma once

#include "cuda/common/block_barrier.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/sum_quad.cuh"
#include "cuda/decode/linear/low_bit/packed_stream.cuh"

namespace fuseopt {

// TUNED: H200, layers of Llama-1B, Llama-8B and GPT-2 XL, 8 to 64 rows, against one group, tiles of 64 rows, and blocks of 4
// warps: 8B's gate and up with 32 rows, int8, 41.2 us, 45.7, 52.9 (a1d415c7).
constexpr int kPackedTileWarps = 8, kPackedTileThreads = kPackedTileWarps * kWarpSize, kTileLines = 2, kTileGroups = 2;
constexpr int kFewTileStages = 3, kMostTileStages = 6;

// A block's tile: kTileLines lines of each warp of a group, and `halves` times 8 rows.
struct PackedTile {
  static constexpr int kWarps = kPackedTileWarps / kTileGroups, kOutputs = kWarps * kTileLines * kLineOutputs;
  static constexpr int kStride = kOutputs + 4;  // between rows of sums, so that a warp's are in different banks
  int halves;

  __host__ __device__ constexpr int rows() const { return halves * kHalfRows; }
  // A stage of a group holds a block of K of all lines, then of all rows.
  __host__ __device__ constexpr int part_bytes(int block_bytes, int chunks) const {
    return kWarps * kTileLines * block_bytes + chunks * halves * kUnitBytes;
  }
};

template <typename T>
struct PackedTileLayer : MmaLayer<T> {
  int strips[MmaLayer<T>::kMaxWeights];  // strips of each weight
  int row_tiles, parts, part_blocks;     // part_blocks: blocks of K for each block of a cluster
  int stages;                            // kFewTileStages to kMostTileStages
  bool is_gated;
};

// Waits for the thread's copies, except those of the last `later` commit groups.
__device__ inline void await_all_but(int later) {
  switch (later) {
    case 1: return await_copy_groups<1>();
    case 2: return await_copy_groups<2>();
    case 3: return await_copy_groups<3>();
    default: return await_copy_groups<kMostTileStages - 2>();
  }
}

// The products of a stage with its rows, which begin at `rows`, both those of the lane's warp.
template <typename T, int kBits, bool kZeros, int kHalves>
__device__ inline void multiply_packed_stage(const PackedShape& shape, const char* weights, const char* rows,
                                             float (&sums)[kTileLines][kHalves][4]) {
  constexpr int kChunks = kBlockChunks<kBits>, kUnitChunks = kChunks / kBlockUnits;
  const int lane = threadIdx.x % kWarpSize;
  weights += lane * kAccessBytes, rows += lane * kAccessBytes;
  const char* const scales = weights - lane * kAccessBytes + kBlockUnits * kUnitBytes + lane / 4 * 4;
  constexpr int kScaleBytes = kZeros ? 2 * kGroupBytes : kGroupBytes;
  uint4 units[kTileLines];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    uint4 low[kTileLines], high[kTileLines];
#pragma unroll
    for (int l = 0; l < kTileLines; ++l) {
      const char* const line = weights + l * shape.block_bytes;
      if (c % kUnitChunks == 0) units[l] = *reinterpret_cast<const uint4*>(line + c / kUnitChunks * kUnitBytes);
      unsigned zeros = kMagic<T> + 0x00080008u;
      const char* const group = scales + l * shape.block_bytes + (c >> shape.group_bits) * kScaleBytes;
      if constexpr (kZeros) zeros = *reinterpret_cast<const unsigned*>(group + kGroupBytes);
      unpack_chunk<T, kBits>(units[l], c, __byte_perm(zeros, 0, kFirstHalf), __byte_perm(zeros, 0, kSecondHalf), low[l],
                             high[l]);
      if constexpr (kBits == 4) {
        const unsigned pair = *reinterpret_cast<const unsigned*>(group);
        multiply_words<T>(low[l], __byte_perm(pair, 0, kFirstHalf));
        multiply_words<T>(high[l], __byte_perm(pair, 0, kSecondHalf));
      }
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const uint4 x = *reinterpret_cast<const uint4*>(rows + (c * kHalves + h) * kUnitBytes);
#pragma unroll
      for (int l = 0; l < kTileLines; ++l) multiply<T>(sums[l][h], {low[l].x, low[l].y}, {high[l].x, high[l].y}, x.x, x.y);
#pragma unroll
      for (int l = 0; l < kTileLines; ++l) multiply<T>(sums[l][h], {low[l].z, low[l].w}, {high[l].z, high[l].w}, x.z, x.w);
    }
  }
}

template <typename T, int kBits, int kHalves>
__global__ void __launch_bounds__(kPackedTileThreads, 2)
    decode_packed_tiles_kernel(const __grid_constant__ PackedTileLayer<T> layer) {
  constexpr PackedTile kTile{kHalves};
  constexpr int kChunks = kBlockChunks<kBits>, kGroups = kTileGroups;
  constexpr int kWarps = PackedTile::kWarps, kOutputs = PackedTile::kOutputs, kStride = PackedTile::kStride;
  // Each of kRowCopiers warps copies one half of the rows, every kChunkStep-th chunk.
  constexpr int kRowCopiers = kHalves < kWarps ? kHalves : kWarps;
  constexpr int kChunkStep = kWarps / kRowCopiers, kWarpHalves = kHalves / kRowCopiers;
  const int group = threadIdx.x / kWarpSize / kWarps, warp = threadIdx.x / kWarpSize % kWarps, lane = threadIdx.x % kWarpSize;
  const int columns = layer.in_features, parts = layer.parts, part = blockIdx.x % parts, tile = blockIdx.x / parts;
  const int first_row = tile % layer.row_tiles * kTile.rows(), rows = min(layer.rows - first_row, kTile.rows());
  const PackedStrip strip(layer, tile / layer.row_tiles);
  const int first_block = part * layer.part_blocks + group;
  const int blocks = max(min(layer.packed.blocks - part * layer.part_blocks, layer.part_blocks) - group + kGroups - 1, 0) / kGroups;
  const int block_bytes = layer.packed.block_bytes, weight_bytes = kWarps * kTileLines * block_bytes;
  const int part_bytes = kTile.part_bytes(block_bytes, kChunks);
  // The rows that this block of the cluster finishes.
  const int share = (rows + parts - 1) / parts, own_row = min(part * share, rows), own_rows = min(share, rows - own_row);

  // Stages of each group; then, in the same place, sums [kGroups][rows][kStride] and those of other blocks [parts - 1][share]
  // [kOutputs].
  extern __shared__ __align__(kRingAlignment) char rings[];
  __shared__ Mailbox mailbox;
  char* const ring = rings + group * layer.stages * part_bytes;

  let_successor_start();
  // Lines past the last one read the last line again, and their results are not stored.
  const int warp_lines = layer.is_gated ? kTileLines / 2 : kTileLines;
  const char* from[kTileLines];
#pragma unroll
  for (int l = 0; l < kTileLines; ++l) {
    const int index = layer.is_gated ? l : strip.index;
    const int last = (layer.widths[strip.index] - 1) / kLineOutputs;
    const int line = min((strip.strip * kWarps + warp) * warp_lines + (layer.is_gated ? 0 : l), last);
    from[l] = reinterpret_cast<const char*>(layer.weights[index]) + static_cast<int64_t>(line) * layer.packed.line_bytes +
              kLineHeader<kBits> + static_cast<int64_t>(first_block) * block_bytes + lane * kAccessBytes;
  }
  // Copies the next block of the warp's lines.
  const auto fetch_weights = [&](int stage) {
    char* const to = ring + stage * part_bytes + warp * kTileLines * block_bytes + lane * kAccessBytes;
#pragma unroll
    for (int l = 0; l < kTileLines; ++l) {
#pragma unroll
      for (int i = 0; i < kBlockUnits * kUnitBytes; i += kUnitBytes) copy_async(to + l * block_bytes + i, from[l] + i, true);
      if (lane * kAccessBytes < block_bytes - kBlockUnits * kUnitBytes) {
        copy_async(to + l * block_bytes + kBlockUnits * kUnitBytes, from[l] + kBlockUnits * kUnitBytes, true);
      }
      from[l] += kGroups * block_bytes;
    }
  };
  const int first_half = warp % kRowCopiers, first_chunk = warp / kRowCopiers;
  int stage_k = first_block * kBlockK<kBits> + first_chunk * kChunk + lane % 4 * kLaneValues;
  const T* input[kWarpHalves];
  bool has_row[kWarpHalves];
#pragma unroll
  for (int i = 0; i < kWarpHalves; ++i) {
    const int row = (i * kRowCopiers + first_half) * kHalfRows + lane / 4;
    has_row[i] = row < rows;
    input[i] = static_cast<const T*>(layer.input) + static_cast<int64_t>(first_row + min(row, rows - 1)) * columns + stage_k;
  }
  const auto fetch_rows = [&](int stage) {
    char* const to = ring + stage * part_bytes + weight_bytes + (first_chunk * kHalves + first_half) * kUnitBytes + lane * kAccessBytes;
#pragma unroll
    for (int c = 0; c < kChunks; c += kChunkStep) {
      const bool is_there = stage_k + c * kChunk < columns;
#pragma unroll
      for (int i = 0; i < kWarpHalves; ++i) {
        const T* const at = is_there ? input[i] + c * kChunk : static_cast<const T*>(layer.input);
        copy_async(to + (c * kHalves + i * kRowCopiers) * kUnitBytes, at, is_there && has_row[i]);
      }
    }
#pragma unroll
    for (auto& of_half : input) of_half += kGroups * kBlockK<kBits>;
    stage_k += kGroups * kBlockK<kBits>;
  };

  const int stages = layer.stages;
#pragma unroll 1
  for (int s = 0; s < min(stages - 1, blocks); ++s) fetch_weights(s);
  prefetch_next_weights(layer);
  if (parts > 1) mailbox.open((parts - 1) * own_rows * kOutputs * sizeof(float));
  wait_for_predecessor();
#pragma unroll 1
  for (int s = 0; s < stages - 1; ++s) {
    if (s < blocks) fetch_rows(s);
    end_copy_group();
  }

  float sums[kTileLines][kHalves][4] = {};
  int stage = 0, free_stage = stages - 1;
#pragma unroll 1
  for (int b = 0; b < blocks; ++b) {
    await_all_but(stages - 2);
    wait_at_barrier(1 + group, kWarps * kWarpSize);
    if (b + stages - 1 < blocks) fetch_weights(free_stage), fetch_rows(free_stage);
    end_copy_group();
    const char* const at = ring + stage * part_bytes;
    const char* const weights = at + warp * kTileLines * block_bytes;
    if (kBits == 4 && layer.packed.has_zeros) {
      multiply_packed_stage<T, kBits, true>(layer.packed, weights, at + weight_bytes, sums);
    } else {
      multiply_packed_stage<T, kBits, false>(layer.packed, weights, at + weight_bytes, sums);
    }
    if (++stage == stages) stage = 0;
    if (++free_stage == stages) free_stage = 0;
  }
  await_copy_groups<0>();
  __syncthreads();  // all warps have read the stages
  if (parts > 1) arrive_relaxed_at_cluster_barrier();

  const int width = layer.is_gated ? kOutputs / 2 : kOutputs;  // gated: the gate's sums, then those that it multiplies
  float *const all_sums = reinterpret_cast<float*>(rings), *const received = all_sums + kGroups * kTile.rows() * kStride;
#pragma unroll
  for (int l = 0; l < kTileLines; ++l) {
    const int line = warp * warp_lines + (layer.is_gated ? 0 : l);
    const int column = line * kLineOutputs + (layer.is_gated ? l * width : 0) + lane / 4;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = group * kTile.rows() + h * kHalfRows + lane % 4 * 2 + i % 2;
        all_sums[row * kStride + column + i / 2 * kTileColumns] = sums[l][h][i];
      }
    }
  }
  __syncthreads();
  const auto received_at = [&](int from, int to, int row, int column) {  // of the block `to`
    return received + (((from - to + parts) % parts - 1) * share + row) * kOutputs + column;
  };
  if (parts > 1) {
    wait_at_cluster_barrier();  // other blocks have read their stages
    constexpr int kQuads = kOutputs / kQuad;
#pragma unroll 1
    for (int row = threadIdx.x / kQuads; row < rows; row += kPackedTileThreads / kQuads) {
      const int to = row / share, column = threadIdx.x % kQuads * kQuad;
      if (to == part) continue;
      SumQuad quad = {};
#pragma unroll
      for (int g = 0; g < kGroups; ++g) add_quad(quad, all_sums + (g * kTile.rows() + row) * kStride + column);
      auto* const at = reinterpret_cast<float4*>(received_at(part, to, row - to * share, column));
      mailbox.send(at, reinterpret_cast<const float4&>(quad), to);
    }
    if (own_rows > 0) mailbox.wait();
  }

  // A thread finishes some rows of a column.
  constexpr int kTogether = 4;
  const int step = kPackedTileThreads / width, c = threadIdx.x % width, column = strip.strip * width + c;
  const auto sum_of = [&](int row, int c) {
    float sum = 0.f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) sum += all_sums[(g * kTile.rows() + own_row + row) * kStride + c];
#pragma unroll 1
    for (int p = 1; p < parts; ++p) sum += received[((p - 1) * share + row) * kOutputs + c];
    return sum;
  };
  if (column < layer.widths[strip.index]) {
    float scales[2] = {1.f, 1.f}, biases[2] = {0.f, 0.f};
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if (p > 0 && !layer.is_gated) break;
      const int index = layer.is_gated ? p : strip.index;
      if (layer.biases[0] != nullptr) biases[p] = to_float(layer.biases[index][column]);
      if constexpr (kBits == 8) {
        const char* const line = reinterpret_cast<const char*>(layer.weights[index]) +
                                 static_cast<int64_t>(column / kLineOutputs) * layer.packed.line_bytes;
        scales[p] = __ldg(reinterpret_cast<const float*>(line) + column % kLineOutputs);
      }
    }
    const int64_t output = static_cast<int64_t>(first_row + own_row) * layer.output_stride +
                           layer.first_outputs[strip.index] + column;
#pragma unroll 1
    for (int first = threadIdx.x / width; first < own_rows; first += kTogether * step) {
      float values[kTogether], others[kTogether];
      unsigned residuals[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = min(first + i * step, own_rows - 1);
        residuals[i] = layer.load_residual_bits(output + static_cast<int64_t>(row) * layer.output_stride);
        values[i] = sum_of(row, c);
        if (layer.is_gated) others[i] = sum_of(row, c + width);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i * step >= own_rows) break;
        float value = activate_quickly(layer.activation, fmaf(values[i], scales[0], biases[0]));
        if (layer.is_gated) value *= fmaf(others[i], scales[1], biases[1]);
        layer.store(output + static_cast<int64_t>(first + i * step) * layer.output_stride, value + layer.residual_from(residuals[i]));
      }
    }
  }
}

}  // namespace fuseopt
