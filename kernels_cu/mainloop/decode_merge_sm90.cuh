// The ends of segments: states of warps, then of spans, then the result.
#pragma once

#include "arch/tma_sm90.cuh"
#include "mainloop/mail_merge.cuh"

template <class V>
class DecodeMerge : public MailMerge<V::kWarps, V::kSharedRings && V::kWarps == 8> {
  using Base = MailMerge<V::kWarps, V::kSharedRings && V::kWarps == 8>;
  using Base::d, Base::kAll, Base::kPad, Base::kWide, Base::lse_of, Base::merge_mail;
  using Base::merge_spans, Base::p, Base::partial_row, Base::piece_block, Base::post;
  using Base::states_, Base::store_final, Base::sum_warps, Base::values_;
  static constexpr int kRowTiles = V::kRowTiles, kSteps = V::kHeadDim / 16, kWarps = V::kWarps;
  // No two warps have the same head.
  static constexpr bool kLone = V::kSharedRings && kWarps == 8;

 public:
  __device__ __forceinline__ DecodeMerge(const AttentionParams &p, const DecodeParams &d, char *at)
      : Base(p, d, reinterpret_cast<float *>(at), states_of(d, at)) {}

  __device__ __forceinline__ u64 *barriers() const {
    return reinterpret_cast<u64 *>(states_ + kWarps * 8 * kRowTiles);
  }
  __device__ __forceinline__ i32 *scratch() const {
    return reinterpret_cast<i32 *>(barriers() + kWarps * d.stages);
  }
  __device__ __forceinline__ i32 *prefix() const { return scratch() + 3 * kWarps + 2; }

  // A value of no use, that has to be made all the same.
  __device__ __forceinline__ void keep(u32 value) const { *values_ = __uint_as_float(value); }

  // The end of a piece. `first`: the segment's first span, if all have as many; `scale`: of the
  // values of this warp's head. All threads of the block.
  __device__ __forceinline__ void finish(const Spans &spans, const Piece &piece, int cta,
                                         int first, float scale,
                                         DecodeState<V> &state) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float sum = state.sum[j][x];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) sum += __shfl_xor_sync(kAll, sum, mask);
        if (g == 0) states_[warp * 8 * kRowTiles + 8 * j + 2 * q + x] = {state.top[j][x], sum};
      }
    }
    float *const scales = reinterpret_cast<float *>(scratch()) + 1;
    if (lane == 0) scales[warp] = scale;
    const bool mailed = d.mail && spans.pieces() > 1;
    const int slot = piece.chunks > 1 ? piece_block(piece) * d.chunks + piece.chunk
                     : mailed         ? cta
                                      : 2 * cta + (piece.start == piece.first ? 1 : 0);
