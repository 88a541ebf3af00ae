// float and double arithmetic, approximations.
#include <cfenv>

#include "alu.h"
#include "half.h"

namespace emu {

inline float saturate(float v) { return v > 0.f ? (v < 1.f ? v : 1.f) : 0.f; }  // NaN gives 0

static int host_rounding(uint32_t flags) {
  return flags & kRz ? FE_TOWARDZERO : flags & kRm ? FE_DOWNWARD : flags & kRp ? FE_UPWARD : FE_TONEAREST;
}
enum { ADD, SUB, MUL, DIV, FMA, SQRT, RCP };

template <class T>
__attribute__((noinline)) static T directed(int op, volatile T a, volatile T b, volatile T c) {
  volatile T r = 0;
  switch (op) {
    case ADD: r = a + b; break;
    case SUB: r = a - b; break;
    case MUL: r = a * b; break;
    case DIV: r = a / b; break;
    case FMA: r = std::fma(T(a), T(b), T(c)); break;
    case SQRT: r = std::sqrt(T(a)); break;
    case RCP: r = T(1) / a; break;
  }
  return r;
}

// Rounding modes other than nearest, and saturation: rare, so slow.
template <class T>
__attribute__((noinline)) static Step slow(Warp& w, const Insn& in, uint32_t m, int op, int n) {
  T r[32];
  const bool ftz = in.flags & kFtz;
  fesetround(host_rounding(in.flags));
  each_lane(m, [&](int l) {
    T v[3] = {};
    for (int i = 0; i < n; i++) {
      v[i] = unpack<T>(source<T>(w, in.arg[1 + i])[l]);
      if (ftz) v[i] = T(flush(float(v[i])));
    }
    r[l] = directed<T>(op, v[0], v[1], v[2]);
  });
  fesetround(FE_TONEAREST);
  lanes(dest<T>(w, in.arg[0]), m, [&](int l) {
    T v = m >> l & 1 ? r[l] : T(0);
    if (ftz) v = T(flush(float(v)));
    if (in.flags & kSat) v = T(saturate(float(v)));
    if constexpr (sizeof(T) == 4) v = canonical(v);
    return pack<T>(v);
  });
  return Step::kNext;
}
constexpr uint32_t kSlow = kSat | kRz | kRm | kRp, kArith = kFtz | kSlow | kApprox;

template <class F>
static Step f32_1(Warp& w, const Insn& in, uint32_t m, F f) {
  if (in.flags & kFtz) return map1<f32, f32>(w, in, m, [=](f32 a) { return canonical(flush(f(flush(a)))); });
  return map1<f32, f32>(w, in, m, [=](f32 a) { return canonical(f(a)); });
}
template <class F>
static Step f32_2(Warp& w, const Insn& in, uint32_t m, F f) {
  if (in.flags & kFtz)
    return map2<f32, f32, f32>(w, in, m, [=](f32 a, f32 b) { return canonical(flush(f(flush(a), flush(b)))); });
  return map2<f32, f32, f32>(w, in, m, [=](f32 a, f32 b) { return canonical(f(a, b)); });
}
#define F1(NAME, MODS, EXPR) {NAME, "Rr", EMU_FN { return f32_1(w, in, m, [](f32 a) -> f32 { return EXPR; }); }, MODS, 0}
#define F2S(NAME, OP, EXPR)                                                              \
  {NAME, "Rrr", EMU_FN {                                                                 \
     if (in.flags & kSlow) return slow<f32>(w, in, m, OP, 2);                            \
     return f32_2(w, in, m, [](f32 a, f32 b) -> f32 { return EXPR; });                   \
   }, kArith, 0}
#define D2S(NAME, OP, EXPR)                                                              \
  {NAME, "Ddd", EMU_FN {                                                                 \
     if (in.flags & kSlow) return slow<f64>(w, in, m, OP, 2);                            \
     return map2<f64, f64, f64>(w, in, m, [](f64 a, f64 b) -> f64 { return EXPR; });     \
   }, kRz | kRm | kRp, 0}

static Step fma32(Warp& w, const Insn& in, uint32_t m) {
  if (in.flags & kSlow) return slow<f32>(w, in, m, FMA, 3);
  if (in.flags & kFtz)
    return map3<f32, f32, f32, f32>(w, in, m, [](f32 a, f32 b, f32 c) {
      return canonical(flush(__builtin_fmaf(flush(a), flush(b), flush(c)))); });
  return map3<f32, f32, f32, f32>(w, in, m, [](f32 a, f32 b, f32 c) { return canonical(__builtin_fmaf(a, b, c)); });
}
static Step fma64(Warp& w, const Insn& in, uint32_t m) {
  if (in.flags & kSlow) return slow<f64>(w, in, m, FMA, 3);
  return map3<f64, f64, f64, f64>(w, in, m, [](f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); });
}

