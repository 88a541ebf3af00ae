// The machine: one launch of one kernel. No globals; every object belongs to a Machine.
#pragma once
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "clock.h"
#include "shadow.h"

namespace emu {

struct Warp;
struct Cta;
struct Machine;
struct Insn;

enum class Step { kNext, kStay, kJump, kYield, kExit };
using Handler = Step (*)(Warp&, const Insn&, uint32_t mask);

// Kinds of instructions (bits).
enum : uint32_t {
  kPreempt = 1,     // a warp may be preempted before it
  kAligned = 2,     // needs every live lane of the warp
  kMembers = 4,     // needs the lanes of a member mask, in the register arg[0]
  kControl = 8,     // runs even when no lane is active

  kLive = 32,       // with kAligned: lanes that have exited need not come (barriers)
  kTouches = 16,    // accesses a register that some wgmma uses (set by the front end, per instruction)
};

// Modifiers that the front end takes out of a mnemonic (bits of Insn::flags).
enum : uint32_t {
  kFtz = 1, kSat = 2, kRz = 4, kRm = 8, kRp = 16, kNan = 32, kRelu = 64, kApprox = 128, kHi = 256,
  kWide = 512, kWrap = 1024, kSatfinite = 2048, kShiftamt = 4096, kXorsign = 8192,
};

struct Insn {
  Handler fn;
  const int32_t* arg;  // register slots, immediates
  int32_t nargs;
  int32_t pred;  // slot of the guard or -1
  uint32_t flags, kind;
  bool negate;
  uint32_t defs, uses;  // bit i: arg[i] is a slot that is written, read
};

struct OpDef {
  const char* name;       // PTX mnemonic without the modifiers
  const char* operands;   // R D P written, r d p read, i immediate, x y z read and written
  Handler fn;
  uint32_t modifiers;  // those allowed
  uint32_t kind;
};
struct OpTable {
  const OpDef* ops;
  size_t size;
};
OpTable integer_ops(), bit_ops(), compare_ops(), float_ops(), half_ops(), convert_ops(), memory_ops(),
    control_ops(), collective_ops(), matrix_ops(), copy_ops(), mbarrier_ops(), tensor_ops(), wgmma_ops();

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// "@12@" in a message stands for instruction 12; the front end puts file:line there.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

constexpr uint64_t kSharedWindow = 1ull << 60, kLocalWindow = 2ull << 60, kParamWindow = 3ull << 60;
constexpr uint64_t kWindowMask = 15ull << 60;
constexpr uint32_t kSharedBase = 1024;  // shared memory starts here: address 0 is never valid
constexpr int kPoisonByte = 0xff;       // NaN in every format
constexpr uint32_t kPoisonRegister = 0x7fc00bad;
constexpr int kBarriers = 16;
constexpr uint32_t kVoted = 7;  // Path::parity of an instruction that runs in two passes

enum Space { kGeneric, kGlobal, kShared, kLocal, kConst, kParam };
enum Ordering { kWeak, kRelaxed, kAcquire, kRelease, kAcqRel };
enum Scope { kScopeCta, kScopeCluster, kScopeGpu, kScopeSys };

struct Region {  // memory that the kernel may touch
  uint64_t begin, end;
  int64_t writable;
};

enum class Wait : uint8_t { kNone, kMbarrier, kBarrier, kMeet, kWarpSync, kPoll };

struct Path {  // the lanes of a warp that share a program counter
  int pc;
  uint32_t mask;
  Wait wait = Wait::kNone;
  uint32_t parity = 0, where = 0;  // mbarrier or barrier number, member mask
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
  std::vector<std::pair<uint32_t, uint32_t>> reads;  // shared address, bytes
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
  std::vector<uint32_t> a, acc;  // registers at issue
  std::vector<std::pair<uint32_t, uint32_t>> reads;
  bool first;  // of its accumulator: acc holds its value
};

struct Warp {
  Machine* vm;
  Cta* cta;
  int id, pc = 0;
  std::vector<uint32_t> file;  // registers: 32 words, 64 words for 64-bit ones, 1 word for predicates
  std::vector<uint8_t> local;  // [lane][bytes]
  std::vector<Path> paths;
  size_t cur = 0;
  uint32_t born = 0, live = 0, carry = 0;  // lanes at the start, lanes that have not exited
  bool done = false;

  // Checker.
  Order base, partial;         // known to all lanes; in addition to those of partial_mask
  uint32_t partial_mask = 0, clock = 1;
  uint32_t floor[32];          // accesses of this warp before that clock are ordered before the lane
  uint32_t low_floor = 1;      // the lowest of the live lanes
  Order fence_gpu, fence_cta;  // at the last fence: what a relaxed write then releases
  Order seen_gpu, seen_cta;    // read by relaxed loads: what a fence then acquires
  bool fenced_gpu = false, fenced_cta = false, pending_gpu = false, pending_cta = false;

