// transformers' logits processors on scores in one pass: repetition penalty, then banned tokens, then temperature. See
// logits_edits.cuh.
#include "cuda/common/dependent_launch.cuh"
#include "cuda/decode/select/logits_edits.cuh"

namespace fuseopt::process_logits {
namespace {

constexpr int kThreads = 256;
// TUNED: windows: half or twice as many gain nothing (27663a3, 47c4843). The rest: 6fe7748.
constexpr int kPenaltyThreads = 512;
constexpr int kLoads = 4;  // 16-byte loads in flight per thread
constexpr int kWindows = 4;  // windows of n ids in flight, in the kernel that only looks for bans
constexpr int64_t kMinChunkBytes = kThreads * kAccessBytes;
// TUNED: a chunk of several rounds of loads, as fewer blocks look through the ids (2331099).
constexpr int64_t kMaxChunkBytes = 64 * 1024;
constexpr int64_t kMaxTokenBits = 48 * 1024 * 8;  // in the shared memory that every kernel may have

// In place, without temperature: reads and writes only the scores of tokens that are penalised or banned. With a
// penalty each row has one block. The thread that first sets a token's bit in shared memory penalises the token. It
// takes one round for each piece of `token_bits` of the vocabulary.
template <typename Id, typename Score>
__global__ void __launch_bounds__(kPenaltyThreads)
    edit_in_place_kernel(LogitsEdits edits, ScoreArithmetic<Score> arithmetic, ScoreMatrix scores, int64_t columns,
                         int64_t token_bits, unsigned blocks_per_row) {
  follow_predecessor();
  extern __shared__ unsigned seen[];
  const int64_t row = blockIdx.x / blocks_per_row;
  const TokenIds& ids = edits.input_ids;
  Score* const row_scores = static_cast<Score*>(scores.data) + row * scores.row_stride;
  for (int64_t begin = 0; token_bits > 0 && begin < columns; begin += token_bits) {
    const int64_t end = min(columns, begin + token_bits);
    for (int i = threadIdx.x; i * kWordBits < end - begin; i += blockDim.x) seen[i] = 0;
    __syncthreads();
    for_each_id<Id>(edits, ids, row, threadIdx.x, blockDim.x, [&](int64_t token) {
      if (token < begin || token >= end || !set_bit(seen, token - begin)) return;
      Score& score = row_scores[token * scores.column_stride];
      score = arithmetic.penalised(score);
    });
    __syncthreads();  // bans follow penalties, and the bits are reused
  }
  const int64_t first = static_cast<int64_t>(blockIdx.x % blocks_per_row) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(blocks_per_row) * blockDim.x;
  for_each_banned<Id, kWindows>(edits, ids, row, first, step, [&](int64_t token) {
    if (token >= 0 && token < columns) row_scores[token * scores.column_stride] = ScoreArithmetic<Score>::banned();
  });
}

// Reads a chunk of a row, and writes it edited. Marks in shared memory which tokens are penalised or banned while the
// first loads are in flight. `output` may be `scores`, since every score is read and written by one thread.
template <typename Id, typename Score>
__global__ void __launch_bounds__(kThreads)
    rewrite_kernel(LogitsEdits edits, ScoreArithmetic<Score> arithmetic, ScoreMatrix scores, ScoreMatrix output,
                   int64_t columns, int64_t chunk, unsigned chunks_per_row) {
  follow_predecessor();
  constexpr int kWidth = kVectorWidth<Score>;
  constexpr int kMarkWords = (kMaxChunkBytes / sizeof(Score) + 2 * kWidth) / kWordBits + 1;
  __shared__ unsigned penalised[kMarkWords], banned[kMarkWords];
  using Chunk = Vector<Score, kWidth>;

  const int64_t row = blockIdx.x / chunks_per_row;
  const int64_t begin = blockIdx.x % chunks_per_row * chunk;
  const int64_t end = min(columns, begin + chunk);
  const Score* const in = static_cast<const Score*>(scores.data) + row * scores.row_stride;
  Score* const out = static_cast<Score*>(output.data) + row * output.row_stride;

  // Whole vectors if both rows have the same offset from alignment. The scores before and after them are read one per
  // thread.
  const auto misalignment = [](const Score* p) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) / sizeof(Score) % kWidth);
  };
  const bool in_vectors =
      scores.column_stride == 1 && output.column_stride == 1 && misalignment(in) == misalignment(out);
  const int64_t head_end = in_vectors ? min(end, begin + (kWidth - misalignment(out + begin)) % kWidth) : end;
  const int vectors = static_cast<int>((end - head_end) / kWidth);
  const int64_t origin = in_vectors ? head_end - kWidth : begin;  // of the marks: those of a vector share a word
  const int head = static_cast<int>(head_end - begin);
  int64_t edge = in_vectors ? (threadIdx.x < head ? begin + threadIdx.x
                                                  : head_end + vectors * kWidth + threadIdx.x - head)
                            : end;

  Chunk loaded[kLoads];
  Score edge_score{};
  if (edge < end) edge_score = in[edge];
  else edge = -1;
  const auto load = [&](int first) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int v = first + k * kThreads;
      if (v < vectors) loaded[k] = reinterpret_cast<const Chunk*>(in + head_end)[v];
    }
  };
  load(threadIdx.x);

  const bool has_temperature = edits.temperature != 1;
  mark_tokens<Id>(edits, row, begin, end, origin, penalised, banned);

  const auto edit = [&](Score& score, unsigned is_penalised, unsigned is_banned) {
    if (is_penalised & 1) score = arithmetic.penalised(score);
    if (is_banned & 1) score = ScoreArithmetic<Score>::banned();
  };
  for (int first = threadIdx.x; first < vectors; first += kLoads * kThreads, load(first)) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int v = first + k * kThreads;
      if (v >= vectors) break;
      const unsigned vector_penalised = marks<kWidth>(penalised, (v + 1) * kWidth);
      const unsigned vector_banned = marks<kWidth>(banned, (v + 1) * kWidth);
      Score* const values = loaded[k].values;
      if (vector_penalised | vector_banned) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) edit(values[j], vector_penalised >> j, vector_banned >> j);
      }
      if (has_temperature) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values[j] = arithmetic.tempered(values[j]);
      }
      reinterpret_cast<Chunk*>(out + head_end)[v] = loaded[k];
    }
  }
  const auto write = [&](int64_t column, Score score) {
    edit(score, marks<1>(penalised, column - origin), marks<1>(banned, column - origin));
    out[column * output.column_stride] = has_temperature ? arithmetic.tempered(score) : score;
  };
  if (edge >= 0) write(edge, edge_score);
  for (int64_t c = begin + threadIdx.x; !in_vectors && c < end; c += kThreads) write(c, in[c * scores.column_stride]);
}

