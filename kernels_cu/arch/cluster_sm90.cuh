// Instructions between the blocks of a cluster, for compute capability 9.0, one a function.
#pragma once

#include "arch/tma_sm90.cuh"

// All threads of all blocks. What they wrote before is visible after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// The same in two steps, where what was written before has been fenced already.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_fence() {
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
}

// The same place in the shared memory of another block.
__device__ __forceinline__ u32 cluster_address(u32 own, u32 rank) {
  u32 other;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(own), "r"(rank));
  return other;
}

// At a barrier in the shared memory of any block of the cluster. Of what other blocks wait for,
// reads are ordered; `writes` as well, which takes about a thousand clocks.
__device__ __forceinline__ void cluster_barrier_arrive(u32 barrier, bool writes) {
  if (writes) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
                 : "memory");
  } else {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
  }
}

__device__ __forceinline__ void cluster_barrier_wait(u32 barrier, u32 parity) {
  asm volatile("{\n\t.reg .pred p;\n\tagain:\n\t"
               "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n\t"
               "@p bra done;\n\tbra again;\n\tdone:\n\t}" ::"r"(barrier), "r"(parity)
               : "memory");
}

__device__ __forceinline__ void cluster_min(u32 at, i32 value) {
  asm volatile("red.relaxed.cluster.shared::cluster.min.s32 [%0], %1;" ::"r"(at), "r"(value)
               : "memory");
}

__device__ __forceinline__ i32 cluster_load(u32 at) {
  i32 value;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
  return value;
}

__device__ __forceinline__ void cluster_store(u32 at, i32 value) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}

// To the same place in each block whose bit is set, and to the barrier at the same place there.
__device__ __forceinline__ void tma_load5_to(u32 to, const TensorMap *map, const i32 (&at)[5],
                                             u32 barrier, u16 blocks, u64 policy) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;"
               ::"r"(to),
               "l"(map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]),
               "h"(blocks), "l"(policy)
               : "memory");
}
