// ld, st, atom, red, prefetch.
#include "alu.h"
#include "half.h"

namespace emu {

// args of ld and st: space, bytes, vector, extension (0 zero, 1 sign to 32, 2 sign to 64), 64-bit
// register, ordering, scope, flags (1 nc, 2 strong), address slot (-1 none), address is 64-bit, offset,
// registers...
enum { SPACE, BYTES, VEC, EXT, WIDE, ORDER, SCOPE, HOW, BASE, BASE64, OFFSET, REGS };

static uint64_t address(Warp& w, const Insn& in, int at, int l) {
  const int slot = in.arg[at];
  uint64_t base = 0;
  if (slot >= 0) base = in.arg[at + 1] ? w.d(slot)[l] : w.r(slot)[l];
  return base + int64_t(in.arg[at + 2]);
}

static void get(Warp& w, int slot, int l, const uint8_t* from, int bytes, int ext, bool wide) {
  uint64_t v = 0;
  memcpy(&v, from, bytes);
  if (ext) {
    const int shift = 64 - 8 * bytes;
    v = uint64_t(int64_t(v << shift) >> shift);
  }
  if (wide) w.d(slot)[l] = v;
  else w.r(slot)[l] = uint32_t(v);
}

// As `resolve`, for what is surely in the shared memory of the own CTA.
static inline Target resolve_own(Warp& w, Space space, uint64_t addr, uint32_t bytes, int lane, bool write, const char* what) {
  const bool shared = space == kShared || (space == kGeneric && (addr & kWindowMask) == kSharedWindow);
  const uint32_t at = uint32_t(addr), align = bytes >= 16 ? 16 : bytes;
  if (shared && !(at & (align - 1)) && at >= kSharedBase && at < w.vm->smem_end && bytes <= w.vm->smem_end - at)
    return {w.cta->smem.data() + at, kShared, at, w.cta};
  return resolve(w, space, addr, bytes, lane, write, what);
}

// Addresses of the active lanes (of the others: that of the first), if all are surely in the shared memory of the own
// CTA, aligned and in bounds.
static bool all_own(Warp& w, Space space, const Insn& in, uint32_t m, uint32_t bytes, uint32_t* at) {
  const int slot = in.arg[BASE], first = first_lane(m);
  const int64_t offset = in.arg[OFFSET];
  if ((space != kShared && space != kGeneric) || slot < 0) return false;
  if (space == kGeneric && (address(w, in, BASE, first) & kWindowMask) != kSharedWindow) return false;
  uint64_t windows = 0;
  uint32_t low = ~0u, high = 0, bits = 0;
  if (in.arg[BASE64]) {
    const uint64_t* const base = w.d(slot);
    for (int l = 0; l < 32; l++) {
      const uint64_t a = (m >> l & 1 ? base[l] : base[first]) + uint64_t(offset);
      windows |= a ^ kSharedWindow;
      at[l] = uint32_t(a);
    }
  } else {
    const uint32_t* const base = w.r(slot);
    for (int l = 0; l < 32; l++) at[l] = (m >> l & 1 ? base[l] : base[first]) + uint32_t(offset);
  }
  if (space == kGeneric && windows & kWindowMask) return false;
  for (int l = 0; l < 32; l++) {
    low = std::min(low, at[l]);
    high = std::max(high, at[l]);
    bits |= at[l];
  }
  const uint32_t align = std::min(bytes, 16u), end = w.vm->smem_end;
  return !(bits & (align - 1)) && low >= kSharedBase && high < end && bytes <= end - high;
}

static void load_shared(Warp& w, const Insn& in, uint32_t m, const uint32_t* at, int how) {
  const int bytes = in.arg[BYTES], vec = in.arg[VEC], total = bytes * vec;
  const uint8_t* const smem = w.cta->smem.data();
  w.vm->cfg.stats[kSharedRead] += uint64_t(total) * __builtin_popcount(m);
  if (w.vm->check) check_shared_reads(w, at, m, total, how);
  count_conflicts(w, at, m, total);
  for (int i = 0; i < vec; i++) {
    const int slot = in.arg[REGS + i];
    if (bytes == 4 && !in.arg[WIDE])
      lanes(w.r(slot), m, [&](int l) {
        uint32_t v;
        memcpy(&v, smem + at[l] + 4 * i, 4);
        return v;
      });
    else each_lane(m, [&](int l) { get(w, slot, l, smem + at[l] + bytes * i, bytes, in.arg[EXT], in.arg[WIDE]); });
  }
}

static void store_shared(Warp& w, const Insn& in, uint32_t m, const uint32_t* at) {
  const int bytes = in.arg[BYTES], vec = in.arg[VEC], total = bytes * vec;
  Cta& cta = *w.cta;
  w.vm->progress++;
  w.vm->cfg.stats[kSharedWritten] += uint64_t(total) * __builtin_popcount(m);
  each_lane(m, [&](int l) { guard_mbarriers(cta, at[l], total); });
  if (w.vm->check) check_shared_writes(w, at, m, total, 0);
  count_conflicts(w, at, m, total);
  for (int i = 0; i < vec; i++) {
    const int slot = in.arg[REGS + i];
    each_lane(m, [&](int l) {
      const void* from = in.arg[WIDE] ? (const void*)&w.d(slot)[l] : (const void*)&w.r(slot)[l];
      memcpy(cta.smem.data() + at[l] + bytes * i, from, bytes);
    });
  }
}

static Step ld(Warp& w, const Insn& in, uint32_t m) {
  const Space space = Space(in.arg[SPACE]);
  const int bytes = in.arg[BYTES], vec = in.arg[VEC], total = bytes * vec;
  const Ordering order = Ordering(in.arg[ORDER]);
  const Scope scope = Scope(in.arg[SCOPE]);
  const bool strong = in.arg[HOW] & 2;
  const int how = (strong ? kStrong : 0) | (in.arg[HOW] & 1 ? kNonCoherent : 0);
  uint32_t shared_addr[32], in_shared = 0;
  if (!strong && all_own(w, space, in, m, total, shared_addr)) {
    load_shared(w, in, m, shared_addr, how);
    return Step::kNext;
  }
  alignas(16) uint8_t value[32][32];  // all lanes read before any register is written
  const uint64_t one = address(w, in, BASE, first_lane(m));
  uint64_t differ = space != kGeneric || (one & kWindowMask) != kParamWindow;
  if (!differ) each_lane(m, [&](int l) { differ |= address(w, in, BASE, l) ^ one; });
  if (!differ) {  // one parameter, which nobody writes
    const Target t = resolve(w, space, one, total, first_lane(m), false, "load");
    each_lane(m, [&](int l) { memcpy(value[l], t.host, total); });
  } else each_lane(m, [&](int l) {
    const uint64_t addr = address(w, in, BASE, l);
    const Target t = resolve_own(w, space, addr, total, l, false, "load");
    if (strong) strong_read(w, 1u << l, sync_key(t), order, scope);
    note_read(w, t, total, l, how);
    if (t.cta == w.cta) {
      shared_addr[l] = uint32_t(t.addr);
      in_shared |= 1u << l;
    }
    memcpy(value[l], t.host, total);
  });
  if (in_shared) count_conflicts(w, shared_addr, in_shared, total);
  for (int i = 0; i < vec; i++) {
    const int slot = in.arg[REGS + i];
    if (bytes == 4 && !in.arg[WIDE]) {
      uint32_t* const r = w.r(slot);
      each_lane(m, [&](int l) { memcpy(&r[l], value[l] + 4 * i, 4); });
    } else {
      each_lane(m, [&](int l) { get(w, slot, l, value[l] + bytes * i, bytes, in.arg[EXT], in.arg[WIDE]); });
    }
  }
  return strong ? Step::kYield : Step::kNext;  // it may be a loop that waits for another warp
}

static Step st(Warp& w, const Insn& in, uint32_t m) {
  const Space space = Space(in.arg[SPACE]);
  const int bytes = in.arg[BYTES], vec = in.arg[VEC], total = bytes * vec;
  const Ordering order = Ordering(in.arg[ORDER]);
  const Scope scope = Scope(in.arg[SCOPE]);
  const bool strong = in.arg[HOW] & 2;
  uint32_t shared_addr[32], in_shared = 0;
  if (!strong && all_own(w, space, in, m, total, shared_addr)) {
    store_shared(w, in, m, shared_addr);
    return Step::kNext;
  }
  each_lane(m, [&](int l) {
    const Target t = resolve_own(w, space, address(w, in, BASE, l), total, l, true, "store");
    note_write(w, t, total, l, strong ? kStrong : 0);
    if (strong) strong_write(w, 1u << l, sync_key(t), order, scope);
    if (t.cta == w.cta) {
      shared_addr[l] = uint32_t(t.addr);
      in_shared |= 1u << l;
    }
    for (int i = 0; i < vec; i++) {
      const int slot = in.arg[REGS + i];
      const void* from = in.arg[WIDE] ? (const void*)&w.d(slot)[l] : (const void*)&w.r(slot)[l];
      memcpy(t.host + bytes * i, from, bytes);
    }
  });
  if (in_shared) count_conflicts(w, shared_addr, in_shared, total);
  return Step::kNext;
}

// ---- atomics
enum AtomOp { A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC };
enum AtomType { T_U32, T_S32, T_U64, T_S64, T_F32, T_F64, T_F16, T_BF16, T_F16X2, T_BF16X2, T_B16 };
static const int kAtomBytes[] = {4, 4, 8, 8, 4, 8, 2, 2, 4, 4, 2};

template <class T>
static T integer_atom(int op, T old, T b, T c) {
  switch (op) {
    case A_ADD: return old + b;
    case A_MIN: return std::min(old, b);
    case A_MAX: return std::max(old, b);
    case A_AND: return old & b;
    case A_OR: return old | b;
    case A_XOR: return old ^ b;
    case A_EXCH: return b;
    case A_CAS: return old == b ? c : old;
    case A_INC: return old >= b ? 0 : old + 1;
    default: return old == 0 || old > b ? b : old - 1;
  }
}
static uint32_t half_atom(int op, uint32_t a, uint32_t b, bool bf) {
  const double x = bf ? bf16_to_float(a) : half_to_float(a), y = bf ? bf16_to_float(b) : half_to_float(b);
  const double r = op == A_ADD ? x + y : op == A_MIN ? std::fmin(x, y) : std::fmax(x, y);
  return narrow(r, bf ? kBf16 : kHalf);
}
uint64_t apply_atom(int op, int type, uint64_t old, uint64_t b, uint64_t c) {
  switch (type) {
    case T_U32: return integer_atom<uint32_t>(op, uint32_t(old), uint32_t(b), uint32_t(c));
    case T_S32: return uint32_t(integer_atom<int32_t>(op, int32_t(old), int32_t(b), int32_t(c)));
    case T_U64: return integer_atom<uint64_t>(op, old, b, c);
    case T_S64: return uint64_t(integer_atom<int64_t>(op, int64_t(old), int64_t(b), int64_t(c)));
    case T_B16: return integer_atom<uint16_t>(op, uint16_t(old), uint16_t(b), uint16_t(c));
    case T_F32: {
      const float x = as_float(uint32_t(old)), y = as_float(uint32_t(b));
      return as_bits(op == A_ADD ? x + y : op == A_MIN ? std::fmin(x, y) : op == A_MAX ? std::fmax(x, y) : y);
    }
    case T_F64: return pack<f64>(unpack<f64>(old) + unpack<f64>(b));
    case T_F16: case T_BF16: return half_atom(op, old & 0xffff, b & 0xffff, type == T_BF16);
    default: {
      const bool bf = type == T_BF16X2;
      return half_atom(op, old & 0xffff, b & 0xffff, bf) | half_atom(op, old >> 16 & 0xffff, b >> 16 & 0xffff, bf) << 16;
    }
  }
}
int atom_bytes(int type) { return kAtomBytes[type]; }

// args: space, operation, type, ordering, scope, returns, vector, address (3), then D..., B..., C (cas)
static Step atom(Warp& w, const Insn& in, uint32_t m) {
  const int32_t* a = in.arg;
  const int op = a[1], type = a[2], bytes = kAtomBytes[type], vec = a[6];
  const Ordering order = Ordering(a[3]);
  const Scope scope = Scope(a[4]);
  const int32_t* regs = a + 10;
  const int32_t* from = regs + (a[5] ? vec : 0);
  bool idle = true;
  each_lane(m, [&](int l) {
    const Target t = resolve(w, Space(a[0]), address(w, in, 7, l), bytes * vec, l, true, "atomic");
    if (t.space != kShared && t.space != kGlobal) fail("ATOMIC: neither shared nor global memory");
    const uint64_t key = sync_key(t);
    const uint64_t progress = w.vm->progress;
    strong_read(w, 1u << l, key, order, scope);
    note_write(w, t, bytes * vec, l, kStrong);
    strong_write(w, 1u << l, key, order, scope);
    bool changed = false;
    for (int i = 0; i < vec; i++) {
      uint64_t old = 0;
      memcpy(&old, t.host + bytes * i, bytes);
      const auto value = [&](int slot) { return bytes == 8 ? w.d(slot)[l] : uint64_t(w.r(slot)[l]); };
      const uint64_t next = apply_atom(op, type, old, value(from[i]), op == A_CAS ? value(from[vec]) : 0);
      changed |= memcmp(&next, &old, bytes) != 0;
      memcpy(t.host + bytes * i, &next, bytes);
      if (a[5]) {
        if (bytes == 8) w.d(regs[i])[l] = old;
        else w.r(regs[i])[l] = uint32_t(old);
      }
    }
    if (!changed) w.vm->progress = progress;  // a failing compare-and-swap in a spin loop
    idle &= !changed;
  });
  return idle ? Step::kYield : Step::kNext;
}

static Step nothing(Warp&, const Insn&, uint32_t) { return Step::kNext; }

// Register operands of ld, st and atom follow the immediates; the front end states which are written.
static const OpDef kOps[] = {
    {"ld", "*", ld, 0, 0},
    {"ld.strong", "*", ld, 0, kPreempt},
    {"st", "*", st, 0, 0},
    {"st.strong", "*", st, 0, kPreempt},
    {"atom", "*", atom, 0, kPreempt},
    {"prefetch", "*", nothing, 0, 0},
};
EMU_TABLE(memory_ops, kOps)

}  // namespace emu
