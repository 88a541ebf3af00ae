// Doubles tiles: one producer warp with bulk copies into a ring, four consumer warps, bulk stores from a staging
// buffer. BUG=k plants a bug.
#include "ptx.cuh"
#ifndef BUG
#define BUG 0
#endif
#define STAGES 2
#define TILE 2048  // bytes

PX void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
               "r"(bytes), "r"(bar) : "memory");
}
PX void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
PX void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
PX void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

extern "C" __global__ void __launch_bounds__(160, 1) doubled(const unsigned char* in, unsigned char* out, int tiles) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const uint32_t base = px::saddr(smem), stage = base + STAGES * TILE, bars = stage + TILE;
  const uint32_t full = bars, empty = bars + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      px::mbar_init(full + 8 * i, 1);
      px::mbar_init(empty + 8 * i, BUG == 1 ? 3 : 4);  // 1: over-arrival
#if BUG == 2  // initialised twice
      px::mbar_init(full + 8 * i, 1);
#endif
    }
#if BUG != 3  // 3: the initialisation is not made visible to the async proxy
    px::mbar_init_fence();
#endif
  }
  __syncthreads();

  if (warp == 4) {
    if (lane == 0) {
      int n = 0;
      for (int t = blockIdx.x; t < tiles; t += gridDim.x, n++) {
        const int s = n % STAGES, phase = n / STAGES & 1;
        px::mbar_wait(empty + 8 * s, phase ^ 1);
        const uint32_t expected = BUG == 4 ? TILE + 16 : BUG == 5 ? TILE / 2 : TILE;  // 4: too large, 5: too small
        px::mbar_expect_tx(full + 8 * s, expected);
        const uint32_t bar = full + 8 * (BUG == 6 ? 0 : s);  // 6: completes on the other stage's barrier
        bulk_load(base + s * TILE, in + (long)t * TILE, TILE / 2, bar);
        bulk_load(base + s * TILE + TILE / 2, in + (long)t * TILE + TILE / 2, TILE / 2, bar);
      }
#if BUG == 7  // one load too many, never waited for
      if (n) {
        px::mbar_wait(empty + 8 * (n % STAGES), (n / STAGES & 1) ^ 1);
        px::mbar_expect_tx(full + 8 * (n % STAGES), TILE);
        bulk_load(base + n % STAGES * TILE, in, TILE, full + 8 * (n % STAGES));
      }
#endif
    }
    return;
  }

  int n = 0;
  for (int t = blockIdx.x; t < tiles; t += gridDim.x, n++) {
    const int s = n % STAGES, phase = n / STAGES & 1;
    px::mbar_wait(full + 8 * s, BUG == 8 ? 0 : phase);  // 8: the phase never flips
    const float4* src = (const float4*)(smem + s * TILE);
    float4* dst = (float4*)(smem + STAGES * TILE);
#if BUG == 9  // released before it is read
    __syncwarp();
    if (lane == 0) px::mbar_arrive(empty + 8 * s);
#endif
    float4 v = src[threadIdx.x];
#if BUG != 9
    __syncwarp();
    if (lane == 0) px::mbar_arrive(empty + 8 * s);
#endif
#if BUG != 10  // 10: the staging buffer is overwritten while it is stored
    if (threadIdx.x == 0) wait_read();
#endif
#if BUG == 11  // a barrier with the wrong count
    px::bar_sync(1, warp == 0 ? 96 : 128);
#elif BUG != 12  // 12: nobody waits for the thread that waits for the store
    px::bar_sync(1, 128);
#endif
    v.x *= 2.f; v.y *= 2.f; v.z *= 2.f; v.w *= 2.f;
    dst[threadIdx.x] = v;
#if BUG != 13  // 13: the async proxy reads generic writes without a fence
    proxy_fence();
#endif
#if BUG != 14  // 14: stored before all have written
    px::bar_sync(2, 128);
#endif
    if (threadIdx.x == 0) bulk_store(out + (long)t * TILE + (BUG == 15 ? 8 : 0), stage, TILE);  // 15: misaligned
  }
#if BUG != 16  // 16: the CTA ends before shared memory has been read
  if (threadIdx.x == 0) wait_read();
#endif
#if BUG == 17  // waits for an arrival that never comes
  px::bar_sync(3, 160);
#endif
}
