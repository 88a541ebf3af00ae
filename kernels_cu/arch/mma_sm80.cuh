// Instructions of compute capability 8.0, one a function, no policy.
#pragma once

#include "core/numeric.cuh"

__device__ __forceinline__ u32 shared_address(const void *pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void cp_async16(u32 to, const char *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// 16 bytes, of which the first `bytes` are read and the rest is zero.
__device__ __forceinline__ void cp_async16(u32 to, const char *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// 8 bytes, or 8 of zero.
__device__ __forceinline__ void cp_async8(u32 to, const char *from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async4(u32 to, const void *from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// All but the newest kPending groups of this thread have landed.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void store_shared4(u32 to, u32 word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void store_shared16(u32 to, const u32 (&word)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(word[0]), "r"(word[1]),
               "r"(word[2]), "r"(word[3])
               : "memory");
}

__device__ __forceinline__ u32 load_shared4(u32 from) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

__device__ __forceinline__ void load_shared16(u32 (&word)[4], u32 from) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(from)
               : "memory");
}

// Four 8x8 matrices of 16 bits; lane 8i + j gives the address of row j of matrix i.
__device__ __forceinline__ void ldmatrix4(u32 (&matrix)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void ldmatrix4_trans(u32 (&matrix)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(row)
               : "memory");
}

// d[16, 8] += a[16, 16] * b[16, 8]
template <ScalarType kType>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kType == kBf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(kType == kFp16, "mma takes fp16 and bf16");
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