inline float min_num(float a, float b) {
  if (a != a) return canonical(b);
  if (b != b) return a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
inline float max_num(float a, float b) {
  if (a != a) return canonical(b);
  if (b != b) return a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
template <bool MAX>
static Step minmax(Warp& w, const Insn& in, uint32_t m) {
  const bool nan = in.flags & kNan, xorsign = in.flags & kXorsign;
  if (nan || xorsign)
    return f32_2(w, in, m, [=](f32 a, f32 b) {
      if (nan && (a != a || b != b)) return as_float(0x7fffffff);
      if (!xorsign) return MAX ? max_num(a, b) : min_num(a, b);
      const uint32_t sign = (as_bits(a) ^ as_bits(b)) & 0x80000000;
      const f32 r = MAX ? max_num(std::fabs(a), std::fabs(b)) : min_num(std::fabs(a), std::fabs(b));
      return as_float((as_bits(r) & 0x7fffffff) | sign);
    });
  return f32_2(w, in, m, [](f32 a, f32 b) { return MAX ? max_num(a, b) : min_num(a, b); });
}
template <bool MAX>
static Step minmax3(Warp& w, const Insn& in, uint32_t m) {
  return map3<f32, f32, f32, f32>(w, in, m, [](f32 a, f32 b, f32 c) {
    return MAX ? max_num(max_num(a, b), c) : min_num(min_num(a, b), c); });
}

// 2^x in single precision; polynomial on [-1/2, 1/2], error below 1 ulp.
static inline float exp2_fast(float x) {
  const float bounded = x > 200.f ? 200.f : x < -200.f ? -200.f : x;
  const float n = std::nearbyintf(bounded), f = bounded - n;
  float p = 1.5403530e-4f;
  p = __builtin_fmaf(p, f, 1.3333558e-3f);
  p = __builtin_fmaf(p, f, 9.6181291e-3f);
  p = __builtin_fmaf(p, f, 5.5504109e-2f);
  p = __builtin_fmaf(p, f, 2.4022651e-1f);
  p = __builtin_fmaf(p, f, 6.9314718e-1f);
  p = __builtin_fmaf(p, f, 1.0f);
  const int32_t e = int32_t(n), half = e / 2;  // in two steps: the result may be subnormal
  const float r = p * as_float(uint32_t(half + 127) << 23) * as_float(uint32_t(e - half + 127) << 23);
  return x == x ? r : x;
}
static Step ex2(Warp& w, const Insn& in, uint32_t m) {
  return f32_1(w, in, m, [](f32 a) { return exp2_fast(a); });
}
template <uint32_t FLIP, uint32_t KEEP>
static Step sign_bit(Warp& w, const Insn& in, uint32_t m) {
  const bool ftz = in.flags & kFtz;  // it makes NaN canonical too
  return map1<u32, f32>(w, in, m, [=](f32 a) -> u32 {
    if (ftz && a != a) return 0x7fffffff;
    return (as_bits(ftz ? flush(a) : a) ^ FLIP) & KEEP;
  });
}
static Step unary_slow(Warp& w, const Insn& in, uint32_t m, int op) { return slow<f32>(w, in, m, op, 1); }

static const OpDef kOps[] = {
    F2S("add.f32", ADD, a + b), F2S("sub.f32", SUB, a - b), F2S("mul.f32", MUL, a * b), F2S("div.f32", DIV, a / b),
    D2S("add.f64", ADD, a + b), D2S("sub.f64", SUB, a - b), D2S("mul.f64", MUL, a * b), D2S("div.f64", DIV, a / b),
    {"fma.f32", "Rrrr", fma32, kArith, 0}, {"mad.f32", "Rrrr", fma32, kArith, 0},
    {"fma.f64", "Dddd", fma64, kRz | kRm | kRp, 0}, {"mad.f64", "Dddd", fma64, kRz | kRm | kRp, 0},
    {"min.f32", "Rrr", minmax<false>, kFtz | kNan | kXorsign, 0}, {"max.f32", "Rrr", minmax<true>, kFtz | kNan | kXorsign, 0},
    {"min.f32", "Rrrr", minmax3<false>, 0, 0}, {"max.f32", "Rrrr", minmax3<true>, 0, 0},
    OP2("min.f64", "Ddd", f64, f64, f64, std::fmin(a, b)), OP2("max.f64", "Ddd", f64, f64, f64, std::fmax(a, b)),
    {"neg.f32", "Rr", sign_bit<0x80000000u, ~0u>, kFtz, 0}, {"abs.f32", "Rr", sign_bit<0u, 0x7fffffffu>, kFtz, 0},
    OP1("neg.f64", "Dd", u64, u64, a ^ 1ull << 63), OP1("abs.f64", "Dd", u64, u64, a & ~(1ull << 63)),
    OP2("copysign.f32", "Rrr", u32, u32, u32, (a & 0x80000000) | (b & 0x7fffffff)),
    OP2("copysign.f64", "Ddd", u64, u64, u64, (a & 1ull << 63) | (b & ~(1ull << 63))),
    {"ex2.f32", "Rr", ex2, kFtz | kApprox, 0}, F1("lg2.f32", kFtz | kApprox, std::log2(a)),
    {"rcp.f32", "Rr", EMU_FN {
       if (in.flags & kSlow) return unary_slow(w, in, m, RCP);
       return f32_1(w, in, m, [](f32 a) -> f32 { return 1.f / a; });
     }, kArith, 0},
    {"sqrt.f32", "Rr", EMU_FN {
       if (in.flags & kSlow) return unary_slow(w, in, m, SQRT);
       return f32_1(w, in, m, [](f32 a) -> f32 { return std::sqrt(a); });
     }, kArith, 0},
    F1("rsqrt.f32", kFtz | kApprox, float(1.0 / std::sqrt(double(a)))),
    F1("sin.f32", kFtz | kApprox, std::sin(a)), F1("cos.f32", kFtz | kApprox, std::cos(a)),
    F1("tanh.f32", kApprox, std::tanh(a)),
    OP1("rcp.f64", "Dd", f64, f64, 1.0 / a), OP1("sqrt.f64", "Dd", f64, f64, std::sqrt(a)),
    {"rcp.approx.ftz.f64", "Dd", EMU_FN { return map1<f64, f64>(w, in, m, [](f64 a) -> f64 { return 1.0 / a; }); }, 0, 0},
    {"rsqrt.approx.ftz.f64", "Dd", EMU_FN { return map1<f64, f64>(w, in, m, [](f64 a) -> f64 { return 1.0 / std::sqrt(a); }); }, 0, 0},
    OP1("rsqrt.approx.f64", "Dd", f64, f64, 1.0 / std::sqrt(a)),
    OP2("add.f32x2", "Ddd", u64, u64, u64, u64(as_bits(as_float(u32(a >> 32)) + as_float(u32(b >> 32)))) << 32 | as_bits(as_float(u32(a)) + as_float(u32(b)))),
    OP2("mul.f32x2", "Ddd", u64, u64, u64, u64(as_bits(as_float(u32(a >> 32)) * as_float(u32(b >> 32)))) << 32 | as_bits(as_float(u32(a)) * as_float(u32(b)))),
    OP3("fma.f32x2", "Dddd", u64, u64, u64, u64,
        u64(as_bits(__builtin_fmaf(as_float(u32(a >> 32)), as_float(u32(b >> 32)), as_float(u32(c >> 32))))) << 32 |
            as_bits(__builtin_fmaf(as_float(u32(a)), as_float(u32(b)), as_float(u32(c))))),
};
EMU_TABLE(float_ops, kOps)

}  // namespace emu
