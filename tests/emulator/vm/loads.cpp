// Bulk and tensor copies into shared memory, of this CTA or of others of its cluster, and stores that complete on an
// mbarrier.
#include "tensor_map.h"

namespace emu {

uint64_t apply_atom(int op, int type, uint64_t old, uint64_t b, uint64_t c);
int atom_bytes(int type);

static Request request(Warp& w, Request::Kind kind, int l) {
  Request t = {};
  t.kind = kind;
  t.from = t.to = w.cta;
  t.warp = w.id;
  t.lane = l;
  t.pc = w.pc;
  return t;
}

// Checks a request whose `to`, `dst`, `mbar` and `bytes` are set, and queues it.
static void start(Warp& w, const Request& t, uint32_t align, int l) {
  if (t.dst & (align - 1)) fail("MISALIGNED: a copy to shared address %u, which is not a multiple of %u", t.dst, align);
  shared_bounds(w, t.dst, t.bytes, "bulk copy");
  Mbarrier& b = mbarrier(w, *t.to, t.mbar, l, "bulk copy");
  if (!b.init_fenced && w.vm->check)
    fail("MBARRIER: a copy completes on shared address %u, whose init at @%d@ has no fence.mbarrier_init or fence.proxy.async after it",
         t.mbar, b.init_pc);
  guard_mbarriers(*t.to, t.dst, t.bytes);
  const bool reduce = t.kind == Request::kReduce;  // they commute; what they add to stays
  pend_shared_write(w, *t.to, t.dst, t.bytes, l, kAsync | (reduce ? kStrong : 0));
  if (!reduce) memset(t.to->smem.data() + t.dst, kPoisonByte, t.bytes);
  w.vm->cfg.stats[kSharedWritten] += t.bytes;
  if (t.to != w.cta) w.vm->cfg.stats[kRemoteBytes] += t.bytes;
  t.to->queue.push_back(t);
  w.vm->progress++;
}

static void note_source(Warp& w, uint64_t addr, uint32_t bytes, int l) {
  w.vm->cfg.read_bytes[w.vm->find_region(w, addr, bytes, false, "bulk copy")] += bytes;
  note_read(w, {nullptr, kGlobal, addr, nullptr}, bytes, l, kAsync);
}

// Sends a request to its own CTA, or to each CTA of a multicast mask, at the same offsets.
static void send(Warp& w, Request& t, const Insn& in, int mask_arg, uint32_t align, int l) {
  if (in.arg[mask_arg] < 0) return start(w, t, align, l);
  const uint32_t mask = w.r(in.arg[mask_arg])[l] & 0xffff;
  const int size = w.cta->cluster->size();
  if (!mask || mask >> size) fail("CLUSTER: multicast mask 0x%x in a cluster of %d", mask, size);
  for (int rank = 0; rank < size; rank++) {
    if (!(mask >> rank & 1)) continue;
    uint32_t addr = t.dst | uint32_t(rank + 1) << kRankShift;
    t.to = &cta_of(w, addr, l, "a multicast copy");
    start(w, t, align, l);
  }
}

// The destination and its mbarrier, which are in one CTA.
static void target(Warp& w, Request& t, const int32_t* dst, const int32_t* mbar, int l) {
  Cta* other;
  t.dst = shared_address(w, dst, l, &t.to);
  t.mbar = shared_address(w, mbar, l, &other);
  if (other != t.to) fail("BULK COPY: the mbarrier is not in the CTA of the destination");
}

// args: rank, dst (3), map (3), mbarrier (3), multicast mask or -1, coordinates...
static Step tensor_load(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) {
    Request t = request(w, Request::kTensor, l);
    const int rank = in.arg[0];
    const TensorMap& map = tensor_map(w, address(w, in.arg + 4, l), l, rank);
    t.src = uint64_t(reinterpret_cast<uintptr_t>(&map));
    target(w, t, in.arg + 1, in.arg + 7, l);
    t.bytes = box_bytes(map);
    for (int d = 0; d < rank; d++) t.coord[d] = int(w.r(in.arg[11 + d])[l]);
    check_coordinates(map, t.coord, false);
    segments(map, t.coord, [&](uint32_t, uint64_t addr, uint32_t bytes) { note_source(w, addr, bytes, l); });
    send(w, t, in, 10, 128, l);
  });
  return Step::kNext;
}

// args: dst (3), src (3), bytes, mbarrier (3), multicast mask or -1, source is shared memory
static Step bulk_load(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) {
    const bool shared = in.arg[11];
    Request t = request(w, shared ? Request::kShared : Request::kBulk, l);
    t.src = shared ? shared_address(w, in.arg + 3, l) : address(w, in.arg + 3, l);
    t.bytes = w.r(in.arg[6])[l];
    target(w, t, in.arg, in.arg + 7, l);
    if (t.bytes & 15) fail("BULK COPY: %u bytes is not a multiple of 16", t.bytes);
    if (t.src & 15) fail("MISALIGNED: a bulk copy from 0x%llx, which is not a multiple of 16", (unsigned long long)t.src);
    if (!t.bytes) return;
    if (shared) {
      shared_bounds(w, uint32_t(t.src), t.bytes, "bulk copy");
      const Range source = {uint32_t(t.src), t.bytes};
      pend_shared_reads(w, *w.cta, &source, 1, l);
      w.vm->cfg.stats[kSharedRead] += t.bytes;
    } else {
      note_source(w, t.src, t.bytes, l);
    }
    send(w, t, in, 10, 16, l);
  });
  return Step::kNext;
}

