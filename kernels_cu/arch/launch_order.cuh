// Programmatic dependent launches: a kernel whose blocks start while the one before still runs.
#pragma once

#include "core/variant.cuh"

// Nothing of memory may be touched before this. Launches after it may start from now on; they wait
// here themselves. No effect where a launch did not ask for it, nor below 9.0.
__device__ __forceinline__ void follow_earlier_launches() {
  if constexpr (kArch >= 90) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
}
