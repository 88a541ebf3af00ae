// Programmatic dependent launches: a kernel whose blocks start while the one before still runs.
#pragma once

#include "core/variant.cuh"

// Asks for the 128 bytes at an address to be in L2, where no launch is waited for yet: L2 is where
// earlier launches write, so what is loaded later is what they wrote.
__device__ __forceinline__ void fetch_early(const void *at) {
  if constexpr (kArch >= 90) asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// No value of memory may be used before this. Launches after it may start from now on; they wait
// here themselves. No effect where a launch did not ask for it, nor below 9.0.
__device__ __forceinline__ void follow_earlier_launches() {
  if constexpr (kArch >= 90) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
}
