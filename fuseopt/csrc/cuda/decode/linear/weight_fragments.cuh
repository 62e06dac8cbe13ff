// A weight in the registers of decode_linear's tensor core kernel, and where the sums over it lie and belong.
#pragma once

#include "cuda/decode/linear/params.cuh"

namespace fuseopt {

// A lane's part of the weight: tiles of 8 columns, of which tile t has column `g` (lane / 4), or if they are woven columns
// kTiles * g to kTiles * (g + 1), as those of a weight [K, N] are. Words hold neighbouring k. Two weights take turns.
template <typename T, Layout kLayout, bool kGated, int kTiles, int kChunks, bool kWoven = kLayout == Layout::kColMajorKN>
struct WeightPart {
  uint4 words[kChunks][kTiles];

  // From column `column` of the output and the lane's k on. Of a weight [K, N], `pair_lines` must follow: until then
  // words hold neighbouring columns.
  __device__ void load(const MmaLayer<T>& layer, int column, int k) {
    const int g = threadIdx.x % kWarpSize / 4, stride = layer.weight_stride;
    if constexpr (kLayout == Layout::kRowMajorNK) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        constexpr int kOfWeight = kGated ? kTiles / 2 : kTiles;
        const int tile = kGated ? t / 2 : t, n = column + (kWoven ? g * kOfWeight + tile : tile * kTileColumns + g);
        const T* const weight = layer.weights[kGated ? t % 2 : blockIdx.y] + static_cast<int64_t>(n) * stride + k;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          words[c][t] = {};
          if (n < layer.widths[blockIdx.y] && k + c * kChunk < layer.in_features) words[c][t] = load_once<uint4>(weight + c * kChunk);
        }
      }
    } else {
      // Loads are unconditional: past the end a lane loads another part of the weight. Such columns are never stored, and
      // such lines are zeroed by pair_lines. Each address is one instruction, not a sum with the one before.
      using Access = std::conditional_t<kTiles == 2, unsigned, std::conditional_t<kTiles == 4, uint2, uint4>>;
      const T* const first = layer.weights[blockIdx.y] + min(column + g * kTiles, layer.out_features - kTiles);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int line = min(k + c * kChunk, layer.in_features - kLaneValues);
        const T* const lines = settled(first + static_cast<int64_t>(line) * stride);
#pragma unroll
        for (int i = 0; i < kLaneValues; ++i) {
          const auto access = load_once<Access>(lines + static_cast<int64_t>(stride) * i);
          const auto& parts = reinterpret_cast<const unsigned(&)[kTiles / 2]>(access);
#pragma unroll
          for (int j = 0; j < kTiles / 2; ++j) reinterpret_cast<unsigned(&)[4]>(words[c][2 * j + i / 4])[i % 4] = parts[j];
        }
      }
    }
  }

  // `columns`: of K; `k`: from which on the lane has loaded.
  __device__ void pair_lines(int columns, int k) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        const uint4 a = words[c][j], b = words[c][j + 1];  // lines 0 to 3 and 4 to 7 of two columns
        constexpr unsigned kLow = 0x5410, kHigh = 0x7632;
        words[c][j] = {__byte_perm(a.x, a.y, kLow), __byte_perm(a.z, a.w, kLow), __byte_perm(b.x, b.y, kLow),
                       __byte_perm(b.z, b.w, kLow)};
        words[c][j + 1] = {__byte_perm(a.x, a.y, kHigh), __byte_perm(a.z, a.w, kHigh), __byte_perm(b.x, b.y, kHigh),
                           __byte_perm(b.z, b.w, kHigh)};
      }
    }
    if (k / kChunk * kChunk + kChunks * kChunk <= columns) [[likely]] return;  // all lanes alike
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (k + c * kChunk < columns) continue;
#pragma unroll
      for (uint4& w : words[c]) w = {};
    }
  }

  // Called before the wait: moves words of a weight [N, K] into the registers that MMA reads. `zero` is opaque to ptxas;
  // OR-ing it keeps weights in MMA operand registers before the wait.
  __device__ void arrange(unsigned zero) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (uint4& w : words[c]) w.x |= zero, w.y |= zero, w.z |= zero, w.w |= zero;
    }
  }

  // Multiplies all columns of chunk c with 8 values of k, or with one more than these.
  __device__ void scale(int c, const uint4& by, bool adds_one) {
    if (adds_one) [[unlikely]] {
#pragma unroll
      for (uint4& w : words[c]) {
        w = {fma_pair<T>(w.x, by.x, w.x), fma_pair<T>(w.y, by.y, w.y), fma_pair<T>(w.z, by.z, w.z),
             fma_pair<T>(w.w, by.w, w.w)};
      }
      return;
    }
#pragma unroll
    for (uint4& w : words[c]) {
      w = {multiply_pair<T>(w.x, by.x), multiply_pair<T>(w.y, by.y), multiply_pair<T>(w.z, by.z),
           multiply_pair<T>(w.w, by.w)};
    }
  }

  // sums[tile pair] += columns of chunk c x 8 rows of 8 values a lane.
  __device__ void multiply_add(float (&sums)[kTiles / 2][4], int c, const uint4& x) const {
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      const uint4 &low = words[c][2 * j], &high = words[c][2 * j + 1];
      multiply<T>(sums[j], {low.x, low.y}, {high.x, high.y}, x.x, x.y);
      multiply<T>(sums[j], {low.z, low.w}, {high.z, high.w}, x.z, x.w);
    }
  }

  // Keeps the compiler from using the words before this call, which would wait for their loads there.
  __device__ void not_before_here() {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (uint4& w : words[c]) asm volatile("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w));
    }
  }
};

// Calls write(place, row, sum) for the lane's sums; places of neighbouring lanes are neighbours.
template <int kTiles, typename Write>
__device__ inline void for_sums(const float (&sums)[kTiles / 2][4], Write write) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int j = 0; j < kTiles / 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) write((2 * j + i / 2) * kTileColumns + lane / 4, lane % 4 * 2 + i % 2, sums[j][i]);
  }
}

// Where sums of two neighbouring places belong: the first one's place, of the first weight if gated, its column of the
// strip, and how far from that the second one's is.
template <Layout kLayout, bool kGated, int kTiles>
struct Pair {
  static constexpr int kNext = kLayout == Layout::kColMajorKN ? kTiles : 1;
  int place, column;

  // Of the strip, or of a gated one's first half.
  static __device__ int column_of(int place) {
    return kLayout == Layout::kColMajorKN ? place % kTileColumns * kTiles + place / kTileColumns : place;
  }

  // The column of any place, and of a gated strip the weight.
  static __device__ int column_at(int place) {
    return kGated ? place / (2 * kTileColumns) * kTileColumns + place % kTileColumns : column_of(place);
  }
  static __device__ int weight_at(int place) { return place / kTileColumns % 2; }

  __device__ explicit Pair(int index) : place(2 * index), column(column_of(2 * index)) {
    if constexpr (kGated) place += column / kTileColumns * kTileColumns;
  }
};

}  // namespace fuseopt
