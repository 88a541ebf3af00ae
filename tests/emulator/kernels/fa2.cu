// FA2-like forward: bf16, head_dim 64, 64 x 64 tiles, 4 warps, causal or full,
// cp.async double buffer, ldmatrix and mma.sync. A toy kernel; BUG=k plants one of six bugs.
#include "ptx.cuh"
#ifndef CAUSAL
#define CAUSAL 0
#endif
#ifndef BUG
#define BUG 0
#endif
#define HD 64
#define BM 64
#define BN 64
#define TILE (64 * HD * 2)

// 128-byte rows in 16-byte chunks.
#ifdef NO_SWIZZLE
PX uint32_t swz(int row, int chunk) { return (uint32_t)(row * 128 + (chunk << 4)); }
#else
PX uint32_t swz(int row, int chunk) { return (uint32_t)(row * 128 + ((chunk ^ (row & 7)) << 4)); }
#endif

PX void load_tile(uint32_t dst, const uint16_t* g, long ld, int row0, int nrows) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int idx = (int)threadIdx.x + i * 128, r = idx >> 3, c = idx & 7;
    bool ok = row0 + r < nrows;
#if BUG == 2  // no bounds predicate
    ok = true;
    px::cp_async16(dst + swz(r, c), g + (long)(row0 + r) * ld + c * 8, 16);
#else
    px::cp_async16(dst + swz(r, c), g + (long)(ok ? row0 + r : 0) * ld + c * 8, ok ? 16 : 0);
#endif
  }
}

extern "C" __global__ void __launch_bounds__(128)
    fa2_fwd(const uint16_t* __restrict__ Q, const uint16_t* __restrict__ K, const uint16_t* __restrict__ V,
            uint16_t* __restrict__ O, int seqlen, int heads, float scale_log2) {
  SMEM_DYN(unsigned char, smem);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int m0 = blockIdx.x * BM, h = blockIdx.y, b = blockIdx.z;
  const long ld = (long)heads * HD, base = (long)b * seqlen * ld + h * HD;
  const uint32_t sQ = px::saddr(smem), sK = sQ + TILE, sV = sK + 2 * TILE;
  int nblk = (seqlen + BN - 1) / BN;
  if (CAUSAL) {
    int e = (m0 + BM + BN - 1) / BN;
    nblk = nblk < e ? nblk : e;
  }

  load_tile(sQ, Q + base, ld, m0, seqlen);
  load_tile(sK, K + base, ld, 0, seqlen);
  px::cp_commit();
  load_tile(sV, V + base, ld, 0, seqlen);
  px::cp_commit();
#if BUG == 3  // K may not have landed
  px::cp_wait<2>();
#else
  px::cp_wait<1>();
#endif
#if BUG != 1
  px::syncthreads();
#endif

  uint32_t q[4][4];
#pragma unroll
  for (int k = 0; k < 4; k++) px::ldsm4(q[k], sQ + swz(warp * 16 + (lane & 15), k * 2 + (lane >> 4)));
  float o[8][4], mx[2] = {-1e30f, -1e30f}, l[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 4; j++) o[i][j] = 0.f;

  for (int nb = 0; nb < nblk; nb++) {
    const uint32_t k_ = sK + (nb & 1) * TILE, v_ = sV + (nb & 1) * TILE;
    if (nb + 1 < nblk) {
      load_tile(sK + ((nb + 1) & 1) * TILE, K + base, ld, (nb + 1) * BN, seqlen);
      px::cp_commit();
      load_tile(sV + ((nb + 1) & 1) * TILE, V + base, ld, (nb + 1) * BN, seqlen);
      px::cp_commit();
    }

    // S = Q K^T
    float s[8][4];
#pragma unroll
    for (int i = 0; i < 8; i++)
      for (int j = 0; j < 4; j++) s[i][j] = 0.f;
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int n = 0; n < 4; n++) {
        uint32_t bb[4];
        px::ldsm4(bb, k_ + swz(n * 16 + (lane & 7) + ((lane >> 4) << 3), k * 2 + ((lane >> 3) & 1)));
        px::mma_bf16(s[n * 2], q[k], bb[0], bb[1]);
        px::mma_bf16(s[n * 2 + 1], q[k], bb[2], bb[3]);
      }

    // mask and online softmax
    const int r0 = m0 + warp * 16 + (lane >> 2), c0 = nb * BN + (lane & 3) * 2;
    float nm[2] = {mx[0], mx[1]};
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int c = c0 + i * 8 + (j & 1), r = r0 + (j >> 1) * 8;
        s[i][j] *= scale_log2;
        if (c >= seqlen || (CAUSAL && c > r)) s[i][j] = -1e30f;
        nm[j >> 1] = fmaxf(nm[j >> 1], s[i][j]);
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
        o[n][i * 2] *= a;
        o[n][i * 2 + 1] *= a;
      }
    }
    uint32_t p[4][4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        s[i][j] = px::ex2(s[i][j] - mx[j >> 1]);
        l[j >> 1] += s[i][j];
      }
      p[i >> 1][(i & 1) * 2] = px::pack_bf16(s[i][0], s[i][1]);
      p[i >> 1][(i & 1) * 2 + 1] = px::pack_bf16(s[i][2], s[i][3]);
    }

    // O += P V
    if (nb + 1 < nblk)
      px::cp_wait<2>();
    else
      px::cp_wait<0>();
    px::syncthreads();
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int n = 0; n < 4; n++) {
        uint32_t bb[4];
        px::ldsm4t(bb, v_ + swz(k * 16 + (lane & 15), n * 2 + (lane >> 4)));
        px::mma_bf16(o[n * 2], p[k], bb[0], bb[1]);
        px::mma_bf16(o[n * 2 + 1], p[k], bb[2], bb[3]);
      }
#if BUG == 5  // divergent barrier
    if (nb + 1 < nblk && warp == 3) px::syncthreads();
#endif
    if (nb + 1 < nblk) px::cp_wait<1>();
#if BUG != 4  // all warps are done with this stage before it is overwritten
    px::syncthreads();
#endif
  }

#pragma unroll
  for (int i = 0; i < 2; i++) {
    l[i] += px::shfl_xor(l[i], 1);
    l[i] += px::shfl_xor(l[i], 2);
    int r = m0 + warp * 16 + (lane >> 2) + i * 8;
    float inv = 1.f / l[i];
#if BUG == 6  // no store predicate
    if (true)
#else
    if (r < seqlen)
#endif
#pragma unroll
      for (int n = 0; n < 8; n++)
        *(uint32_t*)(O + base + (long)r * ld + n * 8 + (lane & 3) * 2) =
            px::pack_bf16(o[n][i * 2] * inv, o[n][i * 2 + 1] * inv);
  }
}
