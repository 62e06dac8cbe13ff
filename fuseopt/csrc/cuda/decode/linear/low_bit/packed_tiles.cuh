// decode_linear for packed weights of 8 and 4 bits and more than 8 rows, without a norm. A block computes all rows of a tile
// of outputs: each weight is read from memory once and made into 16-bit values once, in the registers of the warp that has
// its line. Rows pass through shared memory, a block of K at a time, in the order in which lanes multiply them. A cluster
// splits K.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/decode/linear/low_bit/packed_stream.cuh"

namespace fuseopt {

// TUNED: H200, layers of Llama-1B, Llama-8B and GPT-2 XL with 8 to 64 rows: 3 stages were up to 30% slower than 4 with 32
// rows and more (a1d415c7). Blocks of 4 warps leave room for several on a multiprocessor; others were not measured.
constexpr int kPackedTileWarps = 4, kPackedTileThreads = kPackedTileWarps * kWarpSize;
constexpr int kTileStages = 4, kFewTileStages = 3;  // of a ring; fewer where shared memory does not suffice

// A tile: so many lines of 16 outputs of each warp, and groups of 8 rows.
struct PackedTile {
  int lines, halves;

  __host__ __device__ constexpr int all_lines() const { return kPackedTileWarps * lines; }
  __host__ __device__ constexpr int outputs() const { return all_lines() * kLineOutputs; }
  __host__ __device__ constexpr int rows() const { return halves * kHalfRows; }
  // Of rows of sums, so that a warp's are in different banks.
  __host__ __device__ constexpr int stride() const { return outputs() + 4; }
  __host__ __device__ constexpr int sum_bytes() const { return rows() * stride() * static_cast<int>(sizeof(float)); }
  // A stage: a block of K of all lines, then of all rows.
  __host__ __device__ constexpr int stage_bytes(int block_bytes, int chunks) const {
    return all_lines() * block_bytes + chunks * halves * kUnitBytes;
  }
  // Blocks of a multiprocessor, for which registers suffice.
  constexpr int blocks() const { return lines * halves >= 32 ? 2 : lines * halves >= 16 ? 3 : 4; }
};

template <typename T>
struct PackedTileLayer : MmaLayer<T> {
  int strips[MmaLayer<T>::kMaxWeights];  // of each weight
  int row_tiles, parts, part_blocks;     // the latter of K, of each block of a cluster
  int stages;                            // kTileStages or kFewTileStages
  bool is_gated;
};

// The products of a stage with its rows, which begin at `rows`, both those of the lane's warp.
template <typename T, int kBits, int kLines, int kHalves>
__device__ inline void multiply_packed_stage(const PackedShape& shape, const char* weights, const char* rows,
                                             float (&sums)[kLines][kHalves][4]) {
  constexpr int kChunks = kBlockChunks<kBits>, kUnitChunks = kChunks / kBlockUnits;
  const int lane = threadIdx.x % kWarpSize;
  weights += lane * kAccessBytes, rows += lane * kAccessBytes;
  const char* const scales = weights - lane * kAccessBytes + kBlockUnits * kUnitBytes + lane / 4 * 4;
  const int group_bytes = shape.has_zeros ? 2 * kGroupBytes : kGroupBytes;
  uint4 units[kLines];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    uint4 low[kLines], high[kLines];
#pragma unroll
    for (int l = 0; l < kLines; ++l) {
      const char* const line = weights + l * shape.block_bytes;
      if (c % kUnitChunks == 0) units[l] = *reinterpret_cast<const uint4*>(line + c / kUnitChunks * kUnitBytes);
      unsigned zeros = kMagic<T> + 0x00080008u;
      const char* const group = scales + l * shape.block_bytes + (c >> shape.group_bits) * group_bytes;
      if (kBits == 4 && shape.has_zeros) zeros = *reinterpret_cast<const unsigned*>(group + kGroupBytes);
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
      for (int l = 0; l < kLines; ++l) multiply<T>(sums[l][h], {low[l].x, low[l].y}, {high[l].x, high[l].y}, x.x, x.y);
#pragma unroll
      for (int l = 0; l < kLines; ++l) multiply<T>(sums[l][h], {low[l].z, low[l].w}, {high[l].z, high[l].w}, x.z, x.w);
    }
  }
}

