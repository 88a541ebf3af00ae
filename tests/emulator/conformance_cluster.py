"""Clusters: ranks, addresses in other CTAs, their barrier, copies and arrivals across CTAs."""

# ruff: noqa: E501  (kernel text)

from __future__ import annotations

import numpy as np

try:
    from .conformance import Case, MapSpec, hashed
except ImportError:
    from conformance import Case, MapSpec, hashed

HELPERS = """
__device__ inline u32 sreg_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline u32 mapa(u32 addr, u32 rank) {
  u32 r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank)); return r;
}
__device__ inline void init(u32 bar, u32 count) {
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
}
__device__ inline void expect(u32 bar, u32 bytes) {
  if (threadIdx.x == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
__device__ inline void wait(u32 bar, u32 parity) {
  asm volatile("{ .reg .pred P; L: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 P, [%0], %1; @P bra D; bra L; D: }"
               :: "r"(bar), "r"(parity) : "memory");
}
"""
RANK = "const u32 rank = sreg_rank(); u32* o = (u32*)out + rank * 256;\n"


def registers():
    names = ["cluster_ctarank", "cluster_nctarank"]
    names += [
        f"{n}.{c}"
        for n in ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid")
        for c in "xyz"
    ]
    body = RANK + "if (t == 0) { u32 v;\n"
    for i, name in enumerate(names):
        body += f'asm volatile("mov.u32 %0, %%{name};" : "=r"(v)); o[{i}] = v;\n'
    body += """
u32 far = mapa(saddr(smem) + 16, rank ^ 1), back; u64 generic, there;
asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(v) : "r"(far)); o[20] = v;
asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(v) : "r"(saddr(smem))); o[21] = v;
back = mapa(far, rank); o[22] = back == saddr(smem) + 16 || back == mapa(saddr(smem) + 16, rank);
generic = (u64)smem;
asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(generic), "r"(rank ^ 1));
asm volatile("getctarank.u64 %0, %1;" : "=r"(v) : "l"(there)); o[23] = v;
asm volatile("{ .reg .pred p; isspacep.shared::cta p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(v) : "l"(there)); o[24] = v;
asm volatile("{ .reg .pred p; isspacep.shared::cluster p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(v) : "l"(there)); o[25] = v;
} cluster_sync();
"""
    yield Case("cluster_registers", body, (), 2048, cluster=2, smem=1024, helpers=HELPERS)


def memory():
    data = hashed(1024, np.uint32, 81)
    fill = (
        RANK
        + "u32* s = (u32*)smem;\nfor (int i = t; i < 256; i += 32) s[i] = ((const u32*)in0)[rank * 256 + i];\ncluster_sync();\n"
    )
    body = (
        fill
        + """
for (u32 r = 0; r < 4; r++) {
  u32 v, at = mapa(saddr(smem) + t * 4, r);
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory"); o[r * 32 + t] = v;
}
u32 a, b, c, d, at = mapa(saddr(smem), (rank + 1) & 3) + t * 16;
asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4+32];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at) : "memory");
o[128 + t] = a ^ b; o[160 + t] = c - d;
cluster_sync();
"""
    )
    yield Case("cluster_loads", body, (data,), 4096, cluster=4, smem=1024 + 64, helpers=HELPERS)
    body = (
        fill
        + """
u32 at = mapa(saddr(smem) + rank * 128 + t * 4, (rank + 1) & 3);
asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(at), "r"(rank * 1000 + t) : "memory");
u32 v, sum = mapa(saddr(smem) + 512 + t * 4, 2);
asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;" : "=r"(v) : "r"(sum), "r"(1u << (8 * rank)) : "memory");
asm volatile("red.relaxed.cluster.shared::cluster.max.u32 [%0], %1;" :: "r"(mapa(saddr(smem) + 640 + t * 4, 1)), "r"(v * 0 + rank * 7 + t) : "memory");
cluster_sync();
for (int i = t; i < 256; i += 32) o[i] = s[i];
"""
    )
    yield Case("cluster_stores", body, (data,), 4096, cluster=4, smem=1024, helpers=HELPERS)


