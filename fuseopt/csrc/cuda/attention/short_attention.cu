// Attention over sequences of up to 32 tokens, for which kernels for long sequences leave most of a 64 x 64 tile empty.
// Here several warps of a block, or one, have a head; short_attention_mma.cu takes 16 bits on the tensor cores.
#include "cuda/attention/short_attention.cuh"
#include "cuda/common/math.cuh"

namespace fuseopt::short_attention {
namespace {

// TUNED: measurement not recorded (71bb838); `fuseopt bench ops --op short_attention` measures it again.
constexpr int kLanesOfQuery = 8;  // share the keys, and the result's columns, of a few neighbouring queries
constexpr int kQueryLanes = kWarpSize / kLanesOfQuery;
constexpr int kColumns = 4;       // that a lane reads at once
constexpr int kGroups = 2;        // groups of columns whose results a lane has at a time
constexpr int kLoads = 6;         // 16-byte loads in flight per lane

template <typename T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename A>
struct alignas(sizeof(A) * kColumns < kAccessBytes ? sizeof(A) * kColumns : kAccessBytes) Columns {
  A values[kColumns];
};

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float as_acc(float x) { return x; }
__device__ inline float as_acc(__half x) { return to_float(x); }
__device__ inline float as_acc(__nv_bfloat16 x) { return to_float(x); }
__device__ inline double as_acc(double x) { return x; }

// Pitch of a row in shared memory: 4 numbers more than a multiple of 8, so that eight rows begin in different banks. A
// query's row is reused for its weights, one for each key.
inline int pitch_of(int64_t head_dim, int keys) {
  return std::max(static_cast<int>(ceil_div(head_dim, 8) * 8), keys) + kColumns;
}

// Shared memory of a head's queries, keys and values.
template <typename A, int kKeys>
size_t head_bytes(int64_t head_dim) {
  return 3 * kKeys * pitch_of(head_dim, kKeys) * sizeof(A);
}

// Loads kKeys queries, keys and values into that many rows of shared memory, with kThreads threads; zeros after the
// last row and the last column. Each thread has several loads in flight, since the kernel's time is that of its loads
// in sequence.
template <typename T, int kKeys, int kThreads>
__device__ void load_rows(Acc<T>* shared, int pitch, const Head<T>& head, int length, int head_dim, bool in_vectors) {
  constexpr int kWidth = kVectorWidth<T>, kRows = 3 * kKeys;
  const int thread = threadIdx.x % kThreads;
  const auto place_of = [&](int row, const T*& data) {
    const int at = row % kKeys;
    const Rows<T>& rows = row < kKeys ? head.query : row < 2 * kKeys ? head.key : head.value;
    data = rows.data + at * rows.stride;
    return at < length;
  };
  if (in_vectors) {
    const int vectors = head_dim / kWidth, rows_apart = kThreads / vectors, vectors_apart = kThreads % vectors;
    int row = thread / vectors, vector = thread % vectors;
    while (row < kRows) {
      Vector<T, kWidth> loaded[kLoads];
      Acc<T>* places[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const T* data;
        loaded[k] = {};
        places[k] = row < kRows ? shared + row * pitch + vector * kWidth : nullptr;
        if (row < kRows && place_of(row, data)) loaded[k] = load_vector<T, kWidth>(data, vector);
        row += rows_apart, vector += vectors_apart;
        if (vector >= vectors) row += 1, vector -= vectors;
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        Acc<T>* const place = places[k];
        if (place == nullptr) break;
        if constexpr (kWidth % kColumns == 0) {
#pragma unroll
          for (int j = 0; j < kWidth; j += kColumns) {
            Columns<Acc<T>> part;
#pragma unroll
            for (int c = 0; c < kColumns; ++c) part.values[c] = loaded[k][j + c];
            *reinterpret_cast<Columns<Acc<T>>*>(place + j) = part;
          }
        } else {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) place[j] = as_acc(loaded[k].values[j]);
        }
      }
    }
  }
  const int begin = in_vectors ? head_dim : 0, columns = pitch - begin;
  for (int i = thread; i < kRows * columns; i += kThreads) {
    const int row = i / columns, column = begin + i % columns;
    const T* data;
    const bool exists = place_of(row, data) && column < head_dim;
    shared[row * pitch + column] = exists ? as_acc(data[column]) : Acc<T>(0);
  }
}

// kHeadWarps: warps that share a head's queries. If it is 1, no warp waits for another, and a block has several heads.
template <typename T, int kKeys, int kHeadWarps>
__global__ void __launch_bounds__((kHeadWarps == 1 ? kMaxWarps : kHeadWarps) * kWarpSize, 1)
    short_attention_kernel(const __grid_constant__ ShortAttention attention) {
  using A = Acc<T>;
  constexpr int kThreads = kHeadWarps * kWarpSize, kQueriesOfLane = kKeys / (kHeadWarps * kQueryLanes);
  constexpr int kKeysOfLane = kKeys / kLanesOfQuery;
  extern __shared__ double2 memory[];
  const int lane = threadIdx.x % kWarpSize, part = threadIdx.x / kThreads;
  const int length = static_cast<int>(attention.length), head_dim = static_cast<int>(attention.head_dim);
  const int pitch = attention.pitch;
  const Head<T> head(attention, static_cast<int64_t>(blockIdx.x) * (blockDim.x / kThreads) + part);
  follow_predecessor();
  if (!head.exists) return;
  const auto synchronise = [] {
    if constexpr (kHeadWarps == 1) __syncwarp();
    else __syncthreads();
  };

  A* const query = reinterpret_cast<A*>(memory) + part * 3 * kKeys * pitch;  // later the query's weights of the keys
  A* const key = query + kKeys * pitch;
  A* const value = key + kKeys * pitch;
  load_rows<T, kKeys, kThreads>(query, pitch, head, length, head_dim, attention.in_vectors);
  synchronise();

  const int own_query = threadIdx.x % kThreads / kLanesOfQuery * kQueriesOfLane, own_key = lane % kLanesOfQuery;
  A score[kQueriesOfLane][kKeysOfLane] = {};
  for (int column = 0; column < pitch - kColumns; column += kColumns) {
    Columns<A> q[kQueriesOfLane], k[kKeysOfLane];
#pragma unroll
    for (int i = 0; i < kQueriesOfLane; ++i) {
      q[i] = *reinterpret_cast<const Columns<A>*>(query + (own_query + i) * pitch + column);
    }
#pragma unroll
    for (int j = 0; j < kKeysOfLane; ++j) {
      k[j] = *reinterpret_cast<const Columns<A>*>(key + (own_key + j * kLanesOfQuery) * pitch + column);
    }
#pragma unroll
    for (int i = 0; i < kQueriesOfLane; ++i) {
#pragma unroll
      for (int j = 0; j < kKeysOfLane; ++j) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) score[i][j] += q[i].values[c] * k[j].values[c];
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kQueriesOfLane; ++i) {
    // Every query sees the first key, so there is a largest score.
    A largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kKeysOfLane; ++j) {
      const int at = own_key + j * kLanesOfQuery;
      const bool is_seen = at < length && (!attention.causal || at <= own_query + i);
      score[i][j] = is_seen ? rounded_product(score[i][j], static_cast<A>(attention.scale)) : -INFINITY;
      largest = score[i][j] > largest || isnan(score[i][j]) ? score[i][j] : largest;
    }
#pragma unroll
    for (int apart = 1; apart < kLanesOfQuery; apart *= 2) {
      const A other = __shfl_xor_sync(0xffffffff, largest, apart);
      largest = other > largest || isnan(other) ? other : largest;
    }
    A sum = 0;
#pragma unroll
    for (int j = 0; j < kKeysOfLane; ++j) sum += score[i][j] = exponential(score[i][j] - largest);
#pragma unroll
    for (int apart = 1; apart < kLanesOfQuery; apart *= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
#pragma unroll
    for (int j = 0; j < kKeysOfLane; ++j) score[i][j] /= sum;
  }
#pragma unroll
  for (int i = 0; i < kQueriesOfLane; ++i) {
#pragma unroll
    for (int j = 0; j < kKeysOfLane; ++j) query[(own_query + i) * pitch + own_key + j * kLanesOfQuery] = score[i][j];
  }
  __syncwarp();

  const int keys = attention.causal ? min(length, own_query + kQueriesOfLane) : length;
  for (int begin = 0; begin < head_dim; begin += kGroups * kLanesOfQuery * kColumns) {
    A result[kQueriesOfLane][kGroups][kColumns] = {};
    for (int at = 0; at < keys; at += kColumns) {
      Columns<A> w[kQueriesOfLane];
#pragma unroll
      for (int i = 0; i < kQueriesOfLane; ++i) {
        w[i] = *reinterpret_cast<const Columns<A>*>(query + (own_query + i) * pitch + at);
      }
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const int column = begin + (group * kLanesOfQuery + own_key) * kColumns;
          if (column >= head_dim) continue;
          const Columns<A> v = *reinterpret_cast<const Columns<A>*>(value + (at + k) * pitch + column);
#pragma unroll
          for (int i = 0; i < kQueriesOfLane; ++i) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) result[i][group][c] += w[i].values[k] * v.values[c];
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kQueriesOfLane; ++i) {
      const int row = own_query + i;
      if (row >= length) continue;
      T* const out = head.output + row * attention.heads * head_dim;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int column = begin + (group * kLanesOfQuery + own_key) * kColumns;
        Vector<T, kColumns> rounded;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) rounded.values[c] = from_acc<T>(result[i][group][c]);
        if (head_dim % kColumns == 0 && column < head_dim) {
          *reinterpret_cast<Vector<T, kColumns>*>(out + column) = rounded;
        } else {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            if (column + c < head_dim) out[column + c] = rounded.values[c];
          }
        }
      }
    }
  }
}

