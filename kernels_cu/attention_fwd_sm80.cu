// Attention forward for compute capability 8.0 and later. Grid: (KV heads * row blocks, 1, splits):
// only x takes more than 65535.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "block/segment.cuh"
#include "mainloop/fwd_sm80.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");

extern "C" __global__ void __launch_bounds__(AttentionVariant::kThreads, AttentionVariant::kBlocks) KERNEL_NAME(
    const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(128) char smem[];
  using Kernel = Forward<AttentionVariant>;
  const u32 heads = p.heads_kv, blocks = gridDim.x / heads;
  // The last blocks of a causal request see the most keys: they start first. Where requests are of
  // unequal lengths, they do so for all heads, or those of the last head would end late.
  const bool heads_first = p.blocks_a_request == 0;
  const u32 major = blockIdx.x / (heads_first ? heads : blocks);
  const u32 minor = blockIdx.x - major * (heads_first ? heads : blocks);
  const int block = static_cast<int>(blocks - 1 - (heads_first ? major : minor));
  Segment found;
  found.kv_head = static_cast<int>(heads_first ? minor : major);
  if (!find_segment<Kernel::kRows>(p, block, blockIdx.z, found)) return;
  set_scale<AttentionVariant::kScoreMod>(p, found);
  // Read where it is needed: registers are for fragments.
  __shared__ Segment segment;
  __shared__ SegmentRows rows;
  if (threadIdx.x == 0) segment = found, rows = SegmentRows::of(p, found);
  __syncthreads();
  Kernel(p, segment, rows, smem).run();
}
