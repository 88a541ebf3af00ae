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

__device__ __forceinline__ u32 load_acquire(const u32 *at) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
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