template <typename T, int kKeys, int kHeadWarps>
cudaError_t launch_as(ShortAttention& attention, cudaStream_t stream) {
  attention.pitch = pitch_of(attention.head_dim, kKeys);
  const size_t bytes = head_bytes<Acc<T>, kKeys>(attention.head_dim);
  const int heads = kHeadWarps > 1 ? 1 : static_cast<int>(std::clamp<size_t>(kUnaskedSharedBytes / bytes, 1, kMaxWarps));
  const size_t shared_bytes = heads * bytes;
  using Kernel = FollowingKernel<short_attention_kernel<T, kKeys, kHeadWarps>>;
  Kernel::launch(static_cast<unsigned>(ceil_div(attention.batch * attention.heads, heads)),
                 heads * kHeadWarps * kWarpSize, shared_bytes, stream, attention);
  return cudaGetLastError();
}

// Many heads keep a multiprocessor busy with few warps each; a lane then has several queries for each key and value
// that it reads. With few heads, the time of one head counts.
template <typename T, int kKeys>
cudaError_t launch_as(ShortAttention& attention, cudaStream_t stream) {
  // TUNED: few heads: all reads of a head in flight at once; many: keys and values staged once (c620c07).
  constexpr int kFewWarps = kKeys / kQueryLanes, kManyWarps = kFewWarps / 4;
  const bool are_few = attention.batch * attention.heads <= tuning().short_attention_few_heads * multiprocessor_count();
  return are_few ? launch_as<T, kKeys, kFewWarps>(attention, stream) : launch_as<T, kKeys, kManyWarps>(attention, stream);
}

