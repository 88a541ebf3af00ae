// The scheduler: which warp of which CTA runs next, for how long, and when nothing can.
#include "vm.h"

namespace emu {

Machine::Machine(const Program& p, const Launch& c) : prog(p), cfg(c), check(c.check) {
  threads = uint32_t(c.block[0] * c.block[1] * c.block[2]);
  warps_per_cta = (threads + 31) / 32;
  if (threads == 0 || threads > 1024) fail("LAUNCH: %u threads in a block", threads);
  random_state = uint64_t(c.seed) * 0x9E3779B97F4A7C15ull ^ 0xD1B54A32D192ED03ull;
  for (int i = 0; i < 8; i++) random();
  smem_end = c.smem ? uint32_t(prog.dynamic_base + c.smem) : kSharedBase + uint32_t(prog.static_smem);
  eager = c.seed == 0 ? 0 : int(random() % 3 == 0 ? 0 : random() % 2 ? 3 : 40);
  region_cache.assign(prog.code.size(), -1);
  const int64_t n = c.grid[0] * c.grid[1] * c.grid[2];
  for (int64_t i = n - 1; i >= 0; i--) pending.push_back(i);
  if (c.seed)
    for (int64_t i = n - 1; i > 0; i--) std::swap(pending[i], pending[random() % (i + 1)]);
}

enum Special { kTidX, kTidY, kTidZ, kNtidX, kNtidY, kNtidZ, kCtaX, kCtaY, kCtaZ, kNctaX, kNctaY, kNctaZ, kLane,
               kWarpId, kNwarp, kSmid, kNsmid, kMaskEq, kMaskLt, kMaskLe, kMaskGt, kMaskGe, kDynSmem, kTotalSmem,
               kZero, kOne, kGridId };

static uint32_t special(const Machine& vm, const Cta& cta, int warp, int l, int id) {
  const uint32_t t = uint32_t(warp * 32 + l);
  const auto& b = vm.cfg.block;
  const auto& g = vm.cfg.grid;
  switch (id) {
    case kTidX: return uint32_t(t % b[0]);
    case kTidY: return uint32_t(t / b[0] % b[1]);
    case kTidZ: return uint32_t(t / (b[0] * b[1]));
    case kNtidX: case kNtidY: case kNtidZ: return uint32_t(b[id - kNtidX]);
    case kCtaX: case kCtaY: case kCtaZ: return cta.block[id - kCtaX];
    case kNctaX: case kNctaY: case kNctaZ: return uint32_t(g[id - kNctaX]);
    case kLane: return l;
    case kWarpId: return warp;
    case kNwarp: return vm.warps_per_cta;
    case kSmid: return uint32_t(cta.index % vm.cfg.resident);
    case kNsmid: return uint32_t(vm.cfg.resident);
    case kMaskEq: return 1u << l;
    case kMaskLt: return (1u << l) - 1;
    case kMaskLe: return (2u << l) - 1;
    case kMaskGt: return ~((2u << l) - 1);
    case kMaskGe: return ~((1u << l) - 1);
    case kDynSmem: return uint32_t(vm.cfg.smem);
    case kTotalSmem: return vm.smem_end - kSharedBase;
    case kOne: return 1;
    default: return 0;
  }
}

void Machine::start_cta(int64_t index) {
  auto cta = std::make_unique<Cta>();
  cta->vm = this;
  cta->index = index;
  cta->block[0] = uint32_t(index % cfg.grid[0]);
  cta->block[1] = uint32_t(index / cfg.grid[0] % cfg.grid[1]);
  cta->block[2] = uint32_t(index / (cfg.grid[0] * cfg.grid[1]));
  cta->smem.assign(smem_end + 16, kPoisonByte);
  if (check) cta->shadow.init(smem_end + 16, int(warps_per_cta));
  for (uint32_t id = 0; id < warps_per_cta; id++) {
    auto w = std::make_unique<Warp>();
    w->vm = this;
    w->cta = cta.get();
    w->id = int(id);
    const uint32_t left = threads - id * 32;
    w->live = left >= 32 ? ~0u : (1u << left) - 1;
    w->born = w->live;
    w->paths = {{0, w->live}};
    std::fill_n(w->floor, 32, 1u);
    w->file.assign(prog.file_words, kPoisonRegister);
    w->in_flight.assign(prog.file_words / 32 + 2, 0);
    w->local.assign(size_t(prog.local_bytes) * 32, kPoisonByte);
    for (size_t i = 0; i < prog.constants.size(); i += 4) {
      const int32_t* c = &prog.constants[i];
      if (c[1] == 2) w->p(c[0]) = uint32_t(c[2]);
      else if (c[1]) std::fill_n(w->d(c[0]), 32, uint64_t(uint32_t(c[3])) << 32 | uint32_t(c[2]));
      else std::fill_n(w->r(c[0]), 32, uint32_t(c[2]));
    }
    for (size_t i = 0; i < prog.specials.size(); i += 2)
      for (int l = 0; l < 32; l++) w->r(prog.specials[i])[l] = special(*this, *cta, int(id), l, prog.specials[i + 1]);
    cta->warps.push_back(std::move(w));
  }
  cta->live = int(warps_per_cta);
  ctas.push_back(std::move(cta));
}

bool Machine::runnable(Warp& w) {
  if (w.done) return false;
  for (Path& p : w.paths) {
    switch (p.wait) {
      case Wait::kNone: return true;
      case Wait::kPoll: return true;
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
    if (p.wait == Wait::kPoll) p.wait = Wait::kNone;
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
        if (w.paths[w.cur].wait == Wait::kPoll) return;
        break;
      case Step::kJump: break;
      case Step::kYield: w.paths[w.cur].pc++; return;
      case Step::kExit: return;
    }
  }
}

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
  if (w.live) return;
  if (!w.open_wgmmas.empty() || !w.wgmma_groups.empty()) fail("IN FLIGHT: a warp exits with a wgmma in flight");
  w.done = true;
  if (--w.cta->live == 0) return finish_cta(*w.cta);
  for (int i = 0; i < kBarriers; i++)
    if (w.cta->barriers[i].whole) complete_barrier(*w.cta, i);
}

