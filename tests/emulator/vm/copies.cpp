// cp.async: copies of 4, 8 or 16 bytes by one lane, and their groups.
#include "vm.h"

namespace emu {

bool Warp::has_copies() const {
  for (int l = 0; l < 32; l++) {
    for (const CopyOp& c : open_copies[l])
      if (!c.done) return true;
    for (const auto& g : copy_groups[l])
      for (const CopyOp& c : g)
        if (!c.done) return true;
  }
  return false;
}

void complete_copy(Warp& w, CopyOp& c) {
  if (c.done) return;
  c.done = true;
  uint8_t* const dst = w.cta->smem.data() + c.dst;
  memcpy(dst, reinterpret_cast<const void*>(c.src), c.filled);
  memset(dst + c.filled, 0, c.bytes - c.filled);
  Record r = record(w, c.lane, 0);
  r.pc = c.pc;
  land_shared_write(*w.cta, c.dst, c.bytes, r);
  w.vm->progress++;
}

void complete_copies(Warp& w, int, std::vector<CopyOp>& ops) {
  for (CopyOp& c : ops) complete_copy(w, c);
  ops.clear();
}

// args: bytes, dst space, dst (3), src (3), size slot or -1, ignore predicate or -1
static Step cp_async(Warp& w, const Insn& in, uint32_t m) {
  const int32_t* a = in.arg;
  const int bytes = a[0];
  uint32_t shared_addr[32];
  each_lane(m, [&](int l) {
    const auto address = [&](int at) {
      const uint64_t base = a[at] < 0 ? 0 : a[at + 1] ? w.d(a[at])[l] : w.r(a[at])[l];
      return base + int64_t(a[at + 2]);
    };
    const Target dst = resolve(w, kShared, address(2), bytes, l, true, "cp.async");
    int filled = bytes;
    if (a[8] >= 0) filled = int(w.r(a[8])[l]);
    if (filled < 0 || filled > bytes) fail("CP.ASYNC: source size %d of a copy of %d bytes", filled, bytes);
    if (a[9] >= 0 && (w.p(a[9]) >> l & 1)) filled = 0;
    CopyOp c = {uint32_t(dst.addr), address(5), uint16_t(bytes), uint16_t(filled), uint8_t(l), false, w.pc};
    if (filled) {
      if (c.src & (bytes - 1)) fail("MISALIGNED: cp.async of %d bytes from global address 0x%llx", bytes,
                                    (unsigned long long)c.src);
      if (c.src & kWindowMask) fail("CP.ASYNC: the source is not global memory");
      w.vm->cfg.read_bytes[w.vm->find_region(w, c.src, filled, false, "cp.async")] += filled;
      note_read(w, {nullptr, kGlobal, c.src, nullptr}, filled, l, 0);
    }
    guard_mbarriers(*w.cta, c.dst, bytes);
    w.vm->cfg.stats[kSharedWritten] += bytes;
    pend_shared_write(w, *w.cta, c.dst, bytes, l, 0);
    memset(dst.host, kPoisonByte, bytes);
    shared_addr[l] = c.dst;
    w.open_copies[l].push_back(c);
  });
  count_conflicts(w, shared_addr, m, bytes);
  return Step::kNext;
}

static Step commit(Warp& w, const Insn&, uint32_t m) {
  each_lane(m, [&](int l) {
    w.copy_groups[l].push_back(std::exchange(w.open_copies[l], {}));
  });
  return Step::kNext;
}

static Step wait_group(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) {
    auto& groups = w.copy_groups[l];
    while (groups.size() > size_t(in.arg[0])) {
      complete_copies(w, l, groups.front());
      groups.erase(groups.begin());
    }
  });
  return Step::kNext;
}
static Step wait_all(Warp& w, const Insn&, uint32_t m) {
  each_lane(m, [&](int l) {
    for (auto& g : w.copy_groups[l]) complete_copies(w, l, g);
    w.copy_groups[l].clear();
    complete_copies(w, l, w.open_copies[l]);
  });
  return Step::kNext;
}

// cp.async.mbarrier.arrive: an arrival when all copies of the lane so far have landed.
// args: address (3), counts as pending (no .noinc)
static Step mbarrier_arrive_copies(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) {
    const uint32_t addr = uint32_t((in.arg[0] < 0 ? 0 : in.arg[1] ? w.d(in.arg[0])[l] : w.r(in.arg[0])[l]) + in.arg[2]);
    Mbarrier& b = mbarrier(w, *w.cta, addr, l, "cp.async.mbarrier.arrive");
    if (in.arg[3]) b.pending++;
    Request t = {};
    t.kind = Request::kCopyArrive;
    t.from = t.to = w.cta;
    t.mbar = addr;
    t.warp = w.id;
    t.lane = l;
    t.pc = w.pc;
    w.cta->queue.push_back(t);
  });
  return Step::kNext;
}

static const OpDef kOps[] = {
    {"cp.async", "*", cp_async, 0, kPreempt},
    {"cp.async.commit_group", "", commit, 0, kPreempt},
    {"cp.async.wait_group", "i", wait_group, 0, kPreempt},
    {"cp.async.wait_all", "", wait_all, 0, kPreempt},
    {"cp.async.mbarrier.arrive", "*", mbarrier_arrive_copies, 0, kPreempt},
};
OpTable copy_ops() { return {kOps, sizeof kOps / sizeof kOps[0]}; }

}  // namespace emu
