// Accesses by the lanes of one instruction to the shared memory of their CTA. The same is asked, and remembered, as by
// lane; what is true for all of them is judged once for all cells that have the same past.
#include "races.h"

namespace emu {

// Whether all of the lanes know the same.
static bool same_view(const Warp& w, uint32_t mask) {
  return !(w.partial_mask & mask) || !(mask & ~w.partial_mask);
}

// How the 16 bytes that begin where `lane` accesses memory are accessed by it and those after it, if wholly.
static bool fills(const uint32_t* addr, uint32_t mask, uint32_t bytes, int lane, Spread& spread) {
  const uint32_t a = addr[lane], those = mask >> lane;
  if (a & 15) return false;
  if (bytes == 16) {
    spread = kAlone;
    return true;
  }
  if (bytes == 8) {
    spread = kPairs;
    return (those & 3) == 3 && addr[lane + 1] == a + 8;
  }
  spread = kFours;
  return bytes == 4 && (those & 15) == 15 && addr[lane + 1] == a + 4 && addr[lane + 2] == a + 8 && addr[lane + 3] == a + 12;
}

// Calls cell(cell, lane, spread) for what is neither split nor accessed in part, and part(lane) for the others.
template <class Cell, class Part>
static void each_access(SharedShadow& s, const uint32_t* addr, uint32_t mask, uint32_t bytes, Cell cell, Part part) {
  while (mask) {
    const int lane = first_lane(mask), i = int(addr[lane] / 16);
    Spread spread;
    if (s.cells[i].child < 0 && fills(addr, mask, bytes, lane, spread) && cell(i, lane, spread)) {
      mask &= ~((spread == kFours ? 15u : spread == kPairs ? 3u : 1u) << lane);
    } else {
      part(lane);
      mask &= mask - 1;
    }
  }
}

// ---- reads
namespace {
struct Reads {
  Warp& w;
  Cta& cta;
  SharedShadow& s;
  ReadMarks& marks;
  const int how;
  const bool uniform;
  SharedCell judged;  // its writer is before all lanes
  ReadMark mark;

  bool others(const ReadMark& m, int lane) const {  // of two lanes that read without order between them
    return m.clock && m.lane != uint32_t(lane) && lane < 32 && (m.clock == w.clock || m.clock >= w.floor[lane]);
  }

  void judge(const SharedCell& c, uint32_t addr, int lane, int spread) {
    const bool one = c.spread == kAlone && spread == kAlone;
    for (int i = 0; i < (one ? 1 : 4); i++) {
      const SharedCell word = c.word(i);
      const int by = lane_of_word(lane, spread, i);
      if (c.pending_writes) race(w, "read of an asynchronous copy in flight", addr + 4 * i, true, by, of_cell(cta, word));
      if (!c.clock) w.vm->cfg.stats[kUninitialised]++;
      else if (!clean_read(w, cta, word, by, how)) bad_read(w, cta, word, addr + 4 * i, by, how);
    }
    if (c.clock && (written_by(c, w) ? c.lane >= kManyLanes || c.clock < w.low_floor : uniform)) judged = c;
  }

  // False if the words of the cell would have different marks.
  bool read(int i, uint32_t addr, int lane, int spread) {
    SharedCell& c = s.cells[i];
    ReadMark& m = marks.at(i);
    bool many = false;
    if (m.clock && (m.lane != uint32_t(lane) || m.spread != uint32_t(spread)) && m.clock >= w.low_floor) {
      if (m.spread == kAlone && spread == kAlone) {
        many = others(m, lane);
      } else {
        int count = 0;
        for (int k = 0; k < 4; k++) count += others(m.word(k), lane_of_word(lane, spread, k));
        if (count & 3) return false;
        many = count;
      }
    }
    if (c.pending_writes || !c.clock || !c.same_writer(judged)) judge(c, addr, lane, spread);
    c.readers |= 1u << w.id % 32;
    m = mark;
    m.lane = uint32_t(many ? kManyLanes : lane);
    m.spread = uint32_t(many ? kAlone : spread);
    if (m.spread != kAlone) c.child = SharedCell::kByLanes;
    return true;
  }
};

struct Writes {
  Warp& w;
  Cta& cta;
  SharedShadow& s;
  const int how;
  const bool uniform;
  SharedCell judged, mine;
  static constexpr int kKept = 32;
  uint64_t judged_marks[kKept] = {};  // by reader: a mark that is before all lanes

  void judge(const SharedCell& c, uint32_t addr, int lane, int spread) {
    writer_checks(w, cta, c, addr, lane, how, spread);
    if (written_by(c, w) ? c.lane == kAnyLane || c.clock < w.low_floor : uniform) judged = c;
  }

