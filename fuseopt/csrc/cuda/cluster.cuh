// Clusters of blocks: a barrier over them, and stores into one another's shared memory. Before sm_90 a block is alone.
#pragma once

#include <type_traits>

namespace fuseopt {

__device__ inline void arrive_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
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

}  // namespace fuseopt
