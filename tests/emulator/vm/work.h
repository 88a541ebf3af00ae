// Asynchronous work and the barriers that wait for it.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "clock.h"
#include "instruction.h"
#include "shadow.h"

namespace emu {

struct Cta;

struct Range {  // of shared memory
  uint32_t addr, bytes;
};

// Of a wgmma: what a warp reads through one descriptor, and what the checker knows of it.
struct Operand {
  static constexpr size_t kMostRanges = 256;
  struct Writer {
    SharedCell cell;
    uint32_t addr;
  };
  struct Read {  // the last by a warp, and which ranges have been written since
    ReadMark mark;
    uint64_t gone[kMostRanges / 64] = {};
    size_t count = 0;
    bool is_gone(size_t k) const { return gone[k / 64] >> k % 64 & 1; }
    void set_gone(size_t k) {
      count += !is_gone(k);
      gone[k / 64] |= 1ull << k % 64;
    }
  };
  std::vector<Range> ranges;
  std::vector<uint32_t> blocks;  // that hold them
  std::vector<Writer> writers;   // of its cells, when the writes to its blocks were `state` in all
  uint64_t state = ~0ull, uninitialised = 0;
  uint32_t pending = 0, readers = 0;  // reads in flight; bit of each warp in `reads` that has a mark
  std::vector<Read> reads;
  Record issued_by;
};

struct CopyOp {  // one cp.async of one lane
  uint32_t dst;
  uint64_t src;
  uint16_t bytes, filled;  // the rest is zero
  uint8_t lane;
  bool done;
  int32_t pc;
};

struct BulkOp {  // a bulk or tensor copy from shared memory
  Range read;
  std::vector<std::pair<uint64_t, uint32_t>> writes;
  std::vector<uint8_t> data;
  std::vector<uint32_t> from;  // where in the data each write begins
  uint32_t src = 0, swizzle = 0, type = 0;
  int32_t pc = 0;
  int reduce = 0, atom_type = -1;  // 0 copy, else 1 + operation
  bool read_done = false, write_done = false;
};

struct WgmmaOp {
  const Insn* insn;
  int32_t pc;
  bool scale;
  uint64_t desc_a, desc_b;
  Operand* reads[2];  // of A, if it is in shared memory, and B
  std::array<uint32_t, 128> a;  // registers at issue
  std::vector<uint32_t> acc;    // the accumulator's value, if it is the first of a chain
  bool first;
};

struct Barrier {
  int arrived = 0, expected = 0;
  bool whole = false;  // of all threads of the CTA
  Order order;
  std::vector<std::pair<int, uint32_t>> who;  // warp, pc (all arrivals)
};

struct Mbarrier {
  bool valid = false;
  uint32_t addr = 0;
  int slot = 0, count = 0, pending = 0;
  int64_t tx = 0;
  uint64_t phase = 0;  // completed phases
  int init_warp = 0, init_lane = 0;
  uint32_t init_clock = 0;
  int32_t init_pc = 0;
  bool init_fenced = false;  // for copies
  // Copies that landed in this phase, in the last one and nobody has waited since.
  bool landed = false, unobserved = false;
  Order current, complete;
  // Released at cluster scope by other CTAs: for those who acquire at that scope.
  std::shared_ptr<const Foreign> wide_current, wide_complete;
  uint64_t fenced_arrivals = ~0ull;  // barrier.cluster.arrive of the initialising warp before its fence.mbarrier_init
};

struct Request {  // a copy into shared memory, or an arrival, that completes on its own
  enum Kind { kTensor, kBulk, kShared, kStore, kReduce, kCopyArrive } kind;
  Cta *from, *to;  // of the thread that asked for it, of the memory that it writes
  uint32_t dst, mbar, bytes;
  uint64_t src;  // tensor map, address, or offset in the shared memory of `from`
  int coord[5];
  uint8_t value[16];  // of a store
  int op, type;       // of a reduction
  int warp, lane;
  int32_t pc;
};

}  // namespace emu
