// Transposed values for the 8-bit products, whose operands have their rows along k.
//
// The order of the keys along k is free as long as P has the same. In every 32 it is chosen so that
// scores of a thread, packed to 8 bits, are its operand of the product with V: of a row it holds
// keys 8i + 2q and one after (q = lane % 4), and the operand wants four neighbours,
//     key    2q  2q+1  8+2q  9+2q  16+2q 17+2q 24+2q 25+2q
//     slot   4q  4q+1  4q+2  4q+3  16+4q  ...
// This is also how ldmatrix.trans hands out pairs of bytes. In every 16, rows of the transposed
// tile are the even columns of V, then the odd ones: stores have no bank conflicts then, and a
// thread ends up with four neighbouring columns of the result.
#pragma once

#include "mainloop/fwd_sm90_fp8_load.cuh"

template <class V>
struct Fp8Transposer {
  using S = Fp8Shared<V>;
  static constexpr int kKeys = V::kKeys, kChunks = V::kHeadDim / 16, kPanelKeys = S::kPanelKeys;

  static constexpr int kOwn = kChunks / kTransposingWarps;  // chunks of a warp
  // As far as registers go: addresses are then a flipped bit and an offset in the instruction.
  static constexpr int kUnroll = V::kLoadRegisters < 40 ? 1 : V::kHeadDim > 128 ? 2 : kOwn;
  static_assert(kChunks % kTransposingWarps == 0 && 8 % kTransposingWarps == 0, "");

  const S &shared;
  const int warp;  // of those that transpose
  const int lane = threadIdx.x & 31;

  __device__ __forceinline__ Fp8Transposer(const S &shared, int warp)
      : shared(shared), warp(warp) {}

  __device__ __forceinline__ void run() const {
    typename S::Rest &r = shared.rest();
    Ring<S::kValueStages> v;
    Ring<S::kTurnedStages> turned;
#pragma unroll 1
    while (true) {
      mbarrier_wait(shared_address(&r.value_full[v.slot]), v.parity);
      // Read by the lane that gives the buffer back. __syncwarp() would order the others, but is
      // no instruction in a converged warp: compute-sanitizer does not see it.
      const int from = __shfl_sync(0xffffffffu, lane == 0 ? r.from[v.slot] : 0, 0);
      const int until = __shfl_sync(0xffffffffu, lane == 0 ? r.until[v.slot] : 0, 0);
      if (from == kStop) return;
      const u32 source = shared.values(v.slot), to = shared.operand(turned.slot);
      if (from > 0 || until < kKeys) {
        clear_rows(source, 0, min(from, kKeys));
        clear_rows(source, max(until, 0), kKeys);
        __syncwarp();
      }
      mbarrier_wait(shared_address(&r.turned_empty[turned.slot]), turned.parity ^ 1);
#pragma unroll(kUnroll)
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int group = 0; group < kKeys / 32; group += 2) {
          u32 first[4], second[4];
          load(first, source, group, i);
          load(second, source, group + 1, i);
          store(first, to, group, i);
          store(second, to, group + 1, i);
        }
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive(shared_address(&r.turned_full[turned.slot]));
        mbarrier_arrive(shared_address(&r.value_empty[v.slot]));
      }
      v.next();
      turned.next();
    }
  }

  // Of this warp's columns. What these rows hold may be NaN, which no weight of 0 undoes.
  __device__ __forceinline__ void clear_rows(u32 source, int from, int until) const {
    const u32 zero[4] = {};
#pragma unroll 1
    for (int chunk = warp; chunk < kChunks; chunk += kTransposingWarps) {
#pragma unroll 1
      for (int row = from + lane; row < until; row += 32) {
        store_shared16(at(source, row, chunk), zero);
      }
    }
  }

  // 16 columns of a row of V.
  __device__ __forceinline__ static u32 at(u32 source, int row, int chunk) {
    return source + (chunk / 8 * kKeys + row) * 128 + (((chunk ^ row) & 7) << 4);
  }

  // 32 keys times 16 columns, of this warp's i-th chunk. Tiles start at multiples of 1024 bytes, so
  // what a swizzle flips is flipped in the address.
  __device__ __forceinline__ void load(u32 (&pair)[4], u32 source, int group, int i) const {
    const u32 line = source + lane * 128 + (((warp ^ lane) & 7) << 4);
    const int chunk = i * kTransposingWarps;
    ldmatrix4_trans(pair, (line ^ chunk % 8 << 4) + (chunk / 8 * kKeys + group * 32) * 128);
  }

  __device__ __forceinline__ void store(const u32 (&pair)[4], u32 to, int group, int i) const {
    constexpr int kGroups = kPanelKeys / 32;  // of a panel
    const u32 row = lane & 7, matrix = lane >> 3;
    const u32 flip = kPanelKeys == 128 ? row : row >> 1;
    const u32 line =
        to + (warp * 16 + 8 * (matrix & 1) + row) * kPanelKeys + (((matrix >> 1) ^ flip) << 4);
    const u32 word[4] = {
        __byte_perm(pair[0], pair[1], 0x6420), __byte_perm(pair[0], pair[1], 0x7531),
        __byte_perm(pair[2], pair[3], 0x6420), __byte_perm(pair[2], pair[3], 0x7531)};
    stmatrix4((line ^ group % kGroups << 5) + group / kGroups * V::kHeadDim * kPanelKeys +
                  i * kTransposingWarps * 16 * kPanelKeys,
              word);
  }
};
