// Groups of requests whose block tables begin alike.

#include "core/variant.cuh"
#include "mainloop/prefix_search.cuh"

static_assert(params_agree<PrefixParams>(), "PrefixParams differs from the host's layout");

namespace {
constexpr int kMostRequests = 1024;
}

extern "C" __global__ void __cluster_dims__(kSearchCtas, 1, 1) __launch_bounds__(kSearchThreads)
    KERNEL_NAME(const __grid_constant__ PrefixParams p) {
  __shared__ PrefixGroups<kMostRequests> groups;
  wait_for_earlier_launches();
  let_later_launches_start();
  PrefixSearch(p, groups).run();
}
