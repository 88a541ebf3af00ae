// From a warp's sums to the result, or to partial results.
#pragma once

#include "arch/mma_sm80.cuh"
#include "block/epilogue.cuh"
#include "block/query_tile.cuh"

// `merge_at`: where in shared memory warps may merge what they have, once all are done.
template <class V>
struct ForwardStore {
  static constexpr int kD = V::kHeadDim, kDv = V::kHeadDimV;
  static constexpr int kRowTiles = V::kRowTiles, kKeyWarps = V::kKeyWarps;
  static constexpr int kOutTiles = kDv / 8, kQueryChunks = kD / 8;
  static constexpr int kMergeBytes = kKeyWarps == 1 ? 0 : kKeyWarps * 16 * (kDv * 4 + 8);
  using Accumulator = float[kRowTiles][kOutTiles][4];

  const AttentionParams &p;
  const Segment &s;
  const SegmentRows rows;
  char *const smem;
  float *const merge_at;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 first_row = warp / kKeyWarps * 16 * kRowTiles;  // of this warp, in the tile

  __device__ __forceinline__ ForwardStore(const AttentionParams &p, const Segment &s,
                                          const SegmentRows &rows, char *smem, int merge_at)
      : p(p), s(s), rows(rows), smem(smem), merge_at(reinterpret_cast<float *>(smem + merge_at)) {}

  __device__ __forceinline__ void finish(Softmax<kRowTiles> &state, Accumulator &acc) const {
    const float v_scale = value_scale(p, s.request.index, s.kv_head);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) state.sum[i][h] = quad_sum(state.sum[i][h]);
    }
    if constexpr (kKeyWarps == 1) {
      if (s.slot < 0 && stores_wide(p)) {
        store_rows(state, acc, v_scale);
        return;
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          store_half<kOutTiles / 2>(i, h, state.shift[i][h], state.sum[i][h], v_scale, 0, 1, true,
                                    acc[i]);
        }
      }
    } else {
      float shift[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        shift[h] = state.fresh >> h & 1 ? -infinity() : state.shift[0][h];
      }
      merge_warps(shift, state.sum[0], acc[0], v_scale);
    }
  }

  // A partial result has no sink.
  __device__ __forceinline__ RowResult result_of(u32 head, float shift, float sum,
                                                 float v_scale) const {
    const bool with_lse = p.lse || (kKeyWarps == 1 && s.slot >= 0);
    if (!p.sink || s.slot >= 0) return conclude(shift, sum, v_scale, with_lse);
    return conclude(shift, sum, v_scale, load_sink(p, static_cast<int>(head)), with_lse);
  }

  // All rows of the warp, by way of the place of its queries, which no other warp reads.
  __device__ __forceinline__ void store_rows(const Softmax<kRowTiles> &state,
                                             const Accumulator &acc, float v_scale) const {
    const i64 token = s.request.q_begin;
    float norm[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row + i * 16 + h * 8 + lane / 4;
        const RowPlace at = rows[min(row, rows.count - 1)];
        const RowResult result = result_of(at.head, state.shift[i][h], state.sum[i][h], v_scale);
        if (row < rows.count && lane % 4 == 0) store_lse(p, token + at.token, at.head, result.lse);
        norm[i][h] = result.norm;
      }
    }
    __syncwarp();  // all its queries have been read
    if (p.out_type == kFp16) {
      stage_rows<kFp16>(norm, acc);
    } else {
      stage_rows<kBf16>(norm, acc);
    }
    __syncwarp();
    constexpr int kLanes = kQueryLanes<kDv>;
    const int chunk = lane % kLanes;
    char *const to = p.out + token * p.out_token_stride + chunk * 16;
    if (chunk * 8 >= p.head_dim_v) return;
