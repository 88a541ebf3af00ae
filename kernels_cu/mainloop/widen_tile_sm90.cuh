// 8-bit keys or values that lie in shared memory as TMA left them, to 16 bits where warpgroup
// products read them. Both are panels of 128 bytes a row with the swizzle of that size, from a
// multiple of 1024 on; one of 8-bit elements becomes one or two. No access meets another in a bank.
#pragma once

#include "arch/mma_sm80.cuh"
#include "arch/tma_sm90.cuh"

// What a warp takes at a time of a panel of kColumns elements a row, 64 or 128: 64 elements of 8
// rows, 16 a lane; of 128 columns steps 2i and 2i + 1 are the halves of the same rows. Loads of
// several may be asked for before the first is used.
template <ScalarType kFrom, int kColumns, ScalarType kTo = kFp16>
struct WidenStep {
  static_assert(kColumns == 64 || kColumns == 128, "");
  static_assert(kTo == kFp16 || kTo == kBf16, "");
  static constexpr int kParts = kColumns / 64, kRows = 8 / kParts;  // rows over steps

  u32 word[4];

  // `panel`: of 8-bit elements.
  __device__ __forceinline__ void load(u32 panel, int step) {
    const u32 at = place(threadIdx.x % 32 / 8) ^ step % kParts * 64;
    load_shared16(word, panel + step / kParts * 1024 + at);
  }

  // `panel`: the first of 16-bit elements; `panel_bytes` from there to the second.
  __device__ __forceinline__ void store(u32 panel, int panel_bytes, int step) const {
    const u32 to = panel + step % kParts * panel_bytes + step / kParts * 1024;
    const u32 at = place(threadIdx.x % 32 / 8 * 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      u32 half[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) half[i] = widen(word[2 * h + i / 2] >> i % 2 * 16);
      store_shared16(to + (at ^ h * 16), half);
    }
  }

  // The row of this lane.
  __device__ __forceinline__ static int row(int step) {
    return step / kParts * 8 + static_cast<int>(threadIdx.x % 8);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = 0;
  }

  __device__ __forceinline__ void negate() {
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] ^= 0x80808080u;
  }

 private:
  // A chunk of 16 bytes of this lane's row: of those, eight lanes side by side have eight.
  __device__ __forceinline__ static u32 place(u32 chunk) {
    const u32 row = threadIdx.x % 8;
    return row * 128 + ((chunk ^ row) << 4);
  }

  __device__ __forceinline__ static u32 widen(u32 pair) {
    const u32 fp16 = fp8_to_fp16<kFrom>(pair & 0xffffu);
    if constexpr (kTo == kFp16) return fp16;
    const float2 both = unpack_fp16(fp16);
    return pack_bf16(both.x, both.y);
  }
};
