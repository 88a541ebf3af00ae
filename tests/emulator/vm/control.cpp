// Branches, barriers, fences, and what needs no model.
#include "alu.h"

namespace emu {

static Step branch_to(Warp& w, uint32_t m, int target) {
  Path& path = w.path();
  if (m == path.mask) {
    path.pc = target;
  } else if (m) {
    path = {path.pc + 1, path.mask & ~m};
    w.paths.push_back({target, m});
  } else {
    path.pc++;
  }
  return Step::kJump;
}
static Step bra(Warp& w, const Insn& in, uint32_t m) { return branch_to(w, m, in.arg[0]); }

// args: index register, targets...
static Step brx(Warp& w, const Insn& in, uint32_t m) {
  uint32_t left = m;
  const Path from = w.path();
  std::vector<Path> out;
  if (from.mask & ~m) out.push_back({from.pc + 1, from.mask & ~m});
  while (left) {
    const uint32_t index = w.r(in.arg[0])[first_lane(left)];
    if (index >= uint32_t(in.nargs - 1)) fail("BRANCH: brx.idx index %u of %d targets", index, in.nargs - 1);
    uint32_t same = 0;
    each_lane(left, [&](int l) { same |= uint32_t(w.r(in.arg[0])[l] == index) << l; });
    out.push_back({in.arg[1 + index], same});
    left &= ~same;
  }
  w.paths[w.cur] = out[0];
  w.paths.insert(w.paths.end(), out.begin() + 1, out.end());
  return Step::kJump;
}

static Step ret(Warp& w, const Insn&, uint32_t m) {
  Path& path = w.path();
  w.vm->exit_lanes(w, m);
  path.mask &= ~m;
  if (path.mask) {
    path.pc++;
    return Step::kJump;
  }
  w.paths.erase(w.paths.begin() + w.cur);
  w.cur = 0;
  return w.paths.empty() ? Step::kExit : Step::kJump;
}

static Step trap(Warp&, const Insn&, uint32_t) { fail("TRAP: the kernel executed trap"); }
static Step nothing(Warp&, const Insn&, uint32_t) { return Step::kNext; }
static Step yield(Warp&, const Insn&, uint32_t) { return Step::kYield; }

// ---- barriers of the CTA
static void census_of(const Warp& w, const Barrier& b, char* text, size_t size) {
  size_t at = 0;
  for (size_t i = 0; i < b.who.size() && at + 40 < size; i++)
    at += snprintf(text + at, size - at, " warp %d at @%d@;", b.who[i].first, b.who[i].second);
  (void)w;
}

// Lets all go who wait, once enough have arrived. A barrier of the whole CTA waits for the warps that have not
// exited.
void complete_barrier(Cta& cta, int number) {
  Barrier& b = cta.barriers[number];
  const int expected = b.whole ? cta.live * 32 : b.expected;
  if (!b.arrived || b.arrived < expected) return;
  if (b.arrived > expected) fail("BARRIER: %d threads arrived at barrier %d, which expects %d", b.arrived, number, expected);
  for (auto& q : cta.warps)
    for (Path& p : q->paths)
      if (p.wait == Wait::kBarrier && p.where == uint32_t(number)) {
        p.wait = Wait::kNone;
        if (!cta.vm->check) continue;
        warp_sync(*q, p.mask);
        acquire(*q, b.order, p.mask);
      }
  cta.result[number] = std::exchange(cta.votes[number], Cta::Votes());
  b = Barrier();
}

void arrive_barrier(Warp& w, uint32_t mask, int expected, bool wait, int number) {
  Cta& cta = *w.cta;
  Barrier& b = cta.barriers[number];
  const bool whole = expected < 0;
  if (whole) expected = int(w.vm->warps_per_cta) * 32;
  if (expected <= 0 || expected % 32) fail("BARRIER: thread count %d is not a multiple of 32", expected);
  if (b.arrived && b.expected != expected) {
    char who[400] = "";
    census_of(w, b, who, sizeof who);
    fail("BARRIER: barrier %d is used with %d threads here, but with %d by%s", number, expected, b.expected, who);
  }
  b.expected = expected;
  b.whole = whole;
  b.arrived += (mask & w.live) == w.live ? 32 : __builtin_popcount(mask);
  b.who.push_back({w.id, w.pc});
  if (w.vm->check) b.order.join(release(w, mask), cta.num_warps(), cta.num_mbar());
  w.vm->progress++;
  if (wait) {
    w.path().wait = Wait::kBarrier;
    w.path().where = uint32_t(number);
  }
  complete_barrier(cta, number);
}

// args: number, count (slots; count -1: the whole CTA); flags of the table say what it is.
static int barrier_number(Warp& w, const Insn& in, uint32_t m) {
  const int l = first_lane(m);
  const uint32_t number = w.r(in.arg[0])[l];
  if (number >= kBarriers) fail("BARRIER: number %u is not below 16", number);
  each_lane(m, [&](int i) { if (w.r(in.arg[0])[i] != number) fail("BARRIER: lanes name different barriers"); });
  return int(number);
}
static int barrier_count(Warp& w, const Insn& in, uint32_t m) {
  return in.arg[1] < 0 ? -1 : int(w.r(in.arg[1])[first_lane(m)]);
}
static Step bar_sync(Warp& w, const Insn& in, uint32_t m) {
  const int number = barrier_number(w, in, m), count = barrier_count(w, in, m);
  w.path().pc++;
  arrive_barrier(w, m, count, true, number);
  return Step::kJump;
}
static Step bar_arrive(Warp& w, const Insn& in, uint32_t m) {
  const int number = barrier_number(w, in, m);
  arrive_barrier(w, m, barrier_count(w, in, m), false, number);
  return Step::kNext;
}

// bar.red: args number, count, operation (0 popc, 1 and, 2 or), predicate, destination. Two passes: the
// arrival leaves its vote in the barrier, and the instruction runs again when all have arrived.
static Step bar_red(Warp& w, const Insn& in, uint32_t m) {
  const int number = barrier_number(w, in, m), count = barrier_count(w, in, m);
  Cta& cta = *w.cta;
  auto& votes = cta.votes[number];
  const auto& result = cta.result[number];
  Path& path = w.path();
  if (path.parity != kVoted) {
    const uint32_t p = (in.arg[4] ? ~w.p(in.arg[3]) : w.p(in.arg[3])) & m;
    votes.count += __builtin_popcount(p);
    votes.all &= p == m;
    votes.any |= p != 0;
    path.parity = kVoted;
    arrive_barrier(w, m, count, true, number);
    if (path.wait != Wait::kNone) return Step::kStay;
  }
  path.parity = 0;
  if (in.arg[2] == 0) lanes(w.r(in.arg[5]), m, [&](int) { return uint32_t(result.count); });
  else w.set_p(in.arg[5], m, (in.arg[2] == 1 ? result.all : result.any) ? ~0u : 0);
  return Step::kNext;
}

// ---- within the warp
static Step warp_barrier(Warp& w, const Insn&, uint32_t m) {
  warp_sync(w, m);
  return Step::kNext;
}

static Step do_fence(Warp& w, uint32_t m, Scope scope) {
  fence(w, m, scope);
  return Step::kNext;
}
static Step mbarrier_fence(Warp& w, const Insn&, uint32_t m) {
  for (Mbarrier& b : w.cta->mbarriers)
    if (b.init_warp == w.id && (m >> b.init_lane & 1)) {
      b.init_fenced = true;
      b.fenced_arrivals = std::min(b.fenced_arrivals, w.cluster_arrivals);
    }
  return Step::kNext;
}
static Step do_proxy(Warp& w, const Insn&, uint32_t m) {
  proxy_fence(w, m);
  for (Mbarrier& b : w.cta->mbarriers)
    if (b.init_warp == w.id) b.init_fenced = true;
  return Step::kNext;
}
static Step read_clock(Warp& w, const Insn& in, uint32_t m) {
  const uint64_t t = w.vm->cfg.stats[kSteps];
  lanes(w.d(in.arg[0]), m, [=](int) { return t; });
  return Step::kNext;
}
static Step read_clock32(Warp& w, const Insn& in, uint32_t m) {
  const uint32_t t = uint32_t(w.vm->cfg.stats[kSteps]);
  lanes(w.r(in.arg[0]), m, [=](int) { return t; });
  return Step::kNext;
}

#define FENCE(NAME, SCOPE) {NAME, "", EMU_FN { (void)in; return do_fence(w, m, SCOPE); }, 0, kPreempt}
static const OpDef kOps[] = {
    {"bra", "*", bra, 0, kControl}, {"brx.idx", "*", brx, 0, kControl},
    {"ret", "", ret, 0, kControl}, {"exit", "", ret, 0, kControl},
    {"trap", "", trap, 0, 0}, {"brkpt", "", trap, 0, 0}, {"nanosleep.u32", "r", yield, 0, 0},
    {"pmevent", "i", nothing, 0, 0},
    {"bar.sync", "rj", bar_sync, 0, kPreempt | kAligned | kLive}, {"bar.arrive", "rj", bar_arrive, 0, kPreempt | kAligned | kLive},
    {"barrier.sync", "rj", bar_sync, 0, kPreempt}, {"barrier.arrive", "rj", bar_arrive, 0, kPreempt},
    {"bar.red", "rjipiP", bar_red, 0, kPreempt | kAligned | kLive}, {"bar.red.popc", "rjipiR", bar_red, 0, kPreempt | kAligned | kLive},
    {"bar.warp.sync", "r", warp_barrier, 0, kPreempt | kMembers},
    FENCE("membar.cta", kScopeCta), FENCE("membar.gl", kScopeGpu), FENCE("membar.sys", kScopeSys),
    FENCE("fence.acq_rel.cta", kScopeCta), FENCE("fence.acq_rel.cluster", kScopeCluster),
    FENCE("fence.acq_rel.gpu", kScopeGpu), FENCE("fence.acq_rel.sys", kScopeSys),
    FENCE("fence.sc.cta", kScopeCta), FENCE("fence.sc.cluster", kScopeCluster),
    FENCE("fence.sc.gpu", kScopeGpu), FENCE("fence.sc.sys", kScopeSys),
    {"fence.proxy.async", "", do_proxy, 0, kPreempt}, {"fence.proxy.async.shared::cta", "", do_proxy, 0, kPreempt},
    {"fence.proxy.async.global", "", do_proxy, 0, kPreempt},
    {"fence.proxy.async.shared::cluster", "", do_proxy, 0, kPreempt},
    {"fence.mbarrier_init.release.cluster", "", mbarrier_fence, 0, kPreempt},
    {"griddepcontrol.wait", "", nothing, 0, 0}, {"griddepcontrol.launch_dependents", "", nothing, 0, 0},
    {"setmaxnreg.inc.sync.aligned.u32", "i", nothing, 0, kPreempt | kAligned},
    {"setmaxnreg.dec.sync.aligned.u32", "i", nothing, 0, kPreempt | kAligned},
    {"clock64", "D", read_clock, 0, 0}, {"clock", "R", read_clock32, 0, 0},
};
EMU_TABLE(control_ops, kOps)

}  // namespace emu
