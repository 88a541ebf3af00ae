// Scalar types and their conversions.
//
// The compile step passes -ftz=true (CuPy does so too), which flushes subnormals in plain C++
// arithmetic. Conversions, fma_rn and div_rn are PTX without .ftz, so that whatever is built on
// them alone keeps subnormals.
#pragma once

#include "variant.cuh"

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

__device__ __forceinline__ float infinity() {
  return __int_as_float(0x7f800000);
}

__device__ __forceinline__ float fma_rn(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

__device__ __forceinline__ float div_rn(float a, float b) {
  float d;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

template <ScalarType kType>
constexpr int kItemBytes = kType == kFp32   ? 4
                           : kType <= kBf16 ? 2
                                            : 1;

template <ScalarType kType>
constexpr bool kIsFp8 = kType == kE4m3 || kType == kE5m2;

// ---- 16-bit pairs, element 0 in the low half

__device__ __forceinline__ u32 pack_fp16(float lo, float hi) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

__device__ __forceinline__ float2 unpack_fp16(u32 pair) {
  float2 d;
  asm("{\n\t.reg .b16 lo, hi;\n\tmov.b32 {lo, hi}, %2;\n\tcvt.f32.f16 %0, lo;\n\t"
      "cvt.f32.f16 %1, hi;\n\t}"
      : "=f"(d.x), "=f"(d.y)
      : "r"(pair));
  return d;
}

__device__ __forceinline__ float2 unpack_bf16(u32 pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ u32 mul_fp16x2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// ---- 8-bit floats: round to nearest even, saturate (infinities too), NaN stays NaN

// One value in integer arithmetic, for architectures without the instruction (below 8.9).
template <ScalarType kType>
__device__ __forceinline__ u32 to_fp8_software(float x) {
  constexpr int kMantissa = kType == kE4m3 ? 3 : 2;
  constexpr int kDropped = 23 - kMantissa;
  constexpr int kBias = kType == kE4m3 ? 7 : 15;
  constexpr u32 kMax = kType == kE4m3 ? 0x43e00000u : 0x47600000u;  // 448, 57344
  constexpr u32 kMinNormal = (127u + 1 - kBias) << 23;
  const u32 bits = __float_as_uint(x), sign = (bits >> 24) & 0x80u, nan = bits & 0x7fffffffu;
  const u32 magnitude = min(nan, kMax);
  // Adding 2^(23 + e) leaves a multiple of the subnormal step 2^e in the low mantissa bits.
  constexpr u32 kStep = (127u + 23 + 1 - kBias - kMantissa) << 23;
  const u32 small = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(kStep)) - kStep;
  const u32 odd = (magnitude >> kDropped) & 1;
  const u32 rounded = (magnitude + (1u << (kDropped - 1)) - 1 + odd) >> kDropped;
  const u32 normal = rounded - ((127u - kBias) << kMantissa);
  const u32 code = magnitude < kMinNormal ? small : normal;
  return nan > 0x7f800000u ? 0x7fu : sign | code;
}

// Two values; element 0 in the low byte.
template <ScalarType kType>
__device__ __forceinline__ u32 pack_fp8(float lo, float hi) {
  if constexpr (kArch < 89) {
    return to_fp8_software<kType>(lo) | to_fp8_software<kType>(hi) << 8;
  } else {
    u16 d;
    if constexpr (kType == kE4m3) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
    } else {
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
    }
    return d;
  }
}

// Two 8-bit values (low 16 bits of `pair`) to two fp16 values, exactly.
template <ScalarType kType>
__device__ __forceinline__ u32 fp8_to_fp16(u32 pair) {
  if constexpr (kArch >= 89) {
    u32 d;
    const u16 two = static_cast<u16>(pair);
    if constexpr (kType == kE4m3) {
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(two));
    } else {
      asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(d) : "h"(two));
    }
    return d;
  } else {
    const u32 spread = __byte_perm(pair, 0, 0x1404);  // each byte on top of a half
    if constexpr (kType == kE5m2) {
      return spread;
    } else {
      // One more exponent bit and a bias of 15 instead of 7: the value over 2^8.
      const u32 magnitude = (spread & 0x7f007f00u) >> 1;
      u32 d = mul_fp16x2(magnitude, 0x5c005c00u) | (spread & 0x80008000u);
      if ((magnitude & 0xffffu) == 0x3f80u) d |= 0x7fffu;
      if ((magnitude >> 16) == 0x3f80u) d |= 0x7fff0000u;
      return d;
    }
  }
}

// ---- any type, kCount elements in registers; element 0 in the lowest bits of word 0

template <ScalarType kType, int kCount>
constexpr int kWords = (kItemBytes<kType> * kCount + 3) / 4;

template <ScalarType kType>
__device__ __forceinline__ u32 pack_pair(float lo, float hi) {
  if constexpr (kType == kFp16) return pack_fp16(lo, hi);
  if constexpr (kType == kBf16) return pack_bf16(lo, hi);
  if constexpr (kIsFp8<kType>) return pack_fp8<kType>(lo, hi);
}

// sum + 0 * pair: NaN where an element is not finite.
template <ScalarType kType>
__device__ __forceinline__ u32 times_zero(u32 pair, u32 sum) {
  u32 result;
  if constexpr (kType == kFp16) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(0u), "r"(sum));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(0u), "r"(sum));
  }
  return result;
}

template <ScalarType kType>
__device__ __forceinline__ float2 unpack_pair(u32 pair) {
  if constexpr (kType == kFp16) return unpack_fp16(pair);
  if constexpr (kType == kBf16) return unpack_bf16(pair);
  if constexpr (kIsFp8<kType>) return unpack_fp16(fp8_to_fp16<kType>(pair));
}

template <ScalarType kType, int kCount>
__device__ __forceinline__ void unpack(const u32 (&word)[kWords<kType, kCount>],
                                       float (&value)[kCount]) {
  if constexpr (kType == kFp32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = __uint_as_float(word[i]);
  } else {
    constexpr int kBits = 16 * kItemBytes<kType>;  // of a pair
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const int bit = i / 2 * kBits;
      const float2 pair = unpack_pair<kType>(word[bit / 32] >> bit % 32);
      value[i] = pair.x;
      if (i + 1 < kCount) value[i + 1] = pair.y;
    }
  }
}

template <ScalarType kType, int kCount>
__device__ __forceinline__ void pack(const float (&value)[kCount],
                                     u32 (&word)[kWords<kType, kCount>]) {
  if constexpr (kType == kFp32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) word[i] = __float_as_uint(value[i]);
  } else {
    constexpr int kBits = 16 * kItemBytes<kType>;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const int bit = i / 2 * kBits;
      const u32 pair = pack_pair<kType>(value[i], i + 1 < kCount ? value[i + 1] : 0.f);
      word[bit / 32] = bit % 32 ? word[bit / 32] | pair << bit % 32 : pair;
    }
  }
}
