// Warpgroup products of 8-bit floats (e4m3), compute capability 9.0a. Both operands have their rows
// along k: there is no other form.
#pragma once

#include "arch/wgmma_sm90.cuh"

// Rows of 64 bytes with the swizzle of that size; groups of 8 rows follow each other.
__device__ __forceinline__ u64 matrix_descriptor64(u32 address) {
  return static_cast<u64>((address & 0x3ffffu) >> 4) | 1ull << 16 | 512ull / 16 << 32 | 2ull << 62;
}

// d[64, n] (+)= a[64, 32] * b[32, n] in float32, of which the tensor core keeps about 14 bits;
// `keep` 0 overwrites d. `registers` takes a from registers.
template <int kN>
struct WgmmaFp8;

#define WGMMA_FP8_TEXT(n, d, keep, operands)                                    \
  "{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, %" #keep                          \
  ", 0;\n\t"                                                                    \
  "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" d "}, " operands \
  ", keep, 1, 1;\n\t}"

// c = n / 2 registers; the six numbers after them.
#define WGMMA_FP8_SHAPE(n, c, i0, i1, i2, i3, i4, i5)                                             \
  template <>                                                                                     \
  struct WgmmaFp8<n> {                                                                            \
    __device__ __forceinline__ static void shared(float (&d)[c], u64 left, u64 right, int keep) { \
      asm volatile(WGMMA_FP8_TEXT(n, WGMMA_D##c, i2, "%" #i0 ", %" #i1)                           \
                   : WGMMA_OUT##c                                                                 \
                   : "l"(left), "l"(right), "r"(keep));                                           \
    }                                                                                             \
    __device__ __forceinline__ static void registers(float (&d)[c], const u32 (&left)[4],         \
                                                     u64 right, int keep) {                       \
      asm volatile(                                                                               \
          WGMMA_FP8_TEXT(n, WGMMA_D##c, i5, "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4)    \
          : WGMMA_OUT##c                                                                          \
          : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(keep));       \
    }                                                                                             \
  };

WGMMA_FP8_SHAPE(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA_FP8_SHAPE(72, 36, 36, 37, 38, 39, 40, 41)
WGMMA_FP8_SHAPE(128, 64, 64, 65, 66, 67, 68, 69)
WGMMA_FP8_SHAPE(136, 68, 68, 69, 70, 71, 72, 73)
WGMMA_FP8_SHAPE(192, 96, 96, 97, 98, 99, 100, 101)
WGMMA_FP8_SHAPE(256, 128, 128, 129, 130, 131, 132, 133)

#undef WGMMA_FP8_SHAPE
#undef WGMMA_FP8_TEXT
