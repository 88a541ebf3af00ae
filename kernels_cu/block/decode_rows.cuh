// The query rows of a segment as columns of mma fragments, and their running softmax.
//
// Column n of row tile j is row 8j + n of the segment. Of queries, lane l holds those of row
// 8j + l/4; of scores, those of rows 8j + 2 (l%4) + x, keys l/4 (x) and l/4 + 8 (x + 2).
#pragma once

#include "block/epilogue.cuh"
#include "block/softmax.cuh"
#include "block/query_tile.cuh"
#include "core/decode_params.cuh"

// The token that a row belongs to: the row over the group size, for rows below 2^16.
__device__ __forceinline__ int token_of(const DecodeParams &d, int row) {
  return d.group_inverse ? static_cast<int>(__umulhi(row, d.group_inverse)) : row;
}

template <class V>
struct DecodeState {
  static constexpr int kRowTiles = V::kRowTiles, kSteps = V::kHeadDim / 16;
  float acc[kSteps][kRowTiles][4];
  float top[kRowTiles][2];  // to base 2, scaled
  float sum[kRowTiles][2];  // of this lane's keys

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      top[j][0] = top[j][1] = -infinity();
      sum[j][0] = sum[j][1] = 0.f;
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[n][j][e] = 0.f;
      }
    }
  }

  __device__ __forceinline__ void rescale(const float (&found)[kRowTiles][2]) {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float most = found[j][x];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, mask));
        }
        most = fmaxf(most, top[j][x]);
        const float factor = most == -infinity() ? 1.f : exp2f_of(top[j][x] - most);
        top[j][x] = most;
        sum[j][x] *= factor;
#pragma unroll
        for (int n = 0; n < kSteps; ++n) acc[n][j][x] *= factor, acc[n][j][x + 2] *= factor;
      }
    }
  }

  __device__ __forceinline__ static float exp2f_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
};

template <class V>
struct DecodeRows {
  static constexpr int kRowTiles = V::kRowTiles, kSteps = V::kHeadDim / 16;
  static constexpr bool kWiden = V::kWiden;

  u32 query[kRowTiles][kSteps][2];
  int position[kRowTiles][2];
  float slope[kRowTiles][2];
  float scales[kWiden ? kRowTiles : 1][2];  // of the scores, to base 2 unless modified
  bool modified;  // scores get a soft cap or ALiBi, and are to base 2 afterwards
  int kv_begin, kv_end, free_begin, free_end;
  int count;
  float of_values;  // scale of the values

  __device__ __forceinline__ float scale(int j, int x) const {
    return scales[kWiden ? j : 0][kWiden ? x : 0];
  }

  // Of scores that may have been modified already.
  template <bool kMaybe>
  __device__ __forceinline__ float later_scale(int j, int x) const {
    return kMaybe && modified ? 1.f : scale(j, x);
  }

  // Whether every row sees all keys of a tile, as they are.
  __device__ __forceinline__ bool all_see(int key, int count) const {
    return !modified && key >= free_begin && key + count <= free_end;
  }

  // Whether the first row tile has all rows.
  __device__ __forceinline__ bool few() const { return count <= 8; }

  // Elements 2q.. of a step lie with the lanes as the keys do: pairs 2q and 2q + 8, or, widened, 4q
  // and 4q + 2.
  __device__ __forceinline__ static int column(int n, int half, int q) {
    return n * 16 + (kWiden ? 4 * q + 2 * half : 2 * q + 8 * half);
  }

