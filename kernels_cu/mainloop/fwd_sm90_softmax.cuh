// The rows of a computing warp of the Hopper prefill: from their scores to weights.
//
// softmax(x) = softmax(x - c) for any c. c follows the maximum through the first key tile of a row
// and those with a mask; afterwards it stays, so that the inner loop has no maximum, no shuffle and
// no rescaling of O. Where sums grow, c moves by a power of two. Only a jump past float32's range
// within one key tile is lost: sums are not finite then, and the tile runs again with the maximum.
#pragma once

#include "arch/wgmma_sm90.cuh"
#include "block/query_tile.cuh"
#include "mainloop/fwd_sm90_rows.cuh"

template <class V>
struct PrefillRows : TileRows<V::kKeys> {
  using Rows = TileRows<V::kKeys>;
  static constexpr int kKeys = V::kKeys, kDv = V::kHeadDimV;
  static constexpr ScalarType kType = V::kCompute;
  // Weights up to here are exact in 16 bits, and sums far from the end of float32.
  static constexpr float kLargestSum = kType == kFp16 ? 0x1p15f : 0x1p40f;
  // The maximum may grow by this (to base 2) before sums are rescaled.
  static constexpr float kSlack = 8.f;
  // Tiles that run again have their weights scaled down: O stays finite whatever V holds.
  static constexpr float kHeadroom = kType == kFp16 ? 0.f : 24.f;
  // Scores of a key tile so far apart (to base 2) that the shift is not fixed.
  static constexpr float kWildSpread = 120.f;
  static constexpr int kManyKeyTiles = 8;

  using Rows::p, Rows::warpgroup, Rows::warp, Rows::lane, Rows::s, Rows::c, Rows::sum;
  using Rows::token, Rows::head;

  float scale;        // of scores, to base 2; of modified ones 1
  float natural;      // of scores over an 8-bit cache
  float narrowed[2];  // `scale` of a row whose queries are narrowed
  float o[kDv / 2];
  u32 weight[kKeys / 16][4];

  __device__ __forceinline__ PrefillRows(const AttentionParams &p, int pack_shift, int warpgroup)
      : Rows(p, pack_shift, warpgroup), scale(V::kScoreMod ? 1.f : p.softmax_scale * kLog2e) {}

