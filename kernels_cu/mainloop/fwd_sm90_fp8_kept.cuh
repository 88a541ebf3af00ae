// Weights of the 8-bit Hopper prefill where registers are few, head size 256: scores of a
// warpgroup's 64 rows folded into a softmax whose weights are rounded to e4m3 with a shift that is
// kept.
//
// e4m3 holds 2^-9 .. 448, so the shift c of softmax(x - c) needs care. The first key tile of a row
// and those with a mask take the maximum: the largest weight is 2^8 exactly. After the first one c
// is raised by powers of two until the row's sum is below 2^8; that leaves room for later tiles,
// which keep c: no maximum, no shuffle. Their sums, which are needed anyway, bound each weight;
// where one exceeds 448, c moves so that the row's largest weight is a power of two, exact in e4m3,
// and the sum below 2^8 again. The bound is that largest weight itself where it is from 2^6 on, a
// quarter of the row: a larger one would count much, and be rounded. Only from a weight past 2^100
// it does not: the sum is infinite then.
#pragma once

#include "mainloop/fwd_sm90_fp8_scores.cuh"

template <class V>
struct Fp8KeptWeights : Fp8Scores<V> {
  using Scores = Fp8Scores<V>;
  using Scores::kKeys;
  using Scores::modify, Scores::orient, Scores::mask, Scores::visible;
  using Scores::scale, Scores::weight, Scores::s, Scores::c, Scores::sum;
  static constexpr float kTop = 8.f;  // of weights after a maximum, to base 2
  static constexpr float kLargestWeight = 448.f, kSmallWeight = 64.f;
  static constexpr float kLargestMove = 0x1p100f;  // from a weight of this size
  static constexpr int kSettled = 4;

  float most[2];  // that a lane's sum of a key tile may be in these rows

  using Scores::Scores;

  // ---- softmax

  // The keys of key tile n that a row sees.
  __device__ __forceinline__ int seen_keys(const PrefillTile &t, int n, int h) const {
    const KeyRange keys = visible(t, n, h);
    return min(keys.end, kKeys) - max(keys.begin, 0);
  }

  // Scores, oriented and masked, become weights. kFirst: of a tile. Returns whether sums of values
  // are to be rescaled by `factor`.
  template <bool kFirst>
  __device__ __forceinline__ bool fold_exact(float (&factor)[2]) {
    bool grown = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = s[2 * h];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      }
      const float wanted = quad_max(top) * fabsf(scale) - kTop;
      const float next = kFirst ? wanted : fmaxf(c[h], wanted);
      grown |= !kFirst && next > c[h];
      if (!V::kScoreMod && !kFirst && next > c[h]) allow(h, 0x1p8f);
      const float shift = next == -infinity() ? 0.f : next;
      factor[h] = kFirst ? 1.f : exp2_approx(c[h] - shift);
      c[h] = next;
      const float added = exponentiate(h, fabsf(scale), shift);
      sum[h] = kFirst ? added : fmaf(sum[h], factor[h], added);
    }
    return !kFirst && __any_sync(0xffffffffu, grown);
  }

  // The first key tile of a tile, whose scores are there.
  __device__ __forceinline__ void fold_first(const PrefillTile &t) {
    const int n = t.n_end - 1;
    modify(t, n);
    orient();
    const bool masked = n >= t.mask_from || n < t.mask_below;
    if (masked) mask(t, n);
    float unused[2];
    fold_exact<true>(unused);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool more = masked && n > t.n_begin;
      make_room(h, more ? static_cast<float>(kKeys) / max(1, seen_keys(t, n, h)) : 1.f);
    }
  }

  // The sum of a row's first weights is brought below 2^8, as it will be for a key tile of which
  // the row sees all: `rarity` is the number of keys over those that it sees in this one.
  __device__ __forceinline__ void make_room(int h, float rarity) {
    const float all = quad_sum(sum[h]) * rarity;
    const int exponent = static_cast<int>(__float_as_uint(all) >> 23 & 255) - 127;
    const int down = min(max(exponent - 7, 0), 16);
    c[h] += down;
    allow(h, __uint_as_float(static_cast<u32>(127 + 8 - down) << 23));
    scale_row(h, __uint_as_float(static_cast<u32>(127 - down) << 23));
  }

  __device__ __forceinline__ void scale_row(int h, float by) {
    sum[h] *= by;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) s[4 * j + 2 * h] *= by, s[4 * j + 2 * h + 1] *= by;
  }

  __device__ __forceinline__ float exponentiate(int h, float by, float shift) {
    float added = 0.f;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float &at = s[4 * j + 2 * h + e];
        at = exp2_approx(V::kScoreMod ? at - shift : fmaf(at, by, -shift));
        added += at;
      }
    }
    return added;
  }

  // A lane's sum of a key tile that needs no other shift. It bounds each of its weights, so that
  // none is beyond e4m3; once `kSettled` key tiles are behind it is also below that of all before,
  // so that a key that outweighs them is exact.
  __device__ __forceinline__ float largest_sum(int h, bool settled) const {
    const float largest = V::kScoreMod ? kLargestWeight : most[h];
    return settled ? fminf(fmaxf(sum[h], kSmallWeight), largest) : largest;
  }

  // Beside a largest weight that outweighs most of the row none may be larger and rounded.
  __device__ __forceinline__ void allow(int h, float largest) {
    most[h] = largest >= kSmallWeight ? largest : kLargestWeight;
  }

  // Moves the shift of rows in which a lane's sum is too large: the largest weight of the key tile
  // becomes a power of two, and their sum is below 2^8.
  __device__ __forceinline__ void move_shift(const float (&added)[2], bool settled,
                                             float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float excess = added[h] <= largest_sum(h, settled) ? 0.f : 1.f;  // NaN: 1
      const bool over = quad_max(excess) > 0.f;
      float top = s[2 * h];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      }
      top = quad_max(top);
      const float all = quad_sum(added[h]), size = log2f(top);
      const float to = floorf(7.f + size - log2f(all));
      factor[h] = over ? exp2_approx(to) * __fdividef(1.f, top) : 1.f;
      c[h] += over ? size - to : 0.f;
      if (!V::kScoreMod && over) allow(h, exp2_approx(to));
      const float before = sum[h];
      sum[h] = added[h];
      scale_row(h, factor[h]);
      // The factor of a larger weight would be flushed to 0.
      sum[h] = over && top > kLargestMove ? infinity() : fmaf(before, factor[h], sum[h]);
    }
  }

  // Weights are 2^8 times those over a maximum: left in, that would cost the log-sum-exp digits.
  __device__ __forceinline__ RowResult conclude(const PrefillTile &t, int h, float by) const {
    RowResult result = Scores::conclude_row(t, c[h] + kTop, sum[h] * 0x1p-8f, by);
    result.norm *= 0x1p-8f;
    return result;
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int g = 0; g < kKeys / 8; ++g) {
      weight[g / 4][g % 4] = Scores::pack_group(Scores::group_at(g));
    }
  }
};
