// The input rows of decode_linear's streaming kernel: each warp has its part of them in shared memory.
#pragma once

#include "cuda/decode/linear/row_moments.cuh"
#include "cuda/decode/linear/weight_stream.cuh"

namespace fuseopt {

// A warp's part of up to 8 rows, in pieces of 8 values: 4 of each chunk and row. Lanes take pieces in turn; all pieces
// of a lane are of one row.
template <typename T, typename X>
class StreamRows {
  using Piece = Vector<X, kLaneValues>;

 public:
  // Rows from `first_row` on. `columns`: how many fit, a multiple of kChunk.
  __device__ StreamRows(char* at, const StreamLayer<T>& layer, int columns, int first_row)
      : pieces_(reinterpret_cast<Piece*>(at)),
        slot_bits_(layer.slot_bits),
        count_(columns / kLaneValues << layer.slot_bits),
        row_(first_row + slot()) {}

  static __device__ int bytes(int slot_bits, int columns) {
    return (columns << slot_bits) * static_cast<int>(sizeof(X));
  }

  // The lane's row.
  __device__ int row() const { return row_; }

  // Loads from column `first_k` on, with zeros after the end. kSums: rows are sums, which are also stored if `leaves`.
  // `change(piece, kept)` changes a piece before it is kept in place of `kept`.
  template <bool kSums, typename Change>
  __device__ void load(const StreamLayer<T>& layer, int first_k, bool leaves, Change change) {
    // TUNED: with the kernel: up and gate of Llama-3.2-1B, 16 rows, 8 in place of 4, a longer ring and the norm's weight
    // applied here: 30.4 -> 23.6 us (60e23dc). Others: measurement not recorded (6a46d2d); `fuseopt bench kernels --model
    // gpt2` measures them again.
    constexpr int kLoads = kSums ? 2 : sizeof(X) == 2 ? 8 : 4;  // loads in flight
    const int64_t first_of_row = static_cast<int64_t>(row_) * layer.in_features;
    const X* const input = static_cast<const X*>(layer.input) + first_of_row;
#pragma unroll 1
    for (int first = threadIdx.x % kWarpSize; first < count_; first += kLoads * kWarpSize) {
      Piece loaded[kLoads];
      Vector<float, kLaneValues> added[kSums ? kLoads : 1][kSplitK];
      const auto k_at = [&](int i) { return first_k + k_of(first + i * kWarpSize); };
      const auto is_there = [&](int i) {
        return first + i * kWarpSize < count_ && row_ < layer.rows && k_at(i) < layer.in_features;
      };
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        loaded[i] = {};
        if (!is_there(i)) continue;
        loaded[i] = *reinterpret_cast<const Piece*>(input + k_at(i));
        if constexpr (kSums) {
#pragma unroll
          for (int a = 0; a < kSplitK; ++a) {
            const float* const partials = layer.split_k_partials + static_cast<int64_t>(a) * layer.rows * layer.in_features;
            added[i][a] = load_fresh(partials + first_of_row + k_at(i));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if constexpr (kSums) {
          if (is_there(i)) loaded[i] = rounded_sum(loaded[i], added[i]);
          if (leaves && is_there(i)) *reinterpret_cast<Piece*>(layer.sum + first_of_row + k_at(i)) = loaded[i];
        }
        if (is_there(i)) change(loaded[i], pieces_[first + i * kWarpSize]);
        if (first + i * kWarpSize < count_) pieces_[first + i * kWarpSize] = loaded[i];
      }
    }
  }

  // Starts copying an RMS norm's weight to the places of the rows that it is to scale.
  __device__ void fetch_scale(const StreamLayer<T>& layer, int first_k) {
#pragma unroll 1
    for (int piece = threadIdx.x % kWarpSize; piece < count_; piece += kWarpSize) {
      const int k = first_k + k_of(piece);
      copy_async(pieces_ + piece, layer.norm_weight + k, k < layer.in_features);
    }
  }

  // `load`, times the norm's weight that has been copied there, if there is one. The sum of squares of the lane's row.
  template <bool kSums>
  __device__ float load_scaled(const StreamLayer<T>& layer, int first_k, bool leaves) {
    float squares = 0.f;
    const float one = layer.adds_one ? 1.f : 0.f;
    load<kSums>(layer, first_k, leaves, [&](Piece& x, const Piece& scale) {
      float values[kLaneValues];
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) values[i] = x[i], squares = fmaf(values[i], values[i], squares);
      if (layer.norm_weight == nullptr) return;
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) values[i] *= scale[i] + one;
      store_floats_as<T>(&x, 0, values);
    });
    return sum_of_row(squares);
  }