// st.async and red.async. args: dst (3), mbarrier (3), bytes of a value, values, operation (-1 store), type, values...
static Step async_store(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) {
    const int size = in.arg[6], count = in.arg[7];
    Request t = request(w, in.arg[8] < 0 ? Request::kStore : Request::kReduce, l);
    t.bytes = uint32_t(size * count);
    t.op = in.arg[8];
    t.type = in.arg[9];
    target(w, t, in.arg, in.arg + 3, l);
    for (int i = 0; i < count; i++) {
      const int slot = in.arg[10 + i];
      const uint64_t v = size == 8 ? w.d(slot)[l] : w.r(slot)[l];
      memcpy(t.value + i * size, &v, size);
    }
    start(w, t, t.bytes, l);
  });
  return Step::kNext;
}

// ---- when they happen
static void fetch_box(const Request& t, uint8_t* smem) {
  const auto& map = *reinterpret_cast<const TensorMap*>(t.src);
  std::vector<uint8_t> box(t.bytes);
  if (const uint32_t pattern = fill_pattern(map))
    for (uint32_t i = 0; i + 4 <= t.bytes; i += 4) memcpy(&box[i], &pattern, 4);
  segments(map, t.coord, [&](uint32_t at, uint64_t addr, uint32_t bytes) {
    memcpy(&box[at], reinterpret_cast<const void*>(addr), bytes);
  });
  for (uint32_t i = 0; i < t.bytes; i += 16) memcpy(smem + swizzled(t.dst + i, map.swizzle), &box[i], 16);
}

static void move(Warp& w, const Request& t, uint8_t* smem) {
  switch (t.kind) {
    case Request::kTensor: return fetch_box(t, smem);
    case Request::kBulk: memcpy(smem + t.dst, reinterpret_cast<const void*>(t.src), t.bytes); return;
    case Request::kShared: {
      memcpy(smem + t.dst, t.from->smem.data() + t.src, t.bytes);
      const Range source = {uint32_t(t.src), t.bytes};
      return land_shared_reads(w, *t.from, &source, 1, t.lane);
    }
    case Request::kReduce: {
      uint64_t old = 0, value = 0;
      memcpy(&old, smem + t.dst, t.bytes);
      memcpy(&value, t.value, t.bytes);
      const uint64_t next = apply_atom(t.op, t.type, old, value, 0);
      memcpy(smem + t.dst, &next, t.bytes);
      return;
    }
    default: memcpy(smem + t.dst, t.value, t.bytes);
  }
}

void perform_request(const Request& t) {
  Warp& w = *t.from->warps[t.warp];
  Cta& cta = *t.to;
  if (!cta.live) fail("CLUSTER: a copy into the shared memory of a CTA that has exited");
  const auto found = cta.mbarrier_at.find(t.mbar);
  if (found == cta.mbarrier_at.end()) fail("MBARRIER: a copy completes on shared address %u, which is no mbarrier any more", t.mbar);
  Mbarrier& b = cta.mbarriers[found->second];
  if (t.kind == Request::kCopyArrive) {
    for (auto& g : w.copy_groups[t.lane])
      for (CopyOp& c : g) complete_copy(w, c);
    for (CopyOp& c : w.open_copies[t.lane]) complete_copy(w, c);
    return arrive_for_copies(w, b, t.lane);
  }
  move(w, t, cta.smem.data());
  Record r;
  r.clock = uint32_t(b.phase) + 1;
  r.pc = t.pc;
  r.cta = int32_t(cta.index);
  r.warp = uint8_t(kMbarrierWriter + b.slot);
  r.strong = t.kind == Request::kReduce;
  land_shared_write(cta, t.dst, t.bytes, r);
  b.tx -= t.bytes;
  b.landed = true;
  mbarrier_complete(cta, b);
}

// args: rank, map (3)
static Step prefetch_tensor(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) { tensor_map(w, address(w, in.arg + 1, l), l, in.arg[0]); });
  return Step::kNext;
}

static const OpDef kOps[] = {
    {"tensor.load", "*", tensor_load, 0, kPreempt}, {"bulk.load", "*", bulk_load, 0, kPreempt},
    {"async.store", "*", async_store, 0, kPreempt}, {"tensor.prefetch", "*", prefetch_tensor, 0, 0},
};
OpTable load_ops() { return {kOps, sizeof kOps / sizeof kOps[0]}; }

}  // namespace emu
