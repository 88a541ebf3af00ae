// From accumulators of the 8-bit Hopper prefill to the result, straight from registers. A lane has
// four neighbouring columns, see fwd_sm90_fp8_turn.cuh.
#pragma once

#include "mainloop/fwd_sm90_store.cuh"
#include "mainloop/tail_merge.cuh"

struct Fp8OutputRow : OutputRow {
  // `half` 1 is the row 8 after in the accumulators.
  template <int kDim>
  __device__ __forceinline__ void store(RowResult result, int half,
                                        const float (&o)[kDim / 2]) const {
    const bool inside = token < t.q_len;
    const float norm = finish(result);
    if (t.slot >= 0) {
      if (inside) store_partial<kDim>(result, half, o);
    } else if (p.out_type == kFp16) {
      store_columns<kFp16, kDim>(inside, norm, half, o);
    } else {
      store_columns<kBf16, kDim>(inside, norm, half, o);
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
  __device__ __forceinline__ void store_partial(RowResult result, int half,
                                                const float (&o)[kDim / 2]) const {
    const i64 row = partial_row();
    if (quarter == 0) p.partial_lse[row] = result.lse;
    // Without a sign, whose word would take a register from one tile to the next.
    float *const to = p.partial_out + row * static_cast<u32>(p.head_dim_v);
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
  __device__ __forceinline__ void store_columns(bool inside, float norm, int half,
                                                const float (&o)[kDim / 2]) const {
    char *const to = out_row();
    const bool odd = quarter & 1;
    const int begin = 16 * (quarter & 1) + 4 * (quarter & 2);
    // All exchanges before the first store, which is a branch or a predicate of its own.
    uint4 piece[kDim / 32];
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
      piece[pair] = make_uint4(odd ? first : word[0][0], odd ? second : word[0][1],
                               odd ? word[1][0] : first, odd ? word[1][1] : second);
    }
#pragma unroll
    for (int pair = 0; pair < kDim / 32; ++pair) {
      const int column = 32 * pair + begin;
      if (inside && column < p.head_dim_v) {
        *reinterpret_cast<uint4 *>(to + column * 2) = piece[pair];
      }
    }
  }
};
