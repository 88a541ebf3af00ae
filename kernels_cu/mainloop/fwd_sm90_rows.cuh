// The rows of a computing warp of both Hopper prefills: where they are, what modifies their scores,
// and what comes of their sums.
#pragma once

#include "block/epilogue.cuh"
#include "block/soft_cap.cuh"
#include "block/tile_order.cuh"

template <int kKeys>
struct TileRows {
  static constexpr int kWarpgroupRows = 64;

  const AttentionParams &p;
  const int pack_shift;
  const int warpgroup, warp, lane;  // 0 or 1; of the warpgroup; of the warp
  float s[kKeys / 2];               // scores, then weights
  float c[2], sum[2];  // of rows lane / 4 and 8 after: the shift to base 2, and the sum

  __device__ __forceinline__ TileRows(const AttentionParams &p, int pack_shift, int warpgroup)
      : p(p),
        pack_shift(pack_shift),
        warpgroup(warpgroup),
        warp(static_cast<int>(threadIdx.x / 32) & 3),
        lane(static_cast<int>(threadIdx.x) & 31) {}

  // This lane's first row in the tile; the other one is 8 after.
  __device__ __forceinline__ int row() const {
    return warpgroup * kWarpgroupRows + warp * 16 + lane / 4;
  }
  __device__ __forceinline__ int token(const PrefillTile &t, int h) const {
    return t.token + ((row() + 8 * h) >> pack_shift);
  }
  __device__ __forceinline__ int head(const PrefillTile &t, int h) const {
    return (t.head_group << pack_shift) + ((row() + 8 * h) & ((1 << pack_shift) - 1));
  }

  __device__ __forceinline__ float load_slope(const PrefillTile &t, int h) const {
    return load_float(p.alibi_slopes,
                      t.request * p.alibi_batch_stride + head(t, h) * p.alibi_head_stride);
  }

  // Soft cap and ALiBi of products that are due `natural`; slope(h) is that of row h. Scores are to
  // base 2 then.
  template <class Slope>
  __device__ __forceinline__ void modify_scores(const PrefillTile &t, int n, float natural,
                                                Slope slope) {
    if (p.softcap > 0.f) {
      SoftCap(natural / p.softcap, p.softcap * kLog2e).apply(s);
    } else {
      const float to_base_2 = natural * kLog2e;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) s[i] *= to_base_2;
    }
    if (p.alibi_slopes) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float steep = -slope(h) * kLog2e;
        const int position = token(t, h) + t.shift - n * kKeys - lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float distance = fabsf(static_cast<float>(position - 8 * j - e));
            s[4 * j + 2 * h + e] = fmaf(steep, distance, s[4 * j + 2 * h + e]);
          }
        }
      }
    }
  }

  // Of a row with the shift `c` and a lane's part of its sum; `by` is what values are due.
  __device__ __forceinline__ RowResult conclude_row(const PrefillTile &t, float c, float part,
                                                    float by) const {
    const float total = quad_sum(part);
    RowResult result = {-infinity(), 0.f};
    if (total != 0.f) {
      result.norm = __fdividef(by, total);  // sums stay far below 2^126
      if (p.lse || p.sink || t.slot >= 0) result.lse = c * kLn2 + logf(total);
    }
    return result;
  }
};
