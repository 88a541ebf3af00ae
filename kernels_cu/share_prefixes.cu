// Who shares what, and the schedule of it, in one launch that needs little room: it may run beside
// the launches in front of the attention.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "arch/tma_sm90.cuh"
#include "mainloop/prefix_search.cuh"
#include "mainloop/shared_schedule.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");
static_assert(SharedScheduleVariant::kSharedBytes == sizeof(SharedParams),
              "SharedParams differs from the host's layout");
static_assert(SharedScheduleVariant::kSearchBytes == sizeof(PrefixParams),
              "PrefixParams differs from the host's layout");
static_assert(SharedScheduleVariant::kScratchBytes >= sizeof(ScheduleScratch<kSearchThreads>),
              "too little shared memory");

extern "C" __global__ void __cluster_dims__(kSearchCtas, 1, 1) __launch_bounds__(kSearchThreads)
    KERNEL_NAME(const __grid_constant__ AttentionParams p, const __grid_constant__ DecodeParams d,
                const __grid_constant__ SharedParams s, const __grid_constant__ PrefixParams f) {
  extern __shared__ __align__(16) char smem[];
  __shared__ PrefixGroups<kSearchThreads> groups;
  __shared__ FoundPlaces<kSearchThreads> found;
  let_later_launches_start();
  wait_for_earlier_launches();
  PrefixSearch(f, groups, &found).run();
  using Scratch = ScheduleScratch<kSearchThreads>;
  SharedSchedule<kSearchThreads> schedule(p, d, s, *reinterpret_cast<Scratch *>(smem), s.ctas);
  schedule.make(Lengths(p, s, threadIdx.x, found));
  schedule.write(threadIdx.x * gridDim.x + blockIdx.x, gridDim.x * kSearchThreads);
}