  void judge_reader(const ReadMark& m, int q, uint32_t addr, int lane, int spread) {
    uint64_t bits;
    memcpy(&bits, &m, sizeof bits);
    if (q < kKept && bits == judged_marks[q]) return;
    const bool own = q == w.id;
    if (own && m.lane == uint32_t(lane) && m.spread == uint32_t(spread)) return;
    reader_checks(w, cta, m, q, own, addr, lane, how, spread);
    if (q < kKept && (own ? m.lane == kAnyLane || m.clock < w.low_floor : uniform)) judged_marks[q] = bits;
  }

  void write(int i, uint32_t addr, int lane, int spread) {
    SharedCell& c = s.cells[i];
    const bool own = written_by(c, w), same_lanes = c.lane == lane && c.spread == spread;
    if (c.pending_writes || c.pending_reads || (c.clock && !(own && same_lanes) && !c.same_writer(judged)))
      judge(c, addr, lane, spread);
    s.each_reader(c.readers, [&](int q, ReadMarks& marks) {
      if (ReadMark* const m = marks.find(i); m && m->clock) {
        judge_reader(*m, q, addr, lane, spread);
        *m = ReadMark();
      }
    });
    const bool many = own && c.clock == w.clock && c.pc == w.pc && !same_lanes;
    mine.lane = uint8_t(many ? kManyLanes : lane);
    mine.spread = uint8_t(many ? kAlone : spread);
    c.set_writer(mine);
    c.readers = 0;
    if (c.child < 0) c.child = mine.spread == kAlone ? SharedCell::kNone : SharedCell::kByLanes;
  }

  void take_operands(uint32_t addr, uint32_t bytes, int lane) {
    SharedShadow::Block& block = s.blocks[addr >> kBlockShift];
    if (block.tracked) write_operands(w, cta, addr, bytes, lane, how);
    else block.writes++;
  }
};
}  // namespace

static Reads reads_of(Warp& w, bool uniform, int how) {
  Cta& cta = *w.cta;
  Reads reads = {w, cta, cta.shadow, cta.shadow.reads[w.id], how, uniform, {}, {}};
  reads.mark.clock = w.clock;
  reads.mark.pc = w.pc;
  reads.mark.strong = (how & kStrong) != 0;
  reads.mark.converged = w.converged;
  return reads;
}

static Writes writes_of(Warp& w, bool uniform, int how) {
  Cta& cta = *w.cta;
  Writes writes = {w, cta, cta.shadow, how, uniform, {}, {}};
  writes.mine.clock = w.clock;
  writes.mine.pc = w.pc;
  writes.mine.warp = uint8_t(w.id);
  writes.mine.strong = (how & kStrong) != 0;
  writes.mine.generic = !(how & kAsync);
  return writes;
}

void check_shared_reads(Warp& w, const uint32_t* addr, uint32_t mask, uint32_t bytes, int how) {
  Reads reads = reads_of(w, same_view(w, mask), how);
  each_access(
      reads.s, addr, mask, bytes, [&](int i, int lane, Spread spread) { return reads.read(i, addr[lane], lane, spread); },
      [&](int lane) { reads.s.visit(addr[lane], bytes, [&](int i) { reads.read(i, addr[lane], lane, kAlone); }); });
}

void check_shared_writes(Warp& w, const uint32_t* addr, uint32_t mask, uint32_t bytes, int how) {
  Writes writes = writes_of(w, same_view(w, mask), how);
  each_lane(mask, [&](int lane) { writes.take_operands(addr[lane], bytes, lane); });
  each_access(
      writes.s, addr, mask, bytes,
      [&](int i, int lane, Spread spread) {
        writes.write(i, addr[lane], lane, spread);
        return true;
      },
      [&](int lane) { writes.s.visit(addr[lane], bytes, [&](int i) { writes.write(i, addr[lane], lane, kAlone); }); });
}

void check_shared_rows(Warp& w, const uint32_t* addr, int count, bool write) {
  if (write) {
    Writes writes = writes_of(w, true, 0);
    for (int l = 0; l < count; l++) {
      writes.take_operands(addr[l], 16, kManyLanes);
      writes.s.visit<true>(addr[l], 16, [&](int i) { writes.write(i, addr[l], kManyLanes, kAlone); });
    }
  } else {
    Reads reads = reads_of(w, true, 0);
    for (int l = 0; l < count; l++)
      reads.s.visit<true>(addr[l], 16, [&](int i) { reads.read(i, addr[l], kManyLanes, kAlone); });
  }
}

}  // namespace emu