template <typename T>
cudaError_t launch(ShortAttention& attention, cudaStream_t stream) {
  const auto is_even = [](const ShortAttention::Heads& heads) {
    constexpr int kWidth = kVectorWidth<T>;
    return is_aligned(heads.data) && heads.batch_stride % kWidth == 0 && heads.head_stride % kWidth == 0 &&
           heads.row_stride % kWidth == 0;
  };
  attention.in_vectors = attention.head_dim % kVectorWidth<T> == 0 && is_even(attention.query) &&
                         is_even(attention.key) && is_even(attention.value);
  if constexpr (sizeof(T) == 2) {
    const bool fits = attention.head_dim == 64 || attention.head_dim == 128;
    if (fits && attention.in_vectors && compute_capability_major() >= 8) {
      return launch_mma<T>(attention, stream);
    }
  }
  return attention.length <= kQueries ? launch_as<T, 16>(attention, stream) : launch_as<T, 32>(attention, stream);
}

}  // namespace

extern "C" bool fuseopt_takes_short_attention(int dtype, int64_t length, int64_t head_dim) {
  const auto bytes_of = [&](auto zero) {
    using A = decltype(zero);
    return length <= kQueries ? head_bytes<A, 16>(head_dim) : head_bytes<A, 32>(head_dim);
  };
  return (dtype == kFloat64 ? bytes_of(0.0) : bytes_of(0.0f)) <= shared_bytes_of_block();
}

extern "C" cudaError_t fuseopt_short_attention(ShortAttention attention, cudaStream_t stream) {
  if (attention.batch * attention.heads * attention.length * attention.head_dim == 0) return cudaSuccess;
  switch (static_cast<DType>(attention.dtype)) {
    case kFloat16: return launch<__half>(attention, stream);
    case kBFloat16: return launch<__nv_bfloat16>(attention, stream);
    case kFloat64: return launch<double>(attention, stream);
    case kFloat32: return launch<float>(attention, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fuseopt::short_attention