void Machine::finish_cta(Cta& cta) {
  for (const TensorRequest& t : cta.queue)
    fail("IN FLIGHT: the CTA ends with an asynchronous copy in flight, issued at @%d@", t.pc);
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
  for (auto& cta : ctas)
    for (auto& w : cta->warps)
      for (const Path& p : w->paths) {
        if (w->done || shown++ > 40) continue;
        static const char* const kWhat[] = {"running", "mbarrier", "barrier", "lanes of its warp", "warp barrier", "polling"};
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

void Machine::run() {
  const size_t resident = std::max<int64_t>(cfg.resident, 1);
  std::vector<Warp*> ready;
  size_t turn = 0;
  uint64_t last_progress = 0;
  while (true) {
    for (size_t i = 0; i < ctas.size();) {
      if (ctas[i]->live == 0) ctas.erase(ctas.begin() + i);
      else i++;
    }
    while (ctas.size() < resident && !pending.empty()) {
      start_cta(pending.back());
      pending.pop_back();
    }
    if (ctas.empty()) return;
    ready.clear();
    Cta* with_queue = nullptr;
    for (auto& c : ctas) {
      if (!c->queue.empty() && (!with_queue || (cfg.seed && random() % 2))) with_queue = c.get();
      for (auto& w : c->warps)
        if (runnable(*w)) ready.push_back(w.get());
    }
    if (progress != last_progress) {
      last_progress = progress;
      idle_steps = 0;
    }
    const bool stuck = ready.empty() || idle_steps > 200000;
    if (with_queue && (stuck || (eager && random() % eager == 0))) {
      perform(*with_queue, cfg.seed ? random() % with_queue->queue.size() : 0);
      progress++;
      continue;
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
  const TensorRequest t = cta.queue[item];
  cta.queue.erase(cta.queue.begin() + item);
  Warp& w = *cta.warps[t.warp];
  const int pc = w.pc;
  w.pc = t.pc;
  try {
    perform_request(cta, t);
  } catch (const Fault& f) {
    char where[120];
    snprintf(where, sizeof where, "\n  in a copy of CTA (%u, %u, %u) warp %d, issued at @%d@", cta.block[0], cta.block[1],
             cta.block[2], t.warp, t.pc);
    throw Fault(f.what() + std::string(where));
  }
  w.pc = pc;
}

}  // namespace emu
