// Weights of the 8-bit Hopper prefill: scores of a warpgroup's 64 rows become weights of a softmax,
// rounded to e4m3.
//
// Each row of each key tile has a shift of its own, so that its largest weight is 2^8: that one is
// exact, those next to it are where e4m3 is finest, and all from 2^-17 of it on count. The output
// of the key tile is due the rest of exp2(x - c), and gets it where it is added to the float32
// sums, with c the largest score of the first key tile of which the row sees anything, for good.
//
// The largest score is looked for first. Then a weight needs no other factor and is rounded as soon
// as it is there, so that all else hides behind the exponentials.
#pragma once

#include "mainloop/fwd_sm90_fp8_scores.cuh"

template <class V>
struct Fp8Weights : Fp8Scores<V> {
  using Scores = Fp8Scores<V>;
  using Scores::kKeys, Scores::p, Scores::scale, Scores::weight, Scores::s, Scores::c, Scores::sum;
  static constexpr float kTop = 8.f;              // of the largest weight of a row, to base 2
  static constexpr float kLargestSum = 0x1p110f;  // with which sums of values are finite

  using Scores::Scores;

  __device__ __forceinline__ void begin_rows() { c[0] = c[1] = -infinity(), sum[0] = sum[1] = 0.f; }

  // One past the last key tile in which no row lacks a shift: the last key of the tile's first row
  // is not below it.
  __device__ __forceinline__ int mask_from(const PrefillTile &t) const {
    if (p.window_right < 0) return t.mask_from;
    return min(t.mask_from, max(0, t.token + t.shift + p.window_right) / kKeys);
  }

  // Of scores that are oriented, to base 2.
  __device__ __forceinline__ float largest_score(int h) const {
    float top = s[2 * h];
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    }
    return quad_max(top) * fabsf(scale);
  }

  // The same of both rows where nothing is masked and the scale is positive. Floats from 0 on are
  // in the order of their bits, and an integer maximum takes three of them. Where a lane has only
  // negative scores the largest is the integer minimum.
  __device__ __forceinline__ void largest_scores(float (&largest)[2]) const {
    int top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int low = bits(2 * h), high = bits(kKeys / 4 + 2 * h);  // two chains: of half the keys each
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        const int at = 4 * j + 2 * h;
        low = max(max(low, bits(at)), bits(at + 1));
        high = max(max(high, bits(kKeys / 4 + at)), bits(kKeys / 4 + at + 1));
      }
      top[h] = max(low, high);
    }
    // Of exact sums rows are asked for before the vote: only there it is faster.
    constexpr bool kEarly = !V::kSumColumn;
    int row[2] = {};
    if constexpr (kEarly) {
#pragma unroll
      for (int h = 0; h < 2; ++h) row[h] = max(top[h], __shfl_xor_sync(0xffffffffu, top[h], 1));
#pragma unroll
      for (int h = 0; h < 2; ++h) row[h] = max(row[h], __shfl_xor_sync(0xffffffffu, row[h], 2));
    }
    if (__any_sync(0xffffffffu, min(top[0], top[1]) < 0)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32 least = bits(2 * h);
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) {
          const int at = 4 * j + 2 * h;
          least = min(min(least, static_cast<u32>(bits(at))), static_cast<u32>(bits(at + 1)));
        }
        if (top[h] < 0) top[h] = static_cast<int>(least);
        if (kEarly) row[h] = __float_as_int(quad_max(__int_as_float(top[h])));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = (kEarly ? __int_as_float(row[h]) : quad_max(__int_as_float(top[h]))) * scale;
    }
  }
  __device__ __forceinline__ int bits(int i) const { return __float_as_int(s[i]); }

  // `less` goes off the scores of this key tile, `due` is what its output is due. Rows that have
  // seen no key before get their c.
  template <bool kMasked>
  __device__ __forceinline__ void find_shift(float (&less)[2], float (&due)[2]) {
    float largest[2];
    if constexpr (kMasked) {
      largest[0] = largest_score(0), largest[1] = largest_score(1);
    } else {
      largest_scores(largest);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (kMasked && c[h] == -infinity()) c[h] = largest[h];
      const bool none = kMasked && largest[h] == -infinity();
      less[h] = none ? 0.f : largest[h] - kTop;
      due[h] = none ? 0.f : exp2_approx(less[h] - c[h]);
    }
  }

  // In tiles that run again the shift grows with the scores; sums of values are due `factor` then.
  __device__ __forceinline__ void grow_shift(float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float next = fmaxf(c[h], largest_score(h));
      factor[h] = c[h] == next ? 1.f : exp2_approx(c[h] - next);
      c[h] = next;
      sum[h] *= factor[h];
    }
  }

  // Scores of both rows become weights, are added up unless products do it, and rounded to 8 bits.
  //
  // Sums keep ptxas from putting all multiply-adds in front of all exponentials, which are waited
  // for alone then. Without them blocks of groups are kept apart by __syncwarp(), which is no
  // instruction here, and each is packed among the exponentials of the next one.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(const float (&less)[2], const float (&due)[2]) {
    constexpr int kGroups = kKeys / 8, kBlock = 4;  // a group: four scores of a row
    constexpr int kLate = V::kSumColumn ? kBlock : 0;
    const float by = V::kScoreMod ? 1.f : kMasked ? fabsf(scale) : scale;
    float added[2][2] = {};
#pragma unroll
    for (int g = 0; g < kGroups + kLate; ++g) {
      if (V::kSumColumn && g > 0 && g % kBlock == 0) __syncwarp();
      if (g < kGroups) {
        // In place: with copies of their own ptxas keeps all scores to the end, and spills.
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int h = g % 2;
          float &x = s[Scores::group_at(g) + k / 2 * 4 + k % 2];
          x = exp2_approx(V::kScoreMod ? x - less[h] : fmaf(x, by, -less[h]));
          if constexpr (!V::kSumColumn) added[h][k % 2] += x;
        }
      }
      if (g >= kLate) {
        const int ready = g - kLate;
        weight[ready / 4][ready % 4] = Scores::pack_group(Scores::group_at(ready));
      }
    }
    if constexpr (!V::kSumColumn) {
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] = fmaf(added[h][0] + added[h][1], due[h], sum[h]);
    }
  }

  __device__ __forceinline__ RowResult conclude(const PrefillTile &t, int h, float by) const {
    // Of a column of ones all four lanes have the whole sum.
    return Scores::conclude_row(t, c[h], V::kSumColumn ? 0.25f * sum[h] : sum[h], by);
  }
};
