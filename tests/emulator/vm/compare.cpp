// setp, set, slct, isspacep, testp.
#include "alu.h"
#include "half.h"

namespace emu {

// The comparison is an immediate, in the order of the front end's list.
enum { EQ, NE, LT, LE, GT, GE, LO, LS, HI, HS, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NANC };

template <class T, class F>
static uint32_t collect(const T* a, const T* b, F f) {
  uint32_t out = 0, t[32];
  for (int l = 0; l < 32; l++) t[l] = f(a[l], b[l]) ? 1u << l : 0;
  for (int l = 0; l < 32; l++) out |= t[l];
  return out;
}

template <class T>
static uint32_t compare(const T* a, const T* b, int how) {
  switch (how) {
    case EQ: return collect(a, b, [](T x, T y) { return x == y; });
    case NE: return collect(a, b, [](T x, T y) { return x != y && x == x && y == y; });
    case LT: case LO: return collect(a, b, [](T x, T y) { return x < y; });
    case LE: case LS: return collect(a, b, [](T x, T y) { return x <= y; });
    case GT: case HI: return collect(a, b, [](T x, T y) { return x > y; });
    case GE: case HS: return collect(a, b, [](T x, T y) { return x >= y; });
    case EQU: return collect(a, b, [](T x, T y) { return !(x < y || x > y); });
    case NEU: return collect(a, b, [](T x, T y) { return x != y; });
    case LTU: return collect(a, b, [](T x, T y) { return !(x >= y); });
    case LEU: return collect(a, b, [](T x, T y) { return !(x > y); });
    case GTU: return collect(a, b, [](T x, T y) { return !(x <= y); });
    case GEU: return collect(a, b, [](T x, T y) { return !(x < y); });
    case NUM: return collect(a, b, [](T x, T y) { return x == x && y == y; });
    default: return collect(a, b, [](T x, T y) { return x != x || y != y; });
  }
}

template <class T>
static uint32_t compare_slots(Warp& w, int sa, int sb, int how, bool ftz) {
  T a[32], b[32];
  const auto* pa = source<T>(w, sa);
  const auto* pb = source<T>(w, sb);
  for (int l = 0; l < 32; l++) a[l] = unpack<T>(pa[l]), b[l] = unpack<T>(pb[l]);
  if constexpr (std::is_same_v<T, float>)
    if (ftz)
      for (int l = 0; l < 32; l++) a[l] = flush(a[l]), b[l] = flush(b[l]);
  return compare(a, b, how);
}
template <float (*GET)(u32)>
static uint32_t compare_half(Warp& w, int sa, int sb, int how, int shift) {
  float a[32], b[32];
  for (int l = 0; l < 32; l++) a[l] = GET(w.r(sa)[l] >> shift & 0xffff), b[l] = GET(w.r(sb)[l] >> shift & 0xffff);
  return compare(a, b, how);
}

// setp p, q | a, b, c: args P P a b c, then comparison, boolean operation (0 none, 1 and, 2 or, 3 xor).
template <class R>
static Step setp(Warp& w, const Insn& in, uint32_t m, R result) {
  uint32_t p = result(w, in);
  uint32_t q = ~p;
  const uint32_t c = w.p(in.arg[4]);
  switch (in.arg[6]) {
    case 1: p &= c; q &= c; break;
    case 2: p |= c; q |= c; break;
    case 3: p ^= c; q ^= c; break;
  }
  w.set_p(in.arg[0], m, p);
  w.set_p(in.arg[1], m, q);
  return Step::kNext;
}
#define SETP(S, SIG, T)                                                                             \
  {"setp." S, SIG, EMU_FN {                                                                         \
     return setp(w, in, m, [](Warp& w, const Insn& in) {                                            \
       return compare_slots<T>(w, in.arg[2], in.arg[3], in.arg[5], in.flags & kFtz); });            \
   }, kFtz, 0}
#define SETP_HALF(S, GET)                                                                           \
  {"setp." S, "PPrrpii", EMU_FN {                                                                   \
     return setp(w, in, m, [](Warp& w, const Insn& in) {                                            \
       return compare_half<GET>(w, in.arg[2], in.arg[3], in.arg[5], 0); });                         \
   }, kFtz, 0},                                                                                     \
  {"setp." S "x2", "PPrrpii", EMU_FN {                                                              \
     w.set_p(in.arg[0], m, compare_half<GET>(w, in.arg[2], in.arg[3], in.arg[5], 0));               \
     w.set_p(in.arg[1], m, compare_half<GET>(w, in.arg[2], in.arg[3], in.arg[5], 16));              \
     return Step::kNext;                                                                            \
   }, kFtz, 0}

// set: args D a b, comparison; 1.0 or all ones where true.
template <class T>
static Step set(Warp& w, const Insn& in, uint32_t m, uint32_t yes) {
  const uint32_t p = compare_slots<T>(w, in.arg[1], in.arg[2], in.arg[3], in.flags & kFtz);
  lanes(w.r(in.arg[0]), m, [=](int l) { return p >> l & 1 ? yes : 0u; });
  return Step::kNext;
}
#define SET(S, SIG, T)                                                                     \
  {"set.u32." S, SIG, EMU_FN { return set<T>(w, in, m, ~0u); }, kFtz, 0},                  \
  {"set.s32." S, SIG, EMU_FN { return set<T>(w, in, m, ~0u); }, kFtz, 0},                  \
  {"set.f32." S, SIG, EMU_FN { return set<T>(w, in, m, 0x3f800000u); }, kFtz, 0}

static Step isspacep(Warp& w, const Insn& in, uint32_t m, uint64_t window, uint64_t mask = kWindowMask) {
  uint32_t out = 0;
  for (int l = 0; l < 32; l++) out |= uint32_t((w.d(in.arg[1])[l] & mask) == window) << l;
  w.set_p(in.arg[0], m, out);
  return Step::kNext;
}
template <class F>
static Step testp(Warp& w, const Insn& in, uint32_t m, F f) {
  uint32_t out = 0;
  for (int l = 0; l < 32; l++) out |= uint32_t(f(as_float(w.r(in.arg[1])[l]))) << l;
  w.set_p(in.arg[0], m, out);
  return Step::kNext;
}

static const OpDef kOps[] = {
    SETP("s16", "PPrrpii", s16), SETP("u16", "PPrrpii", u16), SETP("b16", "PPrrpii", u16),
    SETP("s32", "PPrrpii", s32), SETP("u32", "PPrrpii", u32), SETP("b32", "PPrrpii", u32),
    SETP("s64", "PPddpii", s64), SETP("u64", "PPddpii", u64), SETP("b64", "PPddpii", u64),
    SETP("f32", "PPrrpii", f32), SETP("f64", "PPddpii", f64),
    SETP_HALF("f16", half_to_float), SETP_HALF("bf16", bf16_to_float),
    SET("s32", "Rrri", s32), SET("u32", "Rrri", u32), SET("b32", "Rrri", u32), SET("f32", "Rrri", f32),
    SET("s64", "Rddi", s64), SET("u64", "Rddi", u64), SET("f64", "Rddi", f64),
    OP3("slct.b32.s32", "Rrrr", u32, u32, u32, s32, c >= 0 ? a : b), OP3("slct.u32.s32", "Rrrr", u32, u32, u32, s32, c >= 0 ? a : b),
    OP3("slct.s32.s32", "Rrrr", u32, u32, u32, s32, c >= 0 ? a : b), OP3("slct.f32.s32", "Rrrr", u32, u32, u32, s32, c >= 0 ? a : b),
    OP3("slct.f32.f32", "Rrrr", u32, u32, u32, f32, c >= 0 ? a : b),
    {"isspacep.shared", "Pd", EMU_FN { return isspacep(w, in, m, kSharedWindow, kWindowMask | 0xff000000); }, 0, 0},
    {"isspacep.shared::cta", "Pd", EMU_FN { return isspacep(w, in, m, kSharedWindow, kWindowMask | 0xff000000); }, 0, 0},
    {"isspacep.shared::cluster", "Pd", EMU_FN { return isspacep(w, in, m, kSharedWindow); }, 0, 0},
    {"isspacep.local", "Pd", EMU_FN { return isspacep(w, in, m, kLocalWindow); }, 0, 0},
    {"isspacep.param", "Pd", EMU_FN { return isspacep(w, in, m, kParamWindow); }, 0, 0},
    {"isspacep.global", "Pd", EMU_FN { return isspacep(w, in, m, 0); }, 0, 0},
    {"testp.finite.f32", "Pr", EMU_FN { return testp(w, in, m, [](float f) { return std::isfinite(f); }); }, 0, 0},
    {"testp.infinite.f32", "Pr", EMU_FN { return testp(w, in, m, [](float f) { return std::isinf(f); }); }, 0, 0},
    {"testp.number.f32", "Pr", EMU_FN { return testp(w, in, m, [](float f) { return !std::isnan(f); }); }, 0, 0},
    {"testp.notanumber.f32", "Pr", EMU_FN { return testp(w, in, m, [](float f) { return std::isnan(f); }); }, 0, 0},
    {"testp.normal.f32", "Pr", EMU_FN { return testp(w, in, m, [](float f) { return std::isnormal(f); }); }, 0, 0},
    {"testp.subnormal.f32", "Pr", EMU_FN { return testp(w, in, m, [](float f) { return std::fpclassify(f) == FP_SUBNORMAL; }); }, 0, 0},
};
EMU_TABLE(compare_ops, kOps)

}  // namespace emu
