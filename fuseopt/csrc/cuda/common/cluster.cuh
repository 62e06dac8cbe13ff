// Clusters of blocks, in one dimension: a barrier, and stores to each other's shared memory. Before sm_90 a cluster is
// one block.
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

// The number of blocks in a cluster.
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

// Arrives without a release: earlier stores need not be visible after the barrier.
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

// The address in the shared memory of block `rank` that corresponds to `own` in this block's.
__device__ inline unsigned address_in_block(unsigned own, int rank) {
  unsigned remote = own;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
#endif
  return remote;
}

// Stores to the place of `own` in the shared memory of block `rank`. It can be read after a barrier.
template <typename Value>
__device__ inline void store_to_block(Value* own, int rank, Value value) {
#if __CUDA_ARCH__ >= 900
  const unsigned remote = address_in_block(shared_address(own), rank);
  if constexpr (std::is_same_v<Value, double>) {
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"(value) : "memory");
  } else if constexpr (std::is_same_v<Value, unsigned long long>) {
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(remote), "l"(value) : "memory");
  } else if constexpr (std::is_same_v<Value, unsigned>) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
  } else {
    static_assert(std::is_same_v<Value, float>);
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
  }
#else
  *own = value;
#endif
}

// Loads from the place of `own` in the shared memory of block `rank`, which must not end before a later barrier.
__device__ inline unsigned load_from_block(const unsigned* own, int rank) {
#if __CUDA_ARCH__ >= 900
  unsigned value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];"
               : "=r"(value)
               : "r"(address_in_block(shared_address(own), rank))
               : "memory");
  return value;
#else
  return *own;
#endif
}

// The same for 8 or 16 bytes of floats, aligned to their size.
template <typename Floats>
__device__ inline Floats load_from_block(const Floats* own, int rank) {
  static_assert(sizeof(Floats) == 8 || sizeof(Floats) == 16);
#if __CUDA_ARCH__ >= 900
  const unsigned remote = address_in_block(shared_address(own), rank);
  Floats result;
  float* const to = reinterpret_cast<float*>(&result);
  if constexpr (sizeof(Floats) == 8) {
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(remote) : "memory");
  } else {
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "r"(remote)
                 : "memory");
  }
  return result;
#else
  return *own;
#endif
}

// Adds to the place of `own` in the shared memory of block `rank`; returns what was there before.
__device__ inline unsigned add_in_block(unsigned* own, int rank, unsigned value) {
#if __CUDA_ARCH__ >= 900
  unsigned before;
  asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(address_in_block(shared_address(own), rank)), "r"(value)
               : "memory");
  return before;
#else
  return atomicAdd(own, value);
#endif
}

// A barrier of all threads of the cluster. Their earlier stores, also to global memory, are visible after it.
__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  arrive_at_cluster_barrier();
  wait_at_cluster_barrier();
#else
  __syncthreads();
#endif
}

// The index in x of this block's cluster.
__device__ inline unsigned cluster_index() {
  unsigned index = blockIdx.x;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
#endif
  return index;
}

// Receives stores of other blocks of the cluster into this block's shared memory, and knows when all have arrived. So
// no cluster barrier is needed, whose release would wait for all of memory. A block may store only once it knows that
// this mailbox is open.
class Mailbox {
 public:
  // Called by all threads of the block. A barrier must follow before one of them calls `expect`.
  __device__ void open() {
    open_and([] {});
  }

  // Called by all threads of the block: sets how many bytes must arrive before `wait` returns. Some may already be
  // there.
  __device__ void expect(unsigned bytes) {
    if (threadIdx.x == 0) arrivals_.expect(bytes);
  }

  // Both in one call.
  __device__ void open(unsigned bytes) {
    open_and([&] { arrivals_.expect(bytes); });
  }

  // Stores to the place of `own` in the shared memory of block `rank`, whose mailbox has the same address as this one.
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

  // Returns once all bytes have arrived; `round` is how many times that happened before.
  __device__ void wait(unsigned round = 0) { arrivals_.wait<true>(round & 1); }

 private:
  // The loop runs once, and keeps a real branch. Without it ptxas would predicate these instructions for the whole
  // warp. compute-sanitizer does not see that predicate, and reports the initialisation as stores by all warps, each to
  // whatever address its register has.
  template <typename Then>
  __device__ void open_and(Then then) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x > 0) return;
    unsigned threads;
    asm("mov.u32 %0, %%ntid.x;" : "=r"(threads));  // blockDim.x, opaque to the compiler, so the loop stays
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
