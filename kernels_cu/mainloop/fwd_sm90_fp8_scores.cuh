// Scores of a warpgroup's 64 rows in the 8-bit Hopper prefill, until they become weights: their
// scale, masks, and what modifies them.
#pragma once

#include "mainloop/fwd_sm90_rows.cuh"

template <class V>
struct Fp8Scores : TileRows<V::kKeys> {
  using Rows = TileRows<V::kKeys>;
  using Rows::p, Rows::lane, Rows::s, Rows::token;
  static constexpr int kKeys = V::kKeys;

  u32 weight[kKeys / 32][4];  // in 8 bits
  float scale;                // of scores, to base 2; of modified ones 1
  float natural;              // of scores

  using Rows::Rows;

  __device__ __forceinline__ void load_scale(const PrefillTile &t) {
    natural = score_scale(p, t.request, t.kv_head);
    // Never 0, as it meets -inf.
    natural = copysignf(fmaxf(fabsf(natural), 1e-30f), natural);
    scale = V::kScoreMod ? 1.f : natural * kLog2e;
  }

  // The keys that a row sees, from the first one of key tile n on.
  __device__ __forceinline__ KeyRange visible(const PrefillTile &t, int n, int h) const {
    const int position = token(t, h) + t.shift;
    const int low = p.window_left < 0 ? 0 : position - p.window_left;
    const int high = p.window_right < 0 ? t.kv_end : min(t.kv_end, position + p.window_right + 1);
    return {low - n * kKeys, high - n * kKeys};
  }

  // A lane's scores of a row have a bit each, in 8 keys two.
  __device__ __forceinline__ static u32 bits_before(int end) {
    const int count = (end >> 3) * 2 + min(end & 7, 2);
    return end <= 0 ? 0 : end >= 128 ? ~0u : (1u << count) - 1;
  }

  __device__ __forceinline__ void mask(const PrefillTile &t, int n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const KeyRange keys = visible(t, n, h);
      const int low = keys.begin - lane % 4 * 2, high = keys.end - lane % 4 * 2;
      if constexpr (V::kHeadDim > 128) {  // a word is a register too many
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int at = 8 * j + e;
            if (at < low || at >= high) s[4 * j + 2 * h + e] = -infinity();
          }
        }
      } else {
        const u32 seen = bits_before(high) & ~bits_before(low);
#pragma unroll
        for (int k = 0; k < kKeys / 4; ++k) {
          float &at = s[k / 2 * 4 + 2 * h + k % 2];
          at = seen >> k & 1 ? at : -infinity();
        }
      }
    }
  }

  // Soft cap and ALiBi; scores are to base 2 then.
  __device__ __forceinline__ void modify(const PrefillTile &t, int n) {
    if constexpr (V::kScoreMod) {
      Rows::modify_scores(t, n, natural, [&](int h) { return Rows::load_slope(t, h); });
    }
  }

  // Four weights of a row, of two groups of 8 keys.
  __device__ __forceinline__ u32 pack_group(int at) const {
    return pack_fp8<kE4m3>(s[at], s[at + 1]) | pack_fp8<kE4m3>(s[at + 4], s[at + 5]) << 16;
  }
  // Of a lane's groups in the order of the operand.
  __device__ __forceinline__ static constexpr int group_at(int group) {
    return 16 * (group / 4) + 8 * (group % 4 / 2) + 2 * (group % 2);
  }

  // Before scores are compared: the largest is the one that weighs most.
  __device__ __forceinline__ void orient() {
    if (!V::kScoreMod && scale < 0.f) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) s[i] = -s[i];
    }
  }
};
