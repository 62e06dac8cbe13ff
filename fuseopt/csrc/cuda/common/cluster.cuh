// Clusters of blocks, in one dimension: a barrier over them, and stores into one another's shared memory. Before sm_90 a
// block is alone.
#pragma once

#include <type_traits>

#include "cuda/common/arrivals.cuh"

namespace fuseopt {

// The rank of this block in its cluster.
__device__ inline int cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}

// How many blocks a cluster has.
__device__ inline int cluster_size() {
  unsigned blocks = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
#endif
  return static_cast<int>(blocks);
}

__device__ inline void arrive_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// Without the release: nothing that was stored before can be relied on.
__device__ inline void arrive_relaxed_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ inline void wait_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Where what lies at `own` in this block's shared memory lies in that of block `rank` of the cluster.
__device__ inline unsigned address_in_block(unsigned own, int rank) {
  unsigned remote = own;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
#endif
  return remote;
}

// Stores to where `own` lies in the shared memory of block `rank` of the cluster. To be read after a barrier.
template <typename Value>
__device__ inline void store_to_block(Value* own, int rank, Value value) {
#if __CUDA_ARCH__ >= 900
  const unsigned remote = address_in_block(shared_address(own), rank);
  if constexpr (std::is_same_v<Value, double>) {
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"(value) : "memory");
  } else {
    static_assert(std::is_same_v<Value, float>);
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
  }
#else
  *own = value;
#endif
}

// The place in x of this block's cluster.
__device__ inline unsigned cluster_index() {
  unsigned index = blockIdx.x;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
#endif
  return index;
}

// Lies in the shared memory of a block that other blocks of its cluster store into, and knows when all has arrived: no
// barrier over the cluster is needed then, whose release waits for memory as a whole. A block that stores must know
// that this one has opened.
class Mailbox {
 public:
  // By all threads of the block, which must meet before one of them calls `expect`.
  __device__ void open() {
    open_and([] {});
  }

  // By all threads of the block: how much is to arrive, and may have already, before `wait` returns.
  __device__ void expect(unsigned bytes) {
    if (threadIdx.x == 0) arrivals_.expect(bytes);
  }

  // Both.
  __device__ void open(unsigned bytes) {
    open_and([&] { arrivals_.expect(bytes); });
  }

  // Stores to where `own` lies in the shared memory of block `rank`, whose mailbox lies where this one does.
  __device__ void send(float4* own, float4 values, int rank = 0) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     address_in_block(shared_address(own), rank)),
                 "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w),
                 "r"(address_in_block(arrivals_.address(), rank))
                 : "memory");
#endif
  }
  __device__ void send(float* own, float value, int rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                     address_in_block(shared_address(own), rank)),
                 "f"(value), "r"(address_in_block(arrivals_.address(), rank))
                 : "memory");
#endif
  }

  // Returns when all bytes have arrived; `round`: how often that has happened before.
  __device__ void wait(unsigned round = 0) { arrivals_.wait<true>(round & 1); }

 private:
  // In a loop of one turn, which stays a branch, where the assembler would put a few instructions under a predicate of the
  // warp: compute-sanitizer does not see that one, and takes a barrier so set up for a store by all warps, each to
  // wherever its register points.
  template <typename Then>
  __device__ void open_and(Then then) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x > 0) return;
    unsigned threads;
    asm("mov.u32 %0, %%ntid.x;" : "=r"(threads));  // blockDim.x, which the compiler does not know to be positive here
#pragma unroll 1
    do {
      arrivals_.open();
      Arrivals::publish();
      then();
    } while (threads == 0);
#endif
  }

  Arrivals arrivals_;
};

}  // namespace fuseopt
