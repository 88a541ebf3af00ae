// Bits: logic, shifts, fields, permutes, moves.
#include "alu.h"

namespace emu {

static u32 bfe(u32 a, u32 b, u32 c, bool is_signed) {
  const u32 pos = b & 255, len = c & 255;
  if (!len) return 0;
  const u32 sign_bit = std::min(pos + len - 1, 31u);
  const bool fill = is_signed && (a >> sign_bit & 1);
  u32 r = pos > 31 ? 0 : a >> pos;
  const u32 have = pos > 31 ? 0 : std::min(len, 32 - pos);
  const u32 keep = have >= 32 ? ~0u : (1u << have) - 1;
  r &= keep;
  return fill ? r | ~keep : r;
}
static u64 bfe64(u64 a, u32 b, u32 c, bool is_signed) {
  const u32 pos = b & 255, len = c & 255;
  if (!len) return 0;
  const u32 sign_bit = std::min(pos + len - 1, 63u);
  const bool fill = is_signed && (a >> sign_bit & 1);
  u64 r = pos > 63 ? 0 : a >> pos;
  const u32 have = pos > 63 ? 0 : std::min(len, 64 - pos);
  const u64 keep = have >= 64 ? ~0ull : (1ull << have) - 1;
  r &= keep;
  return fill ? r | ~keep : r;
}
template <class T>
static T bfi(T a, T b, u32 c, u32 d) {
  const u32 pos = c & 255, len = d & 255, bits = 8 * sizeof(T);
  if (pos >= bits || !len) return b;
  const T field = (len >= bits ? ~T(0) : (T(1) << len) - 1) << pos;
  return (b & ~field) | ((a << pos) & field);
}
static u32 bfind(u32 a, bool shiftamt) { return a ? (shiftamt ? __builtin_clz(a) : 31 - __builtin_clz(a)) : ~0u; }
static u32 bfind64(u64 a, bool shiftamt) { return a ? (shiftamt ? __builtin_clzll(a) : 63 - __builtin_clzll(a)) : ~0u; }
static u32 brev(u32 v) {
  v = (v >> 1 & 0x55555555) | (v & 0x55555555) << 1;
  v = (v >> 2 & 0x33333333) | (v & 0x33333333) << 2;
  v = (v >> 4 & 0x0f0f0f0f) | (v & 0x0f0f0f0f) << 4;
  return __builtin_bswap32(v);
}
static u32 prmt(u32 a, u32 b, u32 sel, int mode) {
  const u64 both = u64(b) << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    int pick, sign = 0;
    const int s = sel & 3;
    switch (mode) {
      case 0: pick = sel >> (4 * i) & 7; sign = sel >> (4 * i) & 8; break;
      case 1: pick = s + i; break;                          // f4e
      case 2: pick = (s - i) & 7; break;                    // b4e
      case 3: pick = s; break;                              // rc8
      case 4: pick = std::max(i, s); break;                 // ecl
      case 5: pick = std::min(i, s); break;                 // ecr
      default: pick = (sel & 1) * 2 + (i & 1); break;       // rc16
    }
    u32 byte = u32(both >> (8 * pick)) & 255;
    if (sign) byte = byte & 128 ? 255 : 0;
    r |= byte << (8 * i);
  }
  return r;
}
static u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 r = 0;
  if (table & 1) r |= ~a & ~b & ~c;
  if (table & 2) r |= ~a & ~b & c;
  if (table & 4) r |= ~a & b & ~c;
  if (table & 8) r |= ~a & b & c;
  if (table & 16) r |= a & ~b & ~c;
  if (table & 32) r |= a & ~b & c;
  if (table & 64) r |= a & b & ~c;
  if (table & 128) r |= a & b & c;
  return r;
}
template <int MODE>
static Step do_prmt(Warp& w, const Insn& in, uint32_t m) {
  return map3<u32, u32, u32, u32>(w, in, m, [](u32 a, u32 b, u32 c) { return prmt(a, b, c, MODE); });
}
static Step do_lop3(Warp& w, const Insn& in, uint32_t m) {
  const u32 table = *w.r(in.arg[4]);
  return map3<u32, u32, u32, u32>(w, in, m, [=](u32 a, u32 b, u32 c) { return lop3(a, b, c, table); });
}
template <class T>
static Step do_bfi(Warp& w, const Insn& in, uint32_t m) {
  const u32* pos = w.r(in.arg[3]);
  const u32* len = w.r(in.arg[4]);
  const auto* a = source<T>(w, in.arg[1]);
  const auto* b = source<T>(w, in.arg[2]);
  lanes(dest<T>(w, in.arg[0]), m, [=](int l) { return bfi<T>(T(a[l]), T(b[l]), pos[l], len[l]); });
  return Step::kNext;
}
template <bool LEFT>
static Step do_shf(Warp& w, const Insn& in, uint32_t m) {
  const bool wrap = in.flags & kWrap;
  return map3<u32, u32, u32, u32>(w, in, m, [=](u32 a, u32 b, u32 c) {
    const u32 n = wrap ? c & 31 : std::min(c, 32u);
    const u64 both = u64(b) << 32 | a;
    return LEFT ? u32(both << n >> 32) : u32(n == 32 ? both >> 32 : both >> n);
  });
}
static Step do_bfind(Warp& w, const Insn& in, uint32_t m, bool is_signed, bool wide) {
  const bool amount = in.flags & kShiftamt;
  if (wide) return map1<u32, u64>(w, in, m, [=](u64 a) { return bfind64(is_signed && s64(a) < 0 ? ~a : a, amount); });
  return map1<u32, u32>(w, in, m, [=](u32 a) { return bfind(is_signed && s32(a) < 0 ? ~a : a, amount); });
}