template <typename T, int kBits, int kLines, int kHalves>
__global__ void __launch_bounds__(kPackedTileThreads, PackedTile{kLines, kHalves}.blocks())
    decode_packed_tiles_kernel(const __grid_constant__ PackedTileLayer<T> layer) {
  constexpr PackedTile kTile{kLines, kHalves};
  constexpr int kChunks = kBlockChunks<kBits>;
  // Of the rows, kRowCopiers warps copy each a half of every kChunkStep-th chunk, or two.
  constexpr int kRowCopiers = kHalves < kPackedTileWarps ? kHalves : kPackedTileWarps;
  constexpr int kChunkStep = kPackedTileWarps / kRowCopiers, kWarpHalves = kHalves / kRowCopiers;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, columns = layer.in_features;
  const int parts = layer.parts, part = blockIdx.x % parts, tile = blockIdx.x / parts;
  const int first_row = tile % layer.row_tiles * kTile.rows(), rows = min(layer.rows - first_row, kTile.rows());
  const PackedStrip strip(layer, tile / layer.row_tiles);
  const int first_block = part * layer.part_blocks;
  const int blocks = max(min(layer.packed.blocks - first_block, layer.part_blocks), 0);
  const int block_bytes = layer.packed.block_bytes, weight_bytes = kTile.all_lines() * block_bytes;
  const int stage_bytes = kTile.stage_bytes(block_bytes, kChunks);

  // Stages; then, in the same place, sums [rows][stride].
  extern __shared__ __align__(kRingAlignment) char rings[];

  let_successor_start();
  // Lines past the last one are copied from that, and not stored.
  const int warp_lines = layer.is_gated ? kLines / 2 : kLines, strip_lines = warp_lines * kPackedTileWarps;
  const char* from[kLines];
#pragma unroll
  for (int l = 0; l < kLines; ++l) {
    const int index = layer.is_gated ? l % 2 : strip.index;
    const int last = (layer.widths[strip.index] - 1) / kLineOutputs;
    const int line = min(strip.strip * strip_lines + warp * warp_lines + (layer.is_gated ? l / 2 : l), last);
    from[l] = reinterpret_cast<const char*>(layer.weights[index]) + static_cast<int64_t>(line) * layer.packed.line_bytes +
              kLineHeader<kBits> + static_cast<int64_t>(first_block) * block_bytes;
  }
  // Copies the next block of the warp's lines.
  const auto fetch_weights = [&](int stage) {
    char* const to = rings + stage * stage_bytes + warp * kLines * block_bytes;
#pragma unroll
    for (int l = 0; l < kLines; ++l) {
#pragma unroll 1
      for (int i = lane * kAccessBytes; i < block_bytes; i += kWarpSize * kAccessBytes) {
        copy_async(to + l * block_bytes + i, from[l] + i, true);
      }
    }
#pragma unroll
    for (int l = 0; l < kLines; ++l) from[l] += block_bytes;
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
    char* const to = rings + stage * stage_bytes + weight_bytes + (first_chunk * kHalves + first_half) * kUnitBytes + lane * kAccessBytes;
#pragma unroll
    for (int c = 0; c < kChunks; c += kChunkStep) {
      if (kChunks < kChunkStep && first_chunk >= kChunks) break;
      const bool is_there = stage_k + c * kChunk < columns;
#pragma unroll
      for (int i = 0; i < kWarpHalves; ++i) {
        const T* const at = is_there ? input[i] + c * kChunk : static_cast<const T*>(layer.input);
        copy_async(to + (c * kHalves + i * kRowCopiers) * kUnitBytes, at, is_there && has_row[i]);
      }
    }
#pragma unroll
    for (auto& of_half : input) of_half += kBlockK<kBits>;
    stage_k += kBlockK<kBits>;
  };

  const int stages = layer.stages;
#pragma unroll 1
  for (int s = 0; s < min(stages - 1, blocks); ++s) fetch_weights(s);
  prefetch_next_weights(layer);
  wait_for_predecessor();
#pragma unroll 1
  for (int s = 0; s < stages - 1; ++s) {
    if (s < blocks) fetch_rows(s);
    end_copy_group();
  }

  float sums[kLines][kHalves][4] = {};
  int stage = 0, free_stage = stages - 1;
#pragma unroll 1
  for (int b = 0; b < blocks; ++b) {
    if (stages == kTileStages) await_copy_groups<kTileStages - 2>();
    else await_copy_groups<kFewTileStages - 2>();
    __syncthreads();
    if (b + stages - 1 < blocks) fetch_weights(free_stage), fetch_rows(free_stage);
    end_copy_group();
    const char* const at = rings + stage * stage_bytes;
    multiply_packed_stage<T, kBits>(layer.packed, at + warp * kLines * block_bytes, at + weight_bytes, sums);
    if (++stage == stages) stage = 0;
    if (++free_stage == stages) free_stage = 0;
  }
  await_copy_groups<0>();
  __syncthreads();  // all warps have read the stages

  const int width = layer.is_gated ? kTile.outputs() / 2 : kTile.outputs();  // a gate's sums, then what it multiplies
  float* const all_sums = reinterpret_cast<float*>(rings);
#pragma unroll
  for (int l = 0; l < kLines; ++l) {
    const int line = warp * warp_lines + (layer.is_gated ? l / 2 : l);
    const int column = line * kLineOutputs + (layer.is_gated ? l % 2 * width : 0) + lane / 4;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = h * kHalfRows + lane % 4 * 2 + i % 2;
        all_sums[row * kTile.stride() + column + i / 2 * kTileColumns] = sums[l][h][i];
      }
    }
  }
  if (parts > 1) cluster_barrier();
  else __syncthreads();

  // Each block of a cluster finishes some of the rows; a thread, some rows of a column.
  constexpr int kTogether = 4;
  const int share = (rows + parts - 1) / parts, end_row = min((part + 1) * share, rows);
  const int span = min(width, kPackedTileThreads), step = kPackedTileThreads / span;
  const auto sum_of = [&](int row, int column) {
    float* const at = all_sums + row * kTile.stride() + column;
    if (parts == 1) return *at;
    float sum = 0.f;
#pragma unroll 4
    for (int p = 0; p < parts; ++p) sum += __uint_as_float(load_from_block(reinterpret_cast<unsigned*>(at), p));
    return sum;
  };
