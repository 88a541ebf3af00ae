// Scores of one key tile in mma fragments: soft cap and ALiBi.
#pragma once

#include "block/softmax.cuh"

// tanh(x) for |x| <= 0.5, to 3e-8: fitted to (tanh(x) / x - 1) / x^2.
__device__ __forceinline__ float tanh_near(float x) {
  const float square = x * x;
  const float slope = fmaf(
      square, fmaf(square, fmaf(square, 0.01799921877682209f, -0.05339105427265167f),
                   0.1333051323890686f),
      -0.3333331048488617f);
  return fmaf(x * square, slope, x);
}

// cap * tanh(score * scale) of one row of a lane. Scores of a model seldom come near the cap, and a
// polynomial has no exponential. Lanes decide for themselves: the bits of a row do not depend on
// the rows beside it.
template <int kTiles>
__device__ __forceinline__ void cap_row(float (&score)[kTiles][4], int h, float scale, float cap) {
  float largest = 0.f;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 2 * h; e < 2 * h + 2; ++e) {
      score[n][e] *= scale;
      largest = fmaxf(largest, fabsf(score[n][e]));
    }
  }
  if (largest > 0.5f) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 2 * h; e < 2 * h + 2; ++e) score[n][e] = cap * tanh_fast(score[n][e]);
    }
  } else {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 2 * h; e < 2 * h + 2; ++e) score[n][e] = cap * tanh_near(score[n][e]);
    }
  }
}

// Scale, soft cap, ALiBi, in this order; the result is to base 2.
template <bool kCap, bool kBias, bool kNarrow, int kRowTiles, int kTiles>
__device__ __forceinline__ void modify_scores(const AttentionParams &p, const Rows<kNarrow> &rows,
                                              int first_column,
                                              float (&score)[kRowTiles][kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kCap) {
        cap_row(score[i], h, rows.scale(i, h) / p.softcap, p.softcap * kLog2e);
      }
      const float scale = kCap ? 1.f : rows.scale(i, h) * kLog2e;
      const float slope = kBias ? rows.at(i, h).slope * kLog2e : 0.f;
      const int position = kBias ? rows.at(i, h).position - first_column : 0;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float x = score[i][n][2 * h + e];
          if constexpr (!kCap) x *= scale;
          if constexpr (kBias) x -= slope * fabsf(static_cast<float>(position - (n * 8 + e)));
          score[i][n][2 * h + e] = x;
        }
      }
    }
  }
}