// ---- predicates
static Step p_and(Warp& w, const Insn& in, uint32_t m) { w.set_p(in.arg[0], m, w.p(in.arg[1]) & w.p(in.arg[2])); return Step::kNext; }
static Step p_or(Warp& w, const Insn& in, uint32_t m) { w.set_p(in.arg[0], m, w.p(in.arg[1]) | w.p(in.arg[2])); return Step::kNext; }
static Step p_xor(Warp& w, const Insn& in, uint32_t m) { w.set_p(in.arg[0], m, w.p(in.arg[1]) ^ w.p(in.arg[2])); return Step::kNext; }
static Step p_not(Warp& w, const Insn& in, uint32_t m) { w.set_p(in.arg[0], m, ~w.p(in.arg[1])); return Step::kNext; }
static Step p_mov(Warp& w, const Insn& in, uint32_t m) { w.set_p(in.arg[0], m, w.p(in.arg[1])); return Step::kNext; }

template <class T>
static Step selp(Warp& w, const Insn& in, uint32_t m) {
  const auto* a = source<T>(w, in.arg[1]);
  const auto* b = source<T>(w, in.arg[2]);
  const u32 p = w.p(in.arg[3]);
  lanes(dest<T>(w, in.arg[0]), m, [=](int l) { return p >> l & 1 ? a[l] : b[l]; });
  return Step::kNext;
}
// Vector moves: one register of 2 or 4 pieces.
template <class W, class P, int N>
static Step join(Warp& w, const Insn& in, uint32_t m) {
  const Slot<P>* part[N];
  for (int i = 0; i < N; i++) part[i] = source<P>(w, in.arg[1 + i]);
  lanes(dest<W>(w, in.arg[0]), m, [&](int l) {
    W v = 0;
    for (int i = 0; i < N; i++) v |= W(P(part[i][l])) << (8 * sizeof(P) * i);
    return Slot<W>(v);
  });
  return Step::kNext;
}
template <class W, class P, int N>
static Step split(Warp& w, const Insn& in, uint32_t m) {
  Slot<W> copy[32];
  memcpy(copy, source<W>(w, in.arg[N]), sizeof copy);
  for (int i = 0; i < N; i++)
    lanes(dest<P>(w, in.arg[i]), m, [&](int l) { return Slot<P>(P(copy[l] >> (8 * sizeof(P) * i))); });
  return Step::kNext;
}

#define LOGIC(B, D1, D2, T)                                                                            \
  OP2("and." B, D2, T, T, T, a & b), OP2("or." B, D2, T, T, T, a | b), OP2("xor." B, D2, T, T, T, a ^ b), \
      OP1("not." B, D1, T, T, ~a), OP1("cnot." B, D1, T, T, a == 0 ? 1 : 0)
