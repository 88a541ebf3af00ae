// Multi-head latent attention for compute capability 9.0a, for many heads: 64 rows (heads of one or
// more tokens) share every row of the cache.
// Grid: (KV heads * row blocks, 1, splits), row blocks fastest: only x takes more than 65535.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/latent_params.cuh"
#include "block/segment.cuh"
#include "mainloop/latent_sm90.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");
static_assert(sizeof(LatentParams) == LatentVariant::kParamsBytes,
              "LatentParams differs from the host's layout");

extern "C" __global__ void __launch_bounds__(384, 1) KERNEL_NAME(
    const __grid_constant__ AttentionParams p, const __grid_constant__ LatentParams d,
    const __grid_constant__ TensorMap rope_map, const __grid_constant__ TensorMap latent_map) {
  extern __shared__ __align__(1024) char smem[];
  // The last blocks of a causal request see the most keys: they start first.
  const u32 blocks = gridDim.x / p.heads_kv;
  const int block = static_cast<int>(blocks - 1 - blockIdx.x % blocks);
  Segment found;
  found.kv_head = static_cast<int>(blockIdx.x / blocks);
  if (!find_segment<kLatentRows>(p, block, blockIdx.z, found)) return;
  const float scale = score_scale(p, found.request.index, found.kv_head);
  found.scale = fabsf(scale);
  found.negate = scale < 0.f;
  const LatentTiles tiles(smem);
  if (tiles.address % 1024) __trap();  // the swizzles count on it
  // Read where it is needed: registers are for queries and sums.
  Segment &segment = tiles.rest().segment;
  if (threadIdx.x == 0) {
    segment = found;
    tiles.init();
  }
  __syncthreads();
  const LatentLoader loader = {p, d, segment, tiles, &rope_map, &latent_map};
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  const bool first_warp = threadIdx.x / 32 % 4 == 0;
  const int begin = loader.first_tile(), end = loader.end_tile();
#pragma unroll 1
  for (int i = 0; i < kLatentStages - 1; ++i) {
    if (first_warp && begin + i < end) loader.load_share(begin + i, i, warpgroup);
  }
  // Queries pass through the last stage on their way to registers.
  load_latent_queries<384, kLatentRows>(p, d, segment, tiles.stage(kLatentStages - 1));
  __syncthreads();
  if (warpgroup == 0) {
    take_registers<184>();
    LatentScores<LatentVariant> scores(loader);
    scores.hold_queries();
    fence_async_proxy();
    named_barrier_sync(4, 384);
    if (first_warp && begin + kLatentStages - 1 < end) {
      loader.load_share(begin + kLatentStages - 1, kLatentStages - 1, 0);
    }
    scores.run();
  } else {
    give_registers<160>();
    named_barrier_sync(4, 384);
    if (first_warp && begin + kLatentStages - 1 < end) {
      loader.load_share(begin + kLatentStages - 1, kLatentStages - 1, warpgroup);
    }
    LatentValues<LatentVariant>(loader, warpgroup - 1).run();
  }
}
