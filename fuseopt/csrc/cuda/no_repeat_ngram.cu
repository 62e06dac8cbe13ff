// Bans the tokens that would repeat an n-gram: transformers' NoRepeatNGramLogitsProcessor and
// EncoderNoRepeatNGramLogitsProcessor.
//
// A window of n ids bans its last id where its first n - 1 equal the last n - 1 ids of the sequence so far. Scores are
// moved and overwritten, never computed with, so the kernels know only their size in bytes. Ids outside the vocabulary
// are never written.
#include "launch.cuh"
#include "vector.cuh"

namespace fuseopt {
namespace {

constexpr int kThreads = 256;
constexpr int kCopyVectors = 8;  // 16-byte loads in flight a thread
constexpr int64_t kMinChunkBytes = 8 * 1024;
constexpr int64_t kMaxChunkBytes = 64 * 1024;

// One sequence's windows and the ids to compare them with.
template <typename Id>
struct NGrams {
  const Id* window_ids;
  const Id* suffix;  // the last n - 1 ids
  int64_t window_stride, suffix_stride;
  int64_t windows;
  int64_t ngram_size;

  __device__ NGrams(const TokenIds& window_rows, const TokenIds& prefix_rows, int64_t row, int64_t rows_per_window_row,
                    int64_t n)
      : window_ids(static_cast<const Id*>(window_rows.data) + row / rows_per_window_row * window_rows.row_stride),
        suffix(static_cast<const Id*>(prefix_rows.data) + row * prefix_rows.row_stride +
               (prefix_rows.length - (n - 1)) * prefix_rows.column_stride),
        window_stride(window_rows.column_stride),
        suffix_stride(prefix_rows.column_stride),
        windows(window_rows.length - n + 1),
        ngram_size(n) {}

