// Multi-head latent attention for compute capability 8.0 and later: queries in the space of the
// latent, over a cache whose rows serve as keys and as values of all heads.
// Grid: (KV heads * row blocks, 1, splits), row blocks fastest: only x takes more than 65535.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/latent_params.cuh"
#include "block/segment.cuh"
#include "mainloop/latent_sm80.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");
static_assert(sizeof(LatentParams) == LatentVariant::kParamsBytes,
              "LatentParams differs from the host's layout");

extern "C" __global__ void __launch_bounds__(kLatentThreads, 1) KERNEL_NAME(
    const __grid_constant__ AttentionParams p, const __grid_constant__ LatentParams d) {
  extern __shared__ __align__(128) char smem[];
  using Kernel = Latent<LatentVariant>;
  // The last blocks of a causal request see the most keys: they start first.
  const u32 blocks = gridDim.x / p.heads_kv;
  const int block = static_cast<int>(blocks - 1 - blockIdx.x % blocks);
  Segment segment;
  segment.kv_head = static_cast<int>(blockIdx.x / blocks);
  if (!find_segment<Kernel::kRows>(p, block, blockIdx.z, segment)) return;
  const float scale = score_scale(p, segment.request.index, segment.kv_head);
  segment.scale = fabsf(scale);
  segment.negate = scale < 0.f;
  Kernel(p, d, segment, smem).run();
}
