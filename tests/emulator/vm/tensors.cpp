// Bulk and tensor copies (TMA), both ways; reductions; their completion.
#include "half.h"
#include "vm.h"

namespace emu {

uint64_t apply_atom(int op, int type, uint64_t old, uint64_t b, uint64_t c);
int atom_bytes(int type);

// The front end's own map (tensor_map.py), as large as the driver's opaque one.
struct TensorMap {
  uint64_t magic, base;
  uint32_t rank, elem, swizzle, fill;
  uint64_t dim[5], stride[4];
  uint16_t box[5];
  uint8_t step[5], type;
  uint8_t pad[8];
};
static_assert(sizeof(TensorMap) == 128, "size of CUtensorMap");
constexpr uint64_t kMagic = 0x7E4507AB;

static uint64_t address(Warp& w, const int32_t* a, int l) {
  return (a[0] < 0 ? 0 : a[1] ? w.d(a[0])[l] : w.r(a[0])[l]) + int64_t(a[2]);
}
static uint32_t shared_address(Warp& w, const int32_t* a, int l) {
  const uint64_t v = address(w, a, l);
  if ((v & kWindowMask) && (v & kWindowMask) != kSharedWindow) fail("BULK COPY: not a shared address");
  return uint32_t(v);
}

static const TensorMap& tensor_map(Warp& w, uint64_t addr, int l, int rank) {
  if (addr & 63) fail("TENSOR MAP: at 0x%llx, which is not a multiple of 64", (unsigned long long)addr);
  const Target t = resolve(w, kGeneric, addr, 16, l, false, "tensor map");
  resolve(w, kGeneric, addr + 112, 16, l, false, "tensor map");
  if (t.space != kParam && t.space != kGlobal) fail("TENSOR MAP: in shared or local memory");
  const auto* map = reinterpret_cast<const TensorMap*>(t.host);
  if (map->magic != kMagic) fail("TENSOR MAP: at 0x%llx is none that was encoded", (unsigned long long)addr);
  if (int(map->rank) != rank) fail("TENSOR MAP: a map of rank %u in an instruction of rank %d", map->rank, rank);
  return *map;
}

static uint32_t box_count(const TensorMap& m, int d) { return d ? (m.box[d] + m.step[d] - 1) / m.step[d] : m.box[0]; }
static uint32_t box_bytes(const TensorMap& m) {
  uint32_t n = m.elem;
  for (int d = 0; d < 5; d++) n *= d < int(m.rank) ? box_count(m, d) : 1;
  return n;
}
static uint32_t swizzled(uint32_t addr, uint32_t mode) { return addr ^ ((addr >> 7 & ((1u << mode) - 1)) << 4); }

// Calls f(offset in the box, global address, bytes) for the runs of elements inside the tensor.
template <class F>
static void segments(const TensorMap& m, const int* coord, F f) {
  const int64_t first = std::max<int64_t>(0, -int64_t(coord[0]));
  const int64_t last = std::min<int64_t>(m.box[0], int64_t(m.dim[0]) - coord[0]);
  if (first >= last) return;
  uint32_t count[5] = {1, 1, 1, 1, 1};
  for (int d = 1; d < int(m.rank); d++) count[d] = box_count(m, d);
  uint32_t row = 0;
  for (uint32_t i4 = 0; i4 < count[4]; i4++)
    for (uint32_t i3 = 0; i3 < count[3]; i3++)
      for (uint32_t i2 = 0; i2 < count[2]; i2++)
        for (uint32_t i1 = 0; i1 < count[1]; i1++, row++) {
          const uint32_t at[5] = {0, i1, i2, i3, i4};
          uint64_t addr = m.base + uint64_t(coord[0] + first) * m.elem;
          bool inside = true;
          for (int d = 1; d < int(m.rank); d++) {
            const int64_t x = int64_t(coord[d]) + int64_t(at[d]) * m.step[d];
            inside &= x >= 0 && x < int64_t(m.dim[d]);
            addr += uint64_t(x) * m.stride[d - 1];
          }
          if (inside) f(uint32_t((row * m.box[0] + first) * m.elem), addr, uint32_t((last - first) * m.elem));
        }
}

static uint32_t fill_pattern(const TensorMap& m) {
  if (!m.fill) return 0;
  return m.type == 9 || m.type == 6 ? 0x7fff7fff : 0x7fffffff;
}

// ---- loads
static void start_load(Warp& w, TensorRequest& t, uint32_t align, int l) {
  if (t.dst & (align - 1)) fail("MISALIGNED: a copy to shared address %u, which is not a multiple of %u", t.dst, align);
  shared_bounds(w, t.dst, t.bytes, "bulk copy");
  Mbarrier& b = mbarrier(w, t.mbar, l, "bulk copy");
  if (!b.init_fenced && w.vm->check)
    fail("MBARRIER: a copy completes on shared address %u, whose init at @%d@ has no fence.mbarrier_init or fence.proxy.async after it",
         t.mbar, b.init_pc);
  guard_mbarriers(w, t.dst, t.bytes);
  pend_shared_write(w, t.dst, t.bytes, l, kAsync);
  memset(w.cta->smem.data() + t.dst, kPoisonByte, t.bytes);
  w.vm->cfg.stats[kSharedWritten] += t.bytes;
  w.cta->queue.push_back(t);
  w.vm->progress++;
}
static void note_source(Warp& w, uint64_t addr, uint32_t bytes, int l) {
  w.vm->cfg.read_bytes[w.vm->find_region(w, addr, bytes, false, "bulk copy")] += bytes;
  note_read(w, {nullptr, kGlobal, addr}, bytes, l, kAsync);
}

// args: rank, dst (3), map (3), mbarrier (3), coordinates...
static Step tensor_load(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) {
    TensorRequest t = {};
    t.kind = TensorRequest::kTensor;
    const int rank = in.arg[0];
    const TensorMap& map = tensor_map(w, address(w, in.arg + 4, l), l, rank);
    t.src = uint64_t(reinterpret_cast<uintptr_t>(&map));
    t.dst = shared_address(w, in.arg + 1, l);
    t.mbar = shared_address(w, in.arg + 7, l);
    t.bytes = box_bytes(map);
    t.warp = w.id;
    t.lane = l;
    t.pc = w.pc;
    for (int d = 0; d < rank; d++) t.coord[d] = int(w.r(in.arg[10 + d])[l]);
    segments(map, t.coord, [&](uint32_t, uint64_t addr, uint32_t bytes) { note_source(w, addr, bytes, l); });
    start_load(w, t, 128, l);
  });
  return Step::kNext;
}