#define MOVES(S, D1, D3, T) OP1("mov." S, D1, T, T, a), {"selp." S, D3, selp<T>, 0, 0}

static const OpDef kOps[] = {
    LOGIC("b16", "Rr", "Rrr", u16), LOGIC("b32", "Rr", "Rrr", u32), LOGIC("b64", "Dd", "Ddd", u64),
    MOVES("b16", "Rr", "Rrrp", u16), MOVES("u16", "Rr", "Rrrp", u16), MOVES("s16", "Rr", "Rrrp", u16),
    MOVES("b32", "Rr", "Rrrp", u32), MOVES("u32", "Rr", "Rrrp", u32), MOVES("s32", "Rr", "Rrrp", u32),
    MOVES("f32", "Rr", "Rrrp", u32), MOVES("b64", "Dd", "Dddp", u64), MOVES("u64", "Dd", "Dddp", u64),
    MOVES("s64", "Dd", "Dddp", u64), MOVES("f64", "Dd", "Dddp", u64),
    {"mov.pred", "Pp", p_mov, 0, 0}, {"and.pred", "Ppp", p_and, 0, 0}, {"or.pred", "Ppp", p_or, 0, 0},
    {"xor.pred", "Ppp", p_xor, 0, 0}, {"not.pred", "Pp", p_not, 0, 0},
    {"mov.b32{2}", "Rrr", join<u32, u16, 2>, 0, 0}, {"mov.b32{4}", "Rrrrr", join<u32, uint8_t, 4>, 0, 0},
    {"mov.b64{2}", "Drr", join<u64, u32, 2>, 0, 0}, {"mov.b64{4}", "Drrrr", join<u64, u16, 4>, 0, 0},
    {"mov.b16{2}", "Rrr", join<u16, uint8_t, 2>, 0, 0},
    {"mov.{2}b32", "RRr", split<u32, u16, 2>, 0, 0}, {"mov.{4}b32", "RRRRr", split<u32, uint8_t, 4>, 0, 0},
    {"mov.{2}b64", "RRd", split<u64, u32, 2>, 0, 0}, {"mov.{4}b64", "RRRRd", split<u64, u16, 4>, 0, 0},
    {"mov.{2}b16", "RRr", split<u16, uint8_t, 2>, 0, 0},
    OP2("shl.b16", "Rrr", u16, u16, u32, b > 15 ? 0 : a << b), OP2("shl.b32", "Rrr", u32, u32, u32, b > 31 ? 0 : a << (b & 31)),
    OP2("shl.b64", "Ddr", u64, u64, u32, b > 63 ? 0 : a << (b & 63)),
    OP2("shr.u16", "Rrr", u16, u16, u32, b > 15 ? 0 : a >> b), OP2("shr.b16", "Rrr", u16, u16, u32, b > 15 ? 0 : a >> b),
    OP2("shr.s16", "Rrr", s16, s16, u32, a >> (b > 15 ? 15 : b)),
    OP2("shr.u32", "Rrr", u32, u32, u32, b > 31 ? 0 : a >> (b & 31)), OP2("shr.b32", "Rrr", u32, u32, u32, b > 31 ? 0 : a >> (b & 31)),
    OP2("shr.s32", "Rrr", s32, s32, u32, a >> (b > 31 ? 31 : b)),
    OP2("shr.u64", "Ddr", u64, u64, u32, b > 63 ? 0 : a >> (b & 63)), OP2("shr.b64", "Ddr", u64, u64, u32, b > 63 ? 0 : a >> (b & 63)),
    OP2("shr.s64", "Ddr", s64, s64, u32, a >> (b > 63 ? 63 : b)),
    {"shf.l.b32", "Rrrr", do_shf<true>, kWrap, 0}, {"shf.r.b32", "Rrrr", do_shf<false>, kWrap, 0},
    OP3("bfe.u32", "Rrrr", u32, u32, u32, u32, bfe(a, b, c, false)), OP3("bfe.s32", "Rrrr", u32, u32, u32, u32, bfe(a, b, c, true)),
    OP3("bfe.u64", "Ddrr", u64, u64, u32, u32, bfe64(a, b, c, false)), OP3("bfe.s64", "Ddrr", u64, u64, u32, u32, bfe64(a, b, c, true)),
    {"bfi.b32", "Rrrrr", do_bfi<u32>, 0, 0}, {"bfi.b64", "Dddrr", do_bfi<u64>, 0, 0},
    OP2("bmsk.clamp.b32", "Rrr", u32, u32, u32, a > 31 ? 0 : (b >= 32 ? ~0u : (1u << b) - 1) << a),
    OP2("bmsk.wrap.b32", "Rrr", u32, u32, u32, ((b & 31) ? (1u << (b & 31)) - 1 : 0) << (a & 31)),
    OP2("szext.clamp.u32", "Rrr", u32, u32, u32, b >= 32 ? a : a & ((1u << b) - 1)),
    OP2("szext.clamp.s32", "Rrr", s32, s32, u32, b == 0 ? 0 : b >= 32 ? a : s32(u32(a) << (32 - b)) >> (32 - b)),
    OP2("szext.wrap.u32", "Rrr", u32, u32, u32, a & ((1u << (b & 31)) - 1)),
    OP2("szext.wrap.s32", "Rrr", s32, s32, u32, (b & 31) == 0 ? 0 : s32(u32(a) << (32 - (b & 31))) >> (32 - (b & 31))),
    OP1("popc.b32", "Rr", u32, u32, __builtin_popcount(a)), OP1("popc.b64", "Rd", u32, u64, __builtin_popcountll(a)),
    OP1("clz.b32", "Rr", u32, u32, a ? __builtin_clz(a) : 32), OP1("clz.b64", "Rd", u32, u64, a ? __builtin_clzll(a) : 64),
    OP1("brev.b32", "Rr", u32, u32, brev(a)), OP1("brev.b64", "Dd", u64, u64, u64(brev(u32(a))) << 32 | brev(u32(a >> 32))),
    {"bfind.u32", "Rr", EMU_FN { return do_bfind(w, in, m, false, false); }, kShiftamt, 0},
    {"bfind.s32", "Rr", EMU_FN { return do_bfind(w, in, m, true, false); }, kShiftamt, 0},
    {"bfind.u64", "Rd", EMU_FN { return do_bfind(w, in, m, false, true); }, kShiftamt, 0},
    {"bfind.s64", "Rd", EMU_FN { return do_bfind(w, in, m, true, true); }, kShiftamt, 0},
    {"prmt.b32", "Rrrr", do_prmt<0>, 0, 0}, {"prmt.b32.f4e", "Rrrr", do_prmt<1>, 0, 0}, {"prmt.b32.b4e", "Rrrr", do_prmt<2>, 0, 0},
    {"prmt.b32.rc8", "Rrrr", do_prmt<3>, 0, 0}, {"prmt.b32.ecl", "Rrrr", do_prmt<4>, 0, 0},
    {"prmt.b32.ecr", "Rrrr", do_prmt<5>, 0, 0}, {"prmt.b32.rc16", "Rrrr", do_prmt<6>, 0, 0},
    {"lop3.b32", "Rrrrr", do_lop3, 0, 0},
    OP1("cvta.to.global.u64", "Dd", u64, u64, a), OP1("cvta.global.u64", "Dd", u64, u64, a),
    OP1("cvta.to.const.u64", "Dd", u64, u64, a), OP1("cvta.const.u64", "Dd", u64, u64, a),
    OP1("cvta.param.u64", "Dd", u64, u64, (a & ~kWindowMask) | kParamWindow), OP1("cvta.to.param.u64", "Dd", u64, u64, a & ~kWindowMask),
    OP1("cvta.shared.u64", "Dd", u64, u64, (a & 0xffffffff) | kSharedWindow), OP1("cvta.to.shared.u64", "Dd", u64, u64, a & ~kWindowMask),
    OP1("cvta.local.u64", "Dd", u64, u64, (a & ~kWindowMask) | kLocalWindow), OP1("cvta.to.local.u64", "Dd", u64, u64, a & ~kWindowMask),
};
EMU_TABLE(bit_ops, kOps)

}  // namespace emu
