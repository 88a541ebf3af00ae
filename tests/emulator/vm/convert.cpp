// cvt. The usual ones are table entries; the rest goes through one general routine.
#include <cfenv>

#include "alu.h"
#include "half.h"

namespace emu {

// Types of the general cvt, in the order of the front end's list.
enum Type { U8, S8, U16, S16, U32, S32, U64, S64, FP16, FBF16, FP32, FP64 };
enum Round { NONE, RN, RZ, RM, RP, RNI, RZI, RMI, RPI };

static bool is_float(int t) { return t >= FP16; }
static int width(int t) { return t <= S8 ? 8 : t <= S16 ? 16 : t <= S32 ? 32 : t <= S64 ? 64 : t <= FBF16 ? 16 : t == FP32 ? 32 : 64; }
static bool is_signed(int t) { return t & 1; }

struct Value {
  long double f;  // 64 bits of significand: holds every integer and float exactly
  bool integer;
};

static long double load(Warp& w, int slot, bool wide, int t, int l, bool ftz) {
  if (width(t) == 64) {
    const u64 v = w.d(slot)[l];
    if (t == FP64) return unpack<f64>(v);
    return t == S64 ? (long double)s64(v) : (long double)v;
  }
  const u32 v = wide ? u32(w.d(slot)[l]) : w.r(slot)[l];  // of a wider register, the low bits
  switch (t) {
    case U8: return uint8_t(v);
    case S8: return int8_t(v);
    case U16: return u16(v);
    case S16: return s16(v);
    case U32: return v;
    case S32: return s32(v);
    case FP16: return half_to_float(v & 0xffff);
    case FBF16: return bf16_to_float(v & 0xffff);
    default: return ftz ? flush(as_float(v)) : as_float(v);
  }
}

static long double to_integer(long double v, int round) {
  switch (round) {
    case RZI: return truncl(v);
    case RMI: return floorl(v);
    case RPI: return ceill(v);
    default: return nearbyintl(v);
  }
}
static float round_float(long double v, int round) {
  fesetround(round == RZ ? FE_TOWARDZERO : round == RM ? FE_DOWNWARD : round == RP ? FE_UPWARD : FE_TONEAREST);
  volatile long double in = v;
  volatile float out = float(in);
  fesetround(FE_TONEAREST);
  return out;
}
static double round_double(long double v, int round) {
  fesetround(round == RZ ? FE_TOWARDZERO : round == RM ? FE_DOWNWARD : round == RP ? FE_UPWARD : FE_TONEAREST);
  volatile long double in = v;
  volatile double out = double(in);
  fesetround(FE_TONEAREST);
  return out;
}
static u64 float_to_int(long double v, int t, int round) {
  if (std::isnan(v)) return width(t) == 64 ? 1ull << 63 : 0;
  const long double r = to_integer(v, round);
  const long double top = is_signed(t) ? ldexpl(1, width(t) - 1) : ldexpl(1, width(t));
  const long double low = is_signed(t) ? -top : 0;
  if (r >= top) return is_signed(t) ? u64(top) - 1 : width(t) == 64 ? ~0ull : u64(top) - 1;
  if (r < low) return is_signed(t) ? u64(s64(low)) : 0;
  return is_signed(t) ? u64(s64(r)) : u64(r);
}

// args: D A, type of D, type of A, rounding, is D a 64-bit register, is A
static Step cvt(Warp& w, const Insn& in, uint32_t m) {
  const int td = in.arg[2], ta = in.arg[3], round = in.arg[4];
  const bool ftz = in.flags & kFtz, sat = in.flags & kSat;
  const Rounding mode = round == RZ ? kToZero : round == RM ? kDown : round == RP ? kUp : kNearest;
  u64 out[32] = {};
  each_lane(m, [&](int l) {
    const long double v = load(w, in.arg[1], in.arg[6], ta, l, ftz);
    if (!is_float(td)) {
      if (is_float(ta)) {
        out[l] = float_to_int(v, td, round);
      } else if (sat) {
        out[l] = float_to_int(v, td, RZI);
      } else {
        out[l] = width(ta) == 64 && !is_signed(ta) ? u64(v) : u64(s64(v));
      }
    } else {
      long double x = round >= RNI ? to_integer(v, round) : v;
      if (round >= RNI && x == 0) x = std::copysign(x, v);
      if (sat) x = std::isnan(x) || x <= 0 ? 0 : std::min<long double>(x, 1);
      if (td == FP64) out[l] = pack<f64>(round_double(x, round));
      else if (td == FP32) {
        const float f = round_float(x, round);
        out[l] = as_bits(f != f ? as_float(0x7fffffff) : ftz ? flush(f) : f);
      } else {
        double d = double(x);  // exact unless x is a 64-bit integer
        u32 bits = narrow(d, td == FP16 ? kHalf : kBf16, mode, in.flags & kSatfinite);
        if ((in.flags & kRelu) && (bits & 0x8000) && d == d) bits = 0;
        out[l] = bits;
      }
    }
    if (!is_float(td) && width(td) < 32) {  // a wider register gets the extended value
      const int shift = 64 - width(td);
      out[l] = is_signed(td) ? u64(s64(out[l] << shift) >> shift) : out[l] << shift >> shift;
      if (in.arg[7]) out[l] &= 0xffff;
    }
  });
  if (in.arg[5]) lanes(w.d(in.arg[0]), m, [&](int l) { return out[l]; });
  else lanes(w.r(in.arg[0]), m, [&](int l) { return u32(out[l]); });
  return Step::kNext;
}

// ---- pairs. The first source goes to the high half.
template <u32 (*PUT)(float), int BITS>
static Step pair(Warp& w, const Insn& in, uint32_t m) {
  const u32* a = w.r(in.arg[1]);
  const u32* b = w.r(in.arg[2]);
  lanes(w.r(in.arg[0]), m, [=](int l) { return PUT(as_float(a[l])) << BITS | PUT(as_float(b[l])); });
  return Step::kNext;
}
static Step pair_general(Warp& w, const Insn& in, uint32_t m, const Format& f, int bits, u32 nan) {
  const u32 *a = w.r(in.arg[1]), *b = w.r(in.arg[2]);
  const Rounding mode = in.flags & kRz ? kToZero : kNearest;
  const auto put = [&](u32 v) {
    float x = as_float(v);
    if ((in.flags & kRelu) && x <= 0) x = 0;
    return x != x ? nan : narrow(x, f, mode, in.flags & kSatfinite);
  };
  lanes(w.r(in.arg[0]), m, [&](int l) { return put(a[l]) << bits | put(b[l]); });
  return Step::kNext;
}
static Step fp8_from_half(Warp& w, const Insn& in, uint32_t m, const Format& f, float (*get)(u32)) {
  const u32* a = w.r(in.arg[1]);
  const auto put = [&](u32 v) {
    float x = get(v);
    if ((in.flags & kRelu) && x <= 0) x = 0;
    return narrow(x, f, kNearest, true);
  };
  lanes(w.r(in.arg[0]), m, [&](int l) { return put(a[l] >> 16) << 8 | put(a[l] & 0xffff); });
  return Step::kNext;
}
template <float (*GET)(u32)>
static Step half_from_fp8(Warp& w, const Insn& in, uint32_t m) {
  const bool relu = in.flags & kRelu;
  return map1<u32, u32>(w, in, m, [=](u32 a) {
    float lo = GET(a & 255), hi = GET(a >> 8 & 255);
    if (relu) lo = lo <= 0 ? 0 : lo, hi = hi <= 0 ? 0 : hi;
    return float_to_half(hi) << 16 | float_to_half(lo);
  });
}
constexpr uint32_t kPairMods = kRelu | kRz | kSatfinite;
#define PAIR16(NAME, PUT, FORMAT)                                                                  \
  {NAME, "Rrr", EMU_FN {                                                                           \
     if (in.flags) return pair_general(w, in, m, FORMAT, 16, 0x7fff);                              \
     return pair<PUT, 16>(w, in, m);                                                               \
   }, kPairMods, 0}
#define PAIR8(NAME, PUT, FORMAT)                                   \
  {NAME, "Rrr", EMU_FN {                                          \
     if (in.flags == kSatfinite) return pair<PUT, 8>(w, in, m);   \
     return pair_general(w, in, m, FORMAT, 8, 0x7f);              \
   }, kRelu | kSatfinite, 0}

static const OpDef kOps[] = {
    {"cvt", "XYiiiiii", cvt, kFtz | kSat | kRelu | kSatfinite, 0},
    PAIR16("cvt.bf16x2.f32", float_to_bf16, kBf16), PAIR16("cvt.f16x2.f32", float_to_half, kHalf),
    PAIR8("cvt.e4m3x2.f32", float_to_e4m3, kE4m3), PAIR8("cvt.e5m2x2.f32", float_to_e5m2, kE5m2),
    {"cvt.e4m3x2.f16x2", "Rr", EMU_FN { return fp8_from_half(w, in, m, kE4m3, half_to_float); }, kRelu | kSatfinite, 0},
    {"cvt.e5m2x2.f16x2", "Rr", EMU_FN { return fp8_from_half(w, in, m, kE5m2, half_to_float); }, kRelu | kSatfinite, 0},
    {"cvt.f16x2.e4m3x2", "Rr", half_from_fp8<e4m3_to_float>, kRelu, 0},
    {"cvt.f16x2.e5m2x2", "Rr", half_from_fp8<e5m2_to_float>, kRelu, 0},
    OP1("cvt.s64.s32", "Dr", s64, s32, a), OP1("cvt.u64.u32", "Dr", u64, u32, a), OP1("cvt.s64.u32", "Dr", u64, u32, a),
    OP1("cvt.u64.s32", "Dr", s64, s32, a),
    OP1("cvt.u32.u64", "Rd", u32, u64, a), OP1("cvt.s32.s64", "Rd", u32, u64, a), OP1("cvt.u32.s64", "Rd", u32, u64, a),
    OP1("cvt.s32.u64", "Rd", u32, u64, a),
    OP1("cvt.u16.u32", "Rr", u16, u32, a), OP1("cvt.u32.u16", "Rr", u32, u16, a), OP1("cvt.s32.s16", "Rr", s32, s16, a),
    OP1("cvt.rn.f32.s32", "Rr", f32, s32, float(a)), OP1("cvt.rn.f32.u32", "Rr", f32, u32, float(a)),
    OP1("cvt.f32.f16", "Rr", u32, u32, as_bits(half_to_float(a & 0xffff))),
    OP1("cvt.f32.bf16", "Rr", u32, u32, a << 16),
    OP1("cvt.rn.f16.f32", "Rr", u32, u32, float_to_half(as_float(a))),
    OP1("cvt.rn.bf16.f32", "Rr", u32, u32, float_to_bf16(as_float(a))),
};
EMU_TABLE(convert_ops, kOps)

}  // namespace emu
