// The ends of segments: states of warps, then of spans, then the result.
#pragma once

#include "arch/tma_sm90.cuh"
#include "mainloop/span_merge.cuh"

// A word that is never 0, for memory where 0 says that none came. NaN stays NaN.
__device__ __forceinline__ u32 posted(float value) { return ~min(__float_as_uint(value), ~1u); }
__device__ __forceinline__ float received(u32 word) { return __uint_as_float(~word); }

template <class V>
class DecodeMerge : public SpanMerge<V::kWarps> {
  using Base = SpanMerge<V::kWarps>;
  using Base::d, Base::kAll, Base::kPad, Base::kWide, Base::lse_of, Base::mail_state;
  using Base::mail_values, Base::merge_spans, Base::p, Base::partial_row, Base::piece_block;
  using Base::states_, Base::store_final, Base::values_;
  static constexpr int kRowTiles = V::kRowTiles, kSteps = V::kHeadDim / 16, kWarps = V::kWarps;

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

  // The end of a piece; `any`: this warp had tiles of it. All threads of the block.
  __device__ __forceinline__ void finish(const Spans &spans, const Piece &piece, int cta, bool any,
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
    const bool mailed = d.mail && spans.pieces_alike();
    const int slot = piece.chunks > 1 ? piece_block(piece) * d.chunks + piece.chunk
                     : mailed         ? cta
                                      : 2 * cta + (piece.start == piece.first ? 1 : 0);
#pragma unroll 1
    for (int column = 0; column < p.head_dim_v; column += 1 << d.column_shift) {
      if (any) put_columns(state, piece.row_end - piece.row_begin, column);
      __syncthreads();
      merge_warps(piece, slot, column, mailed);
      __syncthreads();
    }
    if (!piece.whole()) merge_spans(spans, piece, cta, mailed, scratch());
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
                                              bool mailed) const {
    const int rows = piece.row_end - piece.row_begin, stride = (1 << d.column_shift) + kPad;
    const int unit = 1 << d.unit_shift;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows << (d.unit_shift + d.column_shift - 2);
         i += V::kThreads) {
      const int all = i >> (d.column_shift - 2), side = all & (unit - 1), row = all >> d.unit_shift;
      const int in_pass = i * 4 & ((1 << d.column_shift) - 1), at = column + in_pass;
      if (at >= p.head_dim_v) continue;
      float top = -infinity(), sum = 0.f, acc[4] = {};
      float2 state[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        state[w] = states_[w * 8 * kRowTiles + row];
        if ((w & (unit - 1)) != side) state[w] = {-infinity(), 0.f};  // of another head
        top = fmaxf(top, state[w].x);
      }
      const float shift = top == -infinity() ? 0.f : top;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (state[w].y == 0.f) continue;  // a warp without tiles has no values either
        const float factor = exp2_approx(state[w].x - shift);
        const float4 v = *reinterpret_cast<const float4 *>(
            values_ + (w * d.row_block + row) * stride + in_pass);
        sum += factor * state[w].y;
        acc[0] += factor * v.x, acc[1] += factor * v.y;
        acc[2] += factor * v.z, acc[3] += factor * v.w;
      }
      const int head = (piece.unit << d.unit_shift) + side;
      const float norm = __fdividef(value_scale(p, piece.request.index, head), sum);
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] = sum == 0.f ? 0.f : acc[e] * norm;
      if (piece.whole()) {
        store_final(piece, side, row, at, acc, lse_of(shift, sum));
      } else {
        const u32 to = partial_row(slot, side * d.row_block + row);
        if (mailed) {
          store_relaxed(mail_values(to, at),
                        make_uint4(posted(acc[0]), posted(acc[1]), posted(acc[2]), posted(acc[3])));
          if (at == 0) store_relaxed(mail_state(to), make_uint2(posted(top), posted(sum)));
          continue;
        }
        *reinterpret_cast<float4 *>(d.partial_out + static_cast<u64>(to) * p.head_dim_v + at) =
            make_float4(acc[0], acc[1], acc[2], acc[3]);
        if (at == 0) d.partial_state[to] = {top, sum};
      }
    }
  }
};
