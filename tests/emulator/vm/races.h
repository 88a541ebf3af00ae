// What races.cpp and operands.cpp share: who has accessed a cell, and whether a lane is ordered after that.
#pragma once
#include "vm.h"

namespace emu {

[[noreturn]] void race(Warp& w, const char* what, uint64_t addr, bool shared, int lane, const Record& other);
void bad_read(Warp& w, const Cta& cta, const SharedCell& c, uint32_t addr, int lane, int how);

// Where a CTA stands after another in the round of the cluster's ranks; 0 is itself.
inline int after(const Cta& from, const Cta& cta) {
  return &from == &cta ? 0 : (cta.rank - from.rank + cta.cluster->size()) % cta.cluster->size();
}
inline const Cta& cta_after(const Cta& cta, int n) {
  return n ? *cta.cluster->ctas[(cta.rank + n) % cta.cluster->size()] : cta;
}
inline int reader(const Cta& cta, const Warp& w) { return after(cta, *w.cta) * cta.shadow.warps + w.id; }

inline bool written_by(const SharedCell& c, const Warp& w) { return c.warp == w.id && !c.from; }  // in its CTA

inline Record of_cell(const Cta& cta, const SharedCell& c) {
  Record r;
  r.clock = c.clock; r.pc = c.pc; r.cta = int32_t(cta_after(cta, c.from).index); r.warp = c.warp; r.lane = c.lane;
  r.strong = c.strong; r.generic = c.generic;
  return r;
}

inline Record of_mark(const Cta& cta, const ReadMark& m, int reader) {
  Record r;
  r.clock = m.clock; r.pc = m.pc; r.cta = int32_t(cta_after(cta, reader / cta.shadow.warps).index);
  r.warp = uint8_t(reader % cta.shadow.warps); r.lane = m.lane; r.strong = m.strong;
  r.converged = m.converged;
  r.read = true;
  return r;
}

inline bool clean_read(Warp& w, const Cta& cta, const SharedCell& c, int lane, int how) {
  if (!c.clock || (c.strong && (how & kStrong))) return true;
  if (c.warp == w.id && c.from == after(cta, *w.cta) && (c.lane == lane || (c.lane == kManyLanes && lane < 32)) && !(how & kAsync)) return true;
  // A writer that the warp as a whole was ordered after once; what it knows only grows.
  SharedCell& known = w.settled[c.warp % Warp::kSettled];
  const bool generic = &cta == w.cta && !c.from && !(how & kAsync);
  if (generic && known.same_writer(c)) return true;
  if (!ordered(w, lane, of_cell(cta, c), how & kAsync)) return false;
  if (generic && c.warp != w.id && !(lane < 32 && (w.partial_mask >> lane & 1))) known = c;
  return true;
}

// Of a mark that is one lane's.
inline void reader_check(Warp& w, const Cta& cta, const ReadMark& m, int reader, bool mine, uint32_t addr, int lane, int how) {
  if (!m.clock || (m.strong && (how & kStrong)) || (mine && m.lane == uint32_t(lane))) return;
  if (!ordered(w, lane, of_mark(cta, m, reader), false))
    race(w, "write not ordered after a read", addr, true, lane, of_mark(cta, m, reader));
}

// Of a write of 16 bytes if the mark or the write is spread over lanes.
inline void reader_checks(Warp& w, const Cta& cta, const ReadMark& m, int reader, bool mine, uint32_t addr, int lane, int how,
                          int spread = kAlone) {
  if (m.spread == kAlone && spread == kAlone) return reader_check(w, cta, m, reader, mine, addr, lane, how);
  for (int i = 0; i < 4; i++)
    reader_check(w, cta, m.word(i), reader, mine, addr + 4 * i, lane_of_word(lane, spread, i), how);
}

// ---- races.cpp
void writer_checks(Warp&, const Cta&, const SharedCell&, uint32_t addr, int lane, int how, int spread = kAlone);

// ---- operands.cpp
void write_operands(Warp&, Cta&, uint32_t addr, uint32_t bytes, int lane, int how);

}  // namespace emu
