// Instructions of compute capability 9.0 around asynchronous copies, one a function, no policy.
#pragma once

#include "arch/memory_sm80.cuh"

struct __align__(64) TensorMap {
  u64 opaque[16];
};

// ---- barriers in shared memory

__device__ __forceinline__ void mbarrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// What was initialised is visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{\n\t.reg .pred p;\n\t"
               "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
               "selp.b32 %0, 1, 0, p;\n\t}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// The barrier is kOffset bytes behind: instructions have room for that.
template <int kOffset = 0>
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  // A loop of its own in C++ would cost the registers around it their uniformity.
  asm volatile("{\n\t.reg .pred p;\n\tagain:\n\t"
               "mbarrier.try_wait.parity.shared::cta.b64 p, [%0+%2], %1;\n\t"
               "@p bra done;\n\tbra again;\n\tdone:\n\t}" ::"r"(barrier), "r"(parity), "n"(kOffset)
               : "memory");
}

// ---- copies of boxes

// A cache policy: the line is the first to go. For bytes that are read once.
constexpr u64 kEvictFirst = 0x12f0000000000000ull;

__device__ __forceinline__ void tma_load5(u32 to, const TensorMap *map, const i32 (&at)[5],
                                          u32 barrier, u64 policy) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
               "l"(map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]),
               "l"(policy)
               : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void *at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}

// ---- dependent launches: no effect where the launch did not ask for them

__device__ __forceinline__ void wait_for_earlier_launches() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_later_launches_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// An 8x8 matrix of 16 bits across the warp, transposed.
__device__ __forceinline__ u32 transpose_8x8(u32 row) {
  u32 column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
  return column;
}

// ---- of tiles that the products read

template <int kOffset = 0>
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0+%1];" ::"r"(barrier), "n"(kOffset)
               : "memory");
}

__device__ __forceinline__ void tma_load3(u32 to, const TensorMap *map, i32 x, i32 y, i32 z,
                                          u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
               "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
               : "memory");
}

__device__ __forceinline__ void tma_load4(u32 to, const TensorMap *map, i32 x, i32 y, i32 z, i32 w,
                                          u32 barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
               "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

__device__ __forceinline__ void tma_store3(const TensorMap *map, u32 from, i32 x, i32 y, i32 z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::
                   "l"(map),
               "r"(from), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// The stores of this thread so far have read shared memory.
__device__ __forceinline__ void tma_wait_read() {
  asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
}

// They are done.
__device__ __forceinline__ void tma_wait_stored() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// What this thread wrote to shared memory is visible to copies and warpgroup products.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Four 8x8 matrices of 16 bits; lane 8i + j gives the address of row j of matrix i.
__device__ __forceinline__ void stmatrix4(u32 row, const u32 (&matrix)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(matrix[0]), "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
               : "memory");
}
