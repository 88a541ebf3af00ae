// Four CTAs of a cluster: a ring that rank 0 fills by multicast, sums pushed to rank 0 and pulled from all, and a copy
// of a CTA's memory to the next. BUG plants a mistake.
typedef unsigned u32;
typedef unsigned long long u64;
#ifndef BUG
#define BUG 0
#endif
constexpr int kRanks = 4, kStages = 2, kFloats = 128;  // floats of a stage
constexpr u32 kBytes = kFloats * 4;

__device__ inline u32 rank_of_cta() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ inline u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ inline u32 mapa(u32 addr, u32 rank) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank));
  return r;
}
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ inline void init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ inline void expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ inline void wait(u32 bar, u32 parity) {
  asm volatile("{ .reg .pred P; L: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1; @P bra D; bra L; D: }" ::"r"(bar), "r"(parity) : "memory");
}
__device__ inline void wait_cluster(u32 bar, u32 parity) {
  asm volatile("{ .reg .pred P; L: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 P, [%0], %1; @P bra D; bra L; D: }" ::"r"(bar), "r"(parity) : "memory");
}
__device__ inline void arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ inline void arrive_cluster(u32 bar) { asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ inline void store(u32 addr, float v) { asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(addr), "f"(v) : "memory"); }
__device__ inline float load(u32 addr) { float v; asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(addr) : "memory"); return v; }

struct Shared {
  float ring[kStages][kFloats], partial[kFloats], sums[kRanks][kFloats], out[kFloats], in[kFloats];
  u64 full[kStages], empty[kStages], pushed, copied;
};

// out[4][4][128]: the pushed sum, the pulled sum, the copy from the CTA before, what came by st.async; rows of a rank.
extern "C" __global__ void __cluster_dims__(kRanks, 1, 1) __launch_bounds__(kFloats) exchange(const float* data, float* out, int tiles) {
  __shared__ __align__(128) Shared s;
  const u32 rank = rank_of_cta(), t = threadIdx.x, next = (rank + 1) % kRanks;
  if (t == 0) {
    for (int i = 0; i < kStages; i++) init(at(&s.full[i]), 1), init(at(&s.empty[i]), BUG == 7 ? 1 : kRanks);
    init(at(&s.pushed), kRanks * kFloats), init(at(&s.copied), 1);
#if BUG != 1
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    expect(at(&s.copied), 2 * kBytes - (BUG == 9 ? 16 : 0));
  }
#if BUG == 2
  __syncthreads();
#else
  cluster_sync_relaxed();
  __syncthreads();
#endif
  float mine = 0;
  for (int i = 0; i < tiles; i++) {
    const int stage = i % kStages, parity = i / kStages & 1;
    if (t == 0) {
      expect(at(&s.full[stage]), kBytes);
      if (rank == 0) {
        wait(at(&s.empty[stage]), parity ^ 1);
        const unsigned short mask = BUG == 8 ? 7 : 15;
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(at(s.ring[stage])),
                     "l"(data + i * kFloats), "r"(kBytes), "r"(at(&s.full[stage])), "h"(mask) : "memory");
      }
    }
    wait(at(&s.full[stage]), parity);
    mine += s.ring[stage][t] * (rank + 1);
    __syncthreads();
    if (t == 0 && (BUG != 7 || rank == 0)) arrive(mapa(at(&s.empty[stage]), 0));
  }
  // Pushed to rank 0.
  store(mapa(at(&s.sums[rank][t]), BUG == 6 ? rank : 0), mine);
  if (BUG == 4) arrive(mapa(at(&s.pushed), 0));
  else arrive_cluster(mapa(at(&s.pushed), 0));
  if (rank == 0) {
    if (BUG == 5) wait(at(&s.pushed), 0);
    else wait_cluster(at(&s.pushed), 0);
    out[t] = s.sums[0][t] + s.sums[1][t] + s.sums[2][t] + s.sums[3][t];
  }
  // Pulled from all.
  s.partial[t] = mine;
#if BUG == 3
  cluster_sync_relaxed();
#elif BUG != 12
  cluster_sync();
#endif
  float sum = 0;
  for (u32 r = 0; r < kRanks; r++) sum += load(mapa(at(&s.partial[t]), r));
  out[(kRanks + rank) * kFloats + t] = sum;
  // Copied to the next.
  s.out[t] = mine;
#if BUG != 10
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncthreads();
  if (t == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(mapa(at(s.in), next)), "r"(at(s.out)),
                 "r"(kBytes), "r"(mapa(at(&s.copied), next)) : "memory");
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(mapa(at(&s.ring[0][t]), next)), "f"(mine + t),
               "r"(mapa(at(&s.copied), next)) : "memory");
#if BUG == 13
  s.out[t] = 0;
#endif
  wait(at(&s.copied), 0);
  out[(2 * kRanks + rank) * kFloats + t] = s.in[t];
  out[(3 * kRanks + rank) * kFloats + t] = s.ring[0][t];
#if BUG != 11
  cluster_sync();
#endif
}
