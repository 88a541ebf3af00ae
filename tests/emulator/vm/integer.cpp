// Integer arithmetic.
#include "alu.h"

namespace emu {

typedef __int128 s128;
typedef unsigned __int128 u128;

template <class T>
inline T safe_div(T a, T b) {
  if (b == 0) return T(-1);
  if (std::is_signed_v<T> && b == T(-1)) return T(0) - std::make_unsigned_t<T>(a);
  return T(a / b);
}
template <class T>
inline T safe_rem(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == T(-1)) return 0;
  return T(a % b);
}
inline s32 saturate(s64 v) { return v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : s32(v); }

// Extended precision: the carry of each lane is in Warp::carry.
template <class T>
static Step add_carry(Warp& w, const Insn& in, uint32_t m, bool use, bool keep, bool subtract) {
  const auto* a = source<T>(w, in.arg[1]);
  const auto* b = source<T>(w, in.arg[2]);
  T out[32];
  uint32_t carry = 0;
  for (int l = 0; l < 32; l++) {
    const u128 cin = use ? w.carry >> l & 1 : 0;
    const u128 r = subtract ? u128(T(a[l])) - T(b[l]) - cin : u128(T(a[l])) + T(b[l]) + cin;
    out[l] = T(r);
    carry |= uint32_t(r >> (8 * sizeof(T)) & 1) << l;
  }
  lanes(dest<T>(w, in.arg[0]), m, [&](int l) { return out[l]; });
  if (keep) w.carry = (w.carry & ~m) | (carry & m);
  return Step::kNext;
}
template <class T>
static Step mad_carry(Warp& w, const Insn& in, uint32_t m, bool use, bool keep, bool high) {
  const auto *a = source<T>(w, in.arg[1]), *b = source<T>(w, in.arg[2]), *c = source<T>(w, in.arg[3]);
  T out[32];
  uint32_t carry = 0;
  for (int l = 0; l < 32; l++) {
    const u128 prod = u128(a[l]) * b[l];
    const u128 part = high ? T(prod >> (8 * sizeof(T))) : T(prod);
    const u128 r = part + c[l] + (use ? w.carry >> l & 1 : 0);
    out[l] = T(r);
    carry |= uint32_t(r >> (8 * sizeof(T)) & 1) << l;
  }
  lanes(dest<T>(w, in.arg[0]), m, [&](int l) { return out[l]; });
  if (keep) w.carry = (w.carry & ~m) | (carry & m);
  return Step::kNext;
}
#define CARRY(NAME, SIG, T, USE, KEEP, SUB) {NAME, SIG, EMU_FN { return add_carry<T>(w, in, m, USE, KEEP, SUB); }, 0, 0}
#define MADC(NAME, SIG, T, USE, KEEP, HIGH) {NAME, SIG, EMU_FN { return mad_carry<T>(w, in, m, USE, KEEP, HIGH); }, 0, 0}

// Arithmetic of one type; WIDE is the type of twice the size.
#define BASIC(S, D, D2, D3, T, U, WIDE)                                                                  \
  OP2("add." S, D2, T, T, T, U(a) + U(b)), OP2("sub." S, D2, T, T, T, U(a) - U(b)),                      \
      OP2("mul.lo." S, D2, T, T, T, U(WIDE(a) * WIDE(b))), OP2("min." S, D2, T, T, T, a < b ? a : b),    \
      OP2("max." S, D2, T, T, T, a > b ? a : b), OP2("div." S, D2, T, T, T, safe_div<T>(a, b)),          \
      OP2("rem." S, D2, T, T, T, safe_rem<T>(a, b)),                                                     \
      OP2("mul.hi." S, D2, T, T, T, (WIDE(a) * WIDE(b)) >> (8 * sizeof(T))),                             \
      OP3("mad.lo." S, D3, T, T, T, T, U(WIDE(a) * WIDE(b)) + U(c)),                                     \
      OP3("mad.hi." S, D3, T, T, T, T, U((WIDE(a) * WIDE(b)) >> (8 * sizeof(T))) + U(c)),                \
      OP3("sad." S, D3, T, T, T, T, U(c) + (a < b ? U(b) - U(a) : U(a) - U(b)))
#define SIGNED(S, D1, T, U)                                                                              \
  OP1("neg." S, D1, T, T, U(0) - U(a)), OP1("abs." S, D1, T, T, a < 0 ? U(0) - U(a) : U(a))

