// Memory that other blocks write during the launch, one instruction a function.
#pragma once

#include "core/numeric.cuh"

// Wraps to 0 after `last`; orders what this thread saw before against what it sees afterwards.
__device__ __forceinline__ u32 arrive_and_wrap(u32 *counter, u32 last) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

// The same among the threads of a block; `counter` is a shared address.
__device__ __forceinline__ u32 arrive_and_wrap_shared(u32 counter, u32 last) {
  u32 before;
  asm volatile("atom.acq_rel.cta.shared.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(counter), "r"(last)
               : "memory");
  return before;
}

__device__ __forceinline__ u32 load_acquire(const u32 *at) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// Between the warps of a block, in shared memory.
__device__ __forceinline__ i32 load_acquire_shared(u32 at) {
  i32 value;
  asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
  return value;
}

// Between two looks: a warp that waits takes no turns of others meanwhile.
__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 100;" ::: "memory"); }

__device__ __forceinline__ void store_release_shared(u32 at, i32 value) {
  asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}

__device__ __forceinline__ float4 load_from_l2(const float4 *at) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ float2 load_from_l2(const float2 *at) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(at) : "memory");
  return v;
}

// Words that another block reads while it waits for them, each for itself.
__device__ __forceinline__ void store_relaxed(uint4 *at, const uint4 &v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_relaxed(uint2 *at, const uint2 &v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(v.x), "r"(v.y)
               : "memory");
}

__device__ __forceinline__ u32 load_relaxed(const u32 *at) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ uint4 load_relaxed(const uint4 *at) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_relaxed(const uint2 *at) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(at)
               : "memory");
  return v;
}
