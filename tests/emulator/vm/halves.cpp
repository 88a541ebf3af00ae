// f16, bf16 and their pairs. Each operation rounds once: sums and products are exact in double.
#include "alu.h"
#include "half.h"

namespace emu {

struct F16 {
  static double get(u32 v) { return half_to_float(v & 0xffff); }
  static u32 put(double v) { return narrow(v, kHalf); }
};
struct BF {
  static double get(u32 v) { return bf16_to_float(v & 0xffff); }
  static u32 put(double v) { return double_to_bf16(v); }
};

inline double flush_half(double v, bool on) { return on && std::fabs(v) < 6.103515625e-05 ? std::copysign(0.0, v) : v; }

// `n` operands, one or two values a register. Flags: ftz (f16 only), sat, relu.
template <class H, class F>
static Step half_map(Warp& w, const Insn& in, uint32_t m, int n, bool pair, F f) {
  const u32* s[3];
  for (int i = 0; i < 3; i++) s[i] = w.r(in.arg[i < n ? 1 + i : 1]);
  if (!in.flags) {
    const u32 *x = s[0], *y = s[1], *z = s[2];
    const auto one = [=](int l, int shift) { return H::put(f(H::get(x[l] >> shift), H::get(y[l] >> shift), H::get(z[l] >> shift))); };
    u32 found[32];
    for (int l = 0; l < 32; l++) found[l] = pair ? one(l, 0) | one(l, 16) << 16 : one(l, 0);
    lanes(w.r(in.arg[0]), m, [&](int l) { return found[l]; });
    return Step::kNext;
  }
  const bool ftz = (in.flags & kFtz) && std::is_same_v<H, F16>;
  u32 out[32] = {};
  each_lane(m, [&](int l) {
    for (int shift = 0; shift <= (pair ? 16 : 0); shift += 16) {
      double v[3] = {};
      for (int i = 0; i < n; i++) v[i] = flush_half(H::get(s[i][l] >> shift), ftz);
      double r = f(v[0], v[1], v[2]);
      if (in.flags & kRelu) r = r != r ? r : std::max(r, 0.0);
      if (in.flags & kSat) r = r > 0 ? std::min(r, 1.0) : 0;
      out[l] |= H::put(flush_half(r, ftz)) << shift;
    }
  });
  lanes(w.r(in.arg[0]), m, [&](int l) { return out[l]; });
  return Step::kNext;
}
inline double half_min(double a, double b) { return a != a ? b : b != b ? a : a < b || (a == b && std::signbit(a)) ? a : b; }
inline double half_max(double a, double b) { return a != a ? b : b != b ? a : a > b || (a == b && !std::signbit(a)) ? a : b; }
inline double nan_or(bool nan, double a, double b, double r) { return nan && (a != a || b != b) ? NAN : r; }

constexpr uint32_t kMods = kFtz | kSat | kRelu | kNan;
#define H(NAME, SIG, N, H_, PAIR, EXPR)                                                          \
  {NAME, SIG, EMU_FN {                                                                           \
     const bool nan = in.flags & kNan; (void)nan;                                                \
     return half_map<H_>(w, in, m, N, PAIR, [=](double a, double b, double c) -> double {        \
       (void)a; (void)b; (void)c; return EXPR; });                                               \
   }, kMods | kApprox, 0}
#define FAMILY(S, H_, PAIR)                                                                       \
  H("add." S, "Rrr", 2, H_, PAIR, a + b), H("sub." S, "Rrr", 2, H_, PAIR, a - b),                 \
      H("mul." S, "Rrr", 2, H_, PAIR, a * b), H("fma." S, "Rrrr", 3, H_, PAIR, std::fma(a, b, c)), \
      H("min." S, "Rrr", 2, H_, PAIR, nan_or(nan, a, b, half_min(a, b))),                         \
      H("max." S, "Rrr", 2, H_, PAIR, nan_or(nan, a, b, half_max(a, b))),                         \
      H("ex2." S, "Rr", 1, H_, PAIR, std::exp2(a)), H("tanh." S, "Rr", 1, H_, PAIR, std::tanh(a))
#define SIGNS(S, MASK)                                                          \
  OP1("neg." S, "Rr", u32, u32, a ^ (MASK)), OP1("abs." S, "Rr", u32, u32, a & ~u32(MASK))

static const OpDef kOps[] = {
    FAMILY("f16", F16, false), FAMILY("f16x2", F16, true), FAMILY("bf16", BF, false), FAMILY("bf16x2", BF, true),
    SIGNS("f16", 0x8000), SIGNS("bf16", 0x8000), SIGNS("f16x2", 0x80008000), SIGNS("bf16x2", 0x80008000),
};
EMU_TABLE(half_ops, kOps)

}  // namespace emu
