// What the race checker remembers of memory: last write and reads of every 16 bytes, of 4 or 1 where
// accesses are smaller.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

namespace emu {

constexpr uint8_t kMbarrierWriter = 64;  // + slot: written by copies that complete on that mbarrier

struct Record {  // one access
  uint32_t clock = 0;  // 0: none
  int32_t pc = 0;
  int32_t cta = 0;
  uint8_t warp = 0, lane = 0;
  bool strong = false;
  bool generic : 1;  // of the generic proxy
  // A shared-memory read by the whole warp at once: done before any lane goes on, so that a later release by
  // one lane covers it. Between lanes of the warp itself it orders nothing.
  bool converged : 1;
  bool read : 1;  // done, rather than visible, is what later accesses need it to be

  Record() : generic(false), converged(false), read(false) {}
};

struct SharedCell {
  uint32_t clock = 0;  // last write; 0: never written
  int32_t pc = 0;
  int32_t child = -1;  // index of four smaller cells
  uint16_t pending_reads = 0, pending_writes = 0;
  uint8_t warp = 0, lane = 0;
  bool strong = false, generic = false;
  uint8_t from = 0;  // writer's CTA: how many ranks after this one, in the cluster's round

  bool same_writer(const SharedCell& o) const {
    return clock == o.clock && pc == o.pc && warp == o.warp && lane == o.lane && strong == o.strong && generic == o.generic && from == o.from;
  }
};

struct ReadMark {  // a warp's last read of a cell
  uint32_t clock = 0;
  uint32_t pc : 24;
  uint32_t lane : 6;
  uint32_t strong : 1;
  uint32_t converged : 1;

  ReadMark() : pc(0), lane(0), strong(0), converged(0) {}
};

struct SharedShadow {
  int warps = 0;  // of a CTA
  std::vector<SharedCell> cells;  // 16-byte cells, then groups of four smaller ones
  // [reader][cell]: a warp's reads of neighbours share cache lines. Readers are the CTA's own warps, then those of
  // the next CTAs of the cluster; empty for one that has read nothing.
  std::vector<std::vector<ReadMark>> reads;

  void init(uint32_t bytes, int num_warps, int cluster) {
    warps = num_warps;
    cells.resize(bytes / 16 + 1);
    reads.resize(size_t(warps) * cluster);
  }

  ReadMark& mark(int cell, int reader) {
    auto& r = reads[reader];
    if (r.empty()) r.resize(cells.size());
    return r[cell];
  }

  int split(int cell) {
    if (cells[cell].child < 0) {
      const int first = int(cells.size());
      SharedCell copy = cells[cell];
      cells.resize(first + 4, copy);
      for (auto& r : reads)
        if (!r.empty()) r.resize(cells.size(), ReadMark(r[cell]));
      cells[cell].child = first;
    }
    return cells[cell].child;
  }

  // Calls f(cell) for the cells of a range, split as finely as it needs.
  template <class F>
  void visit(uint32_t addr, uint32_t bytes, F f) {
    const uint32_t end = addr + bytes;
    if (!((addr | bytes) & 15)) {
      for (uint32_t i = addr / 16; i < end / 16; i++) {
        if (cells[i].child < 0) f(int(i));
        else walk(int(i), i * 16, 16, addr, end, f);
      }
      return;
    }
    for (uint32_t a = addr & ~15u; a < end; a += 16) walk(int(a / 16), a, 16, addr, end, f);
  }

  // Whether a range is made of cells that were never split.
  bool whole(uint32_t addr, uint32_t bytes) const {
    if ((addr | bytes) & 15) return false;
    for (uint32_t i = addr / 16; i < (addr + bytes) / 16; i++)
      if (cells[i].child >= 0) return false;
    return true;
  }

 private:
  template <class F>
  void walk(int cell, uint32_t at, uint32_t size, uint32_t begin, uint32_t end, F f) {
    if (begin <= at && end >= at + size && cells[cell].child < 0) return f(cell);
    const int first = split(cell);
    const uint32_t sub = size / 4;
    for (uint32_t i = 0; i < 4; i++) {
      const uint32_t a = at + i * sub;
      if (a < end && a + sub > begin) walk(first + int(i), a, sub, begin, end, f);
    }
  }
};

struct GlobalCell {
  Record write, read[2];
  uint16_t pending_writes = 0;
  int32_t child = -1;
};

struct GlobalShadow {
  struct Page {
    GlobalCell cells[256];
  };
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages;
  std::deque<GlobalCell> pool;
  uint64_t last = ~0ull;
  Page* page = nullptr;

  template <class F>
  void visit(uint64_t addr, uint64_t bytes, F f) {
    const uint64_t end = addr + bytes;
    for (uint64_t a = addr & ~15ull; a < end; a += 16) {
      if (a >> 12 != last) {
        auto& p = pages[a >> 12];
        if (!p) p = std::make_unique<Page>();
        last = a >> 12;
        page = p.get();
      }
      GlobalCell& c = page->cells[a >> 4 & 255];
      if (addr <= a && end >= a + 16 && c.child < 0) {
        f(c);
      } else {
        split(c);
        const int first = c.child;
        for (int i = 0; i < 4; i++) {
          const uint64_t b = a + i * 4;
          if (b >= end || b + 4 <= addr) continue;
          if (addr <= b && end >= b + 4 && pool[first + i].child < 0) {
            f(pool[first + i]);
            continue;
          }
          GlobalCell word = pool[first + i];
          split(word);
          pool[first + i].child = word.child;
          for (int j = 0; j < 4; j++)
            if (b + j < end && b + j + 1 > addr) f(pool[word.child + j]);
        }
      }
    }
  }

 private:
  void split(GlobalCell& c) {
    if (c.child >= 0) return;
    const int first = int(pool.size());
    GlobalCell copy = c;
    for (int i = 0; i < 4; i++) pool.push_back(copy);
    c.child = first;
  }
};

}  // namespace emu