#pragma unroll 1
    for (int column = 0; column < p.head_dim_v; column += 1 << d.column_shift) {
      put_columns(state, piece.row_end - piece.row_begin, column);
      if constexpr (kLone) {
        __syncwarp();
        store_own(piece, slot, column, mailed, scale);
        __syncwarp();
        continue;
      }
      __syncthreads();
      merge_warps(piece, slot, column, mailed, scales);
      if (!mailed || column + (1 << d.column_shift) < p.head_dim_v) __syncthreads();
    }
    if (kLone && !mailed) __syncthreads();
    if (mailed) {
      merge_mail(piece, first, spans.pieces(), cta - first);
    } else if (!piece.whole()) {
      merge_spans(spans, piece, scratch());
    }
  }

 private:
  // After the values of all rows of all warps.
  __device__ __forceinline__ static float2 *states_of(const DecodeParams &d, char *at) {
    const int floats = kWarps * max(kWide, d.row_block * ((1 << d.column_shift) + kPad));
    return reinterpret_cast<float2 *>(reinterpret_cast<float *>(at) + floats);
  }

  __device__ __forceinline__ void put_columns(const DecodeState<V> &state, int rows,
                                              int column) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int columns = 1 << d.column_shift, stride = columns + kPad;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int row = 8 * j + 2 * q + x;
        if (row >= rows) continue;
        float *to = values_ + (warp * d.row_block + row) * stride - column;
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          if (n * 16 < column || n * 16 >= column + columns) continue;
          to[n * 16 + (V::kWiden ? 2 * g : g)] = state.acc[n][j][x];
          to[n * 16 + (V::kWiden ? 2 * g + 1 : g + 8)] = state.acc[n][j][x + 2];
        }
      }
    }
  }

  // A thread takes four columns of a row.
  __device__ __forceinline__ void merge_warps(const Piece &piece, int slot, int column,
                                              bool mailed, const float *scales) const {
    const int rows = piece.row_end - piece.row_begin, stride = (1 << d.column_shift) + kPad;
    const int unit = 1 << d.unit_shift;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows << (d.unit_shift + d.column_shift - 2);
         i += V::kThreads) {
      const int all = i >> (d.column_shift - 2), side = all & (unit - 1), row = all >> d.unit_shift;
      const int in_pass = i * 4 & ((1 << d.column_shift) - 1), at = column + in_pass;
      if (at >= p.head_dim_v) continue;
      float top = -infinity(), sum, acc[4];
      float2 state[kWarps];
      float4 v[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        state[w] = states_[w * 8 * kRowTiles + row];
        v[w] = *reinterpret_cast<const float4 *>(values_ + (w * d.row_block + row) * stride +
                                                 in_pass);
        if ((w & (unit - 1)) != side) state[w] = {-infinity(), 0.f}, v[w] = {};  // another head's
        top = fmaxf(top, state[w].x);
      }
      sum_warps(state, v, top, acc, sum);
      const float norm = __fdividef(scales[side], sum);
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] = sum == 0.f ? 0.f : acc[e] * norm;
      store_four_of(piece, slot, side, row, at, mailed, acc, top, sum);
    }
  }

  // The warp's own rows, of a head that no other warp has.
  __device__ __forceinline__ void store_own(const Piece &piece, int slot, int column, bool mailed,
                                            float scale) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rows = piece.row_end - piece.row_begin, quads_shift = d.column_shift - 2;
    const int stride = (1 << d.column_shift) + kPad;
#pragma unroll 1
    for (int i = lane; i < rows << quads_shift; i += 32) {
      const int row = i >> quads_shift, in_pass = (i & ((1 << quads_shift) - 1)) * 4;
      if (column + in_pass >= p.head_dim_v) continue;
      const float2 state = states_[warp * 8 * kRowTiles + row];
      const float4 v = *reinterpret_cast<const float4 *>(
          values_ + (warp * d.row_block + row) * stride + in_pass);
      const float norm = __fdividef(scale, state.y);
      float acc[4] = {v.x * norm, v.y * norm, v.z * norm, v.w * norm};
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] = state.y == 0.f ? 0.f : acc[e];
      store_four_of(piece, slot, warp, row, column + in_pass, mailed, acc, state.x, state.y);
    }
  }

  // Four columns of a row of a piece, and what goes with them.
  __device__ __forceinline__ void store_four_of(const Piece &piece, int slot, int side, int row,
                                                int at, bool mailed, float (&value)[4], float top,
                                                float sum) const {
    if (piece.whole()) {
      store_final(piece, side, row, at, value, lse_of(top == -infinity() ? 0.f : top, sum));
      return;
    }
    const u32 to = partial_row(slot, side * d.row_block + row);
    if (mailed) {
      post(to, at, value, top, sum);
      return;
    }
    *reinterpret_cast<float4 *>(d.partial_out + static_cast<u64>(to) * p.head_dim_v + at) =
        make_float4(value[0], value[1], value[2], value[3]);
    if (at == 0) d.partial_state[to] = {top, sum};
  }
};