// args: dst (3), src (3), bytes, mbarrier (3)
static Step bulk_load(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) {
    TensorRequest t = {};
    t.kind = TensorRequest::kBulk;
    t.dst = shared_address(w, in.arg, l);
    t.src = address(w, in.arg + 3, l);
    t.bytes = w.r(in.arg[6])[l];
    t.mbar = shared_address(w, in.arg + 7, l);
    t.warp = w.id;
    t.lane = l;
    t.pc = w.pc;
    if (t.bytes & 15) fail("BULK COPY: %u bytes is not a multiple of 16", t.bytes);
    if (t.src & 15) fail("MISALIGNED: a bulk copy from 0x%llx, which is not a multiple of 16", (unsigned long long)t.src);
    if (!t.bytes) return;
    note_source(w, t.src, t.bytes, l);
    start_load(w, t, 16, l);
  });
  return Step::kNext;
}

void perform_request(Cta& cta, const TensorRequest& t) {
  Warp& w = *cta.warps[t.warp];
  const auto found = cta.mbarrier_at.find(t.mbar);
  if (found == cta.mbarrier_at.end()) fail("MBARRIER: a copy completes on shared address %u, which is no mbarrier any more", t.mbar);
  Mbarrier& b = cta.mbarriers[found->second];
  if (t.kind == TensorRequest::kCopyArrive) {
    for (auto& g : w.copy_groups[t.lane])
      for (CopyOp& c : g) complete_copy(w, c);
    for (CopyOp& c : w.open_copies[t.lane]) complete_copy(w, c);
    Order order;
    if (w.vm->check) order = release(w, 1u << t.lane);
    mbarrier_arrive(w, b, t.lane, 1, w.vm->check ? &order : nullptr);
    return;
  }
  uint8_t* const smem = cta.smem.data();
  if (t.kind == TensorRequest::kBulk) {
    memcpy(smem + t.dst, reinterpret_cast<const void*>(t.src), t.bytes);
  } else {
    const auto& map = *reinterpret_cast<const TensorMap*>(t.src);
    std::vector<uint8_t> box(t.bytes);
    const uint32_t pattern = fill_pattern(map);
    if (pattern)
      for (uint32_t i = 0; i + 4 <= t.bytes; i += 4) memcpy(&box[i], &pattern, 4);
    segments(map, t.coord, [&](uint32_t at, uint64_t addr, uint32_t bytes) {
      memcpy(&box[at], reinterpret_cast<const void*>(addr), bytes);
    });
    for (uint32_t i = 0; i < t.bytes; i += 16) memcpy(smem + swizzled(t.dst + i, map.swizzle), &box[i], 16);
  }
  Record r;
  r.clock = uint32_t(b.phase) + 1;
  r.pc = t.pc;
  r.cta = int32_t(cta.index);
  r.warp = uint8_t(kMbarrierWriter + b.slot);
  land_shared_write(w, t.dst, t.bytes, r);
  b.tx -= t.bytes;
  b.landed = true;
  mbarrier_complete(cta, b);
}