static const OpDef kOps[] = {
    BASIC("s16", "Rr", "Rrr", "Rrrr", s16, u32, s32),
    BASIC("u16", "Rr", "Rrr", "Rrrr", u16, u32, u32),
    BASIC("s32", "Rr", "Rrr", "Rrrr", s32, u32, s64),
    BASIC("u32", "Rr", "Rrr", "Rrrr", u32, u32, u64),
    BASIC("s64", "Dd", "Ddd", "Dddd", s64, u64, s128),
    BASIC("u64", "Dd", "Ddd", "Dddd", u64, u64, u128),
    SIGNED("s16", "Rr", s16, u32),
    SIGNED("s32", "Rr", s32, u32),
    SIGNED("s64", "Dd", s64, u64),
    OP2("mul.wide.s16", "Rrr", s32, s16, s16, s32(a) * s32(b)),
    OP2("mul.wide.u16", "Rrr", u32, u16, u16, u32(a) * u32(b)),
    OP2("mul.wide.s32", "Drr", s64, s32, s32, s64(a) * b),
    OP2("mul.wide.u32", "Drr", u64, u32, u32, u64(a) * b),
    OP3("mad.wide.s16", "Rrrr", s32, s16, s16, s32, s32(a) * s32(b) + u32(c)),
    OP3("mad.wide.u16", "Rrrr", u32, u16, u16, u32, u32(a) * u32(b) + c),
    OP3("mad.wide.s32", "Drrd", s64, s32, s32, s64, u64(s64(a) * b) + u64(c)),
    OP3("mad.wide.u32", "Drrd", u64, u32, u32, u64, u64(a) * b + c),
    OP2("add.sat.s32", "Rrr", s32, s32, s32, saturate(s64(a) + b)),
    OP2("sub.sat.s32", "Rrr", s32, s32, s32, saturate(s64(a) - b)),
    OP2("mul24.lo.s32", "Rrr", s32, s32, s32, u64(s64(a << 8 >> 8) * (b << 8 >> 8))),
    OP2("mul24.lo.u32", "Rrr", u32, u32, u32, u64(a & 0xffffff) * (b & 0xffffff)),
    OP3("mad24.lo.s32", "Rrrr", s32, s32, s32, s32, u32(u64(s64(a << 8 >> 8) * (b << 8 >> 8))) + u32(c)),
    OP3("mad24.lo.u32", "Rrrr", u32, u32, u32, u32, u64(a & 0xffffff) * (b & 0xffffff) + c),
    OP2("add.u16x2", "Rrr", u32, u32, u32, ((a + b) & 0xffff) | ((a & 0xffff0000) + (b & 0xffff0000))),
    OP2("add.s16x2", "Rrr", u32, u32, u32, ((a + b) & 0xffff) | ((a & 0xffff0000) + (b & 0xffff0000))),
    OP3("dp4a.u32.u32", "Rrrr", u32, u32, u32, u32,
        c + (a & 255) * (b & 255) + (a >> 8 & 255) * (b >> 8 & 255) + (a >> 16 & 255) * (b >> 16 & 255) + (a >> 24) * (b >> 24)),
    OP3("dp4a.s32.s32", "Rrrr", s32, s32, s32, s32,
        u32(c) + int8_t(a) * int8_t(b) + int8_t(a >> 8) * int8_t(b >> 8) + int8_t(a >> 16) * int8_t(b >> 16) + (a >> 24) * (b >> 24)),
    CARRY("add.cc.u32", "Rrr", u32, false, true, false), CARRY("add.cc.s32", "Rrr", u32, false, true, false),
    CARRY("add.cc.u64", "Ddd", u64, false, true, false), CARRY("add.cc.s64", "Ddd", u64, false, true, false),
    CARRY("addc.u32", "Rrr", u32, true, false, false), CARRY("addc.s32", "Rrr", u32, true, false, false),
    CARRY("addc.u64", "Ddd", u64, true, false, false), CARRY("addc.s64", "Ddd", u64, true, false, false),
    CARRY("addc.cc.u32", "Rrr", u32, true, true, false), CARRY("addc.cc.s32", "Rrr", u32, true, true, false),
    CARRY("addc.cc.u64", "Ddd", u64, true, true, false), CARRY("addc.cc.s64", "Ddd", u64, true, true, false),
    CARRY("sub.cc.u32", "Rrr", u32, false, true, true), CARRY("sub.cc.s32", "Rrr", u32, false, true, true),
    CARRY("sub.cc.u64", "Ddd", u64, false, true, true), CARRY("sub.cc.s64", "Ddd", u64, false, true, true),
    CARRY("subc.u32", "Rrr", u32, true, false, true), CARRY("subc.s32", "Rrr", u32, true, false, true),
    CARRY("subc.u64", "Ddd", u64, true, false, true), CARRY("subc.s64", "Ddd", u64, true, false, true),
    CARRY("subc.cc.u32", "Rrr", u32, true, true, true), CARRY("subc.cc.s32", "Rrr", u32, true, true, true),
    CARRY("subc.cc.u64", "Ddd", u64, true, true, true),
    MADC("mad.lo.cc.u32", "Rrrr", u32, false, true, false), MADC("madc.lo.u32", "Rrrr", u32, true, false, false),
    MADC("madc.lo.cc.u32", "Rrrr", u32, true, true, false), MADC("mad.hi.cc.u32", "Rrrr", u32, false, true, true),
    MADC("madc.hi.u32", "Rrrr", u32, true, false, true), MADC("madc.hi.cc.u32", "Rrrr", u32, true, true, true),
    MADC("mad.lo.cc.u64", "Dddd", u64, false, true, false), MADC("madc.hi.u64", "Dddd", u64, true, false, true),
    MADC("madc.lo.u64", "Dddd", u64, true, false, false), MADC("madc.lo.cc.u64", "Dddd", u64, true, true, false),
    MADC("mad.hi.cc.u64", "Dddd", u64, false, true, true), MADC("madc.hi.cc.u64", "Dddd", u64, true, true, true),
};
EMU_TABLE(integer_ops, kOps)

}  // namespace emu
