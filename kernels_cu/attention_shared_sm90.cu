// Attention of few query rows a request, where requests share keys, for compute capability 9.0.
// Four warps of a CTA stream own keys while two warpgroups multiply gathered rows with shared ones;
// when all CTAs are done their states are merged. Grid: as many CTAs as run at the same time.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/decode_params.cuh"
#include "core/shared_params.cuh"
#include "mainloop/shared_own_sm90.cuh"
#include "mainloop/shared_tile_sm90.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");
static_assert(SharedVariant::kParamsBytes == sizeof(DecodeParams),
              "DecodeParams differs from the host's layout");
static_assert(SharedScheduleVariant::kSharedBytes == sizeof(SharedParams),
              "SharedParams differs from the host's layout");

namespace {
constexpr int kThreads = 512, kMergers = 32 * kMergeWarps;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) KERNEL_NAME(
    const __grid_constant__ AttentionParams p, const __grid_constant__ DecodeParams d,
    const __grid_constant__ SharedParams s, const __grid_constant__ TensorMap own_k,
    const __grid_constant__ TensorMap own_v, const __grid_constant__ TensorMap shared_k,
    const __grid_constant__ TensorMap shared_v) {
  extern __shared__ __align__(1024) char smem[];
  using V = SharedVariant;
  using S = SharedPlaces<V>;
  const u32 base = shared_address(smem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < V::kStages; ++i) {
      mbarrier_init(base + S::kKeyFull + 8 * i, 1), mbarrier_init(base + S::kValueFull + 8 * i, 1);
      mbarrier_init(base + S::kKeyEmpty + 8 * i, 8);
      mbarrier_init(base + S::kValueEmpty + 8 * i, 8);
    }
    for (int i = 0; i < kOwnWarps * V::kOwnStages; ++i) {
      mbarrier_init(base + S::kOwnFull + 8 * i, 1);
    }
    mbarrier_init(base + S::kDone, kMergers), mbarrier_init(base + S::kOpen, 1);
    mbarrier_init(base + S::kNever, 1);
    mbarrier_init_fence();
    prefetch_tensor_map(&own_k), prefetch_tensor_map(&own_v);
    prefetch_tensor_map(&shared_k), prefetch_tensor_map(&shared_v);
  }
  // The table is read after the schedule, and should be near by then.
  const int line = (blockIdx.x * kThreads + threadIdx.x) * 128;
  if (line < d.table_bytes) prefetch_l2(p.block_table + line);
  __syncthreads();
  wait_for_earlier_launches();
  let_later_launches_start();
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const auto again = [&] {  // a register of one role, not of all
    u32 found = base;
    asm volatile("" : "+r"(found));
    return found;
  };
  if (role == 1) {
    give_registers<24>();
    if (threadIdx.x / 32 == 4) SharedLoads<V>{p, d, s, &shared_k, &shared_v, again()}.run();
  } else if (role == 0) {
    take_registers<V::kOwnRegisters>();
    OwnKeys<V> keys(p, d, s, &own_k, &own_v, again());
    keys.run();
    SharedMerge<V>(p, d, s).run(keys.base(), threadIdx.x / 32, threadIdx.x / 32 == 0);
  } else {
    take_registers<V::kTileRegisters>();
    SharedProducts<V>(p, d, s, again(), role - 2).run();
  }
}