// ---- stores
static void start_store(Warp& w, BulkOp&& op, int l) {
  op.pc = w.pc;
  for (const auto& [addr, bytes] : op.reads) {
    shared_bounds(w, addr, bytes, "bulk store");
    pend_shared_read(w, addr, bytes, l);
    w.vm->cfg.stats[kSharedRead] += bytes;
  }
  for (const auto& [addr, bytes] : op.writes) {
    w.vm->cfg.write_bytes[w.vm->find_region(w, addr, bytes, true, "bulk store")] += bytes;
    note_write(w, {nullptr, kGlobal, addr}, bytes, l, kAsync | kKeepInit | (op.reduce ? kStrong : 0));
  }
  w.open_bulk[l].push_back(std::move(op));
}

// args: rank, map (3), src (3), reduction (0 none), coordinates...
static Step tensor_store(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) {
    const int rank = in.arg[0];
    const TensorMap& map = tensor_map(w, address(w, in.arg + 1, l), l, rank);
    const uint32_t src = shared_address(w, in.arg + 4, l);
    if (src & 127) fail("MISALIGNED: a tensor store from shared address %u, which is not a multiple of 128", src);
    int coord[5] = {};
    for (int d = 0; d < rank; d++) coord[d] = int(w.r(in.arg[8 + d])[l]);
    BulkOp op;
    op.reduce = in.arg[7];
    op.type = map.type;
    op.swizzle = map.swizzle;
    op.src = src;
    op.reads.push_back({src, box_bytes(map)});
    segments(map, coord, [&](uint32_t at, uint64_t addr, uint32_t bytes) {
      op.writes.push_back({addr, bytes});
      op.from.push_back(at);
    });
    start_store(w, std::move(op), l);
  });
  return Step::kNext;
}

