// What the checker knows of wgmma's reads of shared memory: an operand is judged and remembered as one, not cell by
// cell. Its reads become marks of cells where a write takes a part of one of its ranges.
#include "races.h"

namespace emu {

static bool tracked(const Operand& o) { return o.pending || o.readers; }

static void track(SharedShadow& s, const Operand& o, int by) {
  for (const uint32_t b : o.blocks) s.blocks[b].tracked += by;
}

// Makes the operand known to the blocks of memory that it is in.
void place_operand(Cta& cta, Operand& o) {
  o.reads.resize(cta.shadow.warps);
  for (const Range& r : o.ranges)
    for (uint32_t b = r.addr >> kBlockShift; b <= (r.addr + r.bytes - 1) >> kBlockShift; b++)
      if (o.blocks.empty() || o.blocks.back() != b) {
        o.blocks.push_back(b);
        if (cta.vm->check) cta.shadow.blocks[b].operands.push_back(&o);
      }
}

// Who has written its cells; the same until a block of it is written again.
static void look(Warp& w, Operand& o, uint64_t state) {
  Cta& cta = *w.cta;
  SharedShadow& s = cta.shadow;
  o.writers.clear();
  o.uninitialised = 0;
  for (const Range& r : o.ranges)
    s.visit(r.addr, r.bytes, [&](int i) {
      const SharedCell& c = s.cells[i];
      if (c.pending_writes)
        race(w, "asynchronous read of a copy in flight", r.addr, true, kAnyLane, of_cell(cta, c));
      if (!c.clock) {
        o.uninitialised++;
        return;
      }
      for (auto last = o.writers.rbegin(); last != o.writers.rend(); ++last)
        if (last->cell.same_writer(c)) return;
      o.writers.push_back({c, r.addr});
    });
  o.state = state;
}

void pend_operand(Warp& w, Operand& o) {
  if (!w.vm->check) return;
  SharedShadow& s = w.cta->shadow;
  uint64_t state = 0;
  for (const uint32_t b : o.blocks) state += s.blocks[b].writes;
  if (state != o.state) look(w, o, state);
  w.vm->cfg.stats[kUninitialised] += o.uninitialised;
  for (const auto& [cell, addr] : o.writers)
    if (!clean_read(w, *w.cta, cell, kAnyLane, kAsync)) bad_read(w, *w.cta, cell, addr, kAnyLane, kAsync);
  if (!tracked(o)) track(s, o, 1);
  o.pending++;
  o.issued_by = record(w, kAnyLane, kAsync);
}

void land_operand(Warp& w, Operand& o) {
  if (!w.vm->check) return;
  o.pending--;
  o.readers |= 1u << w.id;
  Operand::Read& read = o.reads[w.id];
  read = {};
  read.mark.clock = w.clock;
  read.mark.pc = w.pc;
  read.mark.lane = kAnyLane;
  read.mark.converged = w.converged;
}

// A reader's marks in the cells of what has not been written since.
static void spread(SharedShadow& s, Operand& o, int reader) {
  const Operand::Read& read = o.reads[reader];
  o.readers &= ~(1u << reader);
  for (size_t k = 0; k < o.ranges.size(); k++)
    if (!read.is_gone(k))
      s.visit(o.ranges[k].addr, o.ranges[k].bytes, [&](int i) {
        ReadMark& m = s.mark(i, reader);
        if (m.clock < read.mark.clock) m = read.mark;
      });
}

static void write_to(Warp& w, Cta& cta, Operand& o, uint32_t addr, uint32_t bytes, int lane, int how) {
  SharedShadow& s = cta.shadow;
  const uint32_t end = addr + bytes;
  const auto begins = [](const Range& r, uint32_t a) { return r.addr + r.bytes <= a; };
  const size_t first = std::lower_bound(o.ranges.begin(), o.ranges.end(), addr, begins) - o.ranges.begin();
  size_t last = first;
  bool whole = o.ranges.size() <= Operand::kMostRanges;
  for (; last < o.ranges.size() && o.ranges[last].addr < end; last++)
    whole &= o.ranges[last].addr >= addr && o.ranges[last].addr + o.ranges[last].bytes <= end;
  if (first == last) return;
  if (o.pending) race(w, "write over the source of an asynchronous read in flight", addr, true, lane, o.issued_by);
  const int self = reader(cta, w);
  each_lane(o.readers, [&](int q) {
    Operand::Read& read = o.reads[q];
    if (!whole) return spread(s, o, q);
    bool held = false;
    for (size_t k = first; k < last; k++) held |= !read.is_gone(k);
    if (!held) return;
    reader_checks(w, cta, read.mark, q, q == self, addr, lane, how);
    for (size_t k = first; k < last; k++) read.set_gone(k);
    if (read.count == o.ranges.size()) o.readers &= ~(1u << q);
  });
  if (!tracked(o)) track(s, o, -1);
}

// Before each write, or issue of one.
void write_operands(Warp& w, Cta& cta, uint32_t addr, uint32_t bytes, int lane, int how) {
  SharedShadow& s = cta.shadow;
  for (uint32_t b = addr >> kBlockShift; b <= (addr + bytes - 1) >> kBlockShift; b++) {
    SharedShadow::Block& block = s.blocks[b];
    block.writes++;
    if (!block.tracked) continue;
    for (Operand* const o : block.operands)
      if (tracked(*o)) write_to(w, cta, *o, addr, bytes, lane, how);
  }
}

}  // namespace emu
