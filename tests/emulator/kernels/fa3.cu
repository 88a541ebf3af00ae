// FA3-like forward: bf16, head_dim 64, 64 x 64 tiles, one producer and one consumer warpgroup, TMA with
// 128B swizzle, mbarrier ring, wgmma SS (Q K^T) and RS with MN-major B (P V), setmaxnreg, named barrier.
// A toy kernel; BUG=k plants one of seven bugs.
#include "ptx.cuh"
#ifndef CAUSAL
#define CAUSAL 0
#endif
#ifndef BUG
#define BUG 0
#endif
#define STAGES 2
#define TILE (64 * 128)

extern "C" __global__ void __launch_bounds__(256, 1)  // without the 1, ptxas ignores setmaxnreg (warning C7508)
    fa3_fwd(const __grid_constant__ TensorMap tq, const __grid_constant__ TensorMap tk,
            const __grid_constant__ TensorMap tv, uint16_t* __restrict__ O, int seqlen, int heads,
            float scale_log2) {
  SMEM_DYN(unsigned char, smem);
  const int wg = threadIdx.x >> 7, warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const int m0 = blockIdx.x * 64, h = blockIdx.y;
  const uint32_t sQ = px::saddr(smem), sK = sQ + TILE, sV = sK + STAGES * TILE, bars = sV + STAGES * TILE;
  const uint32_t full = bars, empty = bars + 8 * STAGES, qbar = bars + 16 * STAGES;
  int nblk = (seqlen + 63) / 64;
  if (CAUSAL) {
    int e = m0 / 64 + 1;
    nblk = nblk < e ? nblk : e;
  }

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      px::mbar_init(full + 8 * i, 1);
      px::mbar_init(empty + 8 * i, 4);
    }
    px::mbar_init(qbar, 1);
    px::mbar_init_fence();
  }
#if BUG != 7
  px::syncthreads();
#endif

  if (wg == 0) {  // producer
    px::setmaxnreg_dec<40>();
    if (warp == 0 && px::elect()) {
      px::mbar_expect_tx(qbar, TILE);
      px::tma2d(sQ, &tq, h * 64, m0, qbar);
      for (int nb = 0; nb < nblk; nb++) {
        int s = nb % STAGES, ph = (nb / STAGES) & 1;
#if BUG == 3
        px::mbar_wait(empty + 8 * s, ph);
#else
        px::mbar_wait(empty + 8 * s, ph ^ 1);
#endif
        px::mbar_expect_tx(full + 8 * s, BUG == 5 ? TILE : 2 * TILE);
        px::tma2d(sK + s * TILE, &tk, h * 64, nb * 64, full + 8 * s);
        px::tma2d(sV + s * TILE, &tv, h * 64, nb * 64, full + 8 * s);
      }
    }
  } else {  // consumer
    px::setmaxnreg_inc<232>();
    float o[32], mx[2] = {-1e30f, -1e30f}, l[2] = {0.f, 0.f};
    for (int i = 0; i < 32; i++) o[i] = 0.f;
    px::mbar_wait(qbar, 0);
    for (int nb = 0; nb < nblk; nb++) {
      int st = nb % STAGES, ph = (nb / STAGES) & 1;

      // S = Q K^T
      float s[32];
#if BUG != 6
      px::mbar_wait(full + 8 * st, ph);
#endif
#if BUG != 4
      px::wg_fence();
#endif
#pragma unroll
      for (int k = 0; k < 4; k++)
        px::wgmma64_ss<0>(s, px::sdesc(sQ + k * 32, 16, 1024), px::sdesc(sK + st * TILE + k * 32, 16, 1024) ^ (BUG == 8 ? 1ull << 63 | 1ull << 62 : 0), k > 0);
      px::wg_commit();
#if BUG != 1
      px::wg_wait<0>();
#endif

      // mask and online softmax
      const int r0 = m0 + warp * 16 + (lane >> 2), c0 = nb * 64 + (lane & 3) * 2;
      float nm[2] = {mx[0], mx[1]};
#pragma unroll
      for (int i = 0; i < 32; i++) {
        int c = c0 + (i >> 2) * 8 + (i & 1), r = r0 + ((i >> 1) & 1) * 8;
        s[i] *= scale_log2;
        if ((c >= seqlen && BUG != 10) || (CAUSAL && BUG != 10 && c > r)) s[i] = -1e30f;
        nm[(i >> 1) & 1] = fmaxf(nm[(i >> 1) & 1], s[i]);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        nm[i] = fmaxf(nm[i], px::shfl_xor(nm[i], 1));
        nm[i] = fmaxf(nm[i], px::shfl_xor(nm[i], 2));
        float a = px::ex2(mx[i] - nm[i]);
        mx[i] = nm[i];
        l[i] *= a;
#pragma unroll
        for (int n = 0; n < 8; n++) {
          o[n * 4 + i * 2] *= a;
          o[n * 4 + i * 2 + 1] *= a;
        }
      }
      uint32_t p[4][4];
#pragma unroll
      for (int i = 0; i < 32; i++) {
        s[i] = px::ex2(s[i] - mx[(i >> 1) & 1]);
        l[(i >> 1) & 1] += s[i];
      }
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int j = 0; j < 4; j++) p[k][j] = px::pack_bf16(s[k * 8 + j * 2], s[k * 8 + j * 2 + 1]);

      // O += P V
      px::wg_fence();
#pragma unroll
      for (int k = 0; k < 4; k++)
        px::wgmma64_rs<1>(o, p[k], px::sdesc(sV + st * TILE + k * 2048, 8192, BUG == 9 ? 512 : 1024), 1);
      px::wg_commit();
#if BUG == 2  // released before wgmma has read V
      if (lane == 0) px::mbar_arrive(empty + 8 * st);
      px::wg_wait<0>();
#else
      px::wg_wait<0>();
      if (lane == 0) px::mbar_arrive(empty + 8 * st);
#endif
    }

    px::bar_sync(1, 128);
    const int r0 = m0 + warp * 16 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      l[i] += px::shfl_xor(l[i], 1);
      l[i] += px::shfl_xor(l[i], 2);
      float inv = 1.f / l[i];
      int r = r0 + i * 8;
      if (r < seqlen)
#pragma unroll
        for (int n = 0; n < 8; n++)
          *(uint32_t*)(O + ((long)r * heads + h) * 64 + n * 8 + (lane & 3) * 2) =
              px::pack_bf16(o[n * 4 + i * 2] * inv, o[n * 4 + i * 2 + 1] * inv);
    }
  }
}
