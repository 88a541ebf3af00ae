// From accumulators of the Hopper prefill to the result, straight from registers: it overlaps the
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

  // `half` 1 is the row 8 after in the accumulators, which hold columns 8j + 2 quarter + {0, 1}.
  template <ScalarType kType, int kDv>
  __device__ __forceinline__ void store(RowResult result, int half,
                                        const float (&o)[kDv / 2]) const {
    const i64 at = static_cast<i64>(t.q_begin) + token;
    if (t.slot >= 0) {
      if (token < t.q_len) store_partial<kDv>(at, result, half, o);
      return;
    }
    float weight = 1.f;
    if (p.sink) {
      const float sink = load_sink(p, head);
      StateSum state(fmaxf(result.lse, sink));
      const float part = state.add(result.lse);
      state.add(sink);
      weight = state.weight(part);
      result.lse = state.lse();
    }
    const bool inside = token < t.q_len;
    if (inside && quarter == 0) store_lse(p, at, head, result.lse);
    char *const to = p.out + at * p.out_token_stride + head * p.out_head_stride;
    store_columns<kType, kDv>(inside, to, result.norm * weight, half, o);
  }

  template <int kDv>
  __device__ __forceinline__ void store_partial(i64 at, RowResult result, int half,
                                                const float (&o)[kDv / 2]) const {
    const i64 row = (static_cast<i64>(t.slot) * p.total_q + at) * p.heads_q + head;
    if (quarter == 0) p.partial_lse[row] = result.lse;
    float *const to = p.partial_out + row * p.head_dim_v;
#pragma unroll
    for (int j = 0; j < kDv / 8; ++j) {
      const int column = 8 * j + 2 * quarter;
      if (column < p.head_dim_v) {
        *reinterpret_cast<float2 *>(to + column) = make_float2(
            o[4 * j + 2 * half] * result.norm, o[4 * j + 2 * half + 1] * result.norm);
      }
    }
  }

  // A transposition of 4 x 4 words among the four lanes makes stores of 16 bytes.
  template <ScalarType kType, int kDv>
  __device__ __forceinline__ void store_columns(bool inside, char *to, float norm, int half,
                                                const float (&o)[kDv / 2]) const {
#pragma unroll
    for (int g = 0; g < kDv / 32; ++g) {
      u32 word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = 4 * (4 * g + i) + 2 * half;
        word[i] = pack_pair<kType>(o[j] * norm, o[j + 1] * norm);
      }
      exchange(word[0], word[1], 1);
      exchange(word[2], word[3], 1);
      exchange(word[0], word[2], 2);
      exchange(word[1], word[3], 2);
      const int column = 32 * g + 8 * quarter;
      if (inside && column < p.head_dim_v) {
        *reinterpret_cast<uint4 *>(to + column * 2) =
            make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }

  // Lanes without `bit` give `high` for `low` of the lane that has it.
  __device__ __forceinline__ void exchange(u32 &low, u32 &high, int bit) const {
    const bool upper = quarter & bit;
    const u32 got = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
    (upper ? low : high) = got;
  }
};