#pragma unroll 1
  for (int c = threadIdx.x % span; c < width; c += span) {
    const int column = strip.strip * width + c;
    if (column >= layer.widths[strip.index]) continue;
    const int products = layer.is_gated ? 2 : 1;
    float scales[2] = {1.f, 1.f}, biases[2] = {0.f, 0.f};
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if (p == products) break;
      const int index = layer.is_gated ? p : strip.index;
      if (layer.biases[0] != nullptr) biases[p] = to_float(layer.biases[index][column]);
      if constexpr (kBits == 8) {
        const char* const line = reinterpret_cast<const char*>(layer.weights[index]) +
                                 static_cast<int64_t>(column / kLineOutputs) * layer.packed.line_bytes;
        scales[p] = __ldg(reinterpret_cast<const float*>(line) + column % kLineOutputs);
      }
    }
    const int64_t output = static_cast<int64_t>(first_row) * layer.output_stride + layer.first_outputs[strip.index] + column;
#pragma unroll 1
    for (int first = part * share + threadIdx.x / span; first < end_row; first += kTogether * step) {
      float values[kTogether], others[kTogether];
      unsigned residuals[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = min(first + i * step, end_row - 1);
        residuals[i] = layer.load_residual_bits(output + static_cast<int64_t>(row) * layer.output_stride);
        values[i] = sum_of(row, c);
        if (layer.is_gated) others[i] = sum_of(row, c + width);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i * step >= end_row) break;
        float value = activate_quickly(layer.activation, fmaf(values[i], scales[0], biases[0]));
        if (layer.is_gated) value *= fmaf(others[i], scales[1], biases[1]);
        layer.store(output + static_cast<int64_t>(first + i * step) * layer.output_stride, value + layer.residual_from(residuals[i]));
      }
    }
  }
  if (parts > 1) cluster_barrier();  // other blocks have read this one's sums
}

}  // namespace fuseopt