template <typename Id, typename Score>
void launch(const LogitsEdits& edits, ScoreMatrix scores, ScoreMatrix output, int64_t rows, int64_t columns,
            cudaStream_t stream) {
  const ScoreArithmetic<Score> arithmetic(edits);
  if (output.data == scores.data && edits.temperature == 1) {
    const bool has_penalty = edits.repetition_penalty != 1;
    const int64_t token_bits = has_penalty ? std::min(columns, kMaxTokenBits) : 0;
    const int threads = has_penalty ? kPenaltyThreads : kThreads;
    const auto windows = [](const TokenIds& ids, int64_t n) { return n == 0 ? 0 : ids.length - n + 1; };
    const int64_t bans = std::max({windows(edits.input_ids, edits.ngram_size), edits.suppressed_count,
                                   windows(edits.encoder_input_ids, edits.encoder_ngram_size)});
    if (bans <= 0 && !has_penalty) return;
    // One window per thread if all such blocks are resident at once.
    const int windows_of_thread = are_few_rows(rows * ceil_div(bans, threads)) ? 1 : kWindows;
    const int64_t blocks_per_row = has_penalty ? 1 : ceil_div(bans, threads * windows_of_thread);
    FollowingKernel<edit_in_place_kernel<Id, Score>>::launch(
        static_cast<unsigned>(rows * blocks_per_row), threads, ceil_div(token_bits, kWordBits) * 4, stream, edits,
        arithmetic, scores, columns, token_bits, static_cast<unsigned>(blocks_per_row));
    return;
  }
  // Chunks are large, because every chunk reads all ids of its row; smaller if rows are too few to fill the device; and
  // nearly equal in size.
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(Score));
  int64_t chunk_bytes = kMaxChunkBytes;
  const int64_t enough_blocks = tuning().process_logits_blocks * multiprocessor_count();
  while (chunk_bytes > kMinChunkBytes && rows * ceil_div(row_bytes, chunk_bytes) < enough_blocks) chunk_bytes /= 2;
  const int64_t chunks_per_row = ceil_div(row_bytes, chunk_bytes);
  constexpr int64_t kWidth = kVectorWidth<Score>;
  const int64_t chunk = ceil_div(ceil_div(columns, chunks_per_row), kWidth) * kWidth;
  FollowingKernel<rewrite_kernel<Id, Score>>::launch(static_cast<unsigned>(rows * chunks_per_row), kThreads, 0, stream,
                                                     edits, arithmetic, scores, output, columns, chunk,
                                                     static_cast<unsigned>(chunks_per_row));
}

template <typename Id>
void launch_dtype(const LogitsEdits& edits, ScoreMatrix scores, ScoreMatrix output, int64_t rows, int64_t columns,
                  cudaStream_t stream) {
  const bool is_fast = dispatch_fast_dtype(scores.dtype, [&](auto tag) {
    launch<Id, typename decltype(tag)::type>(edits, scores, output, rows, columns, stream);
  });
  if (!is_fast) launch<Id, double>(edits, scores, output, rows, columns, stream);
}

}  // namespace

extern "C" cudaError_t fuseopt_process_logits(const LogitsEdits* edits, ScoreMatrix scores, ScoreMatrix output,
                                              int64_t rows, int64_t columns, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  const auto launch_ids = edits->input_ids.bytes == 4 ? launch_dtype<int> : launch_dtype<int64_t>;
  launch_ids(*edits, scores, output, rows, columns, stream);
  return cudaGetLastError();
}

}  // namespace fuseopt::process_logits