  // Asks for the queries of rows row_begin..row_end - 1, and uses none of them yet.
  __device__ __forceinline__ void fetch(const AttentionParams &p, const DecodeParams &d,
                                        const Request &request, int kv_head, int row_begin,
                                        int row_end) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const int row = row_begin + 8 * j + g, token = token_of(d, row);
      const bool inside = row < row_end;
      const char *from = p.q + (static_cast<i64>(request.q_begin) + token) * p.q_token_stride +
                         (kv_head * p.group + row - token * p.group) * p.q_head_stride;
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = column(n, half, q);
          query[j][n][half] = inside && at < p.head_dim ? load_pair(p, from, at) : 0u;
        }
      }
    }
  }

  // Makes what was asked for ready, and all else that scores need.
  __device__ __forceinline__ void prepare(const AttentionParams &p, const DecodeParams &d,
                                          const Request &request, int kv_head, int row_begin,
                                          int row_end) {
    const int lane = threadIdx.x % 32, q = lane % 4;
    const int shift = request.kv_len - request.q_len;
    const KeyRange seen = visible_keys(p, request, 0, request.q_len - 1);
    kv_begin = seen.begin, kv_end = seen.end, count = row_end - row_begin;
    const int first = token_of(d, row_begin) + shift, last = token_of(d, row_end - 1) + shift;
    free_begin = p.window_left < 0 ? kv_begin : max(kv_begin, last - p.window_left);
    free_end = p.window_right < 0 ? kv_end : min(kv_end, first + p.window_right + 1);
    const float signed_scale = score_scale(p, request.index, kv_head);
    of_values = value_scale(p, request.index, kv_head);
    modified = p.softcap > 0.f || p.alibi_slopes;
    // Never 0, as it meets -inf. Scores are below 1e14, so 1e-30 is 0 all the same.
    const float common = fmaxf(fabsf(signed_scale), 1e-30f) * (modified ? 1.f : kLog2e);
    scales[0][0] = common;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const int exponent = kWiden ? widen(p, query[j]) : 0;
      if (signed_scale < 0.f) {
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          query[j][n][0] ^= 0x80008000u, query[j][n][1] ^= 0x80008000u;
        }
      }
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int scored = min(row_begin + 8 * j + 2 * q + x, row_end - 1);
        const int scored_token = token_of(d, scored);
        position[j][x] = scored_token + shift;
        slope[j][x] = 0.f;
        if (p.alibi_slopes) {
          slope[j][x] = load_float(
              p.alibi_slopes,
              request.index * p.alibi_batch_stride +
                  (kv_head * p.group + scored - scored_token * p.group) * p.alibi_head_stride);
        }
        if constexpr (kWiden) {
          const int of_row = __shfl_sync(0xffffffffu, exponent, (2 * q + x) * 4);
          scales[j][x] = fmaxf(power_of_two(of_row) * common, 1e-30f);
        }
      }
    }
  }

  // Two elements of a query, as they are.
  __device__ __forceinline__ static u32 load_pair(const AttentionParams &p, const char *row,
                                                  int column) {
    if (kWiden && p.q_type >= kE4m3) return *reinterpret_cast<const u16 *>(row + column);
    return *reinterpret_cast<const u32 *>(row + column * 2);
  }

  // A row to fp16. bf16 is divided by a power of two, whose exponent is returned.
  __device__ __forceinline__ static int widen(const AttentionParams &p, u32 (&row)[kSteps][2]) {
    if (p.q_type == kFp16) return 0;
    if (p.q_type >= kE4m3) {
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          row[n][half] = p.q_type == kE4m3 ? fp8_to_fp16<kE4m3>(row[n][half])
                                           : fp8_to_fp16<kE5m2>(row[n][half]);
        }
      }
      return 0;
    }
    float largest = 0.f;
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = unpack_bf16(row[n][half]);
        largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
      }
    }
    const int exponent = narrowing_exponent(quad_max(largest));
    const float factor = power_of_two(-exponent);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = unpack_bf16(row[n][half]);
        row[n][half] = pack_fp16(pair.x * factor, pair.y * factor);
      }
    }
    return exponent;
  }

  // Scale, soft cap, ALiBi where there are any; then the masks, by selects, since what must not be
  // seen may be NaN. Scores of keys from `key` on.
  template <int kKeyTiles>
  __device__ __forceinline__ void modify_and_mask(const AttentionParams &p, int key,
                                                  float (&s)[kKeyTiles][kRowTiles][4]) const {
    key += threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int low =
            p.window_left < 0 ? kv_begin : max(kv_begin, position[j][x] - p.window_left);
        const int high =
            p.window_right < 0 ? kv_end : min(kv_end, position[j][x] + p.window_right + 1);
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int at = key + t * 16 + h * 8;
            float &score = s[t][j][x + 2 * h];
            if (modified) score = modify(p, score * scale(j, x), position[j][x] - at, slope[j][x]);
            if (at < low || at >= high) score = -infinity();
          }
        }
      }
    }
  }

  __device__ __forceinline__ static float modify(const AttentionParams &p, float x, int distance,
                                                 float slope) {
    if (p.softcap > 0.f) x = p.softcap * tanh_fast(x / p.softcap);
    return (x - slope * fabsf(static_cast<float>(distance))) * kLog2e;
  }

  // Which of the keys from `key` on count: masks for pairs 2q and 2q + 8.
  __device__ __forceinline__ void kept_keys(int key, u32 (&keep)[2]) const {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = key + 2 * q + 8 * half;
      keep[half] = (at >= kv_begin && at < kv_end ? 0xffffu : 0u) |
                   (at + 1 >= kv_begin && at + 1 < kv_end ? 0xffff0000u : 0u);
    }
  }
};
