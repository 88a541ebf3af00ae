// From accumulators of the Hopper prefills to the result, straight from registers: it overlaps the
// products of the other warpgroup.
#pragma once

#include "block/epilogue.cuh"
#include "block/tile_order.cuh"

// One row of a tile, which four neighbouring lanes hold.
struct OutputRow {
  const AttentionParams &p;
  const PrefillTile &t;
  int token;  // in the request
  int head;
  int quarter;  // this lane

  // With the sink, which partial results go without. Returns the factor that O is due, and stores
  // the LSE; that of a partial result with kPartial only.
  template <bool kPartial = false>
  __device__ __forceinline__ float finish(RowResult result) const {
    if (t.slot >= 0) {
      if constexpr (kPartial) {
        if (token < t.q_len && quarter == 0) p.partial_lse[partial_row()] = result.lse;
      }
      return result.norm;
    }
    if (p.sink) {
      const float sink = load_sink(p, head);
      StateSum state(fmaxf(result.lse, sink));
      const float part = state.add(result.lse);
      state.add(sink);
      result.norm *= state.weight(part);
      result.lse = state.lse();
    }
    if (p.lse && token < t.q_len && quarter == 0) {
      store_lse(p, static_cast<i64>(t.q_begin) + token, head, result.lse);
    }
    return result.norm;
  }

  __device__ __forceinline__ char *out_row() const {
    const i64 at = static_cast<i64>(t.q_begin) + token;
    return p.out + at * p.out_token_stride + head * p.out_head_stride;
  }

  __device__ __forceinline__ i64 partial_row() const {
    const i64 at = static_cast<i64>(t.slot) * p.total_q + t.q_begin + token;
    return at * p.heads_q + head;
  }

  // The partial result's row, and its LSE stored.
  __device__ __forceinline__ float *begin_partial(RowResult result) const {
    const i64 row = partial_row();
    if (quarter == 0) p.partial_lse[row] = result.lse;
    return p.partial_out + row * p.head_dim_v;
  }

  // `half` 1 is the row 8 after in the accumulators, which hold columns 8j + 2 quarter + {0, 1}.
  // Returns 0, or NaN where anything is not finite.
  template <int kDv>
  __device__ __forceinline__ float store_partial(float *to, float norm, int half,
                                                const float (&o)[kDv / 2]) const {
    float test = 0.f;
#pragma unroll
    for (int j = 0; j < kDv / 8; ++j) {
      const int column = 8 * j + 2 * quarter;
      const float x = o[4 * j + 2 * half] * norm, y = o[4 * j + 2 * half + 1] * norm;
      test = fmaf(x, 0.f, fmaf(y, 0.f, test));
      if (column < p.head_dim_v) *reinterpret_cast<float2 *>(to + column) = make_float2(x, y);
    }
    return test;
  }

  // Even lanes take the first of two groups of 8 columns, odd ones the second: stores of 8 bytes,
  // 32 a row. Returns 0, or NaN where anything is not finite.
  template <ScalarType kType, int kDv>
  __device__ __forceinline__ u32 store_columns(bool inside, float norm, int half,
                                               const float (&o)[kDv / 2]) const {
    char *const to = out_row() + quarter / 2 * 8;
    const bool odd = quarter & 1;
    u32 test = 0;
#pragma unroll
    for (int g = 0; g < kDv / 16; ++g) {
      const int j = 8 * g + 2 * half;
      const u32 first = pack_pair<kType>(o[j] * norm, o[j + 1] * norm);
      const u32 second = pack_pair<kType>(o[j + 4] * norm, o[j + 5] * norm);
      test = times_zero<kType>(first, times_zero<kType>(second, test));
      const u32 got = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
      const int column = 16 * g + 8 * odd;
      if (inside && column < p.head_dim_v) {
        *reinterpret_cast<uint2 *>(to + column * 2) =
            odd ? make_uint2(got, second) : make_uint2(first, got);
      }
    }
    return test;
  }
};

template <ScalarType kType>
__device__ __forceinline__ float sum_pairs(u32 pair) {
  const float2 both = unpack_pair<kType>(pair);
  return both.x + both.y;
}

// 16 rows of a warp, normalised, to shared memory as TMA stores take them: panels of 128 bytes a
// row with the swizzle of 128 bytes, `panel` bytes apart.
template <ScalarType kType, int kDv>
struct StagedRows {
  u32 to;
  int panel;
  u32 test[4] = {};

  __device__ __forceinline__ StagedRows(u32 rows, int panel, int lane) : panel(panel) {
    const int matrix = lane / 8, row = lane % 8;
    to = rows + (matrix % 2 * 8 + row) * 128 + (matrix / 2 ^ row) * 16;
  }

  // Columns 16j on.
  __device__ __forceinline__ void put(int j, const float (&norm)[2], const float (&o)[kDv / 2]) {
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * j + i / 2 * 4 + i % 2 * 2;
      word[i] = pack_pair<kType>(o[at] * norm[i % 2], o[at + 1] * norm[i % 2]);
      test[i] = times_zero<kType>(word[i], test[i]);
    }
    stmatrix4((to ^ j % 4 * 32) + j / 4 * panel, word);
  }

  // 0, or NaN where anything is not finite.
  __device__ __forceinline__ float sum() const {
    return sum_pairs<kType>(test[0]) + sum_pairs<kType>(test[1]) + sum_pairs<kType>(test[2]) +
           sum_pairs<kType>(test[3]);
  }
};

// All of them. Returns 0, or NaN where anything is not finite.
template <ScalarType kType, int kDv>
__device__ __forceinline__ float stage_rows(u32 rows, int panel, int lane, const float (&norm)[2],
                                            const float (&o)[kDv / 2]) {
  StagedRows<kType, kDv> staged(rows, panel, lane);
#pragma unroll
  for (int j = 0; j < kDv / 16; ++j) staged.put(j, norm, o);
  return staged.sum();
}
