// Attention forward for compute capability 9.0a, for many queries. Grid: as many blocks as run at
// once; each takes tiles until there are none. One warpgroup loads and stores, two to four compute.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/prefill_params.cuh"
#include "mainloop/fwd_sm90_early.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");
static_assert(sizeof(PrefillParams) == PrefillVariant::kParamsBytes,
              "PrefillParams differs from the host's layout");

extern "C" __global__ void __launch_bounds__(PrefillShared<PrefillVariant>::kThreads, 1)
    KERNEL_NAME(
    const __grid_constant__ AttentionParams p, const __grid_constant__ PrefillParams x,
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map) {
  extern __shared__ __align__(1024) char smem[];
  const PrefillShared<PrefillVariant> shared(smem);
  constexpr int kGroups = PrefillVariant::kTileRows / 64;
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&k_map);
    prefetch_tensor_map(&v_map);
    shared.init();
  }
  sort_requests<PrefillVariant>(p, x, shared.rest().order, shared.scratch());
  if (warpgroup == 0) {
    give_registers<PrefillVariant::kLoadRegisters>();
    fence_async_proxy();  // keys land where the requests were sorted
    const PrefillMaps maps = {&q_map, &k_map, &v_map, &out_map};
    const PrefillLoader<PrefillVariant> loader(p, x, maps, shared);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
    if (warp == 0) {
      loader.run_tiles();
      // Beside another kernel: it is over when this one is.
      wait_for_earlier_launches();
    } else if (warp == 1) {
      loader.run_keys();
    } else if (warp == 2) {
      loader.run_values();
    } else if constexpr (PrefillShared<PrefillVariant>::kStaged) {
      loader.run_stores();
    }
  } else {
    take_registers<PrefillVariant::kComputeRegisters>();
    PrefillComputing<PrefillVariant>::Type compute(p, x, shared, warpgroup - 1);
    if (PrefillVariant::kTurns && warpgroup == kGroups) named_barrier_arrive(1, 256);
    compute.run();
  }
}
