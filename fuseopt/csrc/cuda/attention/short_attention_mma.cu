// short_attention on the tensor cores: 16 bits, a warp has 16 queries of a head. It has a file of its own to shorten the
// build.
#include "cuda/attention/short_attention.cuh"
#include "cuda/common/math.cuh"
#include "cuda/common/tensor_core.cuh"

namespace fuseopt::short_attention {
namespace {

// 32 * kUnits columns per head, without shared memory. Of rows g and g + 8 of each tensor, lane 4 g + t has columns 8 t to
// 8 t + 7 of every 32, in 16-byte accesses. So products add up columns in another order, which is the same for queries and
// keys.
template <typename T, int kKeys, int kUnits>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize)
    short_attention_mma_kernel(const __grid_constant__ ShortAttention attention) {
  constexpr int kTiles = kKeys / 8, kWords = 4;
  const int lane = threadIdx.x % kWarpSize, line = lane / 4, place = lane % 4;
  const int length = static_cast<int>(attention.length);
  const int64_t parts = (attention.length + kQueries - 1) / kQueries;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kMaxWarps + threadIdx.x / kWarpSize;
  const Head<T> head(attention, warp / parts);
  const int first = static_cast<int>(warp % parts) * kQueries;
  follow_predecessor();
  if (!head.exists) return;

  const auto load = [&](const Rows<T>& rows, int row, int unit) {
    if (row >= length) return uint4{};
    return __ldcg(reinterpret_cast<const uint4*>(rows.data + row * rows.stride + unit * 32 + place * 8));
  };
  uint4 query[2][kUnits], key[kTiles][kUnits], value[kTiles][kUnits];
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    query[0][unit] = load(head.query, first + line, unit);
    query[1][unit] = load(head.query, first + line + 8, unit);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) key[tile][unit] = load(head.key, tile * 8 + line, unit);
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) value[tile][unit] = load(head.value, tile * 8 + line, unit);
  }

  // Scores of queries `line` and `line` + 8 with keys 2 `place` and 2 `place` + 1 of each tile.
  float score[kTiles][4] = {};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const uint4 low = query[0][unit], high = query[1][unit], k = key[tile][unit];
      multiply<T>(score[tile], {low.x, low.y}, {high.x, high.y}, k.x, k.y);
      multiply<T>(score[tile], {low.z, low.w}, {high.z, high.w}, k.z, k.w);
    }
  }
  const float scale = static_cast<float>(attention.scale) * kLog2E;
  float reciprocal[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = first + line + half * 8;
    float largest = -INFINITY, sum = 0;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& own = score[tile][half * 2 + j];
        const int own_key = tile * 8 + place * 2 + j;
        own = own_key < length && (!attention.causal || own_key <= at) ? rounded_product(own, scale) : -INFINITY;
        largest = own > largest || isnan(own) ? own : largest;
      }
    }
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2) {
      const float other = __shfl_xor_sync(0xffffffff, largest, apart);
      largest = other > largest || isnan(other) ? other : largest;
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& own = score[tile][half * 2 + j];
        sum += own = exp2_approx(own - largest);
      }
    }
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
    reciprocal[half] = 1 / sum;
  }

  float result[kUnits][kWords][4] = {};
#pragma unroll
  for (int pair = 0; pair < kTiles; pair += 2) {
    const auto weights = [&](int tile, int half) {
      const Vector<T, 2> rounded{
          {from_acc<T>(score[tile][half * 2]), from_acc<T>(score[tile][half * 2 + 1])}};
      return reinterpret_cast<const unsigned&>(rounded);
    };
    const uint2 low{weights(pair, 0), weights(pair + 1, 0)}, high{weights(pair, 1), weights(pair + 1, 1)};
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        const auto of_columns = [&](const uint4& rows) { return transposed(reinterpret_cast<const unsigned*>(&rows)[word]); };
        multiply<T>(result[unit][word], low, high, of_columns(value[pair][unit]), of_columns(value[pair + 1][unit]));
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + line + half * 8;
    if (row >= length) continue;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      Vector<T, 8> rounded;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        rounded.values[j] = from_acc<T>(result[unit][j / 2][half * 2 + j % 2] * reciprocal[half]);
      }
      T* const out = head.output + row * attention.heads * attention.head_dim + unit * 32 + place * 8;
      *reinterpret_cast<Vector<T, 8>*>(out) = rounded;
    }
  }
}

template <typename T, int kKeys>
cudaError_t launch_mma_for(const ShortAttention& attention, cudaStream_t stream) {
  const int64_t tasks = attention.batch * attention.heads * ceil_div(attention.length, kQueries);
  const auto launch = [&](auto kernel) {
    kernel.launch(static_cast<unsigned>(ceil_div(tasks, kMaxWarps)), kMaxWarps * kWarpSize, 0, stream, attention);
  };
  if (attention.head_dim == 64) launch(FollowingKernel<short_attention_mma_kernel<T, kKeys, 2>>{});
  else launch(FollowingKernel<short_attention_mma_kernel<T, kKeys, 4>>{});
  return cudaGetLastError();
}

}  // namespace

template <typename T>
cudaError_t launch_mma(const ShortAttention& attention, cudaStream_t stream) {
  return attention.length <= kQueries ? launch_mma_for<T, 16>(attention, stream) : launch_mma_for<T, 32>(attention, stream);
}

template cudaError_t launch_mma<__half>(const ShortAttention&, cudaStream_t);
template cudaError_t launch_mma<__nv_bfloat16>(const ShortAttention&, cudaStream_t);

}  // namespace fuseopt::short_attention
