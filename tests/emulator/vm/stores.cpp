// Bulk and tensor copies from shared to global memory, reductions, and their groups.
#include "tensor_map.h"

namespace emu {

uint64_t apply_atom(int op, int type, uint64_t old, uint64_t b, uint64_t c);
int atom_bytes(int type);

static void start_store(Warp& w, BulkOp&& op, int l) {
  op.pc = w.pc;
  shared_bounds(w, op.read.addr, op.read.bytes, "bulk store");
  pend_shared_reads(w, *w.cta, &op.read, 1, l);
  w.vm->cfg.stats[kSharedRead] += op.read.bytes;
  for (const auto& [addr, bytes] : op.writes) {
    w.vm->cfg.write_bytes[w.vm->find_region(w, addr, bytes, true, "bulk store")] += bytes;
    note_write(w, {nullptr, kGlobal, addr, nullptr}, bytes, l, kAsync | kKeepInit | (op.reduce ? kStrong : 0));
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
    check_coordinates(map, coord, true);
    BulkOp op;
    op.reduce = in.arg[7];
    op.type = map.type;
    op.swizzle = map.swizzle;
    op.src = src;
    op.read = {src, box_bytes(map)};
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
    op.read = {op.src, bytes};
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
    const auto [src, bytes] = op.read;
    op.data.resize(bytes);
    for (uint32_t i = 0; i < bytes; i += 16)
      memcpy(&op.data[i], w.cta->smem.data() + swizzled(src + i, op.swizzle), std::min(16u, bytes - i));
    land_shared_reads(w, *w.cta, &op.read, 1, l);
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
      while (groups.size() > keep) groups.erase(groups.begin());
  });
  return Step::kNext;
}

static const OpDef kOps[] = {
    {"tensor.store", "*", tensor_store, 0, kPreempt}, {"bulk.store", "*", bulk_store, 0, kPreempt},
    {"cp.async.bulk.commit_group", "", commit, 0, kPreempt}, {"bulk.wait", "ii", wait, 0, kPreempt},
};
OpTable store_ops() { return {kOps, sizeof kOps / sizeof kOps[0]}; }

}  // namespace emu