  // Asynchronous work.
  std::vector<CopyOp> open_copies[32];
  std::deque<std::vector<CopyOp>> copy_groups[32];
  std::vector<BulkOp> open_bulk[32];
  std::deque<std::vector<BulkOp>> bulk_groups[32];
  std::vector<WgmmaOp> open_wgmmas;
  std::deque<std::vector<WgmmaOp>> wgmma_groups;
  std::vector<uint8_t> in_flight;  // by slot / 32: 1 read by a wgmma, 2 written by one
  uint64_t wgmma_count = 0;
  bool converged = true;  // the running instruction is executed by all live lanes
  bool wgmma_fenced = false, any_in_flight = false;

  uint32_t* r(int slot) { return file.data() + slot; }
  uint64_t* d(int slot) { return reinterpret_cast<uint64_t*>(file.data() + slot); }
  uint32_t& p(int slot) { return file[slot]; }
  void set_p(int slot, uint32_t mask, uint32_t v) { file[slot] = (file[slot] & ~mask) | (v & mask); }
  Path& path() { return paths[cur]; }
  bool has_copies() const;
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
  bool init_fenced = false;
  // Copies that landed in this phase, in the last one and nobody has waited since.
  bool landed = false, unobserved = false;
  Order current, complete;
};

struct TensorRequest {  // a copy into shared memory, or an arrival, that completes on its own
  enum Kind { kTensor, kBulk, kCopyArrive } kind;
  uint32_t dst, mbar, bytes;
  uint64_t src;  // tensor map or address
  int coord[5];
  int warp, lane;
  int32_t pc;
};

struct Cta {
  Machine* vm;
  int64_t index;
  uint32_t block[3];
  std::vector<uint8_t> smem;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<Mbarrier> mbarriers;
  std::unordered_map<uint32_t, int> mbarrier_at;
  Barrier barriers[kBarriers];
  Barrier cluster;
  int cluster_waiting = 0;
  bool cluster_open = false;
  struct Votes {
    int count = 0, all = 1, any = 0;
  } votes[kBarriers], result[kBarriers];  // of bar.red: being counted, of the last completion
  std::deque<TensorRequest> queue;
  SharedShadow shadow;
  std::unordered_map<uint64_t, Order> sync;  // releases seen inside the CTA, by address
  int live = 0;
  int num_mbar() const { return int(mbarriers.size()); }
  int num_warps() const { return int(warps.size()); }
};

struct Program {
  std::vector<Insn> code;
  std::vector<int32_t> args;
  std::vector<int32_t> constants;  // slot, 0 | 1 (64-bit), low, high
  std::vector<int32_t> specials;   // slot, id
  int64_t file_words, local_bytes, static_smem, dynamic_base;
};

struct Launch {  // 64-bit fields only; the front end passes an array
  int64_t grid[3], block[3], smem;
  const uint8_t* params;
  int64_t param_bytes;
  const Region* regions;
  int64_t nregions;
  int64_t check, seed, resident, preempt_shift, arch, max_idle;
  uint64_t *hits, *conflicts, *stats;  // [pc], [pc], see Stat
  uint64_t *read_bytes, *write_bytes;  // [region]
};
enum Stat { kUninitialised, kGlobalRead, kGlobalWritten, kSharedRead, kSharedWritten, kLocalBytes,
            kWavefronts, kSteps, kSwitches, kLeftArrived, kStats = 16 };

struct Machine {
  const Program& prog;
  const Launch& cfg;
  bool check;
  uint64_t random_state, progress = 0, idle_steps = 0;
  uint32_t warps_per_cta, threads;
  uint32_t smem_end;  // shared addresses are below it
  int eager;  // how often queued copies run early: 0 never, else one turn in `eager`
  std::vector<int> region_cache;  // by pc
  std::vector<std::unique_ptr<Cta>> ctas;  // resident
  std::vector<int64_t> pending;  // CTAs not started, last first
  GlobalShadow shadow;
  std::unordered_map<uint64_t, std::shared_ptr<const Foreign>> sync;  // releases at GPU scope

  Machine(const Program&, const Launch&);
  void run();
  uint32_t random() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return uint32_t(random_state >> 16);
  }
  void start_cta(int64_t index);
  void run_warp(Warp&);
  bool select_path(Warp&);
  bool runnable(Warp&);
  void perform(Cta&, size_t item);  // a queued copy
  void exit_lanes(Warp&, uint32_t mask);
  void finish_cta(Cta&);
  std::string census();
  void touch(Warp&, const Insn&);
  int find_region(Warp&, uint64_t addr, uint64_t bytes, bool write, const char* what);
};

