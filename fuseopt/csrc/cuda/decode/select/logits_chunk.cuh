// A chunk of a row of logits in the registers of a block. It is read in 16-byte accesses whatever the row's alignment:
// chunks begin at aligned addresses, so the first one begins up to a vector before the row.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/decode/select/logits_edits.cuh"

namespace fuseopt {

// Which tokens of a block's chunk are penalised or banned; `penalised` and `banned` are in shared memory.
struct ChunkMarks {
  const unsigned* penalised;
  const unsigned* banned;
  bool forces;  // every token that is not banned scores 0
  bool has_temperature;

  // Edits kWidth neighbouring scores, the first of which is at `place` in the chunk.
  template <int kWidth>
  __device__ void edit(int place, const ScoreArithmetic<float>& arithmetic, float (&scores)[kWidth]) const {
    const unsigned is_penalised = marks<kWidth>(penalised, place), is_banned = marks<kWidth>(banned, place);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (is_penalised >> j & 1) scores[j] = arithmetic.penalised(scores[j]);
      if (forces) scores[j] = 0;
      if (is_banned >> j & 1) scores[j] = -INFINITY;
      if (has_temperature) scores[j] = arithmetic.tempered(scores[j]);
    }
  }
};

// Each warp has a stretch of the chunk, and its lanes have neighbouring vectors of that.
template <typename T, int kThreads, int kPerThread>
struct LogitsChunk {
  static constexpr int kSize = kThreads * kPerThread;
  static constexpr int kStretch = kWarpSize * kPerThread;
  static constexpr int kWidth = kVectorWidth<T>;
  static constexpr int kVectors = kPerThread / kWidth;  // per thread
  static constexpr int kMarkWords = kSize / kWordBits;

  Vector<T> vectors[kVectors];

  __device__ LogitsChunk(const ScoreMatrix& logits, int64_t row, int chunk, int64_t vocabulary)
      : row_(static_cast<const T*>(logits.data) + row * logits.row_stride),
        column_stride_(logits.column_stride),
        begin_(chunk * kSize - static_cast<int>(reinterpret_cast<uintptr_t>(row_) / sizeof(T) % kWidth)),
        vocabulary_(static_cast<int>(vocabulary)) {}

  // The beginning of a thread's k-th vector: its place in the chunk, and its token.
  __device__ int place_of(int k) const {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    return warp * kStretch + (k * kWarpSize + lane) * kWidth;
  }
  __device__ int token_of(int k) const { return begin_ + place_of(k); }
  __device__ int token_at(int place) const { return begin_ + place; }
  __device__ bool is_token(int token) const { return token >= 0 && token < vocabulary_; }

  __device__ void load() { load_alike(row_, column_stride_, vectors); }

  // Calls visit(place, vector) for the thread's vectors, one after another, in a loop. They move up: a loop cannot index
  // registers.
  template <typename Visit>
  __device__ void for_each_vector(Visit visit) {
#pragma unroll 1
    for (int k = 0; k < kVectors; ++k) {
      visit(place_of(k), vectors[0]);
#pragma unroll
      for (int i = 1; i < kVectors; ++i) vectors[i - 1] = vectors[i];
    }
  }

  // Loads the same columns of another row. Elements outside the vocabulary keep their values.
  template <typename U>
  __device__ void load_alike(const U* row, int64_t column_stride, Vector<U, kWidth> (&loaded)[kVectors]) const {
    using Loaded = Vector<U, kWidth>;
    const bool in_vectors = column_stride == 1 && reinterpret_cast<uintptr_t>(row + begin_) % alignof(Loaded) == 0;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int first = token_of(k);
      if (in_vectors && first >= 0 && first + kWidth <= vocabulary_) {
        loaded[k] = *reinterpret_cast<const Loaded*>(row + first);
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if (is_token(first + j)) loaded[k].values[j] = row[(first + j) * column_stride];
        }
      }
    }
  }

  // Called by all threads of the block; `penalised` and `banned` [kMarkWords] are in shared memory.
  __device__ ChunkMarks mark(const LogitsEdits& edits, int64_t row, unsigned* penalised, unsigned* banned) const {
    const int end = min(begin_ + kSize, vocabulary_);
    const bool forces = mark_tokens<int64_t>(edits, row, max(begin_, 0), end, begin_, penalised, banned);
    return {penalised, banned, forces, edits.temperature != 1};
  }

 private:
  const T* row_;
  int64_t column_stride_;
  int begin_;
  int vocabulary_;
};

// The number of chunks of `size` scores in a row of any alignment.
inline int64_t chunks_of(int64_t vocabulary, int size) { return ceil_div(vocabulary + kAccessBytes / 2 - 1, size); }

}  // namespace fuseopt
