// mbarrier objects. Their state is kept beside shared memory; the eight bytes themselves are poison.
#include "vm.h"

namespace emu {

bool mbarrier_ready(const Mbarrier& b, uint32_t parity) {
  if (parity & 2) return !b.valid || uint32_t(b.phase) << 2 >> 2 != (parity >> 2);  // a state token: phase << 2 | 2
  return !b.valid || (b.phase & 1) != parity;
}

Mbarrier& mbarrier(Warp& w, Cta& cta, uint32_t addr, int lane, const char* what) {
  if (addr & 7) fail("MBARRIER: %s at shared address %u, which is not a multiple of 8", what, addr);
  shared_bounds(w, addr, 8, what);
  const auto it = cta.mbarrier_at.find(addr);
  if (it == cta.mbarrier_at.end()) fail("MBARRIER: %s at shared address %u, which is not initialised", what, addr);
  Mbarrier& b = cta.mbarriers[it->second];
  if (w.vm->check) {
    Record r;
    r.clock = b.init_clock; r.pc = b.init_pc; r.cta = int32_t(cta.index); r.warp = uint8_t(b.init_warp); r.lane = uint8_t(b.init_lane);
    // fence.mbarrier_init and then barrier.cluster, even a relaxed one, show the init to the cluster.
    const bool shown = b.init_fenced && w.cluster_waits > b.fenced_arrivals;
    if (!shown && !ordered(w, lane, r, false))
      fail("RACE: %s at shared address %u is not ordered after its mbarrier.init at @%d@", what, addr, b.init_pc);
  }
  return b;
}

void mbarrier_complete(Cta& cta, Mbarrier& b) {
  if (b.pending || b.tx) return;
  b.phase++;
  b.unobserved |= std::exchange(b.landed, false);
  b.pending = b.count;
  b.complete = std::move(b.current);
  b.current = Order();
  b.wide_complete = std::move(b.wide_current);
  b.wide_current = nullptr;
  b.complete.seen.mbar[b.slot] = uint32_t(b.phase);
  cta.vm->progress++;
}

// `order`: what the arriving lane of `w` releases, at the scope of its CTA or of the cluster; null if it is relaxed.
static void arrive_at(Warp& w, Cta& cta, Mbarrier& b, int count, const Order* order, bool wide) {
  if (count < 1) fail("MBARRIER: arrival count %d at shared address %u", count, b.addr);
  if (b.pending < count) fail("MBARRIER: over-arrival: %d arrivals at shared address %u, where %d of %d are pending", count,
                              b.addr, b.pending, b.count);
  if (order && &cta == w.cta) {
    b.current.join(*order, cta.num_warps(), cta.num_mbar());
  } else if (order) {  // another CTA's: at the scope of a CTA only its reads are known to be done
    b.current.join_foreign(abroad(w, *order, false));
    if (wide) join(b.wide_current, abroad(w, *order));
  }
  b.pending -= count;
  w.vm->progress++;
  mbarrier_complete(cta, b);
}

void arrive_for_copies(Warp& w, Mbarrier& b, int lane) {
  Order order;
  if (w.vm->check) order = release(w, 1u << lane);
  arrive_at(w, *w.cta, b, 1, w.vm->check ? &order : nullptr, false);
}

// An operand's place; `cta`: whose memory it is in, null where only the own will do.
static uint32_t address(Warp& w, const Insn& in, int at, int l, Cta** cta = nullptr) {
  const uint64_t base = in.arg[at] < 0 ? 0 : in.arg[at + 1] ? w.d(in.arg[at])[l] : w.r(in.arg[at])[l];
  const uint64_t a = base + int64_t(in.arg[at + 2]);
  if ((a & kWindowMask) && (a & kWindowMask) != kSharedWindow) fail("MBARRIER: not a shared address");
  uint32_t addr = uint32_t(a);
  if (cta) *cta = &cta_of(w, addr, l, "an mbarrier operation");
  else if (addr >> kRankShift && int(addr >> kRankShift) - 1 != w.cta->rank)
    fail("MBARRIER: init, inval and waits take an mbarrier of the own CTA");
  return addr & ((1u << kRankShift) - 1);
}

// args: address (3), count
static Step init(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) {
    const uint32_t addr = address(w, in, 0, l);
    const int count = int(w.r(in.arg[3])[l]);
    if (addr & 7) fail("MBARRIER: init at shared address %u, which is not a multiple of 8", addr);
    shared_bounds(w, addr, 8, "mbarrier.init");
    if (count < 1 || count > (1 << 20) - 1) fail("MBARRIER: init with count %d", count);
    if (w.cta->mbarrier_at.count(addr)) fail("MBARRIER: init of a live mbarrier at shared address %u (no mbarrier.inval before)", addr);
    check_shared_write(w, *w.cta, addr, 8, l, 0);
    Mbarrier b;
    b.valid = true;
    b.addr = addr;
    b.count = b.pending = count;
    b.init_warp = w.id;
    b.init_lane = l;
    b.init_clock = w.clock;
    b.init_pc = w.pc;
    b.slot = int(w.cta->mbarriers.size());
    if (b.slot >= kMaxMbarriers) fail("MBARRIER: more than %d in one CTA", kMaxMbarriers);
    w.cta->mbarrier_at[addr] = b.slot;
    w.cta->first_mbarrier = std::min(w.cta->first_mbarrier, addr);
    w.cta->last_mbarrier = std::max(w.cta->last_mbarrier, addr);
    w.cta->mbarriers.push_back(std::move(b));
    w.vm->progress++;
  });
  return Step::kNext;
}
static Step inval(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) {
    const uint32_t addr = address(w, in, 0, l);
    Mbarrier& b = mbarrier(w, *w.cta, addr, l, "mbarrier.inval");
    if (b.tx) fail("MBARRIER: inval with a transaction count of %lld", (long long)b.tx);
    b.valid = false;
    w.cta->mbarrier_at.erase(addr);
    check_shared_write(w, *w.cta, addr, 8, l, 0);
    w.vm->progress++;
  });
  return Step::kNext;
}

