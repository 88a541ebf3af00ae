// 16-bit and 8-bit floats.
#pragma once
#include "vm.h"

namespace emu {

inline float flush(float f) {
  const uint32_t b = as_bits(f);
  return (b & 0x7f800000) ? f : as_float(b & 0x80000000);
}

// Results that are NaN have one bit pattern.
inline float canonical(float v) { return v == v ? v : as_float(0x7fffffff); }

inline float bf16_to_float(uint32_t v) { return as_float(v << 16); }
inline float half_to_float(uint32_t v) {
  const uint32_t sign = (v & 0x8000) << 16, e = v >> 10 & 31, f = v & 1023;
  if (e == 31) return f ? as_float(0x7fffffff) : as_float(sign | 0x7f800000);
  if (e) return as_float(sign | (e + 112) << 23 | f << 13);
  const float tiny = float(f) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -tiny : tiny;
}
inline float e4m3_to_float(uint32_t v) {
  const uint32_t e = v >> 3 & 15, f = v & 7;
  if ((v & 127) == 127) return as_float(0x7fffffff);
  const float r = e ? as_float((e + 120) << 23 | f << 20) : float(f) * 0.001953125f;  // 2^-9
  return v & 128 ? -r : r;
}
inline float e5m2_to_float(uint32_t v) { return half_to_float(v << 8); }

enum Rounding { kNearest, kToZero, kDown, kUp };
struct Format {
  int ebits, mbits;
  bool has_inf;
  uint32_t nan, max;
};
constexpr Format kHalf = {5, 10, true, 0x7fff, 0x7bff}, kBf16 = {8, 7, true, 0x7fff, 0x7f7f},
                 kE4m3 = {4, 3, false, 0x7f, 0x7e}, kE5m2 = {5, 2, true, 0x7f, 0x7b};

// Rounds once, from the exact double.
inline uint32_t narrow(double v, const Format& f, Rounding mode = kNearest, bool satfinite = false) {
  const int width = f.ebits + f.mbits;
  if (std::isnan(v)) return f.nan;
  const uint32_t sign = std::signbit(v) ? 1u << width : 0;
  double a = std::fabs(v);
  const int bias = (1 << (f.ebits - 1)) - 1;
  const uint32_t inf = f.has_inf && !satfinite ? ((1u << f.ebits) - 1) << f.mbits : f.max;
  const auto overflow = [&] {
    if (satfinite) return sign | f.max;
    if (!f.has_inf) return sign | f.nan;
    const bool to_max = mode == kToZero || (mode == kDown && !sign) || (mode == kUp && sign);
    return sign | (to_max ? f.max : inf);
  };
  if (std::isinf(v)) return satfinite ? sign | f.max : f.has_inf ? sign | inf : f.nan;
  if (a == 0) return sign;
  int e;
  std::frexp(a, &e);
  e = std::max(e - 1, 1 - bias);
  const double unit = std::ldexp(1.0, e - f.mbits), scaled = a / unit;
  double r;
  switch (mode) {
    case kToZero: r = std::floor(scaled); break;
    case kDown: r = sign ? std::ceil(scaled) : std::floor(scaled); break;
    case kUp: r = sign ? std::floor(scaled) : std::ceil(scaled); break;
    default: r = std::nearbyint(scaled);
  }
  const uint32_t q = uint32_t(r);
  uint32_t bits;  // of a number whose significand may have grown to the next power of two
  if (q >> f.mbits == 0) bits = q;
  else bits = (uint32_t(e + bias) << f.mbits) + (q - (1u << f.mbits));
  if (bits > f.max) return overflow();
  return sign | bits;
}

// To bf16, to nearest, from the exact double.
inline uint32_t double_to_bf16(double v) {
  uint64_t b;
  memcpy(&b, &v, sizeof b);
  const uint64_t a = b & ~(1ull << 63);
  if (a < 0x3810ull << 48 || a >= 0x47f0ull << 48) return narrow(v, kBf16);  // below 2^-126, from 2^128 on
  return uint32_t(b >> 48 & 0x8000) | uint32_t(((a + ((1ull << 44) - 1) + (a >> 45 & 1)) >> 45) - (896 << 7));
}

inline uint32_t float_to_bf16(float v) {
  const uint32_t b = as_bits(v);
  return (b & 0x7fffffff) > 0x7f800000 ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
inline uint32_t float_to_half(float v) {
  const uint32_t b = as_bits(v), sign = b >> 16 & 0x8000, a = b & 0x7fffffff;
  if (a > 0x7f800000) return 0x7fff;
  if (a >= 0x47800000) return sign | 0x7c00;                             // 2^16 and more
  if (a < 0x38800000) {                                                  // below 2^-14
    const float r = as_float(a) * 16777216.f;                            // exact: units of 2^-24
    return sign | uint32_t(std::nearbyintf(r));
  }
  const uint32_t r = a - 0x38000000 + 0xfff + (a >> 13 & 1);
  return sign | std::min(r >> 13, 0x7c00u);
}

// To 8 bits, to nearest, what is too large to the largest. A small number is one of units of its least bit: they
// are the lowest bits of a float to which 2^23 of them are added.
template <int EBITS, int MBITS, uint32_t MAX>
inline uint32_t float_to_8bit(float v) {
  constexpr int kShift = 23 - MBITS;
  constexpr uint32_t kBias = 127 - ((1 << (EBITS - 1)) - 1), kLeast = (kBias + 1) << 23;
  const uint32_t b = as_bits(v), a = b & 0x7fffffff;
  const uint32_t normal = ((a + ((1u << (kShift - 1)) - 1) + (a >> kShift & 1)) >> kShift) - (kBias << MBITS);
  const uint32_t magic = (kBias + 1 + uint32_t(kShift)) << 23;
  const uint32_t small = as_bits(as_float(a) + as_float(magic)) - magic;
  const uint32_t found = a < kLeast ? small : normal > MAX ? MAX : normal;
  return a > 0x7f800000 ? 0x7f : (b >> 24 & 0x80) | found;
}
inline uint32_t float_to_e4m3(float v) { return float_to_8bit<4, 3, 0x7e>(v); }
inline uint32_t float_to_e5m2(float v) { return float_to_8bit<5, 2, 0x7b>(v); }

}  // namespace emu
