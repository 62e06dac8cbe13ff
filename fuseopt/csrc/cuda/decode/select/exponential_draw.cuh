// The exponentially distributed numbers that torch.Tensor.exponential_ draws for a float32 tensor on a GPU, each computed
// on its own. Upstream: distribution_elementwise_grid_stride_kernel and transformation::exponential of PyTorch, with
// Philox4x32-10 (Salmon et al. 2011) as cuRAND has it.
#pragma once

#include <cfloat>

#include "cuda/common/launch.cuh"

namespace fuseopt {

// The launch in which torch draws `count` numbers.
struct TorchDraw {
  static constexpr int64_t kThreads = 256, kNumbers = 4;  // of a block; of a thread between two of its offsets
  unsigned threads;
  unsigned offset;  // of the generator, that the draw takes

  explicit TorchDraw(int64_t count) {
    const int64_t most = multiprocessor_count() * (cached_attribute<cudaDevAttrMaxThreadsPerMultiProcessor>() / kThreads);
    threads = static_cast<unsigned>(kThreads * std::clamp(ceil_div(count, kThreads), int64_t{1}, most));
    offset = static_cast<unsigned>(ceil_div(count, threads * kNumbers) * kNumbers);
  }
};

class ExponentialDraw {
 public:
  // `random`: seed and offset of torch's generator, and how many draws came before. Null: there is no draw. Each of torch's
  // threads takes one of the tensor's elements after another, four a counter of Philox.
  __device__ ExponentialDraw(const int64_t* random, const TorchDraw& draw) : threads_(draw.threads) {
    if (random == nullptr) return;
    key_x_ = static_cast<unsigned>(random[0]), key_y_ = static_cast<unsigned>(static_cast<uint64_t>(random[0]) >> 32);
    first_ = static_cast<uint64_t>(random[1] + random[2] * draw.offset) / kWords;
  }

  // The number of an element.
  __device__ float operator()(unsigned element) const {
    const unsigned thread = element % threads_, turn = element / threads_;
    const uint64_t block = first_ + turn / kWords;
    unsigned c0 = static_cast<unsigned>(block), c1 = static_cast<unsigned>(block >> 32), c2 = thread, c3 = 0;
    unsigned k0 = key_x_, k1 = key_y_;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c0, b = static_cast<uint64_t>(0xCD9E8D57u) * c2;
      c0 = static_cast<unsigned>(b >> 32) ^ c1 ^ k0;
      c1 = static_cast<unsigned>(b);
      c2 = static_cast<unsigned>(a >> 32) ^ c3 ^ k1;
      c3 = static_cast<unsigned>(a);
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    const unsigned low = turn & 1 ? c1 : c0, high = turn & 1 ? c3 : c2;
    // In (0, 1].
    const float uniform = static_cast<float>(turn & 2 ? high : low) * 0x1p-32f + 0x1p-33f;
    constexpr float kLeast = FLT_EPSILON / 2;
    // PyTorch uses __logf here. Near 1 its relative error exceeds 1%, so logf would give other numbers than PyTorch.
    return uniform >= 1 - kLeast ? kLeast : -__logf(uniform);
  }

 private:
  static constexpr unsigned kWords = 4;  // of a counter's result

  unsigned key_x_ = 0, key_y_ = 0;
  uint64_t first_ = 0;  // counter of the first elements
  unsigned threads_;
};

}  // namespace fuseopt