def mbarriers():
    body = (
        RANK
        + """
u32* s = (u32*)smem; const u32 bar = saddr(smem) + 512;
init(bar, 64); cluster_sync();
asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(mapa(saddr(smem) + rank * 128 + t * 4, rank ^ 1)), "r"(rank * 100 + t) : "memory");
asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(mapa(bar, rank ^ 1)) : "memory");
asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(mapa(bar, rank)) : "memory");
wait(bar, 0);
o[t] = s[(rank ^ 1) * 32 + t];
cluster_sync();
"""
    )
    yield Case("cluster_mbarrier", body, (), 2048, cluster=2, smem=1024, helpers=HELPERS)
    body = (
        RANK
        + """
u32* s = (u32*)smem; const u32 bar = saddr(smem) + 512, far = mapa(bar, rank ^ 1);
init(bar, 1); cluster_sync(); expect(bar, 32 * 28);
asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
             :: "r"(mapa(saddr(smem) + t * 4, rank ^ 1)), "r"(rank * 100 + t), "r"(far) : "memory");
asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %1}, [%2];"
             :: "r"(mapa(saddr(smem) + 128 + t * 8, rank ^ 1)), "r"(t * t), "r"(far) : "memory");
asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %1}, [%2];"
             :: "r"(mapa(saddr(smem) + 1024 + t * 16, rank ^ 1)), "l"((u64)t << 33 | rank), "r"(far) : "memory");
wait(bar, 0);
for (int i = t; i < 96; i += 32) o[i] = s[i];
for (int i = t; i < 128; i += 32) o[96 + i] = s[256 + i];
cluster_sync();
"""
    )
    yield Case("cluster_st_async", body, (), 2048, cluster=2, smem=2048, helpers=HELPERS)
    body = (
        RANK
        + """
u32* s = (u32*)smem; const u32 bar = saddr(smem) + 512;
s[t] = 1000 + t; init(bar, 1); cluster_sync(); expect(bar, 2 * 32 * 4);
for (u32 r = 0; r < 2; r++)
  asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];"
               :: "r"(mapa(saddr(smem) + t * 4, r)), "r"(rank * 5 + t), "r"(mapa(bar, r)) : "memory");
wait(bar, 0);
o[t] = s[t];
cluster_sync();
"""
    )
    yield Case("cluster_red_async", body, (), 2048, cluster=2, smem=1024, helpers=HELPERS)


def copies():
    data = hashed(2048, np.uint32, 82)
    body = (
        RANK
        + """
u32* s = (u32*)smem; const u32 bar = saddr(smem) + 2048;
for (int i = t; i < 256; i += 32) s[i] = ((const u32*)in0)[rank * 256 + i];
init(bar, 1);
asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
cluster_sync(); expect(bar, 512);
if (t == 0)
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 512, [%2];"
               :: "r"(mapa(saddr(smem) + 1024, rank ^ 1)), "r"(saddr(smem) + 16), "r"(mapa(bar, rank ^ 1)) : "memory");
wait(bar, 0);
for (int i = t; i < 128; i += 32) o[i] = s[256 + i];
cluster_sync();
"""
    )
    yield Case("cluster_bulk", body, (data,), 2048, cluster=2, smem=2048 + 64, helpers=HELPERS)
    body = (
        RANK
        + """
u32* s = (u32*)smem; const u32 bar = saddr(smem) + 2048;
for (int i = t; i < 512; i += 32) s[i] = 0x5A5A5A5A;
asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
init(bar, 1); cluster_sync();
expect(bar, rank < 3 ? 1024 + 256 : 256);
cluster_sync();
if (t == 0 && rank == 1)
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
               "[%1, {%3, %4}], [%2], %5;" :: "r"(saddr(smem)), "l"(&map0), "r"(bar), "r"(0), "r"(3), "h"((u16)7) : "memory");
if (t == 0 && rank == 2)
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 256, [%2], %3;"
               :: "r"(saddr(smem) + 1024), "l"(in0 + 4096), "r"(bar), "h"((u16)15) : "memory");
wait(bar, 0);
for (int i = t; i < 256; i += 32) o[i] = s[i] ^ s[(i & 63) + 256];
cluster_sync();
"""
    )
    spec = MapSpec(0, 9, (64, 16), (256,), (64, 8), 3)
    yield Case(
        "cluster_multicast",
        body,
        (data,),
        4096,
        cluster=4,
        smem=2048 + 64,
        maps=(spec,),
        helpers=HELPERS,
    )
    body = (
        RANK
        + """
u32* s = (u32*)smem; const u32 bar = saddr(smem) + 1024; u64 policy;
asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
init(bar, 1); cluster_sync(); expect(bar, 512 + 512);
if (t == 0) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], 512, [%2], %3;"
               :: "r"(saddr(smem)), "l"(in0 + 512), "r"(bar), "l"(policy) : "memory");
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
               :: "r"(saddr(smem) + 512), "l"(&map0), "r"(bar), "r"(16), "r"(1), "l"(policy) : "memory");
}
wait(bar, 0);
for (int i = t; i < 256; i += 32) o[i] = s[i];
cluster_sync();
"""
    )
    spec = MapSpec(0, 9, (64, 16), (128,), (32, 8), 0)
    yield Case(
        "bulk_cache_hint",
        body,
        (data,),
        2048,
        cluster=2,
        smem=1024 + 64,
        maps=(spec,),
        helpers=HELPERS,
    )


def cases():
    for group in (registers, memory, mbarriers, copies):
        yield from group()
