// The scheduler: which warp of which CTA runs next, for how long, and when nothing can.
#include "vm.h"

namespace emu {

constexpr uint64_t kPollSteps = 500;  // a look that changes nothing counts as so many instructions without progress

Machine::Machine(const Program& p, const Launch& c) : prog(p), cfg(c), check(c.check) {
  threads = uint32_t(c.block[0] * c.block[1] * c.block[2]);
  warps_per_cta = (threads + 31) / 32;
  if (threads == 0 || threads > 1024) fail("LAUNCH: %u threads in a block", threads);
  random_state = uint64_t(c.seed) * 0x9E3779B97F4A7C15ull ^ 0xD1B54A32D192ED03ull;
  for (int i = 0; i < 8; i++) random();
  smem_end = c.smem ? uint32_t(prog.dynamic_base + c.smem) : kSharedBase + uint32_t(prog.static_smem);
  eager = c.seed == 0 ? 0 : int(random() % 3 == 0 ? 0 : random() % 2 ? 3 : 40);
  region_cache.assign(prog.code.size(), -1);
  const int64_t size = c.cluster[0] * c.cluster[1] * c.cluster[2];
  if (size > kMaxCluster) fail("LAUNCH: a cluster of %lld CTAs; at most %d are portable", (long long)size, kMaxCluster);
  for (int d = 0; d < 3; d++)
    if (c.grid[d] % c.cluster[d]) fail("LAUNCH: the grid is not made of whole clusters");
  const int64_t n = c.grid[0] * c.grid[1] * c.grid[2] / size;
  for (int64_t i = n - 1; i >= 0; i--) pending.push_back(i);
  if (c.seed)
    for (int64_t i = n - 1; i > 0; i--) std::swap(pending[i], pending[random() % (i + 1)]);
}

bool Machine::runnable(Warp& w) {
  if (w.done) return false;
  for (Path& p : w.paths) {
    switch (p.wait) {
      case Wait::kNone: return true;
      case Wait::kCluster:
        if (w.cta->cluster->phase >= p.parity) return true;
        break;
      case Wait::kMbarrier: {
        const auto it = w.cta->mbarrier_at.find(p.where);
        if (it == w.cta->mbarrier_at.end() || mbarrier_ready(w.cta->mbarriers[it->second], p.parity)) return true;
        break;
      }
      default: break;
    }
  }
  return false;
}

// Picks the lowest pc among the paths that can run; paths at one pc become one.
bool Machine::select_path(Warp& w) {
  if (w.paths.size() == 1 && w.paths[0].wait == Wait::kNone) {
    w.cur = 0;
    return true;
  }
  for (Path& p : w.paths) {
    if (p.wait == Wait::kCluster && w.cta->cluster->phase >= p.parity) {
      p.wait = Wait::kNone;
      p.parity = 0;
    }
    if (p.wait == Wait::kMbarrier) {
      const auto it = w.cta->mbarrier_at.find(p.where);
      if (it == w.cta->mbarrier_at.end() || mbarrier_ready(w.cta->mbarriers[it->second], p.parity)) {
        p.wait = Wait::kNone;
        p.parity = 0;
      }
    }
  }
  for (size_t i = 0; i < w.paths.size(); i++)
    for (size_t j = i + 1; j < w.paths.size();) {
      Path &a = w.paths[i], &b = w.paths[j];
      const bool may = (a.wait == Wait::kNone || a.wait == Wait::kMeet) && (b.wait == Wait::kNone || b.wait == Wait::kMeet);
      if (a.pc == b.pc && may && a.parity == b.parity) {
        a.mask |= b.mask;
        a.wait = Wait::kNone;
        w.paths.erase(w.paths.begin() + j);
      } else {
        j++;
      }
    }
  int best = -1;
  size_t meeting = 0;
  for (size_t i = 0; i < w.paths.size(); i++) {
    meeting += w.paths[i].wait == Wait::kMeet;
    if (w.paths[i].wait == Wait::kNone && (best < 0 || w.paths[i].pc < w.paths[best].pc)) best = int(i);
  }
  if (best >= 0) {
    w.cur = best;
    return true;
  }
  if (meeting == w.paths.size()) {
    std::string text = "DIVERGENT: lanes of one warp wait for others, which are elsewhere or have exited:";
    for (const Path& p : w.paths) {
      char part[80];
      snprintf(part, sizeof part, " lanes 0x%08x at @%d@;", p.mask, p.pc);
      text += part;
    }
    w.pc = w.paths[0].pc;
    throw Fault(text);
  }
  return false;
}

// An instruction that accesses registers which some wgmma uses.
void Machine::touch(Warp& w, const Insn& in) {
  for (int i = 0; i < in.nargs; i++) {
    const bool def = in.defs >> std::min(i, 31) & 1;
    if (!def && !(in.uses >> std::min(i, 31) & 1)) continue;
    const uint8_t state = w.in_flight[in.arg[i] / 32];
    if (state & 2) fail("WGMMA: an accumulator register is touched before wgmma.wait_group");
    if (def && (state & 1)) fail("WGMMA: an A register is overwritten before wgmma.wait_group");
  }
}

void Machine::run_warp(Warp& w) {
  const bool preempt = cfg.seed != 0;
  for (int quantum = 4096; quantum > 0; quantum--) {
    if (!select_path(w)) return;
    Path& path = w.paths[w.cur];
    w.pc = path.pc;
    const Insn& in = prog.code[path.pc];
    uint32_t m = path.mask;
    if (in.pred >= 0) m &= in.negate ? ~w.p(in.pred) : w.p(in.pred);
    if (!m && !(in.kind & kControl)) {
      path.pc++;
      continue;
    }
    if (in.kind & (kPreempt | kAligned | kMembers)) {
      if (preempt && (in.kind & kPreempt) && quantum < 4096 && (random() & ((1u << cfg.preempt_shift) - 1)) == 0) return;
      uint32_t need = 0;
      if (in.kind & kAligned) need = in.kind & kLive ? w.live : w.born;
      else if (in.kind & kMembers) {
        need = w.r(in.arg[0])[first_lane(m)];
        if (~need & m) fail("MASK: an executing lane is not in the member mask 0x%08x (active: 0x%08x)", need, m);
        need &= w.born;
      }
      if (need & ~path.mask) {  // others have to come first
        path.wait = Wait::kMeet;
        continue;
      }
      if (need & ~m) fail("DIVERGENT: lanes 0x%08x do not take part in a collective (active: 0x%08x)", need & ~m, m);
    }
    if (w.any_in_flight && (in.kind & kTouches)) touch(w, in);
    w.converged = m == w.live;
    cfg.hits[path.pc]++;
    cfg.stats[kSteps]++;
    idle_steps++;
    switch (in.fn(w, in, m)) {
      case Step::kNext: w.paths[w.cur].pc++; break;
      case Step::kStay:
      case Step::kJump: break;
      case Step::kYield:
        w.paths[w.cur].pc++;
        w.polled = progress;
        return;
      case Step::kExit: return;
    }
  }
}

void Machine::run() {
  const size_t size = size_t(cfg.cluster[0] * cfg.cluster[1] * cfg.cluster[2]);
  const size_t resident = std::max<size_t>(size > 1 ? 2 : 1, cfg.resident / size);
  std::vector<Warp*> ready, polling;
  size_t turn = 0;
  uint64_t last_progress = 0;
  while (true) {
    for (size_t i = 0; i < clusters.size();) {
      if (!clusters[i]->live()) clusters.erase(clusters.begin() + i);
      else i++;
    }
    while (clusters.size() < resident && !pending.empty()) {
      start_cluster(pending.back());
      pending.pop_back();
    }
    if (clusters.empty()) return;
    ready.clear();
    polling.clear();
    Cta* with_queue = nullptr;
    for (auto& cluster : clusters)
     for (auto& c : cluster->ctas) {
      if (!c->queue.empty() && (!with_queue || (cfg.seed && random() % 2))) with_queue = c.get();
      for (auto& w : c->warps)
        if (runnable(*w)) (w->polled == progress ? polling : ready).push_back(w.get());
    }
    if (progress != last_progress) {
      last_progress = progress;
      idle_steps = 0;
    }
    const bool stuck = ready.empty() || idle_steps > 200000;  // loops that only look may go on for ever
    if (with_queue && (stuck || (eager && random() % eager == 0))) {
      perform(*with_queue, cfg.seed ? random() % with_queue->queue.size() : 0);
      progress++;
      continue;
    }
    if (ready.empty()) {  // none but loops that wait: they may be counting
      std::swap(ready, polling);
      idle_steps += kPollSteps;
    }
    if (ready.empty()) throw Fault("DEADLOCK: no warp can go on" + census());
    if (int64_t(idle_steps) > cfg.max_idle) throw Fault("NO PROGRESS: warps spin without changing anything" + census());
    Warp& w = *ready[cfg.seed ? random() % ready.size() : turn++ % ready.size()];
    cfg.stats[kSwitches]++;
    try {
      run_warp(w);
    } catch (const Fault& f) {
      char where[120];
      snprintf(where, sizeof where, "\n  in CTA (%u, %u, %u) warp %d at @%d@", w.cta->block[0], w.cta->block[1],
               w.cta->block[2], w.id, w.pc);
      throw Fault(f.what() + std::string(where));
    }
  }
}

void Machine::perform(Cta& cta, size_t item) {
  const Request t = cta.queue[item];
  cta.queue.erase(cta.queue.begin() + item);
  Warp& w = *t.from->warps[t.warp];
  const int pc = w.pc;
  w.pc = t.pc;
  try {
    perform_request(t);
  } catch (const Fault& f) {
    char where[120];
    snprintf(where, sizeof where, "\n  in a copy of CTA (%u, %u, %u) warp %d, issued at @%d@", t.from->block[0], t.from->block[1],
             t.from->block[2], t.warp, t.pc);
    throw Fault(f.what() + std::string(where));
  }
  w.pc = pc;
}

}  // namespace emu
