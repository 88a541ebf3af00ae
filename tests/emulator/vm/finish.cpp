// Lanes and CTAs as they exit, and the census of those that cannot.
#include "vm.h"

namespace emu {

void Machine::exit_lanes(Warp& w, uint32_t mask) {
  for (auto* groups : {&w.copy_groups})
    each_lane(mask, [&](int l) {
      for (auto& g : (*groups)[l])
        for (CopyOp& c : g)
          if (!c.done) fail("IN FLIGHT: lane %d exits with a cp.async in flight, issued at @%d@", l, c.pc);
      for (CopyOp& c : w.open_copies[l])
        if (!c.done) fail("IN FLIGHT: lane %d exits with an uncommitted cp.async in flight, issued at @%d@", l, c.pc);
      for (auto& g : w.bulk_groups[l])
        for (BulkOp& b : g) {
          if (!b.read_done) fail("IN FLIGHT: lane %d exits before its bulk store has read shared memory, issued at @%d@", l, b.pc);
          land_bulk(w, l, b, true);
        }
      for (BulkOp& b : w.open_bulk[l])
        fail("IN FLIGHT: lane %d exits with an uncommitted bulk store, issued at @%d@", l, b.pc);
    });
  w.live &= ~mask;
  progress++;
  for (Path& p : w.paths)  // collectives wait for lanes that live
    if (p.wait == Wait::kMeet) p.wait = Wait::kNone;
  if (w.live) {
    if (w.cluster_mask && (w.cluster_mask & w.live) == w.live) {
      w.cluster_mask = 0;
      w.cluster_arrivals++;
      complete_cluster_barrier(*w.cta->cluster);
    }
    return;
  }
  if (!w.open_wgmmas.empty() || !w.wgmma_groups.empty()) fail("IN FLIGHT: a warp exits with a wgmma in flight");
  w.done = true;
  const bool clustered = w.cta->cluster->size() > 1;
  if (check && clustered) {
    w.cta->at_exit.join(w.base, w.cta->num_warps(), w.cta->num_mbar());
    if (w.partial_mask) w.cta->at_exit.join(w.partial, w.cta->num_warps(), w.cta->num_mbar());
  }
  --w.cta->live;
  complete_cluster_barrier(*w.cta->cluster);
  if (!w.cta->live) return finish_cta(*w.cta);
  for (int i = 0; i < kBarriers; i++)
    if (w.cta->barriers[i].whole) complete_barrier(*w.cta, i);
}

void Machine::finish_cta(Cta& cta) {
  for (const Request& t : cta.queue)
    fail("IN FLIGHT: the CTA ends with an asynchronous copy in flight, issued at @%d@", t.pc);
  for (auto& other : cta.cluster->ctas)
    for (const Request& t : other->queue)
      if (t.from == &cta && t.kind == Request::kShared)
        fail("IN FLIGHT: the CTA ends before a copy has read its shared memory, issued at @%d@", t.pc);
  if (check && cta.cluster->size() > 1) check_remote_accesses_done(cta);
  for (const Mbarrier& b : cta.mbarriers)
    if (b.valid && b.tx) fail("MBARRIER: the CTA ends with a transaction count of %lld bytes at shared address %u (initialised at @%d@)",
                              (long long)b.tx, b.addr, b.init_pc);
  for (const Mbarrier& b : cta.mbarriers)
    if (b.valid && (b.landed || b.unobserved))
      fail("IN FLIGHT: the CTA ends without a wait for the last copies on the mbarrier at shared address %u (initialised at @%d@)",
           b.addr, b.init_pc);
  for (size_t g = 0; g + 4 <= cta.warps.size(); g += 4)
    for (size_t i = 1; i < 4; i++)
      if (cta.warps[g]->wgmma_count != cta.warps[g + i]->wgmma_count)
        fail("WGMMA: the warps of a warpgroup executed %llu and %llu wgmma.mma_async", (unsigned long long)cta.warps[g]->wgmma_count,
             (unsigned long long)cta.warps[g + i]->wgmma_count);
  // A bar.arrive that nobody waits for is legal; the hardware forgets it.
  for (const Barrier& b : cta.barriers) cfg.stats[kLeftArrived] += b.arrived;
}

std::string Machine::census() {
  std::string text;
  int shown = 0;
  for (auto& cluster : clusters)
   for (auto& cta : cluster->ctas)
    for (auto& w : cta->warps)
      for (const Path& p : w->paths) {
        if (w->done || shown++ > 40) continue;
        static const char* const kWhat[] = {"running", "mbarrier", "barrier", "lanes of its warp", "barrier of the cluster"};
        char part[200];
        int n = snprintf(part, sizeof part, "\n  CTA %lld warp %d lanes 0x%08x: %s", (long long)cta->index, w->id, p.mask,
                         kWhat[int(p.wait)]);
        if (p.wait == Wait::kMbarrier) {
          const auto it = cta->mbarrier_at.find(p.where);
          if (it != cta->mbarrier_at.end()) {
            const Mbarrier& b = cta->mbarriers[it->second];
            n += snprintf(part + n, sizeof part - n, " %u parity %u (phase %llu, pending %d of %d, tx %lld)", p.where, p.parity,
                          (unsigned long long)b.phase, b.pending, b.count, (long long)b.tx);
          }
        }
        if (p.wait == Wait::kBarrier) n += snprintf(part + n, sizeof part - n, " %u (%d of %d threads)", p.where,
                                                    cta->barriers[p.where].arrived, cta->barriers[p.where].expected);
        snprintf(part + n, sizeof part - n, " at @%d@", p.pc);
        text += part;
      }
  return text;
}

}  // namespace emu
