// Scores of one key tile in mma fragments: scale, soft cap, ALiBi, in this order. The result is to
// base 2. What is fused is written so: a row has the same bits in every tile and every part of one.
#pragma once

#include "block/softmax.cuh"

// Up to this, tanh(x) is x + x^3 (c0 + c1 x^2 + c2 x^4) to 1.2e-7 of its size. Most models keep
// their scores below it, and a polynomial has no exponential.
constexpr float kNearCap = 0.4f;
constexpr float kNearTanh[3] = {-0.3333190083503724f, 0.13278022408485413f, -0.0478118397295475f};

// score -> cap * tanh(score * scale), to base 2. Each lane decides for its part of each row: the
// bits of a row do not depend on the rows beside it.
template <bool kNarrow, int kRowTiles, int kTiles>
__device__ __forceinline__ void cap_scores(const Rows<kNarrow> &rows, float softcap,
                                           float (&score)[kRowTiles][kTiles][4]) {
  const float cap = softcap * kLog2e, inverse = __fdividef(1.f, softcap);
  u32 far = 0;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = 0.f;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        top = fmaxf(top, fmaxf(fabsf(score[i][n][2 * h]), fabsf(score[i][n][2 * h + 1])));
      }
      // The powers of other scales might not be normal numbers.
      const float scale = rows.scale(i, h) * inverse;
      const bool near = top * scale <= kNearCap && scale > 0x1p-16f && scale < 0x1p10f;
      far |= (near ? 0u : 1u) << (2 * i + h);
    }
  }
  const bool some = __any_sync(0xffffffffu, far != 0);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = rows.scale(i, h) * inverse;
      if (some && far >> (2 * i + h) & 1) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) {
            score[i][n][e] = __fmul_rn(cap, tanh_fast(score[i][n][e] * scale));
          }
        }
      } else {
        const float square = scale * scale, first = cap * scale;
        const float second = first * square, third = second * square;
        const float factor[3] = {second * kNearTanh[0], third * kNearTanh[1],
                                 third * square * kNearTanh[2]};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) {
            const float x = score[i][n][e], xx = x * x;
            score[i][n][e] = __fmul_rn(
                x, fmaf(xx, fmaf(xx, fmaf(xx, factor[2], factor[1]), factor[0]), first));
          }
        }
      }
    }
  }
}

template <bool kNarrow, int kRowTiles, int kTiles>
__device__ __forceinline__ void modify_scores(const AttentionParams &p, const Rows<kNarrow> &rows,
                                              int first_column,
                                              float (&score)[kRowTiles][kTiles][4]) {
  if (p.softcap != 0.f) cap_scores(rows, p.softcap, score);
  if (!p.alibi_slopes) return;
  const bool capped = p.softcap != 0.f;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = capped ? 1.f : rows.scale(i, h) * kLog2e;
      const float slope = rows.at(i, h).slope * kLog2e;
      const int position = rows.at(i, h).position - first_column;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float distance = fabsf(static_cast<float>(position - (n * 8 + e)));
          score[i][n][2 * h + e] = fmaf(-slope, distance, score[i][n][2 * h + e] * scale);
        }
      }
    }
  }
}
