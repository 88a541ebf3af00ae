// Tiles before each request of a large batch, once for all CTAs of the launches that follow, and
// counters of arrivals set to 0 where they lie in memory that may hold anything. One CTA.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/decode_params.cuh"
#include "block/spans.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");

namespace {
constexpr int kScheduleThreads = 1024, kStep = 8 * kScheduleThreads;
}

extern "C" __global__ void __launch_bounds__(kScheduleThreads) KERNEL_NAME(
    const __grid_constant__ AttentionParams p, const __grid_constant__ DecodeParams d) {
  __shared__ i32 scratch[2 * kScheduleThreads / 32];
  if (d.arrivals) {
    for (int i = threadIdx.x; i < d.spans; i += kScheduleThreads) d.arrivals[i] = 0;
  }
  if (!d.prefix) return;
  BatchTotals totals = {};
#pragma unroll 1
  for (int begin = 0; begin < p.batch; begin += kStep) {
    totals = add_up<kScheduleThreads>(p, d, begin, min(p.batch, begin + kStep), totals, d.prefix,
                                      scratch);
  }
  if (threadIdx.x == 0) {
    d.prefix[p.batch + 1] = totals.alike;
    d.prefix[p.batch + 2] = totals.segments;
    d.prefix[p.batch + 3] = totals.largest;
  }
}
