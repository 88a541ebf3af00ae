// The schedule of shared prefixes alone, for launches that follow with the same lengths.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "arch/tma_sm90.cuh"
#include "mainloop/shared_schedule.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");
static_assert(SharedScheduleVariant::kSharedBytes == sizeof(SharedParams),
              "SharedParams differs from the host's layout");
namespace {
constexpr int kMostRequests = 1024;
}
static_assert(SharedScheduleVariant::kScratchBytes >= sizeof(ScheduleScratch<kMostRequests>),
              "too little shared memory");

extern "C" __global__ void __launch_bounds__(kMostRequests) KERNEL_NAME(
    const __grid_constant__ AttentionParams p, const __grid_constant__ DecodeParams d,
    const __grid_constant__ SharedParams s) {
  extern __shared__ __align__(16) char smem[];
  // The attention may take its place early: it waits for all of this.
  let_later_launches_start();
  wait_for_earlier_launches();
  SharedSchedule<kMostRequests> schedule(
      p, d, s, *reinterpret_cast<ScheduleScratch<kMostRequests> *>(smem), s.ctas);
  schedule.make(Lengths(p, s, threadIdx.x));
  schedule.write(threadIdx.x * gridDim.x + blockIdx.x, gridDim.x * blockDim.x);
}
