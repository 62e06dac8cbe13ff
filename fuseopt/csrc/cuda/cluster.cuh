// Clusters of blocks, in one dimension: a barrier over them, and stores into one another's shared memory. Before sm_90 a
// block is alone.
#pragma once

#include <cstdint>
#include <type_traits>

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

// Stores to where `own` lies in the shared memory of block `rank` of the cluster. To be read after a barrier.
template <typename Value>
__device__ inline void store_to_block(Value* own, int rank, Value value) {
#if __CUDA_ARCH__ >= 900
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(own));
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  if constexpr (std::is_same_v<Value, double>) {
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"(value) : "memory");
  } else if constexpr (std::is_same_v<Value, float>) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
  } else {
    static_assert(std::is_same_v<Value, int>);
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
  }
#else
  *own = value;
#endif
}

// This block's place in its cluster, how many blocks that has, and the cluster's place in x.
__device__ inline unsigned rank_in_cluster() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ inline unsigned blocks_in_cluster() {
  unsigned blocks = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
#endif
  return blocks;
}

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
  // By one thread.
  __device__ void open(unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address()) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // Stores to where `own` lies in the shared memory of block `rank`, whose mailbox lies where this one does.
  __device__ void send(float4* own, float4 values, int rank = 0) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     in_block(static_cast<unsigned>(__cvta_generic_to_shared(own)), rank)),
                 "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w), "r"(in_block(address(), rank))
                 : "memory");
#endif
  }

  // Returns when all bytes have arrived.
  __device__ void wait() {
#if __CUDA_ARCH__ >= 900
    unsigned done = 0;
    while (done == 0) {
      asm volatile(
          "{\n"
          ".reg .pred done;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], 0;\n"
          "selp.u32 %0, 1, 0, done;\n"
          "}\n"
          : "=r"(done)
          : "r"(address())
          : "memory");
    }
#endif
  }

 private:
  __device__ unsigned address() const { return static_cast<unsigned>(__cvta_generic_to_shared(&state_)); }

#if __CUDA_ARCH__ >= 900
  __device__ static unsigned in_block(unsigned address, int rank) {
    unsigned remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
  }
#endif

  uint64_t state_;
};

}  // namespace fuseopt
