// The products of a tile of few query rows with keys and values that lie in shared memory.
//
// Products have keys on their 16 rows and query rows on their 8 columns: S^T = K Q^T and
// O^T = V^T P^T. A group of up to 8 rows wastes nothing, and P^T is made from S^T in registers.
#pragma once

#include "arch/mma_sm80.cuh"
#include "arch/tma_sm90.cuh"
#include "block/decode_rows.cuh"

template <class V>
struct DecodeProducts {
  static constexpr int kD = V::kHeadDim, kRowTiles = V::kRowTiles, kKeys = V::kKeys;
  static constexpr bool kWiden = V::kWiden;
  static constexpr int kSteps = kD / 16, kKeyTiles = kKeys / 16;
  static constexpr int kPanels = (kD * kItemBytes<V::kCache> + 127) / 128;
  static constexpr int kPanelBytes = 16 * 128, kSideBytes = kPanels * kPanelBytes;
  static constexpr int kStageBytes = 2 * kKeyTiles * kSideBytes;
  static constexpr int kPanelSteps = kWiden ? 8 : 4;  // steps of 16 elements in 128 bytes
  static constexpr bool kSkipPanels = kD > 128;       // that the head does not have
  static constexpr float kRescaleAt = 8.f;  // a maximum is kept until a score is 2^8 above it

  using Rows = DecodeRows<V>;

  const AttentionParams &p;
  const int lane = threadIdx.x % 32;
  const u32 values;  // from 16 keys to their values; heads side by side lie one after the other

  __device__ __forceinline__ explicit DecodeProducts(const AttentionParams &p, int heads_shift = 0)
      : p(p), values(kSideBytes << heads_shift) {}

  // 32 bytes further along the rows of a swizzled panel.
  __device__ __forceinline__ static u32 along(u32 base, int step) {
    return (base + step / 4 * kPanelBytes) ^ (step % 4 * 32);
  }

  __device__ __forceinline__ static u32 widen(u32 pair) {
    return fp8_to_fp16<V::kWiden ? V::kCache : kE4m3>(pair);
  }

  // kTiles: row tiles that have rows.
  template <int kTiles>
  __device__ __forceinline__ void score(u32 tile, const Rows &rows,
                                        float (&s)[kKeyTiles][kRowTiles][4]) const {
    const int token = lane % 8 + (lane & 8);
    const u32 base = tile + token * 128 + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][j][e] = 0.f;
      }
    }
#pragma unroll
    for (int panel = 0; panel < kSteps; panel += kPanelSteps) {
      if (kSkipPanels && panel * 16 >= p.head_dim) break;
#pragma unroll
      for (int n = panel; n < panel + kPanelSteps && n < kSteps; n += kWiden ? 2 : 1) {
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
          u32 r[4];
          ldmatrix4(r, along(base + t * 2 * values, kWiden ? n / 2 : n));
          if constexpr (kWiden) {
            // The order of the 16 elements of a step is permuted; that of the queries too.
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const u32 a[4] = {widen(r[2 * h] & 0xffffu), widen(r[2 * h + 1] & 0xffffu),
                                widen(r[2 * h] >> 16), widen(r[2 * h + 1] >> 16)};
#pragma unroll
              for (int j = 0; j < kTiles; ++j) {
                mma_16x8x16<V::kCompute>(s[t][j], a, rows.query[j][n + h][0],
                                         rows.query[j][n + h][1]);
              }
            }
          } else {
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
              mma_16x8x16<V::kCompute>(s[t][j], r, rows.query[j][n][0], rows.query[j][n][1]);
            }
          }
        }
      }
    }
  }

  // `keep`: which of the keys 2q, 2q + 1 and 8 after those of this lane count.
  template <bool kEdge, int kTiles>
  __device__ __forceinline__ void accumulate(u32 tile, const u32 (&weight)[kRowTiles][2],
                                             const u32 (&keep)[2],
                                             float (&acc)[kSteps][kRowTiles][4]) const {
    const int token = kWiden ? lane % 8 + (lane & 8) : lane % 8 + (lane >> 1 & 8);
    const int chunk = kWiden ? lane / 16 : lane >> 3 & 1;
    const u32 base = tile + values + token * 128 + ((chunk ^ lane % 8) << 4);
#pragma unroll
    for (int panel = 0; panel < kSteps; panel += kPanelSteps) {
      if (kSkipPanels && panel * 16 >= p.head_dim_v) break;
#pragma unroll
      for (int n = panel; n < panel + kPanelSteps && n < kSteps; n += kWiden ? 2 : 1) {
        u32 r[4];
        ldmatrix4_trans(r, along(base, kWiden ? n / 2 : n));
        if constexpr (kWiden) {
          // Bytes (key, element) to pairs of keys; rows g and g + 8 are elements 2g and 2g + 1.
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const u32 low = __byte_perm(r[2 * h], 0, 0x3120);
            const u32 high = __byte_perm(r[2 * h + 1], 0, 0x3120);
            u32 a[4] = {widen(low & 0xffffu), widen(low >> 16), widen(high & 0xffffu),
                        widen(high >> 16)};
            if constexpr (kEdge) mask_values(a, keep);
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
              mma_16x8x16<V::kCompute>(acc[n + h][j], a, weight[j][0], weight[j][1]);
            }
          }
        } else {
          if constexpr (kEdge) mask_values(r, keep);
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            mma_16x8x16<V::kCompute>(acc[n][j], r, weight[j][0], weight[j][1]);
          }
        }
      }
    }
  }

  // What lies in unused slots may be NaN, and 0 * NaN is NaN.
  __device__ __forceinline__ static void mask_values(u32 (&a)[4], const u32 (&keep)[2]) {
    a[0] &= keep[0], a[1] &= keep[0], a[2] &= keep[1], a[3] &= keep[1];
  }

  // One tile: scores, running softmax over the keys, sums of values; of the first kTiles row tiles.
  template <bool kEdge, int kTiles = kRowTiles>
  __device__ __forceinline__ void take_tile(u32 tile, int key, const Rows &rows,
                                            DecodeState<V> &state) const {
    float s[kKeyTiles][kRowTiles][4];
    score<kTiles>(tile, rows, s);
    if constexpr (kEdge) rows.modify_and_mask(p, key, s);
    bool grew = false;
    float top[kRowTiles][2];
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) top[j][0] = top[j][1] = -infinity();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float most = -infinity();
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) most = fmaxf(most, fmaxf(s[t][j][x], s[t][j][x + 2]));
        top[j][x] = most * rows.template later_scale<kEdge>(j, x);
        grew |= top[j][x] > state.top[j][x] + kRescaleAt;
      }
    }
    if (__any_sync(0xffffffffu, grew)) state.rescale(top);
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
      u32 weight[kRowTiles][2];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        float w[4];
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const float shift =
              kEdge && state.top[j][x] == -infinity() ? 0.f : state.top[j][x];
          const float scale = rows.template later_scale<kEdge>(j, x);
          w[x] = exp2_approx(fmaf(s[t][j][x], scale, -shift));
          w[x + 2] = exp2_approx(fmaf(s[t][j][x + 2], scale, -shift));
          state.sum[j][x] += w[x] + w[x + 2];
        }
        weight[j][0] = transpose_8x8(pack_pair<V::kCompute>(w[0], w[1]));
        weight[j][1] = transpose_8x8(pack_pair<V::kCompute>(w[2], w[3]));
      }
      u32 keep[2] = {};
      if constexpr (kEdge) rows.kept_keys(key + t * 16, keep);
      accumulate<kEdge, kTiles>(tile + t * 2 * values, weight, keep, state.acc);
    }
  }
};
