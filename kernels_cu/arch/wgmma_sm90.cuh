// Warpgroup instructions of compute capability 9.0a, one a function, no policy.
#pragma once

#include "core/numeric.cuh"

// Before the first product of a sequence, and after registers that it reads or adds to changed.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// All but the newest kPending groups are done.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Ties registers to this point of the program: no arithmetic on them moves above a wait before it.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// threadIdx.x, which no register holds from one use to the next.
__device__ __forceinline__ u32 read_thread_anew() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// A matrix in shared memory with 128-byte swizzle: 8 rows of 128 bytes follow each other, groups of
// 8 rows lie `stride` apart, panels `lead` (for operands whose rows are not the k dimension).
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 lead, u32 stride) {
  return static_cast<u64>((address & 0x3ffffu) >> 4) | static_cast<u64>(lead >> 4) << 16 |
         static_cast<u64>(stride >> 4) << 32 | 1ull << 62;
}

// Rows of 32 bytes with the swizzle of that size, one step of a product; a multiple of 256.
__device__ __forceinline__ u64 matrix_descriptor32(u32 address) {
  return static_cast<u64>((address & 0x3ffffu) >> 4) | 1ull << 16 | 256ull / 16 << 32 | 3ull << 62;
}

// The named barrier `id` of `threads` threads.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Whether `vote` holds for any thread of the barrier.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool vote) {
  u32 any;
  asm volatile("{\n\t.reg .pred in, out;\n\tsetp.ne.u32 in, %1, 0;\n\t"
               "bar.red.or.pred out, %2, %3, in;\n\tselp.u32 %0, 1, 0, out;\n\t}"
               : "=r"(any)
               : "r"(static_cast<u32>(vote)), "r"(id), "r"(threads)
               : "memory");
  return any != 0;
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// d[64, n] (+)= a[64, 16] * b[16, n] in float32; `keep` 0 overwrites d. Both operands of `shared`
// have their rows along k; `registers` takes a from registers, and b with its rows along n. So does
// `shared_columns` with b, while `registers_rows` takes it with its rows along k.
template <int kN>
struct Wgmma;

#define WGMMA_D24 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23"
#define WGMMA_D32 \
  WGMMA_D24 ", " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D40 \
  WGMMA_D32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_D48 \
  WGMMA_D40 ", " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D56 \
  WGMMA_D48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_D64 \
  WGMMA_D56 ", " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D36 \
  WGMMA_D32 ", " \
  "%32, %33, %34, %35"
#define WGMMA_D68 \
  WGMMA_D64 ", " \
  "%64, %65, %66, %67"
#define WGMMA_D96 \
  WGMMA_D64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_D128 \
  WGMMA_D96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, " \
  "%123, %124, %125, %126, %127"

#define WGMMA_OUT8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_OUT24 WGMMA_OUT8(0), WGMMA_OUT8(8), WGMMA_OUT8(16)
#define WGMMA_OUT32 WGMMA_OUT24, WGMMA_OUT8(24)
#define WGMMA_OUT40 WGMMA_OUT32, WGMMA_OUT8(32)
#define WGMMA_OUT48 WGMMA_OUT40, WGMMA_OUT8(40)
#define WGMMA_OUT56 WGMMA_OUT48, WGMMA_OUT8(48)
#define WGMMA_OUT64 WGMMA_OUT56, WGMMA_OUT8(56)
#define WGMMA_OUT36 WGMMA_OUT32, WGMMA_OUT4(32)
#define WGMMA_OUT68 WGMMA_OUT64, WGMMA_OUT4(64)
#define WGMMA_OUT96 \
  WGMMA_OUT64, WGMMA_OUT8(64), WGMMA_OUT8(72), WGMMA_OUT8(80), WGMMA_OUT8(88)
#define WGMMA_OUT128 \
  WGMMA_OUT96, WGMMA_OUT8(96), WGMMA_OUT8(104), WGMMA_OUT8(112), WGMMA_OUT8(120)

#define WGMMA_TEXT(n, type, d, keep, operands, layout) \
  "{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, %" #keep ", 0;\n\t" \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" d "}, " operands \
  ", keep, 1, 1, " layout ";\n\t}"

#define WGMMA_SHARED(n, c, type, a, b, k, columns) \
  asm volatile(WGMMA_TEXT(n, type, WGMMA_D##c, k, "%" #a ", %" #b, "0, " columns) \
               : WGMMA_OUT##c \
               : "l"(left), "l"(right), "r"(keep))

#define WGMMA_REGISTERS(n, c, type, a0, a1, a2, a3, b, k, columns) \
  asm volatile(WGMMA_TEXT(n, type, WGMMA_D##c, k, \
                          "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b, columns) \
               : WGMMA_OUT##c \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(keep))

// c = n / 2 registers; the six numbers after them.
#define WGMMA_SHAPE(n, c, i0, i1, i2, i3, i4, i5) \
  template <> \
  struct Wgmma<n> { \
    template <ScalarType kType> \
    __device__ __forceinline__ static void shared(float (&d)[c], u64 left, u64 right, int keep) { \
      if constexpr (kType == kBf16) { \
        WGMMA_SHARED(n, c, "bf16", i0, i1, i2, "0"); \
      } else { \
        WGMMA_SHARED(n, c, "f16", i0, i1, i2, "0"); \
      } \
    } \
    template <ScalarType kType> \
    __device__ __forceinline__ static void shared_columns(float (&d)[c], u64 left, u64 right, \
                                                          int keep) { \
      if constexpr (kType == kBf16) { \
        WGMMA_SHARED(n, c, "bf16", i0, i1, i2, "1"); \
      } else { \
        WGMMA_SHARED(n, c, "f16", i0, i1, i2, "1"); \
      } \
    } \
    template <ScalarType kType> \
    __device__ __forceinline__ static void registers(float (&d)[c], const u32 (&left)[4], \
                                                     u64 right, int keep) { \
      if constexpr (kType == kBf16) { \
        WGMMA_REGISTERS(n, c, "bf16", i0, i1, i2, i3, i4, i5, "1"); \
      } else { \
        WGMMA_REGISTERS(n, c, "f16", i0, i1, i2, i3, i4, i5, "1"); \
      } \
    } \
    template <ScalarType kType> \
    __device__ __forceinline__ static void registers_rows(float (&d)[c], const u32 (&left)[4], \
                                                          u64 right, int keep) { \
      if constexpr (kType == kBf16) { \
        WGMMA_REGISTERS(n, c, "bf16", i0, i1, i2, i3, i4, i5, "0"); \
      } else { \
        WGMMA_REGISTERS(n, c, "f16", i0, i1, i2, i3, i4, i5, "0"); \
      } \
    } \
  };

WGMMA_SHAPE(48, 24, 24, 25, 26, 27, 28, 29)
WGMMA_SHAPE(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA_SHAPE(80, 40, 40, 41, 42, 43, 44, 45)
WGMMA_SHAPE(96, 48, 48, 49, 50, 51, 52, 53)
WGMMA_SHAPE(112, 56, 56, 57, 58, 59, 60, 61)
WGMMA_SHAPE(128, 64, 64, 65, 66, 67, 68, 69)
WGMMA_SHAPE(192, 96, 96, 97, 98, 99, 100, 101)
WGMMA_SHAPE(256, 128, 128, 129, 130, 131, 132, 133)

#undef WGMMA_SHAPE
#undef WGMMA_REGISTERS
#undef WGMMA_SHARED
#undef WGMMA_TEXT