  // The id that window w bans, or -1.
  __device__ int64_t banned(int64_t w) const {
    for (int64_t i = 0; i < ngram_size - 1; ++i) {
      if (window_ids[(w + i) * window_stride] != suffix[i * suffix_stride]) return -1;
    }
    return window_ids[(w + ngram_size - 1) * window_stride];
  }
};

// A thread a window.
template <typename Id, typename Score>
__global__ void __launch_bounds__(kThreads)
    ban_in_place_kernel(TokenIds windows, TokenIds prefixes, ScoreMatrix scores, Score minus_infinity, int64_t columns,
                        int64_t blocks_per_row, int64_t rows_per_window_row, int64_t ngram_size) {
  const int64_t row = blockIdx.x / blocks_per_row;
  const int64_t window = blockIdx.x % blocks_per_row * kThreads + threadIdx.x;
  const NGrams<Id> ngrams(windows, prefixes, row, rows_per_window_row, ngram_size);
  if (window >= ngrams.windows) return;
  const int64_t token = ngrams.banned(window);
  if (token < 0 || token >= columns) return;
  static_cast<Score*>(scores.data)[row * scores.row_stride + token * scores.column_stride] = minus_infinity;
}

// Copies row[begin, end) to out[begin, end): 16 bytes at a time where both can be aligned by the same step, else score
// by score.
template <typename Score>
__device__ void copy_chunk(const Score* row, int64_t column_stride, Score* out, int64_t begin, int64_t end) {
  constexpr int kWidth = kAccessBytes / sizeof(Score);
  using Chunk = Vector<Score, kWidth>;
  const auto misalignment = [](const Score* p) { return reinterpret_cast<uintptr_t>(p) / sizeof(Score) % kWidth; };
  if (column_stride != 1 || misalignment(row) != misalignment(out)) {
    for (int64_t c = begin + threadIdx.x; c < end; c += kThreads) out[c] = row[c * column_stride];
    return;
  }
  const int64_t head_end = min(end, begin + static_cast<int64_t>((kWidth - misalignment(out + begin)) % kWidth));
  const int64_t vectors = (end - head_end) / kWidth;
  if (begin + threadIdx.x < head_end) out[begin + threadIdx.x] = row[begin + threadIdx.x];
  const int64_t tail = head_end + vectors * kWidth + threadIdx.x;
  if (tail < end) out[tail] = row[tail];

  const Chunk* const source = reinterpret_cast<const Chunk*>(row + head_end);
  Chunk* const target = reinterpret_cast<Chunk*>(out + head_end);
  for (int64_t first = threadIdx.x; first < vectors; first += kThreads * kCopyVectors) {
    Chunk loaded[kCopyVectors];
#pragma unroll
    for (int k = 0; k < kCopyVectors; ++k) {
      if (first + k * kThreads < vectors) loaded[k] = source[first + k * kThreads];
    }
#pragma unroll
    for (int k = 0; k < kCopyVectors; ++k) {
      if (first + k * kThreads < vectors) target[first + k * kThreads] = loaded[k];
    }
  }
}

// A block copies a chunk of a row and then, while the stores drain, looks through all windows of the row for tokens in
// its chunk.
template <typename Id, typename Score>
__global__ void __launch_bounds__(kThreads)
    copy_and_ban_kernel(TokenIds windows, TokenIds prefixes, ScoreMatrix scores, Score* __restrict__ output,
                        Score minus_infinity, int64_t columns, int64_t chunk, int64_t chunks_per_row,
                        int64_t rows_per_window_row, int64_t ngram_size) {
  const int64_t row = blockIdx.x / chunks_per_row;
  const int64_t begin = blockIdx.x % chunks_per_row * chunk;
  const int64_t end = min(columns, begin + chunk);
  Score* const out = output + row * columns;
  copy_chunk(static_cast<const Score*>(scores.data) + row * scores.row_stride, scores.column_stride, out, begin, end);
  __syncthreads();  // a ban overwrites what another thread has copied

  if (prefixes.length < ngram_size - 1) return;
  const NGrams<Id> ngrams(windows, prefixes, row, rows_per_window_row, ngram_size);
  for (int64_t window = threadIdx.x; window < ngrams.windows; window += kThreads) {
    const int64_t token = ngrams.banned(window);
    if (token >= begin && token < end) out[token] = minus_infinity;
  }
}

// Calls `launch(Score)` with minus infinity of `dtype` as the unsigned integer of its size.
template <typename Launch>
void dispatch_minus_infinity(int dtype, Launch launch) {
  switch (dtype) {
    case kFloat16: launch(static_cast<unsigned short>(0xfc00)); break;
    case kBFloat16: launch(static_cast<unsigned short>(0xff80)); break;
    case kFloat32: launch(0xff800000u); break;
    default: launch(0xfff0000000000000ull);
  }
}

template <typename Id>
void launch(TokenIds windows, TokenIds prefixes, ScoreMatrix scores, void* output, int64_t rows, int64_t columns,
            int64_t rows_per_window_row, int64_t ngram_size, cudaStream_t stream) {
  dispatch_minus_infinity(scores.dtype, [&](auto minus_infinity) {
    using Score = decltype(minus_infinity);
    if (output == nullptr) {
      const int64_t window_count = windows.length - ngram_size + 1;
      if (window_count <= 0 || prefixes.length < ngram_size - 1) return;
      const int64_t blocks_per_row = ceil_div(window_count, kThreads);
      ban_in_place_kernel<Id, Score><<<static_cast<unsigned>(rows * blocks_per_row), kThreads, 0, stream>>>(
          windows, prefixes, scores, minus_infinity, columns, blocks_per_row, rows_per_window_row, ngram_size);
    } else {
      // Large chunks, since every chunk of a row looks through all the row's ids; smaller ones where rows are too few
      // to fill the device.
      const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(Score));
      int64_t chunk_bytes = kMaxChunkBytes;
      while (chunk_bytes > kMinChunkBytes && rows * ceil_div(row_bytes, chunk_bytes) < 2 * multiprocessor_count())
        chunk_bytes /= 2;
      const int64_t chunk = chunk_bytes / static_cast<int64_t>(sizeof(Score));
      const int64_t chunks_per_row = ceil_div(columns, chunk);
      copy_and_ban_kernel<Id, Score><<<static_cast<unsigned>(rows * chunks_per_row), kThreads, 0, stream>>>(
          windows, prefixes, scores, static_cast<Score*>(output), minus_infinity, columns, chunk, chunks_per_row,
          rows_per_window_row, ngram_size);
    }
  });
}

}  // namespace

extern "C" cudaError_t fuseopt_no_repeat_ngram(TokenIds windows, TokenIds prefixes, ScoreMatrix scores, void* output,
                                               int64_t rows, int64_t columns, int64_t rows_per_window_row,
                                               int64_t ngram_size, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  const auto launch_ids = windows.bytes == 4 ? launch<int> : launch<int64_t>;
  launch_ids(windows, prefixes, scores, output, rows, columns, rows_per_window_row, ngram_size, stream);
  return cudaGetLastError();
}

}  // namespace fuseopt