// args: dst (3), src (3), bytes, reduction, type
static Step bulk_store(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) {
    BulkOp op;
    const uint64_t dst = address(w, in.arg, l);
    op.src = shared_address(w, in.arg + 3, l);
    const uint32_t bytes = w.r(in.arg[6])[l];
    op.reduce = in.arg[7];
    op.atom_type = in.arg[8];
    if (bytes & 15) fail("BULK COPY: %u bytes is not a multiple of 16", bytes);
    if ((dst | op.src) & 15) fail("MISALIGNED: a bulk store to 0x%llx from shared address %u: not multiples of 16",
                                  (unsigned long long)dst, op.src);
    if (!bytes) return;
    op.reads.push_back({op.src, bytes});
    op.writes.push_back({dst, bytes});
    op.from.push_back(0);
    start_store(w, std::move(op), l);
  });
  return Step::kNext;
}

static void reduce_into(uint8_t* to, const uint8_t* from, uint32_t bytes, int op, int type) {
  const int size = atom_bytes(type);
  for (uint32_t i = 0; i < bytes; i += size) {
    uint64_t a = 0, b = 0;
    memcpy(&a, to + i, size);
    memcpy(&b, from + i, size);
    const uint64_t r = apply_atom(op, type, a, b, 0);
    memcpy(to + i, &r, size);
  }
}

void land_bulk(Warp& w, int l, BulkOp& op, bool write_too) {
  if (!op.read_done) {
    op.read_done = true;
    const auto [src, bytes] = op.reads[0];
    op.data.resize(bytes);
    for (uint32_t i = 0; i < bytes; i += 16)
      memcpy(&op.data[i], w.cta->smem.data() + swizzled(src + i, op.swizzle), std::min(16u, bytes - i));
    land_shared_read(w, src, bytes, l);
    w.vm->progress++;
  }
  if (!write_too || op.write_done) return;
  op.write_done = true;
  static const int kTypes[] = {0, 0, 0, 1, 2, 3, 6, 4, 5, 7, 4, 4, 4};  // tensor map type -> atomic type
  const int type = op.atom_type >= 0 ? op.atom_type : kTypes[op.type];
  for (size_t i = 0; i < op.writes.size(); i++) {
    const auto [addr, bytes] = op.writes[i];
    auto* to = reinterpret_cast<uint8_t*>(addr);
    if (op.reduce) reduce_into(to, &op.data[op.from[i]], bytes, op.reduce - 1, type);
    else memcpy(to, &op.data[op.from[i]], bytes);
    land_global_write(w, addr, bytes, l, op.reduce != 0);
  }
  w.vm->progress++;
}

static Step commit(Warp& w, const Insn&, uint32_t m) {
  each_lane(m, [&](int l) { w.bulk_groups[l].push_back(std::exchange(w.open_bulk[l], {})); });
  return Step::kNext;
}
// args: groups that may be pending, reads only
static Step wait(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) {
    auto& groups = w.bulk_groups[l];
    const size_t keep = size_t(in.arg[0]), n = groups.size();
    for (size_t i = 0; i + keep < n; i++)
      for (BulkOp& op : groups[i]) land_bulk(w, l, op, !in.arg[1]);
    if (!in.arg[1])
      while (groups.size() > keep) groups.pop_front();
  });
  return Step::kNext;
}

// args: rank, map (3)
static Step prefetch_tensor(Warp& w, const Insn& in, uint32_t m) {
  each_lane(m, [&](int l) { tensor_map(w, address(w, in.arg + 1, l), l, in.arg[0]); });
  return Step::kNext;
}

static const OpDef kOps[] = {
    {"tensor.load", "*", tensor_load, 0, kPreempt}, {"tensor.store", "*", tensor_store, 0, kPreempt},
    {"bulk.load", "*", bulk_load, 0, kPreempt}, {"bulk.store", "*", bulk_store, 0, kPreempt},
    {"tensor.prefetch", "*", prefetch_tensor, 0, 0},
    {"cp.async.bulk.commit_group", "", commit, 0, kPreempt}, {"bulk.wait", "ii", wait, 0, kPreempt},
};
OpTable tensor_ops() { return {kOps, sizeof kOps / sizeof kOps[0]}; }

}  // namespace emu