  // Moments of the lane's row, of which `columns` are present.
  __device__ Moments moments(int columns) const {
    const int lane = threadIdx.x % kWarpSize;
    // Deviations from any value of the row are small enough to sum their squares.
    const float pivot = __shfl_sync(kFullWarp, lane < count_ ? pieces_[lane][0] : 0.f, slot() * 4);
    float sum = 0.f, squares = 0.f;
#pragma unroll 2
    for (int piece = lane; piece < count_; piece += kWarpSize) {
      if (k_of(piece) >= columns) break;
      const Piece x = pieces_[piece];
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) {
        const float deviation = x[i] - pivot;
        sum += deviation;
        squares = fmaf(deviation, deviation, squares);
      }
    }
    sum = sum_of_row(sum), squares = sum_of_row(squares);
    const float mean = columns > 0 ? __fdividef(sum, columns) : 0.f;
    return {pivot + mean, squares - sum * mean};
  }

  // `norm`: mean and 1 / deviation of the lane's row.
  __device__ void normalise(const StreamLayer<T>& layer, float2 norm, const T* scale, const T* shift, int columns) {
#pragma unroll 2
    for (int piece = threadIdx.x % kWarpSize; piece < count_; piece += kWarpSize) {
      const int k = k_of(piece);
      if (k >= columns) break;
      const Piece x = pieces_[piece];
      float values[kLaneValues];
#pragma unroll
      for (int i = 0; i < kLaneValues; ++i) values[i] = (x[i] - norm.x) * norm.y;
      if (layer.is_rms_norm) round_floats_as<T>(values);
      if (layer.norm_weight != nullptr) {
        const float one = layer.adds_one ? 1.f : 0.f;
        const auto factors = *reinterpret_cast<const Vector<T, kLaneValues>*>(scale + k);
#pragma unroll
        for (int i = 0; i < kLaneValues; ++i) values[i] *= factors[i] + one;
      }
      if (layer.norm_bias != nullptr) {
        const auto terms = *reinterpret_cast<const Vector<T, kLaneValues>*>(shift + k);
#pragma unroll
        for (int i = 0; i < kLaneValues; ++i) values[i] += terms[i];
      }
      store_floats_as<T>(pieces_ + piece, 0, values);
    }
  }

  // A product's operand of a chunk: 8 values of row lane / 4; arbitrary values if there is no such row.
  __device__ uint4 operator[](int chunk) const {
    return *reinterpret_cast<const uint4*>(pieces_ + ((chunk << slot_bits_) + slot()) * 4 + threadIdx.x % 4);
  }

 private:
  // The sum over the lanes that have the same row.
  __device__ float sum_of_row(float value) const {
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      if (distance >= 4 && distance < 4 << slot_bits_) continue;  // another row
      value += __shfl_xor_sync(kFullWarp, value, distance);
    }
    return value;
  }

  __device__ int slot() const { return threadIdx.x % kWarpSize / 4 & ((1 << slot_bits_) - 1); }
  __device__ int k_of(int piece) const { return (piece >> 2 + slot_bits_) * kChunk + piece % 4 * kLaneValues; }

  Piece* const pieces_;
  const int slot_bits_, count_, row_;
};

}  // namespace fuseopt
