// What the race checker remembers of memory: last write and reads of every 16 bytes, of 4 or 1 where
// accesses are smaller.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
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

// By whom the four words of 16 bytes are accessed: all by one lane, or by it and those after it.
enum Spread : uint8_t { kAlone, kPairs, kFours };
inline int lane_of_word(int lane, int spread, int word) {
  return lane + (spread == kFours ? word : spread == kPairs ? word / 2 : 0);
}

struct SharedCell {
  uint32_t clock = 0;  // last write; 0: never written
  int32_t pc = 0;
  uint8_t warp = 0, lane = 0;
  uint8_t from = 0;  // writer's CTA: how many ranks after this one, in the cluster's round
  uint8_t strong : 1, generic : 1, spread : 2, unused : 4;
  int32_t child = kNone;  // index of four smaller cells
  uint32_t readers = 0;   // bit r % 32 of each reader r whose mark is set
  uint16_t pending_reads = 0, pending_writes = 0;

  static constexpr int kNone = -1, kByLanes = -2;  // no smaller ones; the writer or a mark may be spread over lanes

  SharedCell() : strong(0), generic(0), spread(kAlone), unused(0) {}

  bool same_writer(const SharedCell& o) const { return !memcmp(this, &o, 12); }
  void set_writer(const SharedCell& o) { memcpy(static_cast<void*>(this), &o, 12); }
  SharedCell word(int i) const {
    SharedCell c = *this;
    c.lane = uint8_t(lane_of_word(lane, spread, i));
    c.spread = kAlone;
    return c;
  }
};
static_assert(sizeof(SharedCell) == 24, "the writer is in the first 12 bytes");

struct ReadMark {  // a warp's last read of a cell
  uint32_t clock = 0;
  uint32_t pc : 22;
  uint32_t spread : 2;
  uint32_t lane : 6;
  uint32_t strong : 1;
  uint32_t converged : 1;

  ReadMark() : pc(0), spread(kAlone), lane(0), strong(0), converged(0) {}

  ReadMark word(int i) const {
    ReadMark m = *this;
    m.lane = uint32_t(lane_of_word(int(lane), spread, i));
    m.spread = kAlone;
    return m;
  }
};
static_assert(sizeof(ReadMark) == 8, "marks are compared as one number");

struct Operand;
constexpr int kBlockShift = 10;

// A warp's marks by cell, in pieces that begin with its first read there.
struct ReadMarks {
  static constexpr int kPiece = 512;
  std::vector<std::unique_ptr<ReadMark[]>> pieces;

  ReadMark* find(int cell) const {
    const size_t piece = size_t(cell) / kPiece;
    return piece < pieces.size() && pieces[piece] ? &pieces[piece][cell % kPiece] : nullptr;
  }
  ReadMark& at(int cell) {
    const size_t piece = size_t(cell) / kPiece;
    if (piece >= pieces.size()) pieces.resize(piece + 1);
    if (!pieces[piece]) pieces[piece] = std::make_unique<ReadMark[]>(kPiece);
    return pieces[piece][cell % kPiece];
  }
};

struct SharedShadow {
  struct Block {  // 1024 bytes
    uint32_t writes = 0;   // issued or landed
    uint32_t tracked = 0;  // operands that reads are known of
    std::vector<Operand*> operands;
  };
  std::vector<Block> blocks;
  int warps = 0;  // of a CTA
  std::vector<SharedCell> cells;  // 16-byte cells, then groups of four smaller ones
  // Of each reader. Readers are the CTA's own warps, then those of the next CTAs of the cluster.
  std::vector<ReadMarks> reads;

  void init(uint32_t bytes, int num_warps, int cluster) {
    warps = num_warps;
    cells.reserve(bytes / 8);
    cells.resize(bytes / 16 + 1);
    blocks.resize((bytes >> kBlockShift) + 1);
    reads.resize(size_t(warps) * cluster);
  }

  ReadMark& mark(int cell, int reader) {
    cells[cell].readers |= 1u << reader % 32;
    return reads[reader].at(cell);
  }

  // f(reader, its marks) for those that may have read one of the cells of a mask.
  template <class F>
  void each_reader(uint32_t mask, F f) {
    for (; mask; mask &= mask - 1)
      for (int q = __builtin_ctz(mask); q < int(reads.size()); q += 32) f(q, reads[q]);
  }

  int split(int cell) {
    if (cells[cell].child < 0) {
      const int first = int(cells.size());
      SharedCell copy = cells[cell];
      copy.child = SharedCell::kNone;
      cells.resize(first + 4);
      for (int i = 0; i < 4; i++) cells[first + i] = copy.word(i);
      cells[cell].child = first;
      each_reader(copy.readers, [&](int, ReadMarks& marks) {
        if (const ReadMark* const m = marks.find(cell); m && m->clock) {
          const ReadMark of_cell = *m;
          for (int i = 0; i < 4; i++) marks.at(first + i) = of_cell.word(i);
        }
      });
    }
    return cells[cell].child;
  }

  // Calls f(cell) for the cells of a range, split as finely as it needs; f is for one lane's accesses, unless it is told
  // of cells that are spread over lanes.
  template <bool kSpread = false, class F>
  void visit(uint32_t addr, uint32_t bytes, F f) {
    const uint32_t end = addr + bytes;
    if (bytes <= 8 && !((addr | bytes) & 3) && (addr & 15) + bytes <= 16) {  // words of a cell that is split
      const int words = cells[addr / 16].child, first = words + int(addr >> 2 & 3), last = first + int(bytes / 4) - 1;
      if (words >= 0 && cells[first].child < 0 && cells[last].child < 0) {
        f(first);
        if (first != last) f(last);
        return;
      }
    }
    if (!((addr | bytes) & 15)) {
      for (uint32_t i = addr / 16; i < end / 16; i++) {
        if (kSpread ? cells[i].child < 0 : cells[i].child == SharedCell::kNone) f(int(i));
        else walk(int(i), i * 16, 16, addr, end, f);
      }
      return;
    }
    for (uint32_t a = addr & ~15u; a < end; a += 16) walk(int(a / 16), a, 16, addr, end, f);
  }

  void note_writes(uint32_t addr, uint32_t bytes) {
    for (uint32_t b = addr >> kBlockShift; b <= (addr + bytes - 1) >> kBlockShift; b++) blocks[b].writes++;
  }

  // Whether a range is made of cells that are not split, nor spread over lanes.
  bool whole(uint32_t addr, uint32_t bytes) const {
    if ((addr | bytes) & 15) return false;
    for (uint32_t i = addr / 16; i < (addr + bytes) / 16; i++)
      if (cells[i].child != SharedCell::kNone) return false;
    return true;
  }

 private:
  template <class F>
  void walk(int cell, uint32_t at, uint32_t size, uint32_t begin, uint32_t end, F f) {
    if (begin <= at && end >= at + size && cells[cell].child == SharedCell::kNone) return f(cell);
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
