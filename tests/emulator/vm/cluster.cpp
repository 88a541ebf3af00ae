// Clusters: their barrier, and addresses in the shared memory of other CTAs.
#include "alu.h"

namespace emu {

bool Cluster::live() const {
  for (const auto& c : ctas)
    if (c->live) return true;
  return false;
}

Cta& cta_of(Warp& w, uint32_t& addr, int lane, const char* what) {
  const uint32_t rank = addr >> kRankShift;
  if (!rank) return *w.cta;
  Cluster& cluster = *w.cta->cluster;
  if (rank > uint32_t(cluster.size())) fail("OUT OF BOUNDS: %s at shared address 0x%x, which is in no CTA of the cluster", what, addr);
  Cta& cta = *cluster.ctas[rank - 1];
  addr &= (1u << kRankShift) - 1;
  if (&cta == w.cta) return cta;
  if (!cta.live) fail("CLUSTER: %s in the shared memory of the CTA of rank %d, which has exited", what, cta.rank);
  if (w.vm->check && !w.cluster_waits && !knows_of(w, lane, cta))
    fail("CLUSTER: %s in the shared memory of the CTA of rank %d, which may not have started (no barrier.cluster before)", what,
         cta.rank);
  return cta;
}

// ---- barrier.cluster: a phase is complete when all warps that have not exited have arrived.
void complete_cluster_barrier(Cluster& cluster) {
  bool any = false;
  for (auto& cta : cluster.ctas)
    for (auto& w : cta->warps) {
      if (w->done) continue;
      any = true;
      if (w->cluster_arrivals == cluster.phase) return;
    }
  if (!any) return;
  cluster.phase++;
  cluster.complete = std::move(cluster.arriving);
  cluster.arriving = nullptr;
  cluster.vm->progress++;
}

// args: relaxed
static Step arrive(Warp& w, const Insn& in, uint32_t m) {
  Cluster& cluster = *w.cta->cluster;
  if (w.cluster_mask & m || w.cluster_arrivals > w.cluster_waits)
    fail("CLUSTER: barrier.cluster.arrive twice without a barrier.cluster.wait in between");
  if (w.vm->check) {
    if (!in.arg[0]) join(cluster.arriving, abroad(w, release(w, m)));
    else if (const Level top = level(w, kScopeCluster); w.fenced[top]) join(cluster.arriving, abroad(w, w.fence_at[top]));
  }
  w.cluster_mask |= m;
  w.vm->progress++;
  if ((w.cluster_mask & w.live) == w.live) {
    w.cluster_mask = 0;
    w.cluster_arrivals++;
    complete_cluster_barrier(cluster);
  }
  return Step::kNext;
}

static Step wait(Warp& w, const Insn&, uint32_t m) {
  Cluster& cluster = *w.cta->cluster;
  const bool in_part = (w.cluster_mask & m) == m;
  if (!in_part && w.cluster_arrivals == cluster.phase && w.cluster_waits == w.cluster_arrivals)
    fail("CLUSTER: barrier.cluster.wait without a barrier.cluster.arrive before");
  const uint64_t phase = w.cluster_arrivals + in_part;
  if (cluster.phase < phase) {
    w.path().wait = Wait::kCluster;
    w.path().parity = uint32_t(phase);
    return Step::kStay;
  }
  w.cluster_waits = phase;
  if (w.vm->check) {
    warp_sync(w, m);
    acquire(w, cluster.complete, m);
  }
  return Step::kNext;
}

// ---- addresses
static uint32_t place(Warp& w, uint32_t addr, uint32_t rank) {
  if (rank >= uint32_t(w.cta->cluster->size())) fail("CLUSTER: mapa to rank %u of a cluster of %d", rank, w.cta->cluster->size());
  const uint32_t at = addr & ((1u << kRankShift) - 1);
  return int(rank) == w.cta->rank ? at : at | (rank + 1) << kRankShift;
}
static uint32_t rank_of(Warp& w, uint32_t addr) {
  return addr >> kRankShift ? (addr >> kRankShift) - 1 : uint32_t(w.cta->rank);
}

// args: D, address, rank
static Step mapa32(Warp& w, const Insn& in, uint32_t m) {
  const uint32_t *a = w.r(in.arg[1]), *rank = w.r(in.arg[2]);
  uint32_t out[32] = {};
  each_lane(m, [&](int l) { out[l] = place(w, a[l], rank[l]); });
  lanes(w.r(in.arg[0]), m, [&](int l) { return out[l]; });
  return Step::kNext;
}
// args: D, address, rank, address is generic
static Step mapa64(Warp& w, const Insn& in, uint32_t m) {
  const uint64_t* a = w.d(in.arg[1]);
  const uint32_t* rank = w.r(in.arg[2]);
  uint64_t out[32] = {};
  each_lane(m, [&](int l) {
    if (in.arg[3] && (a[l] & kWindowMask) != kSharedWindow) fail("CLUSTER: mapa of an address outside shared memory");
    out[l] = (a[l] & kWindowMask) | place(w, uint32_t(a[l]), rank[l]);
  });
  lanes(w.d(in.arg[0]), m, [&](int l) { return out[l]; });
  return Step::kNext;
}
static Step rank32(Warp& w, const Insn& in, uint32_t m) {
  const uint32_t* a = w.r(in.arg[1]);
  lanes(w.r(in.arg[0]), m, [&](int l) { return rank_of(w, a[l]); });
  return Step::kNext;
}
static Step rank64(Warp& w, const Insn& in, uint32_t m) {
  const uint64_t* a = w.d(in.arg[1]);
  lanes(w.r(in.arg[0]), m, [&](int l) { return rank_of(w, uint32_t(a[l])); });
  return Step::kNext;
}

static const OpDef kOps[] = {
    {"barrier.cluster.arrive", "i", arrive, 0, kPreempt},
    {"barrier.cluster.wait", "", wait, 0, kPreempt},
    {"barrier.cluster.arrive.aligned", "i", arrive, 0, kPreempt | kAligned | kLive},
    {"barrier.cluster.wait.aligned", "", wait, 0, kPreempt | kAligned | kLive},
    {"mapa32", "Rrr", mapa32, 0, 0}, {"mapa64", "Ddri", mapa64, 0, 0},
    {"getctarank32", "Rr", rank32, 0, 0}, {"getctarank64", "Rd", rank64, 0, 0},
};
EMU_TABLE(cluster_ops, kOps)

}  // namespace emu
