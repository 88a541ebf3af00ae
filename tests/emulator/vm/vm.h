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
#include "instruction.h"
#include "shadow.h"
#include "work.h"

namespace emu {

struct Machine;
struct Cluster;

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
// A shared::cluster address of another CTA: (rank + 1) << kRankShift above its shared::cta address.
constexpr int kRankShift = 24, kMaxCluster = 8;

enum Space { kGeneric, kGlobal, kShared, kLocal, kConst, kParam, kSharedCluster };
enum Ordering { kWeak, kRelaxed, kAcquire, kRelease, kAcqRel };
enum Scope { kScopeCta, kScopeCluster, kScopeGpu, kScopeSys };

struct Region {  // memory that the kernel may touch
  uint64_t begin, end;
  int64_t writable;
};

enum class Wait : uint8_t { kNone, kMbarrier, kBarrier, kMeet, kCluster };
enum Level { kOwnCta, kOwnCluster, kDevice, kLevels };  // how far a release or an acquire reaches

struct Path {  // the lanes of a warp that share a program counter
  int pc;
  uint32_t mask;
  Wait wait = Wait::kNone;
  uint32_t parity = 0, where = 0;  // or phase of the cluster's barrier; mbarrier, barrier number or member mask
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
  uint64_t polled = ~0ull;  // the machine's progress when a loop that waits last looked

  // Checker.
  Order base, partial;         // known to all lanes; in addition to those of partial_mask
  uint32_t partial_mask = 0, clock = 1;
  uint32_t floor[32];          // accesses of this warp before that clock are ordered before the lane
  uint32_t low_floor = 1;      // the lowest of the live lanes
  static constexpr int kSettled = 8;
  SharedCell settled[kSettled];  // writers in its CTA that it is ordered after
  Order fence_at[kLevels];     // at the last fence: what a relaxed write then releases
  Order seen_at[kLevels];      // read by relaxed loads: what a fence then acquires
  bool fenced[kLevels] = {}, pending[kLevels] = {};

  // barrier.cluster: arrivals of all lanes, phases waited for, lanes that have arrived since.
  uint64_t cluster_arrivals = 0, cluster_waits = 0;
  uint32_t cluster_mask = 0;

