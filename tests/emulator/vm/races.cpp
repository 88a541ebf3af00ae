// Races: what the checker says of an access, and what it remembers of it.
#include "races.h"

namespace emu {

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

void race(Warp&, const char* what, uint64_t addr, bool shared, int lane, const Record& other) {
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

void bad_read(Warp& w, const Cta& cta, const SharedCell& c, uint32_t addr, int lane, int how) {
  const bool order_is_right = (how & kAsync) && ordered(w, lane, of_cell(cta, c), false);
  race(w, order_is_right ? "the async proxy reads a generic write without fence.proxy.async in between"
                         : "read not ordered after a write", addr, true, lane, of_cell(cta, c));
}

static inline void mark_read(Warp& w, SharedShadow& s, int self, int cell, int lane, int how) {
  ReadMark& m = s.mark(cell, self);
  // Of two lanes that read without order between them it keeps both as many.
  const bool others = m.clock && m.lane != uint32_t(lane) && lane < 32 && (m.clock == w.clock || m.clock >= w.floor[lane]);
  m.clock = w.clock;
  m.pc = w.pc;
  m.lane = others ? kManyLanes : lane;
  m.strong = (how & kStrong) != 0;
  m.converged = w.converged;
}

void check_shared_read(Warp& w, Cta& cta, uint32_t addr, uint32_t bytes, int lane, int how) {
  if (!w.vm->check) return;
  SharedShadow& s = cta.shadow;
  const int self = reader(cta, w);
  s.visit(addr, bytes, [&](int i) {
    const SharedCell& c = s.cells[i];
    if (c.pending_writes) race(w, "read of an asynchronous copy in flight", addr, true, lane, of_cell(cta, c));
    if (!c.clock) w.vm->cfg.stats[kUninitialised]++;
    else if (!clean_read(w, cta, c, lane, how)) bad_read(w, cta, c, addr, lane, how);
    mark_read(w, s, self, i, lane, how);
  });
}

// Of a cell that one lane wrote.
static void writer_check(Warp& w, const Cta& cta, const SharedCell& c, uint32_t addr, int lane, int how) {
  if (c.pending_writes && !(c.strong && (how & kStrong)))
    race(w, "write over an asynchronous copy in flight", addr, true, lane, of_cell(cta, c));
  if (c.pending_reads) race(w, "write over the source of an asynchronous read in flight", addr, true, lane, of_cell(cta, c));
  if (!c.clock || (c.strong && (how & kStrong))) return;
  if (c.warp == w.id && c.from == after(cta, *w.cta) && c.pc == w.pc && c.clock == w.clock) return;  // one instruction
  Record o = of_cell(cta, c);
  o.read = c.warp >= kMbarrierWriter;  // of a copy that has landed it only matters that it is done
  if (!ordered(w, lane, o, false)) race(w, "write not ordered after a write", addr, true, lane, o);
}

// Of 16 bytes if the cell or the write is spread over lanes.
void writer_checks(Warp& w, const Cta& cta, const SharedCell& c, uint32_t addr, int lane, int how, int spread) {
  if (c.spread == kAlone && spread == kAlone) return writer_check(w, cta, c, addr, lane, how);
  for (int i = 0; i < 4; i++) writer_check(w, cta, c.word(i), addr + 4 * i, lane_of_word(lane, spread, i), how);
}

// After them the reads of the cell are forgotten.
static void write_checks(Warp& w, const Cta& cta, SharedShadow& s, int i, uint32_t addr, int lane, int how) {
  writer_checks(w, cta, s.cells[i], addr, lane, how);
  const int self = reader(cta, w);
  s.each_reader(s.cells[i].readers, [&](int q, ReadMarks& marks) {
    ReadMark* const m = marks.find(i);
    if (!m) return;
    reader_checks(w, cta, *m, q, q == self, addr, lane, how);
    *m = ReadMark();
  });
  s.cells[i].readers = 0;
  if (s.cells[i].child == SharedCell::kByLanes) s.cells[i].child = SharedCell::kNone;
}

// The same for cells that were never split; neighbours mostly have the same past, which is judged once.
static void write_checks_of_range(Warp& w, const Cta& cta, SharedShadow& s, int first, int count, uint32_t addr, int lane, int how) {
  const SharedCell* judged = nullptr;
  uint32_t readers = 0;
  for (int i = first; i < first + count; i++) {
    SharedCell& c = s.cells[i];
    readers |= std::exchange(c.readers, 0);
    if (judged && c.same_writer(*judged) && !c.pending_writes && !c.pending_reads) continue;
    writer_checks(w, cta, c, addr, lane, how);
    judged = &c;
  }
  const int self = reader(cta, w);
  s.each_reader(readers, [&](int q, ReadMarks& marks) {
    uint64_t last = 0;
    for (int i = first; i < first + count; i++) {
      ReadMark* const m = marks.find(i);
      if (!m) continue;
      uint64_t mark;
      memcpy(&mark, m, sizeof mark);
      if (mark != last) reader_checks(w, cta, *m, q, q == self, addr, lane, how);
      last = mark;
      *m = ReadMark();
    }
  });
}

static void set_writer(const Cta& cta, SharedCell& c, const Record& r, const Cta* from) {
  c.from = uint8_t(from ? after(cta, *from) : 0);
  c.clock = r.clock; c.pc = r.pc; c.warp = r.warp; c.lane = r.lane; c.strong = r.strong; c.generic = r.generic; c.spread = kAlone;
}

void check_shared_write(Warp& w, Cta& cta, uint32_t addr, uint32_t bytes, int lane, int how) {
  if (!w.vm->check) return;
  SharedShadow& s = cta.shadow;
  write_operands(w, cta, addr, bytes, lane, how);
  s.visit<true>(addr, bytes, [&](int i) {
    write_checks(w, cta, s, i, addr, lane, how);
    SharedCell& c = s.cells[i];
    Record r = record(w, lane, how);
    if (c.warp == w.id && c.from == after(cta, *w.cta) && c.clock == w.clock && c.pc == w.pc && c.lane != lane && lane < 32) r.lane = kManyLanes;
    set_writer(cta, c, r, w.cta);
  });
}

void pend_shared_write(Warp& w, Cta& cta, uint32_t addr, uint32_t bytes, int lane, int how) {
  if (!w.vm->check) return;
  SharedShadow& s = cta.shadow;
  write_operands(w, cta, addr, bytes, lane, how);
  const Record r = record(w, lane, how);
  const bool whole = bytes >= 64 && s.whole(addr, bytes);
  if (whole) write_checks_of_range(w, cta, s, int(addr / 16), int(bytes / 16), addr, lane, how);
  s.visit<true>(addr, bytes, [&](int i) {
    if (!whole) write_checks(w, cta, s, i, addr, lane, how);
    SharedCell& c = s.cells[i];
    set_writer(cta, c, r, w.cta);
    c.pending_writes++;
  });
}

void land_shared_write(Cta& cta, uint32_t addr, uint32_t bytes, const Record& r) {
  if (!cta.vm->check) return;
  SharedShadow& s = cta.shadow;
  s.note_writes(addr, bytes);
  s.visit(addr, bytes, [&](int i) {
    SharedCell& c = s.cells[i];
    if (c.pending_writes) c.pending_writes--;
    set_writer(cta, c, r, nullptr);
  });
}

// While a read is pending nothing may write to its source, so what is true at its issue is true until it lands.
static void pend_read(Warp& w, Cta& cta, SharedCell& c, SharedCell& judged, uint32_t addr, int lane) {
  if (c.pending_writes) race(w, "asynchronous read of a copy in flight", addr, true, lane, of_cell(cta, c));
  if (!c.clock) w.vm->cfg.stats[kUninitialised]++;
  else if (!clean_read(w, cta, c, lane, kAsync)) bad_read(w, cta, c, addr, lane, kAsync);
  judged = c;
}
void pend_shared_reads(Warp& w, Cta& cta, const Range* ranges, size_t count, int lane) {
  if (!w.vm->check) return;
  SharedShadow& s = cta.shadow;
  SharedCell judged;  // neighbours mostly have the same writer
  const auto pend = [&](SharedCell& c, uint32_t addr) {
    c.pending_reads++;
    if (c.pending_writes || !c.clock || !c.same_writer(judged)) pend_read(w, cta, c, judged, addr, lane);
  };
  for (size_t k = 0; k < count; k++)
    s.visit(ranges[k].addr, ranges[k].bytes, [&, from = ranges[k].addr](int i) { pend(s.cells[i], from); });
}

// One that no lane alone has issued leaves the same mark everywhere.
void land_shared_reads(Warp& w, Cta& cta, const Range* ranges, size_t count, int lane) {
  if (!w.vm->check) return;
  SharedShadow& s = cta.shadow;
  ReadMark mark;
  mark.clock = w.clock;
  mark.pc = w.pc;
  mark.lane = lane;
  mark.converged = w.converged;
  const int self = reader(cta, w);
  const uint32_t bit = 1u << self % 32;
  ReadMarks& marks = s.reads[self];
  for (size_t k = 0; k < count; k++)
    s.visit(ranges[k].addr, ranges[k].bytes, [&](int i) {
      SharedCell& c = s.cells[i];
      c.pending_reads--;
      if (lane < 32) return mark_read(w, s, self, i, lane, kAsync);
      c.readers |= bit;
      marks.at(i) = mark;
    });
}

// ---- global memory
static void global_read(Warp& w, uint64_t addr, uint32_t bytes, int lane, int how) {
  Record r = record(w, lane, how);
  r.read = true;
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
  const Record r = record(w, lane, how);
  w.vm->shadow.visit(addr, bytes, [&](GlobalCell& c) {
    if (c.pending_writes && !(c.write.strong && (how & kStrong)))
      race(w, "write over an asynchronous copy in flight", addr, false, lane, c.write);
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
    if (w.vm->check) check_shared_read(w, *t.cta, uint32_t(t.addr), bytes, lane, how);
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
    guard_mbarriers(*t.cta, uint32_t(t.addr), bytes);
    if (w.vm->check) check_shared_write(w, *t.cta, uint32_t(t.addr), bytes, lane, how);
  } else if (t.space == kGlobal) {
    w.vm->cfg.stats[kGlobalWritten] += bytes;
    if (w.vm->check) global_write(w, t.addr, bytes, lane, how & ~kKeepInit, how & kKeepInit);
  } else if (t.space == kLocal) {
    w.vm->cfg.stats[kLocalBytes] += bytes;
  }
}

// At the end of a CTA of a larger cluster: others must be known to have finished with its shared memory.
void check_remote_accesses_done(Cta& cta) {
  SharedShadow& s = cta.shadow;
  const auto judge = [&](const Record& r, const char* what) {
    if (known_elsewhere(cta.at_exit, r, false)) return;
    fail("CLUSTER: a CTA exits before %s of its shared memory by CTA %d warp %d, at @%d@, is known to be done", what, r.cta,
         r.warp, r.pc);
  };
  for (size_t i = 0; i < s.cells.size(); i++) {
    const SharedCell& c = s.cells[i];
    if (c.clock && c.from && c.warp < kMbarrierWriter) judge(of_cell(cta, c), "a write");
    for (size_t q = s.warps; q < s.reads.size(); q++)
      if (const ReadMark* const m = s.reads[q].find(int(i)); m && m->clock) judge(of_mark(cta, *m, int(q)), "a read");
  }
}

}  // namespace emu
