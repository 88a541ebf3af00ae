// Shared keys of 8-bit caches on their way from copies to products: three warps widen them to fp16.
#pragma once

#include "block/shared_work.cuh"
#include "mainloop/shared_merge_sm90.cuh"
#include "mainloop/widen_tile_sm90.cuh"

constexpr int kWidenWarps = 3, kFirstToWiden = 5;

template <class V>
struct SharedWidening {
  using S = SharedPlaces<V>;
  using Step = WidenStep<V::kCache, V::kHeadDim>;
  static constexpr int kParts = Step::kParts, kOctets = kShareKeys / 8;  // of rows
  static constexpr int kPanelBytes = kShareKeys * 128;

  const u32 base;

  // The blocks of all pieces of the CTA's span in order, keys and values in turn.
  __device__ __forceinline__ void run(const SharedStarts &from) const {
    const int4 span = *from.groups;
    // Eights of rows are no multiple of the warps; those of values are dealt from the other end.
    const int warp = threadIdx.x / 32 - kFirstToWiden;
    int first = warp;
    if constexpr (V::kInside) mbarrier_wait(base + S::kRows, 0);  // it is made where stages are
    int raw = 0, wide = 0;
    u32 raw_phase = 0, wide_phase = 0;
#pragma unroll 1
    for (int left = 2 * (span.y - span.x); left > 0; --left) {
      const bool values = left & 1;
      const u32 raw_full = base + S::kRawFull + 8 * raw + (values ? 8 * V::kRawStages : 0);
      const u32 full = base + (values ? S::kValueFull : S::kKeyFull) + 8 * wide;
      mbarrier_wait(raw_full, raw_phase);
      mbarrier_wait(full + 8 * V::kStages, wide_phase ^ 1);
      widen(base + (values ? S::kLoadedValues : S::kLoads) + raw * S::kLoadBytes + first * 1024,
            base + (values ? S::kValues : S::kKeys) + wide * S::kStageBytes + first * 1024, first);
      fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(raw_full + S::kRawEmpty - S::kRawFull);
        mbarrier_arrive(full);
      }
      first = kWidenWarps - 1 - first;
      if (!values) continue;
      if (++raw == V::kRawStages) raw = 0, raw_phase ^= 1;
      if (++wide == V::kStages) wide = 0, wide_phase ^= 1;
    }
  }

 private:
  __device__ __forceinline__ static void widen(u32 from, u32 to, int first) {
#pragma unroll
    for (int octet = 0; octet < kOctets; octet += kWidenWarps) {
      if (octet + first >= kOctets) continue;
      Step step[kParts];
#pragma unroll
      for (int i = 0; i < kParts; ++i) step[i].load(from, octet * kParts + i);
#pragma unroll
      for (int i = 0; i < kParts; ++i) step[i].store(to, kPanelBytes, octet * kParts + i);
    }
  }
};