  // Asynchronous work.
  std::vector<CopyOp> open_copies[32];
  std::vector<std::vector<CopyOp>> copy_groups[32];
  std::vector<BulkOp> open_bulk[32];
  std::vector<std::vector<BulkOp>> bulk_groups[32];
  std::vector<WgmmaOp> open_wgmmas;
  std::deque<std::vector<WgmmaOp>> wgmma_groups;
  std::vector<std::vector<uint32_t>> spare;  // for accumulators that are set aside
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

struct Cta {
  Machine* vm;
  Cluster* cluster;
  int rank;
  int64_t index;
  uint32_t block[3];
  std::vector<uint8_t> smem;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<Mbarrier> mbarriers;
  std::unordered_map<uint32_t, int> mbarrier_at;
  uint32_t first_mbarrier = ~0u, last_mbarrier = 0;  // addresses of all there have been
  Barrier barriers[kBarriers];
  struct Votes {
    int count = 0, all = 1, any = 0;
  } votes[kBarriers], result[kBarriers];  // of bar.red: being counted, of the last completion
  std::deque<Request> queue;  // of copies into this CTA's memory
  std::unordered_map<uint64_t, Operand> operands;  // of wgmma, by descriptor
  std::pair<uint64_t, Operand*> found_operands[1024] = {};  // some of them, by a hash
  SharedShadow shadow;
  Order at_exit;  // what its exited warps knew
  std::unordered_map<uint64_t, Order> sync;  // releases seen inside the CTA, by address
  int live = 0;
  int num_mbar() const { return int(mbarriers.size()); }
  int num_warps() const { return int(warps.size()); }
};

struct Cluster {  // CTAs that run at the same time and may access each other's shared memory
  Machine* vm;
  int64_t index;
  std::vector<std::unique_ptr<Cta>> ctas;  // by rank
  uint64_t phase = 0;                      // completed barriers
  std::shared_ptr<const Foreign> arriving, complete;
  std::unordered_map<uint64_t, std::shared_ptr<const Foreign>> sync;  // releases at cluster scope
  int size() const { return int(ctas.size()); }
  bool live() const;
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
  int64_t cluster[3];
};
enum Stat { kUninitialised, kGlobalRead, kGlobalWritten, kSharedRead, kSharedWritten, kLocalBytes,
            kWavefronts, kSteps, kSwitches, kLeftArrived, kRemoteBytes, kStats = 16 };

struct Machine {
  const Program& prog;
  const Launch& cfg;
  bool check;
  uint64_t random_state, progress = 0, idle_steps = 0;
  uint32_t warps_per_cta, threads;
  uint32_t smem_end;  // shared addresses are below it
  int eager;  // how often queued copies run early: 0 never, else one turn in `eager`
  std::vector<int> region_cache;  // by pc
  std::vector<std::unique_ptr<Cluster>> clusters;  // resident
  std::vector<int64_t> pending;  // clusters not started, last first
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
  void start_cluster(int64_t index);
  void start_cta(Cta&, const int64_t* block);
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
void acquire(Warp&, const std::shared_ptr<const Foreign>&, uint32_t mask);
void warp_sync(Warp&, uint32_t mask);
// What another CTA learns from a release; `writes`: else only that its reads are done.
std::shared_ptr<const Foreign> abroad(const Warp&, const Order&, bool writes = true);
std::shared_ptr<const Foreign> reads_only(const Foreign&);
void join(std::shared_ptr<const Foreign>& into, const std::shared_ptr<const Foreign>&);
bool known_elsewhere(const Order&, const Record&, bool async_proxy);
bool knows_of(const Warp&, int lane, const Cta&);
Level level(const Warp&, Scope);
void fence(Warp&, uint32_t mask, Scope);
void proxy_fence(Warp&, uint32_t mask);
void strong_write(Warp&, uint32_t mask, uint64_t addr, Ordering, Scope);
void strong_read(Warp&, uint32_t mask, uint64_t addr, Ordering, Scope);

// Whether the lane is ordered after an access; `async_proxy`: through a proxy fence, if it needs one.
inline bool ordered(Warp& w, int lane, const Record& rec, bool async_proxy) {
  if (!rec.clock) return true;
  const Order& o = lane < 32 && (w.partial_mask >> lane & 1) ? w.partial : w.base;
  if (rec.cta != w.cta->index) return known_elsewhere(o, rec, async_proxy);
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
  Cta* cta;       // of shared memory
};
enum : int { kStrong = 1, kAsync = 2, kNonCoherent = 4, kKeepInit = 8 };
Target resolve(Warp&, Space, uint64_t addr, uint32_t bytes, int lane, bool write, const char* what);
void shared_bounds(const Warp&, uint32_t addr, uint64_t bytes, const char* what);
void guard_mbarriers(Cta&, uint32_t addr, uint32_t bytes);
void count_conflicts(Warp&, const uint32_t* addr, uint32_t mask, int bytes);
uint64_t sync_key(const Target&);

// ---- races.cpp: what the checker says of an access to memory (of `Cta`, if shared)
void note_read(Warp&, const Target&, uint32_t bytes, int lane, int how);
void note_write(Warp&, const Target&, uint32_t bytes, int lane, int how);
void check_shared_read(Warp&, Cta&, uint32_t addr, uint32_t bytes, int lane, int how);
void check_shared_write(Warp&, Cta&, uint32_t addr, uint32_t bytes, int lane, int how);
// ... by lanes of one instruction, in their own CTA
void check_shared_reads(Warp&, const uint32_t* addr, uint32_t mask, uint32_t bytes, int how);
void check_shared_writes(Warp&, const uint32_t* addr, uint32_t mask, uint32_t bytes, int how);
void check_shared_rows(Warp&, const uint32_t* addr, int count, bool write);  // of 16 bytes, by the warp as one
void pend_shared_write(Warp&, Cta&, uint32_t addr, uint32_t bytes, int lane, int how);  // async write issued
void land_shared_write(Cta&, uint32_t addr, uint32_t bytes, const Record&);             // ... and done
void pend_shared_reads(Warp&, Cta&, const Range*, size_t count, int lane);              // async reads issued
void land_shared_reads(Warp&, Cta&, const Range*, size_t count, int lane);
void place_operand(Cta&, Operand&);  // a new one
void pend_operand(Warp&, Operand&);  // a read by wgmma issued
void land_operand(Warp&, Operand&);  // ... and done
void land_global_write(Warp&, uint64_t addr, uint32_t bytes, int lane, bool strong);
void check_remote_accesses_done(Cta&);
Record record(Warp&, int lane, int how);

// ---- cluster.cpp
Cta& cta_of(Warp&, uint32_t& addr, int lane, const char* what);  // strips the rank from a shared::cluster address
void complete_cluster_barrier(Cluster&);

// ---- others
void complete_copy(Warp&, CopyOp&);
void complete_copies(Warp&, int lane, std::vector<CopyOp>&);
void perform_request(const Request&);
Mbarrier& mbarrier(Warp&, Cta&, uint32_t addr, int lane, const char* what);
void mbarrier_complete(Cta&, Mbarrier&);
void arrive_for_copies(Warp&, Mbarrier&, int lane);
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
