// From accumulators of the 8-bit Hopper prefill to the result, straight from registers. A lane has
// four neighbouring columns, see fwd_sm90_fp8_turn.cuh.
#pragma once

#include "block/epilogue.cuh"
#include "block/tile_order.cuh"

// One row of a tile, which four neighbouring lanes hold.
struct Fp8OutputRow {
  const AttentionParams &p;
  const PrefillTile &t;
  int token;  // in the request
  int head;
  int quarter;  // this lane

  // `half` 1 is the row 8 after in the accumulators.
  template <int kDim>
  __device__ __forceinline__ void store(RowResult result, int half,
                                        const float (&o)[kDim / 2]) const {
    const i64 at = static_cast<i64>(t.q_begin) + token;
    const bool inside = token < t.q_len;
    if (t.slot >= 0) {
      if (inside) store_partial<kDim>(at, result, half, o);
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
    if (inside && quarter == 0) store_lse(p, at, head, result.lse);
    char *const to = p.out + at * p.out_token_stride + head * p.out_head_stride;
    if (p.out_type == kFp16) {
      store_columns<kFp16, kDim>(inside, to, result.norm * weight, half, o);
    } else {
      store_columns<kBf16, kDim>(inside, to, result.norm * weight, half, o);
    }
  }

  // Columns 16 * chunk + 4 * quarter and after.
  template <int kDim>
  __device__ __forceinline__ static float4 columns(int chunk, int half, const float (&o)[kDim / 2],
                                                   float norm) {
    const int i = 8 * chunk + 2 * half;
    return make_float4(o[i] * norm, o[i + 4] * norm, o[i + 1] * norm, o[i + 5] * norm);
  }

  template <int kDim>
  __device__ __forceinline__ void store_partial(i64 at, RowResult result, int half,
                                                const float (&o)[kDim / 2]) const {
    const i64 row = (static_cast<i64>(t.slot) * p.total_q + at) * p.heads_q + head;
    if (quarter == 0) p.partial_lse[row] = result.lse;
    float *const to = p.partial_out + row * p.head_dim_v;
#pragma unroll
    for (int chunk = 0; chunk < kDim / 16; ++chunk) {
      const int column = 16 * chunk + 4 * quarter;
      if (column < p.head_dim_v) {
        *reinterpret_cast<float4 *>(to + column) = columns<kDim>(chunk, half, o, result.norm);
      }
    }
  }

  // Even lanes take the first of two chunks of 16 columns, odd ones the second: stores of 16 bytes.
  template <ScalarType kType, int kDim>
  __device__ __forceinline__ void store_columns(bool inside, char *to, float norm, int half,
                                                const float (&o)[kDim / 2]) const {
    const bool odd = quarter & 1;
#pragma unroll
    for (int pair = 0; pair < kDim / 32; ++pair) {
      u32 word[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 value = columns<kDim>(2 * pair + i, half, o, norm);
        word[i][0] = pack_pair<kType>(value.x, value.y);
        word[i][1] = pack_pair<kType>(value.z, value.w);
      }
      const u32 first = __shfl_xor_sync(0xffffffffu, odd ? word[0][0] : word[1][0], 1);
      const u32 second = __shfl_xor_sync(0xffffffffu, odd ? word[0][1] : word[1][1], 1);
      const int column = 32 * pair + 16 * (quarter & 1) + 4 * (quarter & 2);
      if (inside && column < p.head_dim_v) {
        *reinterpret_cast<uint4 *>(to + column * 2) =
            odd ? make_uint4(first, second, word[1][0], word[1][1])
                : make_uint4(word[0][0], word[0][1], first, second);
      }
    }
  }
};
