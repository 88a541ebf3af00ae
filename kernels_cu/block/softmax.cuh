// Scores of one key tile in mma fragments: modified, masked, and folded into a running softmax.
//
// Of a 16 x 8 fragment, lane l holds rows l/4 (elements 0, 1) and l/4 + 8 (elements 2, 3), columns
// 2 (l%4) and one after. Here "row (i, h)" is row l/4 + 8h of row tile i.
#pragma once

#include "block/segment.cuh"
#include "core/memory.cuh"

// What a row brings along. It lies in shared memory: most tiles need none of it.
struct RowInfo {
  int position;  // in the sequence of keys
  float slope;   // of ALiBi; 0 without
  float factor;  // that its queries were divided by
};

template <bool kNarrow>
struct Rows {
  const RowInfo *first;  // this lane's row (0, 0)
  const float &common;   // scale of the scores of all rows: to base 2, or to natural units where a
                         // modification comes in between

  __device__ __forceinline__ const RowInfo &at(int i, int h) const { return first[i * 16 + h * 8]; }

  // Never 0, as it meets -inf. Scores are below 1e14, so 1e-30 is 0 all the same.
  __device__ __forceinline__ float scale(int i, int h) const {
    return fmaxf(kNarrow ? common * at(i, h).factor : common, 1e-30f);
  }
};

// Weights are exp2(score - shift). Softmax is the same for any shift, so a row keeps that of its
// first keys, their largest score, until its weights outgrow it: most tiles look for no maximum.
template <int kRowTiles>
struct Softmax {
  float shift[kRowTiles][2];  // finite
  float sum[kRowTiles][2];    // of this lane's columns
  u32 fresh;                  // bit 2i + h: no key yet; kNoKeyYet: in no row of the warp
  static constexpr u32 kNoKeyYet = 0x80000000u;
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ float load_float(const char *base, i64 offset) {
  return *reinterpret_cast<const float *>(base + offset);
}

// What scores are multiplied by; its sign goes to the queries.
__device__ __forceinline__ float score_scale(const AttentionParams &p, int request, int kv_head) {
  float scale = p.softmax_scale;
  if (p.q_descale) {
    scale *= load_float(
        p.q_descale, request * p.q_descale_batch_stride + kv_head * p.q_descale_head_stride);
  }
  if (p.k_descale) {
    scale *= load_float(
        p.k_descale, request * p.k_descale_batch_stride + kv_head * p.k_descale_head_stride);
  }
  return scale;
}

// The scale of a segment's scores: to base 2, or to natural units where they are modified.
template <bool kModified>
__device__ __forceinline__ void set_scale(const AttentionParams &p, Segment &s) {
  const float scale = score_scale(p, s.request.index, s.kv_head);
  s.scale = fabsf(scale) * (kModified ? 1.f : kLog2e);
  s.negate = scale < 0.f;
}

// tanh to about 2 units of 2^-24, absolutely; relatively so where x is small. tanh.approx is off by
// 2^-11, which a cap of 30 makes an error of 1.5 % in a weight.
__device__ __forceinline__ float tanh_fast(float x) {
  const float square = x * x;
  const float series =
      x * fmaf(square, fmaf(square, fmaf(square, -17.f / 315.f, 2.f / 15.f), -1.f / 3.f), 1.f);
  const float far = 1.f - __fdividef(2.f, 1.f + exp2f(2.f * kLog2e * fabsf(x)));
  return fabsf(x) < 0.15f ? series : copysignf(far, x);
}

template <bool kNarrow, int kRowTiles, int kTiles>
__device__ __forceinline__ void mask_scores(const AttentionParams &p, const Rows<kNarrow> &rows,
                                            int kv_end, int first_column, float masked,
                                            float (&score)[kRowTiles][kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = rows.at(i, h).position;
      // From this lane's first column on: the others are constants then.
      const int low = p.window_left < 0 ? 0 : position - p.window_left - first_column;
      const int high =
          (p.window_right < 0 ? kv_end : min(kv_end, position + p.window_right + 1)) -
          first_column;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + e < low || n * 8 + e >= high) score[i][n][2 * h + e] = masked;
        }
      }
    }
  }
}

// Gives rows that need one a new shift, the largest score yet: those without, and those of which a
// lane has seen too large a weight (bits of `outgrown`). What depends on a row alone decides, so
// its bits do not depend on the rows beside it. `rescale` is what earlier sums are multiplied by.
template <bool kScaled, bool kNarrow, int kRowTiles, int kTiles, class Exp2>
__device__ __forceinline__ void shift_rows(const Rows<kNarrow> &rows,
                                           const float (&score)[kRowTiles][kTiles][4],
                                           Softmax<kRowTiles> &state, u32 outgrown,
                                           float (&rescale)[kRowTiles][2], Exp2 exp2) {
  const u32 before = state.fresh;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 lanes = __ballot_sync(0xffffffffu, outgrown >> (2 * i + h) & 1);
      const bool fresh = state.fresh >> (2 * i + h) & 1;
      const bool moves = fresh || (lanes >> (threadIdx.x & 28) & 15) != 0;
      float top = -infinity();
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        top = fmaxf(top, fmaxf(score[i][n][2 * h], score[i][n][2 * h + 1]));
      }
      top = quad_max(top) * (kScaled ? 1.f : rows.scale(i, h));
      rescale[i][h] = 1.f;
      if (moves && top != -infinity()) {
        const float after = fresh ? top : fmaxf(state.shift[i][h], top);
        if (!fresh) rescale[i][h] = exp2(state.shift[i][h] - after);
        state.shift[i][h] = after;
        state.sum[i][h] = __fmul_rn(state.sum[i][h], rescale[i][h]);  // see fold_scores
        state.fresh &= ~(1u << (2 * i + h));
      }
    }
  }
  if (__any_sync(0xffffffffu, before != state.fresh)) {
    state.fresh &= ~Softmax<kRowTiles>::kNoKeyYet;
  }
}

// The largest weight of a row that its products and sums hold with room to spare.
template <ScalarType kCompute>
constexpr float kLargestWeight = kCompute == kFp16 ? 0x1p15f : 0x1p60f;

// Scores become weights, and count. Returns false, and counts nothing, if some row needs a new
// shift first; unless `shifted`, when they had it. `outgrown` says which, by this lane's columns.
// Rescaling and adding are never fused: a row has the same bits in every tile.
template <ScalarType kCompute, bool kScaled, bool kNarrow, int kRowTiles, int kTiles, class Exp2>
__device__ __forceinline__ bool fold_scores(const Rows<kNarrow> &rows,
                                            float (&score)[kRowTiles][kTiles][4],
                                            Softmax<kRowTiles> &state, bool shifted, u32 &outgrown,
                                            Exp2 exp2) {
  float sum[kRowTiles][2];
  bool right = state.fresh == 0;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = kScaled ? 1.f : rows.scale(i, h);
      float part = 0.f;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          score[i][n][e] = exp2(fmaf(score[i][n][e], scale, -state.shift[i][h]));
          part += score[i][n][e];
        }
      }
      sum[i][h] = part;
      right &= part <= kLargestWeight<kCompute>;  // not for NaN
    }
  }
  if (!shifted && !__all_sync(0xffffffffu, right)) {
    outgrown = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        outgrown |= (sum[i][h] <= kLargestWeight<kCompute> ? 0u : 1u) << (2 * i + h);
      }
    }
    return false;
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) state.sum[i][h] = __fadd_rn(state.sum[i][h], sum[i][h]);
  }
  return true;
}
