// Checked memory accesses: which space, in bounds, aligned, not racing.
#include "vm.h"

namespace emu {

void fail(const char* format, ...) {
  char text[700];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw Fault(text);
}

Record record(Warp& w, int lane, int how) {
  Record r;
  r.clock = w.clock;
  r.pc = w.pc;
  r.cta = int32_t(w.cta->index);
  r.warp = uint8_t(w.id);
  r.lane = uint8_t(lane);
  r.strong = how & kStrong;
  r.generic = !(how & kAsync);
  return r;
}

int Machine::find_region(Warp& w, uint64_t addr, uint64_t bytes, bool write, const char* what) {
  int& cached = region_cache[w.pc];
  const Region* const regions = cfg.regions;
  if (!(cached >= 0 && addr >= regions[cached].begin && bytes <= regions[cached].end - addr &&
        addr < regions[cached].end)) {
    int lo = 0, hi = int(cfg.nregions);  // sorted by begin; they may overlap
    while (lo < hi) {
      const int mid = (lo + hi) / 2;
      (regions[mid].begin <= addr ? lo : hi) = regions[mid].begin <= addr ? mid + 1 : mid;
    }
    int found = -1;
    for (int i = lo - 1; i >= 0; i--)
      if (addr < regions[i].end && bytes <= regions[i].end - addr) {
        found = i;
        break;
      }
    if (found < 0) {
      const int near = lo > 0 ? lo - 1 : 0;
      if (cfg.nregions == 0) fail("OUT OF BOUNDS: %s of %llu bytes at 0x%llx: no array is registered", what,
                                  (unsigned long long)bytes, (unsigned long long)addr);
      const long long past = (long long)(addr + bytes - regions[near].end);
      fail("OUT OF BOUNDS: %s of %llu bytes at 0x%llx; nearest is array #%d, of %llu bytes: the access ends "
           "%lld bytes past its end (offset %lld)",
           what, (unsigned long long)bytes, (unsigned long long)addr, near,
           (unsigned long long)(regions[near].end - regions[near].begin), past,
           (long long)(addr - regions[near].begin));
    }
    cached = found;
  }
  if (write && !regions[cached].writable) fail("READ-ONLY: %s to array #%d, which is read-only", what, cached);
  return cached;
}

void shared_bounds(const Warp& w, uint32_t addr, uint64_t bytes, const char* what) {
  if (addr < kSharedBase || uint64_t(addr) + bytes > w.vm->smem_end)
    fail("OUT OF BOUNDS: %s of %llu bytes at shared address %u (valid: %u to %u)", what,
         (unsigned long long)bytes, addr, kSharedBase, w.vm->smem_end);
}

Target resolve(Warp& w, Space space, uint64_t addr, uint32_t bytes, int lane, bool write, const char* what) {
  Machine& vm = *w.vm;
  if (space == kGeneric) {
    switch (addr & kWindowMask) {
      case kSharedWindow: space = kShared; break;
      case kLocalWindow: space = kLocal; break;
      case kParamWindow: space = kParam; break;
      default: space = kGlobal;
    }
  }
  if (space >= kShared && space != kConst) addr &= ~kWindowMask;
  if (space == kShared) addr = uint32_t(addr);
  const uint32_t align = bytes >= 16 ? 16 : bytes;
  if (align > 1 && addr & (align - 1))
    fail("MISALIGNED: %s of %u bytes at %s address 0x%llx (lane %d)", what, bytes,
         space == kShared ? "shared" : space == kLocal ? "local" : "global", (unsigned long long)addr, lane);
  switch (space) {
    case kShared:
      shared_bounds(w, uint32_t(addr), bytes, what);
      return {w.cta->smem.data() + addr, space, addr};
    case kLocal: {
      const uint64_t size = vm.prog.local_bytes;
      if (addr < 16 || addr + bytes > size) fail("OUT OF BOUNDS: %s of %u bytes at local address %llu", what, bytes,
                                                 (unsigned long long)addr);
      return {w.local.data() + size * lane + addr, space, addr};
    }
    case kParam:
      if (write) fail("READ-ONLY: %s to a kernel parameter", what);
      if (addr + bytes > uint64_t(vm.cfg.param_bytes)) fail("OUT OF BOUNDS: %s at parameter offset %llu", what,
                                                            (unsigned long long)addr);
      return {const_cast<uint8_t*>(vm.cfg.params) + addr, space, addr};
    default: {
      if (addr & kWindowMask) fail("OUT OF BOUNDS: %s at 0x%llx is not a global address", what,
                                   (unsigned long long)addr);
      const int region = vm.find_region(w, addr, bytes, write, what);
      (write ? vm.cfg.write_bytes : vm.cfg.read_bytes)[region] += bytes;
      return {reinterpret_cast<uint8_t*>(addr), kGlobal, addr};
    }
  }
}

// ---- races
[[noreturn]] static void race(Warp& w, const char* what, uint64_t addr, bool shared, int lane, const Record& other) {
  char who[64], mine[32];
  const long long cta = other.cta;
  if (other.warp >= kMbarrierWriter) {
    snprintf(who, sizeof who, "a copy on mbarrier #%d", other.warp - kMbarrierWriter);
  } else if (other.lane < 32) {
    snprintf(who, sizeof who, "CTA %lld warp %d lane %d", cta, other.warp, other.lane);
  } else {
    snprintf(who, sizeof who, "CTA %lld warp %d", cta, other.warp);
  }
  if (lane < 32) snprintf(mine, sizeof mine, " (lane %d)", lane); else mine[0] = 0;
  fail("RACE: %s at %s address 0x%llx%s; the other access was by %s at @%d@", what, shared ? "shared" : "global",
       (unsigned long long)addr, mine, who, other.pc);
}

static inline Record of_cell(const Warp& w, const SharedCell& c) {
  Record r;
  r.clock = c.clock; r.pc = c.pc; r.cta = int32_t(w.cta->index); r.warp = c.warp; r.lane = c.lane;
  r.strong = c.strong; r.generic = c.generic;
  return r;
}

static Record of_mark(const Warp& w, const ReadMark& m, int warp) {
  Record r;
  r.clock = m.clock; r.pc = m.pc; r.cta = int32_t(w.cta->index); r.warp = uint8_t(warp); r.lane = m.lane; r.strong = m.strong;
  r.converged = m.converged;
  return r;
}

static inline bool clean_read(Warp& w, const SharedCell& c, int lane, int how) {
  if (!c.clock || (c.strong && (how & kStrong))) return true;
  if (c.warp == w.id && (c.lane == lane || (c.lane == kManyLanes && lane < 32)) && !(how & kAsync)) return true;
  return ordered(w, lane, of_cell(w, c), how & kAsync);
}

static void bad_read(Warp& w, const SharedCell& c, uint32_t addr, int lane, int how) {
  const bool order_is_right = (how & kAsync) && ordered(w, lane, of_cell(w, c), false);
  race(w, order_is_right ? "the async proxy reads a generic write without fence.proxy.async in between"
                         : "read not ordered after a write", addr, true, lane, of_cell(w, c));
}

static inline void mark_read(Warp& w, int cell, int lane, int how) {
  ReadMark& m = w.cta->shadow.mark(cell, w.id);
  const uint32_t who = m.clock == w.clock && m.lane != uint32_t(lane) && lane < 32 ? uint32_t(kManyLanes) : lane;
  if (m.clock && m.clock != w.clock && m.lane != uint32_t(lane) && lane < 32 && !(m.clock < w.floor[lane])) {
    m.lane = kManyLanes;
  } else {
    m.lane = who;
  }
  m.clock = w.clock;
  m.pc = w.pc;
  m.strong = (how & kStrong) != 0;
  m.converged = w.converged;
}

void check_shared_read(Warp& w, uint32_t addr, uint32_t bytes, int lane, int how) {
  if (!w.vm->check) return;
  SharedShadow& s = w.cta->shadow;
  s.visit(addr, bytes, [&](int i) {
    const SharedCell& c = s.cells[i];
    if (c.pending_writes) race(w, "read of an asynchronous copy in flight", addr, true, lane, of_cell(w, c));
    if (!c.clock) w.vm->cfg.stats[kUninitialised]++;
    else if (!clean_read(w, c, lane, how)) bad_read(w, c, addr, lane, how);
    mark_read(w, i, lane, how);
  });
}

static void write_checks(Warp& w, int i, uint32_t addr, int lane, int how) {
  SharedShadow& s = w.cta->shadow;
  const SharedCell& c = s.cells[i];
  if (c.pending_writes) race(w, "write over an asynchronous copy in flight", addr, true, lane, of_cell(w, c));
  if (c.pending_reads) race(w, "write over the source of an asynchronous read in flight", addr, true, lane, of_cell(w, c));
  if (c.clock && !(c.strong && (how & kStrong))) {
    const bool same_instruction = c.warp == w.id && c.pc == w.pc && c.clock == w.clock;
    if (!same_instruction && !ordered(w, lane, of_cell(w, c), false))
      race(w, "write not ordered after a write", addr, true, lane, of_cell(w, c));
  }
  for (int q = 0; q < s.warps; q++) {
    const ReadMark& m = s.mark(i, q);
    if (!m.clock || (m.strong && (how & kStrong))) continue;
    if (q == w.id && m.lane == uint32_t(lane)) continue;
    if (!ordered(w, lane, of_mark(w, m, q), false))
      race(w, "write not ordered after a read", addr, true, lane, of_mark(w, m, q));
  }
}

static void set_writer(SharedCell& c, const Record& r) {
  c.clock = r.clock; c.pc = r.pc; c.warp = r.warp; c.lane = r.lane; c.strong = r.strong; c.generic = r.generic;
}

static void clear_reads(SharedShadow& s, int i) {
  for (int q = 0; q < s.warps; q++) s.mark(i, q).clock = 0;
}

void check_shared_write(Warp& w, uint32_t addr, uint32_t bytes, int lane, int how) {
  if (!w.vm->check) return;
  SharedShadow& s = w.cta->shadow;
  s.visit(addr, bytes, [&](int i) {
    write_checks(w, i, addr, lane, how);
    SharedCell& c = s.cells[i];
    Record r = record(w, lane, how);
    if (c.warp == w.id && c.clock == w.clock && c.pc == w.pc && c.lane != lane && lane < 32) r.lane = kManyLanes;
    set_writer(c, r);
    clear_reads(s, i);
  });
}

void pend_shared_write(Warp& w, uint32_t addr, uint32_t bytes, int lane, int how) {
  if (!w.vm->check) return;
  SharedShadow& s = w.cta->shadow;
  s.visit(addr, bytes, [&](int i) {
    write_checks(w, i, addr, lane, how);
    SharedCell& c = s.cells[i];
    set_writer(c, record(w, lane, how));
    c.pending_writes++;
    clear_reads(s, i);
  });
}

void land_shared_write(Warp& w, uint32_t addr, uint32_t bytes, const Record& r) {
  if (!w.vm->check) return;
  SharedShadow& s = w.cta->shadow;
  s.visit(addr, bytes, [&](int i) {
    SharedCell& c = s.cells[i];
    if (c.pending_writes) c.pending_writes--;
    set_writer(c, r);
  });
}

void pend_shared_read(Warp& w, uint32_t addr, uint32_t bytes, int lane) {
  if (!w.vm->check) return;
  SharedShadow& s = w.cta->shadow;
  s.visit(addr, bytes, [&](int i) {
    SharedCell& c = s.cells[i];
    if (c.pending_writes) race(w, "asynchronous read of a copy in flight", addr, true, lane, of_cell(w, c));
    if (!c.clock) w.vm->cfg.stats[kUninitialised]++;
    else if (!clean_read(w, c, lane, kAsync)) bad_read(w, c, addr, lane, kAsync);
    c.pending_reads++;
    mark_read(w, i, lane, kAsync);
  });
}

void land_shared_read(Warp& w, uint32_t addr, uint32_t bytes, int lane) {
  if (!w.vm->check) return;
  SharedShadow& s = w.cta->shadow;
  s.visit(addr, bytes, [&](int i) {
    SharedCell& c = s.cells[i];
    if (c.pending_writes) race(w, "asynchronous read overtaken by a copy", addr, true, lane, of_cell(w, c));
    if (c.clock && !clean_read(w, c, lane, kAsync)) bad_read(w, c, addr, lane, kAsync);
    if (c.pending_reads) c.pending_reads--;
    mark_read(w, i, lane, kAsync);
  });
}

// ---- global memory
static void global_read(Warp& w, uint64_t addr, uint32_t bytes, int lane, int how) {
  w.vm->shadow.visit(addr, bytes, [&](GlobalCell& c) {
    if (c.pending_writes) race(w, "read of an asynchronous copy in flight", addr, false, lane, c.write);
    if (c.write.clock) {
      if (how & kNonCoherent)
        race(w, "ld.global.nc of memory that this kernel writes", addr, false, lane, c.write);
      const bool mine = c.write.cta == w.cta->index && c.write.warp == w.id && c.write.lane == lane && !(how & kAsync);
      if (!mine && !(c.write.strong && (how & kStrong)) && !ordered(w, lane, c.write, how & kAsync)) {
        const bool order_is_right = (how & kAsync) && ordered(w, lane, c.write, false);
        race(w, order_is_right ? "the async proxy reads a generic write without fence.proxy.async in between"
                               : "read not ordered after a write", addr, false, lane, c.write);
      }
    }
    const Record r = record(w, lane, how);
    int slot = 1;  // replace a read that this one is ordered after, else the older one
    for (int i = 0; i < 2; i++) {
      const Record& o = c.read[i];
      if (!o.clock || (o.cta == r.cta && o.warp == r.warp && o.lane == r.lane) || ordered(w, lane, o, false)) {
        slot = i;
        break;
      }
    }
    c.read[slot] = r;
  });
}

static void global_write(Warp& w, uint64_t addr, uint32_t bytes, int lane, int how, bool pend) {
  w.vm->shadow.visit(addr, bytes, [&](GlobalCell& c) {
    if (c.pending_writes && !(c.write.strong && (how & kStrong)))
      race(w, "write over an asynchronous copy in flight", addr, false, lane, c.write);
    const Record r = record(w, lane, how);
    const Record& o = c.write;
    const bool same_instruction = o.cta == r.cta && o.warp == r.warp && o.pc == r.pc && o.clock == r.clock;
    if (o.clock && !same_instruction && !(o.strong && r.strong) && !ordered(w, lane, o, false))
      race(w, "write not ordered after a write", addr, false, lane, o);
    for (Record& q : c.read) {
      if (!q.clock || (q.strong && r.strong)) continue;
      if (q.cta == r.cta && q.warp == r.warp && q.lane == r.lane) continue;
      if (!ordered(w, lane, q, false)) race(w, "write not ordered after a read", addr, false, lane, q);
    }
    c.write = r;
    c.read[0] = c.read[1] = Record();
    if (pend) c.pending_writes++;
  });
}

void land_global_write(Warp& w, uint64_t addr, uint32_t bytes, int lane, bool strong) {
  if (!w.vm->check) return;
  w.vm->shadow.visit(addr, bytes, [&](GlobalCell& c) {
    if (c.pending_writes) c.pending_writes--;
    c.write = record(w, lane, kAsync | (strong ? kStrong : 0));
  });
}

void note_read(Warp& w, const Target& t, uint32_t bytes, int lane, int how) {
  if (t.space == kShared) {
    w.vm->cfg.stats[kSharedRead] += bytes;
    if (w.vm->check) check_shared_read(w, uint32_t(t.addr), bytes, lane, how);
  } else if (t.space == kGlobal) {
    w.vm->cfg.stats[kGlobalRead] += bytes;
    if (w.vm->check) global_read(w, t.addr, bytes, lane, how);
  } else if (t.space == kLocal) {
    w.vm->cfg.stats[kLocalBytes] += bytes;
  }
}

void note_write(Warp& w, const Target& t, uint32_t bytes, int lane, int how) {
  w.vm->progress++;
  if (t.space == kShared) {
    w.vm->cfg.stats[kSharedWritten] += bytes;
    if (!w.cta->mbarrier_at.empty()) guard_mbarriers(w, uint32_t(t.addr), bytes);
    if (w.vm->check) check_shared_write(w, uint32_t(t.addr), bytes, lane, how);
  } else if (t.space == kGlobal) {
    w.vm->cfg.stats[kGlobalWritten] += bytes;
    if (w.vm->check) global_write(w, t.addr, bytes, lane, how & ~kKeepInit, how & kKeepInit);
  } else if (t.space == kLocal) {
    w.vm->cfg.stats[kLocalBytes] += bytes;
  }
}

void guard_mbarriers(Warp& w, uint32_t addr, uint32_t bytes) {
  for (uint32_t a = addr & ~7u; a < addr + bytes; a += 8)
    if (w.cta->mbarrier_at.count(a)) fail("MBARRIER: a write to shared address %u overwrites a live mbarrier", addr);
}

// Wavefronts of a shared-memory access; the excess over the least possible counts as conflicts.
void count_conflicts(Warp& w, const uint32_t* addr, uint32_t mask, int bytes) {
  const int words = bytes <= 4 ? 1 : bytes / 4, group = 32 / words;
  uint64_t waves = 0, least = 0;
  for (int first = 0; first < 32; first += group) {
    uint32_t lanes_in = mask >> first & (group == 32 ? ~0u : (1u << group) - 1);
    if (!lanes_in) continue;
    least++;
    uint32_t seen[32];  // one word per bank, without conflicts
    uint32_t used = 0;
    uint32_t extra[128];
    int n_extra = 0;
    each_lane(lanes_in, [&](int l) {
      for (int i = 0; i < words; i++) {
        const uint32_t word = addr[first + l] / 4 + i, bank = word & 31;
        if (!(used >> bank & 1)) {
          used |= 1u << bank;
          seen[bank] = word;
        } else if (seen[bank] != word) {
          bool known = false;
          for (int j = 0; j < n_extra; j++) known |= extra[j] == word;
          if (!known) extra[n_extra++] = word;
        }
      }
    });
    int most = 1;
    if (n_extra) {
      int count[32] = {};
      for (int j = 0; j < n_extra; j++) most = std::max(most, 1 + ++count[extra[j] & 31]);
    }
    waves += most;
  }
  w.vm->cfg.stats[kWavefronts] += waves;
  w.vm->cfg.conflicts[w.pc] += waves - least;
}

}  // namespace emu