// args: address (3), state slot (junk if none), count slot or -1, transaction slot or -1, flags (1 drop, 2 relaxed,
// 4 no arrival, 8 cluster scope, 16 gives a state)
static Step arrive(Warp& w, const Insn& in, uint32_t m) {
  const int flags = in.arg[6];
  // One release for all lanes: each publishes what its lane did before.
  Order order;
  if (w.vm->check && !(flags & 6)) order = release(w, m);
  each_lane(m, [&](int l) {
    Cta* cta;
    const uint32_t addr = address(w, in, 0, l, &cta);
    if (cta != w.cta && flags & 16) fail("MBARRIER: an arrival at another CTA's mbarrier gives no state");
    Mbarrier& b = mbarrier(w, *cta, addr, l, flags & 4 ? "mbarrier.expect_tx" : "mbarrier.arrive");
    const uint64_t state = b.phase << 2 | 2;
    if (in.arg[5] >= 0) {
      const int64_t bytes = int32_t(w.r(in.arg[5])[l]);
      if (bytes < 0 || bytes > (1 << 20) - 1) fail("MBARRIER: expect_tx of %lld bytes", (long long)bytes);
      b.tx += bytes;
      w.vm->progress++;
    }
    if (flags & 1) b.count--;
    if (!(flags & 4))
      arrive_at(w, *cta, b, in.arg[4] < 0 ? 1 : int(w.r(in.arg[4])[l]), w.vm->check && !(flags & 2) ? &order : nullptr, flags & 8);
    w.d(in.arg[3])[l] = state;
  });
  return Step::kNext;
}

// args: P, address (3), state or parity slot, flags (1 parity, 2 may wait, 4 relaxed, 8 cluster scope)
static Step wait(Warp& w, const Insn& in, uint32_t m) {
  const int flags = in.arg[5];
  uint32_t ready = 0;
  const auto phase_of = [&](int l) {
    if (!(flags & 1)) return uint32_t(w.d(in.arg[4])[l]);
    const uint32_t parity = w.r(in.arg[4])[l];
    if (parity > 1) fail("MBARRIER: phase parity %u", parity);
    return parity;
  };
  each_lane(m, [&](int l) {
    const Mbarrier& b = mbarrier(w, *w.cta, address(w, in, 1, l), l, "mbarrier wait");
    ready |= uint32_t(mbarrier_ready(b, phase_of(l))) << l;
  });
  if (!ready && (flags & 2)) {
    const bool give_up = w.vm->cfg.seed && w.vm->random() % 16 == 0;
    if (!give_up) {
      Path& p = w.path();
      p.wait = Wait::kMbarrier;
      p.where = address(w, in, 1, first_lane(m));
      p.parity = phase_of(first_lane(m));
      return Step::kStay;
    }
  }
  uint32_t left = ready;
  while (left) {  // lanes that wait for the same mbarrier acquire together
    const uint32_t addr = address(w, in, 1, first_lane(left));
    uint32_t same = 0;
    each_lane(left, [&](int l) { same |= uint32_t(address(w, in, 1, l) == addr) << l; });
    Mbarrier& b = w.cta->mbarriers[w.cta->mbarrier_at[addr]];
    b.unobserved = false;
    if (!(flags & 4)) acquire(w, b.complete, same);
    if (!(flags & 4) && (flags & 8)) acquire(w, b.wide_complete, same);
    left &= ~same;
  }
  w.set_p(in.arg[0], m, ready);
  return ready == m ? Step::kNext : Step::kYield;
}


// args: address (3), bytes: a transaction completed by hand
static Step complete_tx(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) {
    Cta* cta;
    const uint32_t addr = address(w, in, 0, l, &cta);
    Mbarrier& b = mbarrier(w, *cta, addr, l, "mbarrier.complete_tx");
    b.tx -= int64_t(w.r(in.arg[3])[l]);
    mbarrier_complete(*cta, b);
  });
  return Step::kNext;
}

static const OpDef kOps[] = {
    {"mbarrier.init", "*", init, 0, kPreempt}, {"mbarrier.inval", "*", inval, 0, kPreempt},
    {"mbarrier.arrive", "*", arrive, 0, kPreempt}, {"mbarrier.wait", "*", wait, 0, kPreempt},
    {"mbarrier.complete_tx", "*", complete_tx, 0, kPreempt},
};
OpTable mbarrier_ops() { return {kOps, sizeof kOps / sizeof kOps[0]}; }

}  // namespace emu
