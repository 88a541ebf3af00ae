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
  __shared__ i32 scratch[3 * kScheduleThreads / 32 + 2];
  if (d.arrivals) {
    for (int i = threadIdx.x; i < d.counters; i += kScheduleThreads) d.arrivals[i] = 0;
  }
  if (!d.prefix) return;
  BatchTotals totals = {};
#pragma unroll 1
  for (int begin = 0; begin < p.batch; begin += kStep) {
    totals = add_up<kScheduleThreads>(p, d, begin, min(p.batch, begin + kStep), totals, d.prefix,
                                      scratch);
  }
  if (threadIdx.x == 0) {
    i32 *const more = d.prefix + p.batch + 1;
    more[0] = totals.largest;
    more[1] = totals.first_tiles;
    more[2] = totals.first_segments;
    more[3] = totals.alike;
    reinterpret_cast<float *>(more)[4] = totals.pairs;
  }
}