// ---- order.cpp: happens-before
Order& view(Warp&, int lane);  // what the lane knows
Order release(Warp&, uint32_t mask);
void acquire(Warp&, const Order&, uint32_t mask);
void warp_sync(Warp&, uint32_t mask);
bool ordered_elsewhere(Warp&, int lane, const Record&, bool async_proxy);
void fence(Warp&, uint32_t mask, Scope);
void proxy_fence(Warp&, uint32_t mask);
void strong_write(Warp&, uint32_t mask, uint64_t addr, Ordering, Scope);
void strong_read(Warp&, uint32_t mask, uint64_t addr, Ordering, Scope);

// Whether the lane is ordered after an access; `async_proxy`: through a proxy fence, if it needs one.
inline bool ordered(Warp& w, int lane, const Record& rec, bool async_proxy) {
  if (!rec.clock) return true;
  if (rec.cta != w.cta->index) return ordered_elsewhere(w, lane, rec, async_proxy);
  const Order& o = lane < 32 && (w.partial_mask >> lane & 1) ? w.partial : w.base;
  if (rec.warp >= kMbarrierWriter) return o.seen.mbar[rec.warp - kMbarrierWriter] >= rec.clock;
  if (async_proxy && rec.generic && !o.proxied.warp[rec.warp].covers(rec.lane, rec.clock)) return false;
  if (rec.warp == w.id) {
    if (rec.lane == lane || rec.lane == kAnyLane) return true;
    return rec.clock < (lane < 32 ? w.floor[lane] : w.low_floor);
  }
  return o.seen.warp[rec.warp].covers(rec.converged ? kAnyLane : rec.lane, rec.clock);
}

// ---- access.cpp: checked memory accesses of one lane (kManyLanes, kAnyLane: of the warp)
struct Target {
  uint8_t* host;
  Space space;
  uint64_t addr;  // in the space
};
enum : int { kStrong = 1, kAsync = 2, kNonCoherent = 4, kKeepInit = 8 };
Target resolve(Warp&, Space, uint64_t addr, uint32_t bytes, int lane, bool write, const char* what);
void note_read(Warp&, const Target&, uint32_t bytes, int lane, int how);
void note_write(Warp&, const Target&, uint32_t bytes, int lane, int how);
void shared_bounds(const Warp&, uint32_t addr, uint64_t bytes, const char* what);
void check_shared_read(Warp&, uint32_t addr, uint32_t bytes, int lane, int how);
void check_shared_write(Warp&, uint32_t addr, uint32_t bytes, int lane, int how);
void pend_shared_write(Warp&, uint32_t addr, uint32_t bytes, int lane, int how);   // async write issued
void land_shared_write(Warp&, uint32_t addr, uint32_t bytes, const Record&);       // ... and done
void pend_shared_read(Warp&, uint32_t addr, uint32_t bytes, int lane);             // async read issued
void land_shared_read(Warp&, uint32_t addr, uint32_t bytes, int lane);
void guard_mbarriers(Warp&, uint32_t addr, uint32_t bytes);
void count_conflicts(Warp&, const uint32_t* addr, uint32_t mask, int bytes);
Record record(Warp&, int lane, int how);

// ---- others
void complete_copy(Warp&, CopyOp&);
void land_global_write(Warp&, uint64_t addr, uint32_t bytes, int lane, bool strong);
void complete_copies(Warp&, int lane, std::vector<CopyOp>&);
void perform_request(Cta&, const TensorRequest&);
Mbarrier& mbarrier(Warp&, uint32_t addr, int lane, const char* what);
void mbarrier_arrive(Warp&, Mbarrier&, int lane, int count, const Order*);
void mbarrier_complete(Cta&, Mbarrier&);
bool mbarrier_ready(const Mbarrier& b, uint32_t parity);
void land_bulk(Warp&, int lane, BulkOp&, bool write_too);
void retire_wgmmas(Warp&, size_t allowed);
void arrive_barrier(Warp&, uint32_t mask, int expected, bool wait, int number);
void complete_barrier(Cta&, int number);

// ---- lanes
template <class F>
inline void each_lane(uint32_t mask, F f) {
  while (mask) {
    const int l = __builtin_ctz(mask);
    mask &= mask - 1;
    f(l);
  }
}
inline int first_lane(uint32_t mask) { return __builtin_ctz(mask); }
inline float as_float(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
inline uint32_t as_bits(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }

// Calls f(lane) for all lanes and stores the results of the active ones to slot `d`.
template <class U, class F>
inline __attribute__((always_inline)) void lanes(U* d, uint32_t mask, F f) {
  U tmp[32];
  U* const out = mask == ~0u ? d : tmp;
#pragma GCC ivdep
  for (int l = 0; l < 32; l++) out[l] = f(l);
  if (mask != ~0u)
    for (int l = 0; l < 32; l++) d[l] = mask >> l & 1 ? tmp[l] : d[l];
}

}  // namespace emu