  // Over an 8-bit cache every tile has factors of its own.
  __device__ __forceinline__ void enter(const PrefillTile &t) {
    if constexpr (V::kWiden) {
      // Its sign is that of the widened keys. Never 0, as it meets -inf.
      natural = fmaxf(fabsf(score_scale(p, t.request, t.kv_head)), 1e-30f);
      if constexpr (!V::kScoreMod) scale = natural * kLog2e;
    }
  }
  // bf16 queries as fp16, each row over a power of two, which its scores are due: exactly, but for
  // elements below 2^-29 of the row's largest.
  template <int kSteps>
  __device__ __forceinline__ void narrow(u32 (&query)[kSteps][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = 0.f;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = h; j < 4; j += 2) {
          const float2 pair = unpack_bf16(query[i][j]);
          top = fmaxf(top, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
      }
      const int exponent = narrowing_exponent(quad_max(top));
      const float by = power_of_two(-exponent);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = h; j < 4; j += 2) {
          const float2 pair = unpack_bf16(query[i][j]);
          query[i][j] = pack_fp16(pair.x * by, pair.y * by);
        }
      }
      narrowed[h] = fmaxf(scale * power_of_two(exponent), 1e-37f);  // as above
    }
  }
  // Of scores of row h, to base 2.
  __device__ __forceinline__ float row_scale(int h) const {
    if constexpr (V::kNarrow) return narrowed[h];
    return scale;
  }
  __device__ __forceinline__ float score_factor() const {
    if constexpr (V::kWiden) return natural;
    return p.softmax_scale;
  }
  __device__ __forceinline__ float value_factor(const PrefillTile &t) const {
    if constexpr (V::kWiden) return value_scale(p, t.request, t.kv_head);
    return 1.f;
  }

  // ---- scores

  // A bit for each of this lane's 32 scores of a row in 128 keys: whether it is before key `end`.
  __device__ __forceinline__ static u32 bits_before(int end) {
    const int count = end / 8 * 2 + min(end & 7, 2);
    return end <= 0 ? 0 : end >= 128 ? ~0u : (1u << count) - 1;
  }

  __device__ __forceinline__ void mask(const PrefillTile &t, int n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = token(t, h) + t.shift, column = n * kKeys + lane % 4 * 2;
      const int low = p.window_left < 0 ? 0 : position - p.window_left;
      const int high =
          p.window_right < 0 ? t.kv_end : min(t.kv_end, position + p.window_right + 1);
#pragma unroll
      for (int i = 0; i < kKeys / 4; i += 32) {
        const u32 seen = bits_before(high - column - 4 * i) & ~bits_before(low - column - 4 * i);
#pragma unroll
        for (int k = 0; k < 32 && i + k < kKeys / 4; ++k) {
          float &at = s[(i + k) / 2 * 4 + 2 * h + k % 2];
          at = seen >> k & 1 ? at : -infinity();
        }
      }
    }
  }

  __device__ __forceinline__ SoftCap soft_cap() const {
    return SoftCap(score_factor() / p.softcap, p.softcap * kLog2e);
  }

  // Soft cap and ALiBi; scores are to base 2 then.
  __device__ __forceinline__ void modify(const PrefillTile &t, int n) {
    if constexpr (V::kScoreMod) {
      Rows::modify_scores(t, n, score_factor(), [&](int h) { return Rows::load_slope(t, h); });
    }
  }

  // ---- softmax

  // Of row h.
  __device__ __forceinline__ float largest(int h) const {
    float top = s[2 * h];
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    }
    return quad_max(top);
  }

  // Scores become weights. kFirst: of a tile. Returns whether O is to be rescaled by `factor`.
  template <bool kFirst>
  __device__ __forceinline__ bool fold_exact(float headroom, float (&factor)[2]) {
    bool grown = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float wanted = largest(h) * row_scale(h) + headroom;
      const float before = kFirst ? -infinity() : c[h];
      // Without a key so far both are -inf and the comparison does not hold.
      const bool grows = wanted - before > kSlack;
      c[h] = grows ? wanted : before;
      const float shift = c[h] == -infinity() ? 0.f : c[h];
      factor[h] = grows ? exp2_approx(before - shift) : 1.f;
      grown |= grows;
      const float added = exponentiate(h, shift);
      sum[h] = kFirst ? added : fmaf(sum[h], factor[h], added);
    }
    return !kFirst && __any_sync(0xffffffffu, grown);
  }

  __device__ __forceinline__ void fold_fixed(const PrefillTile &t, int n) {
    if constexpr (V::kScoreMod) {
      if (p.softcap > 0.f && !p.alibi_slopes && fold_capped()) return;
    }
    modify(t, n);
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += exponentiate(h, c[h]);
  }

  // Cap, shift and scale in one multiply-add, where scores are small enough.
  __device__ __forceinline__ bool fold_capped() {
    const SoftCap soft = soft_cap();
    const float reach = soft.reach(s);
    if (SoftCap::holds(reach, SoftCap::kNear)) {
      fold_polynomial([&](float square) { return soft.of_near(square); });
      return true;
    }
    if (!SoftCap::holds(reach, SoftCap::kFar)) return false;
    fold_polynomial([&](float square) { return soft.of_far(square); });
    return true;
  }

  template <class Factor>
  __device__ __forceinline__ void fold_polynomial(Factor factor) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int h = i / 2 % 2;
      s[i] = exp2_approx(fmaf(s[i], factor(s[i] * s[i]), -c[h]));
      sum[h] += s[i];
    }
  }

  // Of row h, eight keys from 8j on; returns what `total` comes to.
  __device__ __forceinline__ float exponentiate(int h, int j, float shift, float total) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float &at = s[4 * j + 2 * h + e];
      at = exp2_approx(V::kScoreMod ? at - shift : fmaf(at, row_scale(h), -shift));
      total += at;
    }
    return total;
  }
  __device__ __forceinline__ float exponentiate(int h, float shift) {
    float total = 0.f;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) total = exponentiate(h, j, shift, total);
    return total;
  }

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < kDv / 8; ++j) {
      o[4 * j] *= factor[0], o[4 * j + 1] *= factor[0];
      o[4 * j + 2] *= factor[1], o[4 * j + 3] *= factor[1];
    }
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weight[i][j] = pack_pair<kType>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
      }
    }
  }

  // Moves the shift of rows whose sums have grown, so that theirs are below 4 again. Depends on
  // the row alone.
  __device__ __forceinline__ void settle_sums() {
    if (!__any_sync(0xffffffffu, sum[0] > kLargestSum || sum[1] > kLargestSum)) return;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = quad_max(sum[h]);
      // 2^-127 would be flushed to 0.
      const int exponent = min(static_cast<int>(__float_as_uint(largest) >> 23) - 127, 126);
      const bool moves = largest > kLargestSum && largest < infinity();
      factor[h] = moves ? __uint_as_float(static_cast<u32>(127 - exponent) << 23) : 1.f;
      c[h] += moves ? static_cast<float>(exponent) : 0.f;
      sum[h] *= factor[h];
    }
    rescale(factor);
    // bf16 takes what float32 does: scores need not be kept for this.
    if constexpr (kType == kFp16) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) s[i] *= factor[i / 2 % 2];
      pack_weights();
    } else {
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack_bf16(weight[i][j]);
          weight[i][j] = pack_bf16(pair.x * factor[j % 2], pair.y * factor[j % 2]);
        }
      }
    }
  }

  // The first key tile of a tile, whose scores are there. Returns whether they are so far apart
  // that the shift follows the maximum throughout.
  __device__ __forceinline__ bool fold_first(const PrefillTile &t, int n) {
    modify(t, n);
    const bool masked = n >= t.mask_from || n < t.mask_below;
    if (masked) mask(t, n);
    float unused[2];
    fold_exact<true>(0.f, unused);
    // A weight of 0 beside the 1 of the maximum. Masked ones say nothing; a short tile had better
    // run again.
    if (masked || t.n_end - t.n_begin < kManyKeyTiles) return false;
    float least = 1.f;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) least = fminf(least, s[i]);
    const float spread = __uint_as_float(static_cast<u32>(127 - kWildSpread) << 23);
    return named_barrier_any(1 + V::kTileRows / 64 + warpgroup, 128, least < spread);
  }
};
