// Attention forward for compute capability 9.0a, for many queries, with q, k and v in e4m3. Grid:
// as many blocks as run at once; each takes tiles until there are none. Of the first warpgroup one
// warp loads queries and keys, one values, and two transpose these; the other warpgroups, two or
// three, compute.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/prefill_params.cuh"
#include "mainloop/fwd_sm90_fp8.cuh"
#include "mainloop/fwd_sm90_fp8_serial.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");
static_assert(sizeof(TailParams) == Fp8Variant::kParamsBytes,
              "TailParams differs from the host's layout");

template <class V>
__device__ __forceinline__ void compute(const AttentionParams &p, const PrefillParams &x,
                                        const Fp8Shared<V> &shared, int warpgroup) {
  if constexpr (V::kColumns > 0) {
    Fp8Serial<V>(p, x, shared, warpgroup).run();
  } else {
    Fp8Compute<V>(p, x, shared, warpgroup).run();
  }
}

extern "C" __global__ void __launch_bounds__(Fp8Shared<Fp8Variant>::kThreads, 1) KERNEL_NAME(
    const __grid_constant__ AttentionParams p, const __grid_constant__ TailParams x,
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map) {
  extern __shared__ __align__(1024) char smem[];
  const Fp8Shared<Fp8Variant> shared(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) shared.init();
  shared.write_ones();
  sort_requests<Fp8Variant>(p, x, shared.rest().order, shared.scratch());
  if (warpgroup == 0) {
    give_registers<Fp8Variant::kLoadRegisters>();
    fence_async_proxy();  // keys land where the requests were sorted
    const PrefillMaps maps = {&q_map, &k_map, &v_map};
    const Fp8Loader<Fp8Variant> loader(p, x, maps, shared);
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
    if (warp == 0) {
      loader.run_keys();
      wait_for_earlier_launches();  // beside another kernel: it is over when this one is
    } else if (warp == 1) {
      loader.run_values();
    } else {
      Fp8Transposer<Fp8Variant>(shared, warp - 2).run();
    }
  } else {
    take_registers<Fp8Variant::kComputeRegisters>();
    compute<Fp8Variant>(p, x, shared, warpgroup - 1);
  }
}
