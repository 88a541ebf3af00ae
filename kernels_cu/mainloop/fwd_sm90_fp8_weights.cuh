// Weights of the 8-bit Hopper prefill: scores of a warpgroup's 64 rows become weights of a softmax,
// rounded to e4m3.
//
// Each row of each key tile is rounded with a factor of its own, so that its largest weight is 2^8:
// that one is exact, those next to it are where e4m3 is finest, and all from 2^-17 of it on count.
// The output of the key tile is due the inverse, and gets it where it is added to the float32 sums.
// So the weights themselves need only be finite: they are exp2(x - c), with c the largest score of
// the first key tile of which the row sees anything, for good. The largest weight is looked for
// beside the exponentials, which wait for nothing then.
#pragma once

#include "mainloop/fwd_sm90_fp8_scores.cuh"

template <class V>
struct Fp8Weights : Fp8Scores<V> {
  using Scores = Fp8Scores<V>;
  using Scores::kKeys, Scores::p, Scores::scale, Scores::weight, Scores::s, Scores::c, Scores::sum;
  static constexpr float kTop = 0x1p8f;           // the largest rounded weight of a row
  static constexpr float kLeast = 0x1p-100f;      // that is told from 0
  static constexpr float kLargestSum = 0x1p110f;  // with which sums of values are finite

  using Scores::Scores;

  __device__ __forceinline__ void begin_rows() { c[0] = c[1] = -infinity(), sum[0] = sum[1] = 0.f; }

  // One past the last key tile in which no row lacks a shift: the last key of the tile's first row
  // is not below it.
  __device__ __forceinline__ int mask_from(const PrefillTile &t) const {
    if (p.window_right < 0) return t.mask_from;
    return min(t.mask_from, max(0, t.token + t.shift + p.window_right) / kKeys);
  }

  // Of scores that are oriented and masked, to base 2.
  __device__ __forceinline__ float largest_score(int h) const {
    float top = s[2 * h];
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    }
    return quad_max(top) * fabsf(scale);
  }

  // Rows that have seen no key before get their shift.
  __device__ __forceinline__ void begin_shift() {
    if (!__any_sync(0xffffffffu, fminf(c[0], c[1]) == -infinity())) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = largest_score(h);
      if (c[h] == -infinity()) c[h] = top;
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

  // Scores of row h become weights, and are added up. Returns the largest of this lane.
  template <bool kMasked>
  __device__ __forceinline__ float weigh(int h) {
    const float shift = kMasked && c[h] == -infinity() ? 0.f : c[h];
    const float by = V::kScoreMod ? 1.f : kMasked ? fabsf(scale) : scale;
    float added = 0.f;
    int top = 0;  // floats from 0 on are in the order of their bits: three in one instruction
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      float &first = s[4 * j + 2 * h], &second = s[4 * j + 2 * h + 1];
      first = exp2_approx(V::kScoreMod ? first - shift : fmaf(first, by, -shift));
      second = exp2_approx(V::kScoreMod ? second - shift : fmaf(second, by, -shift));
      added += first;
      added += second;
      top = max(max(top, __float_as_int(first)), __float_as_int(second));
    }
    sum[h] += added;
    return __int_as_float(top);
  }

  // Weights of row h to 8 bits. Returns what their output is due.
  __device__ __forceinline__ float pack(int h, float top) {
    const float largest = fmaxf(quad_max(top), kLeast);
    const float by = __fdividef(kTop, largest);
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
#pragma unroll
      for (int j = h; j < 4; j += 2) {
        const int at = 16 * i + 8 * (j / 2) + 2 * (j % 2);
        weight[i][j] = pack_fp8<kE4m3>(s[at] * by, s[at + 1] * by) |
                       pack_fp8<kE4m3>(s[at + 4] * by, s[at + 5] * by) << 16;
      }
    }
    return largest * (1.f / kTop);
  }

  __device__ __forceinline__ RowResult conclude(const PrefillTile &t, int h, float by) const {
    return Scores::conclude_row(t, c[h], sum[h], by);
  }
};
