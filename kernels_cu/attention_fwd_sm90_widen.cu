// Attention forward for compute capability 9.0a, for many 16-bit queries over an 8-bit cache. Grid:
// as many blocks as run at once; each takes tiles until there are none. One warpgroup loads and
// stores, two compute, and the last one widens keys and values to 16 bits for them.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/prefill_params.cuh"
#include "mainloop/fwd_sm90_early.cuh"
#include "mainloop/fwd_sm90_widen.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");
static_assert(sizeof(PrefillParams) == WidenVariant::kParamsBytes,
              "PrefillParams differs from the host's layout");

extern "C" __global__ void __launch_bounds__(WidenShared<WidenVariant>::kThreads, 1) KERNEL_NAME(
    const __grid_constant__ AttentionParams p, const __grid_constant__ PrefillParams x,
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map) {
  extern __shared__ __align__(1024) char smem[];
  const WidenShared<WidenVariant> shared(smem);
  constexpr int kGroups = WidenVariant::kTileRows / 64;
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0) % 4;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&k_map);
    prefetch_tensor_map(&v_map);
    shared.init();
  }
  sort_requests<WidenVariant>(p, x, shared.rest().order, shared.scratch());
  if (warpgroup == 0) {
    give_registers<WidenVariant::kLoadRegisters>();
    const PrefillMaps maps = {&q_map, &k_map, &v_map, &out_map};
    const WidenLoader<WidenVariant> loader(p, x, maps, shared);
    if (warp == 0) {
      loader.run_tiles();
      // Beside another kernel: it is over when this one is.
      wait_for_earlier_launches();
    } else if (warp == 1) {
      loader.run<true>();
    } else if (warp == 2) {
      loader.run<false>();
    } else if constexpr (WidenShared<WidenVariant>::kStaged) {
      loader.run_stores();
    }
  } else if (warpgroup <= kGroups) {
    take_registers<WidenVariant::kComputeRegisters>();
    PrefillComputing<WidenVariant>::Type compute(p, x, shared, warpgroup - 1);
    if (WidenVariant::kTurns && warpgroup == kGroups) named_barrier_arrive(1, 256);
    compute.run();
  } else {
    give_registers<WidenVariant::kWidenRegisters>();
    const PrefillWidener<WidenVariant> widener(shared, warp % 2);
    if (warp < 2) {
      widener.run_keys();
    } else {
      widener.run_values();
    }
  }
}
