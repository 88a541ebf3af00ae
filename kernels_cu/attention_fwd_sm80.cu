// Attention forward for compute capability 8.0 and later. Grid: (KV heads * row blocks, 1, splits),
// row blocks fastest: only x takes more than 65535.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "block/segment.cuh"
#include "mainloop/fwd_sm80.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");

extern "C" __global__ void __launch_bounds__(AttentionVariant::kThreads, AttentionVariant::kBlocks) KERNEL_NAME(
    const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) char smem[];
  using Kernel = Forward<AttentionVariant>;
  // The last blocks of a causal request see the most keys: they start first.
  const u32 blocks = gridDim.x / p.heads_kv;
  const int block = static_cast<int>(blocks - 1 - blockIdx.x % blocks);
  Segment found;
  found.kv_head = static_cast<int>(blockIdx.x / blocks);
  if (!find_segment<Kernel::kRows>(p, block, blockIdx.z, found)) return;
  const float scale = score_scale(p, found.request.index, found.kv_head);
  found.scale = fabsf(scale) * (AttentionVariant::kScoreMod ? 1.f : kLog2e);
  found.negate = scale < 0.f;
  // Read where it is needed: registers are for fragments.
  __shared__ Segment segment;
  __shared__ SegmentRows rows;
  if (threadIdx.x == 0) segment = found, rows = SegmentRows::of(p, found);
  __syncthreads();
  Kernel(p, segment, rows, smem).run();
}