#pragma unroll 4
    for (int row = first_row + lane / kLanes; row < first_row + kRowTiles * 16;
         row += 32 / kLanes) {
      const RowPlace at = rows[min(row, rows.count - 1)];
      const uint4 value =
          *reinterpret_cast<const uint4 *>(smem + tile_offset<kQueryChunks>(row, chunk));
      if (row < rows.count) {
        *reinterpret_cast<uint4 *>(to + at.token * p.out_token_stride +
                                   at.head * p.out_head_stride) = value;
      }
    }
  }

  template <ScalarType kOut>
  __device__ __forceinline__ void stage_rows(const float (&norm)[kRowTiles][2],
                                             const Accumulator &acc) const {
    const u32 pair = lane % 4, chunk = V::kWiden ? pair / 2 : 0;
    const u32 even = shared_address(smem) +
                     tile_offset<kQueryChunks>(first_row + lane / 4, chunk) +
                     (V::kWiden ? pair % 2 * 8 : pair * 4);
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const u32 at = V::kWiden ? tile_pair<kQueryChunks>(even, n / 2) + n % 2 * 4
                               : tile_pair<kQueryChunks>(n % 2 ? even ^ 16 : even, n / 2);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float a = V::kWiden ? acc[i][n & ~1][2 * h + n % 2] : acc[i][n][2 * h];
          const float b = V::kWiden ? acc[i][n | 1][2 * h + n % 2] : acc[i][n][2 * h + 1];
          store_shared4(at + (i * 16 + h * 8) * kQueryChunks * 16,
                        pack_pair<kOut>(a * norm[i][h], b * norm[i][h]));
        }
      }
    }
  }

  // Pairs of column tiles `first`, first + step, ... of the rows (i, h).
  template <int kPairs>
  __device__ __forceinline__ void store_half(int i, int h, float shift, float sum, float v_scale,
                                             int first, int step, bool with_lse,
                                             const float (&acc)[2 * kPairs][4]) const {
    const int in_block = first_row + i * 16 + h * 8 + lane / 4, row = s.row_begin + in_block;
    if (in_block >= rows.count) return;
    const RowResult result = result_of(rows[in_block].head, shift, sum, v_scale);
    float value[2 * kPairs][2];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (V::kWiden) {
          value[2 * n + e / 2][e % 2] = acc[2 * n + e % 2][2 * h + e / 2];
        } else {
          value[2 * n + e / 2][e % 2] = acc[2 * n + e / 2][2 * h + e % 2];
        }
      }
    }
    const int first_column = first * 16 + lane % 4 * (V::kWiden ? 4 : 2);
    const bool with_state = with_lse && lane % 4 == 0;
    const auto column_of = [&](int n) {
      return n / 2 * step * 16 + n % 2 * (V::kWiden ? 2 : 8);
    };
    if (kKeyWarps > 1 && s.slot >= 0) {
      const i64 at = static_cast<i64>(s.slot) * p.row_block + in_block;
      if (with_state) reinterpret_cast<float2 *>(p.partial_lse)[at] = make_float2(shift, sum);
      store_partial(p, at, result.norm, first_column, value, column_of);
      return;
    }
    store_row<2 * kPairs, false>(p, s, s.kv_head, row, result, first_column, with_state, value,
                                 column_of);
  }

  // The warps hold states of the same rows over different keys; each then stores a share of the
  // columns.
  __device__ __forceinline__ void merge_warps(const float (&shift)[2], const float (&sum)[2],
                                              const float (&acc)[kOutTiles][4],
                                              float v_scale) const {
    constexpr int kPairs = kOutTiles / 2, kShare = (kPairs + kKeyWarps - 1) / kKeyWarps;
    float *const values_at = merge_at;
    float *const shifts_at = values_at + kKeyWarps * kOutTiles * 4 * 32;
    float *const sums_at = shifts_at + kKeyWarps * 16;
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        values_at[((warp * kOutTiles + n) * 4 + e) * 32 + lane] = acc[n][e];
      }
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        shifts_at[warp * 16 + h * 8 + lane / 4] = shift[h];
        sums_at[warp * 16 + h * 8 + lane / 4] = sum[h];
      }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = h * 8 + lane / 4;
      float top = -infinity(), total = 0.f, merged[2 * kShare][4] = {};
#pragma unroll
      for (int w = 0; w < kKeyWarps; ++w) top = fmaxf(top, shifts_at[w * 16 + row]);
#pragma unroll
      for (int w = 0; w < kKeyWarps; ++w) {
        const float factor =
            exp2_approx(shifts_at[w * 16 + row] - (top == -infinity() ? 0.f : top));
        total += factor * sums_at[w * 16 + row];
#pragma unroll
        for (int n = 0; n < 2 * kShare; ++n) {
          const int tile = (warp + n / 2 * kKeyWarps) * 2 + n % 2;
          if (tile >= kOutTiles) break;
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) {
            merged[n][e] += factor * values_at[((w * kOutTiles + tile) * 4 + e) * 32 + lane];
          }
        }
      }
      store_half<kShare>(0, h, top, total, v_scale, warp, kKeyWarps, warp == 0, merged);
    }
  }
};
