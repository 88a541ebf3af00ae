// Latent attention of one segment on mma.sync: 8 warps, key tiles by cp.async in a ring of stages.
//
// A row of the tile is a row of the cache: 512 elements of the latent, which are the values too, and
// 64 of the rope part. For the scores, warps take 16 keys and every kDepths-th step of the 36 along
// the row each, with their share of the queries in registers; the parts are added up in shared
// memory, where a warp folds some rows into the softmax; for the values each takes 64 columns.
// An 8-bit tile lands as it is stored, and is widened in shared memory when its turn comes.
#pragma once

#include "arch/mma_sm80.cuh"
#include "block/epilogue.cuh"
#include "block/softmax.cuh"
#include "mainloop/latent_rows.cuh"

constexpr int kLatentThreads = 256;

template <class V>
struct Latent {
  static constexpr int kRowTiles = V::kRowTiles, kRows = 16 * kRowTiles;
  static constexpr int kKeys = V::kKeys, kStages = V::kStages;
  static constexpr int kWarps = kLatentThreads / 32;
  static constexpr int kKeyGroups = kKeys / 16;           // of warps
  static constexpr int kDepths = kWarps / kKeyGroups;     // warps that share 16 keys
  static constexpr int kSteps = kRowDim / 16 / kDepths;      // of products along a row, a warp
  static constexpr int kChains = kRowTiles == 1 ? 2 : 1;  // sums side by side: latency
  static constexpr int kOutTiles = kLatentDim / 8 / kWarps;
  static constexpr int kWarpKeys = kKeys / kWarps;        // rows of the cache that a warp copies
  // Softmax: lanes of a row hold two keys each.
  static constexpr int kLanes = kKeys / 2, kSideBySide = 32 / kLanes;
  static constexpr int kFolds = kRows / kWarps / kSideBySide;  // rows of a lane

  static constexpr int kChunkBytes = 8 * kItemBytes<V::kCache>;
  static constexpr int kStageBytes = kKeys * kRowChunks * kChunkBytes;
  static constexpr int kWideBytes = V::kWiden ? kKeys * kRowDim * 2 : 0;  // a tile to compute with
  static constexpr int kScoreStride = kKeys + 8;  // floats: no two rows in the same banks
  static constexpr int kScoresAt = kWideBytes + kStages * kStageBytes;
  static constexpr int kFactorsAt = kScoresAt + kDepths * kRows * kScoreStride * 4;
  static constexpr int kBytes = kFactorsAt + kRows * 8;
  static_assert(kSteps * kDepths * 16 == kRowDim && kDepths <= 4, "steps are dealt in turn");
  static_assert(kRows <= kKeys, "queries pass through a stage");
  static_assert(kBytes == V::kSharedBytes, "the host asks for another amount of shared memory");

  // Rows of the softmax state that this lane looks after.
  struct Fold {
    float top[kFolds];    // largest score yet, to base 2
    float sum[kFolds];    // of this lane's keys
    int position[kFolds];
    float slope[kFolds];
  };

  const AttentionParams &p;
  const LatentParams &d;
  const Segment &s;
  char *const smem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_key = warp % kKeyGroups * 16, depth = warp / kKeyGroups;

  __device__ __forceinline__ Latent(const AttentionParams &p, const LatentParams &d,
                                    const Segment &s, char *smem)
      : p(p), d(d), s(s), smem(smem) {}

  __device__ __forceinline__ char *stage_at(int stage) const {
    return smem + kWideBytes + stage * kStageBytes;
  }
  // Queries pass through here before the first tile is computed with.
  __device__ __forceinline__ char *query_tile() const {
    return V::kWiden ? smem : stage_at(kStages - 1);
  }
  __device__ __forceinline__ float *scores_at(int part, int row) const {
    return reinterpret_cast<float *>(smem + kScoresAt) + (part * kRows + row) * kScoreStride;
  }
  // The weights of a row take the place of its scores.
  __device__ __forceinline__ char *weights_at(int row) const {
    return reinterpret_cast<char *>(scores_at(0, row));
  }
  // [kRows] factors of the sums yet; at the end [kRows] factors, then [kRows] log-sum-exps.
  __device__ __forceinline__ float *factors() const {
    return reinterpret_cast<float *>(smem + kFactorsAt);
  }

  // ---- loads

  __device__ __forceinline__ static void copy_chunk(u32 to, const char *from, bool inside,
                                                    bool vectorised) {
    if constexpr (V::kWiden) {
      if (vectorised) {
        cp_async8(to, from, inside ? 8 : 0);
      } else {
        u32 word[2] = {};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (inside) word[j / 4] |= static_cast<u32>(static_cast<u8>(from[j])) << j % 4 * 8;
        }
        store_shared8(to, word);
      }
    } else if (vectorised) {
      cp_async16(to, from, inside ? 16 : 0);
    } else {
      u32 word[4] = {};
      if (inside) load_elements(from, word);
      store_shared16(to, word);
    }
  }

  // Where a chunk of 8 elements lies in a stage.
  __device__ __forceinline__ static u32 stored_at(int row, int chunk) {
    return V::kWiden ? (row * kRowChunks + chunk) * kChunkBytes : latent_chunk_at(row, chunk);
  }

  // A stage to the tile that products read.
  __device__ __forceinline__ void widen(u32 from) const {
    const u32 to = shared_address(smem);
#pragma unroll 3
    for (int i = threadIdx.x; i < kKeys * kRowChunks; i += kLatentThreads) {
      u32 word[2], wide[4];
      load_shared8(from + i * kChunkBytes, word);
      widen_eight<V::kCache, V::kCompute>(word, wide);
      store_shared16(to + latent_chunk_at(i / kRowChunks, i % kRowChunks), wide);
    }
  }

  // Of the kWarpKeys rows that a warp copies, each of its lanes looks up one (or one twice).
  __device__ __forceinline__ int key_of_lane(int tile) const {
    return tile * kKeys + warp * kWarpKeys + lane % kWarpKeys;
  }

  __device__ __forceinline__ LatentSlot slot_of(int tile) const {
    return find_latent(p, s, key_of_lane(tile));
  }

  __device__ __forceinline__ void load_tile(int tile, int stage, LatentSlot at) const {
    const bool mine = is_inside(s, key_of_lane(tile));
    const i64 k_row = at.block * p.k_block_stride + at.slot * p.k_token_stride;
    const i64 v_row = at.block * p.v_block_stride + at.slot * p.v_token_stride;
    const u32 lanes = __ballot_sync(0xffffffffu, mine);  // whose keys there are
    const char *const latent = p.v + s.kv_head * p.v_head_stride;
    const char *const rope = p.k + s.kv_head * p.k_head_stride;
    const u32 to = shared_address(stage_at(stage));
#pragma unroll
    for (int r = 0; r < kWarpKeys; ++r) {
      const i64 offset = __shfl_sync(0xffffffffu, v_row, r);
#pragma unroll
      for (int i = 0; i < kLatentChunks / 32; ++i) {
        const int chunk = i * 32 + lane;
        const bool inside = (lanes >> r & 1u) && chunk * 8 < p.head_dim_v;
        copy_chunk(to + stored_at(warp * kWarpKeys + r, chunk),
                   latent + (inside ? offset + chunk * kChunkBytes : 0), inside, p.v_vectorised);
      }
    }
#pragma unroll
    for (int i = 0; i < kWarpKeys / 4; ++i) {
      const int r = i * 4 + lane / 8, chunk = lane % 8;
      const i64 offset = __shfl_sync(0xffffffffu, k_row, r);
      const bool inside = (lanes >> r & 1u) && chunk * 8 < p.head_dim;
      copy_chunk(to + stored_at(warp * kWarpKeys + r, kLatentChunks + chunk),
                 rope + (inside ? offset + chunk * kChunkBytes : 0), inside, p.k_vectorised);
    }
  }

  // Offset of step `i` of this warp within a row whose number is `row` modulo 8.
  __device__ __forceinline__ u32 step_at(int i, int row, int half) const {
    const int step = depth + kDepths * i;
    return static_cast<u32>((step * 2 + half) ^ (row & 7)) * 16;
  }

  using Queries = u32[kSteps][kRowTiles][4];

  __device__ __forceinline__ void hold_queries(u32 tile, Queries &q) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        const int row = t * 16 + lane % 16;
        ldmatrix4(q[i][t], tile + row * kRowDim * 2 + step_at(i, row, lane / 16));
      }
    }
  }

  // ---- products

  // This warp's part of the scores, to shared memory.
  __device__ __forceinline__ void score(u32 tile, const Queries &q) const {
    float sum[kChains][kRowTiles][2][4] = {};
    const int row = first_key + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      u32 b[4];
      ldmatrix4(b, tile + row * kRowDim * 2 + step_at(i, row, lane / 8 % 2));
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        mma_16x8x16<V::kCompute>(sum[i % kChains][t][0], q[i][t], b[0], b[1]);
        mma_16x8x16<V::kCompute>(sum[i % kChains][t][1], q[i][t], b[2], b[3]);
      }
    }
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float2 pair = make_float2(sum[0][t][n][2 * h], sum[0][t][n][2 * h + 1]);
          if constexpr (kChains == 2) {
            pair.x += sum[1][t][n][2 * h], pair.y += sum[1][t][n][2 * h + 1];
          }
          float *to = scores_at(depth, t * 16 + h * 8 + lane / 4) + first_key + n * 8;
          *reinterpret_cast<float2 *>(to + lane % 4 * 2) = pair;
        }
      }
    }
  }

  // acc += weights * values, columns 64 * warp and on.
  __device__ __forceinline__ void accumulate(u32 tile,
                                             float (&acc)[kRowTiles][kOutTiles][4]) const {
    rescale(acc);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      u32 a[kRowTiles][4];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        ldmatrix4(a[t], shared_address(weights_at(t * 16 + lane % 16)) + step * 32 +
                            lane / 16 * 16);
      }
      const int row = step * 16 + lane % 16;
#pragma unroll
      for (int n = 0; n < kOutTiles / 2; ++n) {
        u32 b[4];
        ldmatrix4_trans(b, tile + latent_chunk_at(row, warp * kOutTiles + n * 2 + lane / 16));
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          mma_16x8x16<V::kCompute>(acc[t][2 * n], a[t], b[0], b[1]);
          mma_16x8x16<V::kCompute>(acc[t][2 * n + 1], a[t], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void rescale(float (&acc)[kRowTiles][kOutTiles][4]) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const float low = factors()[t * 16 + lane / 4], high = factors()[t * 16 + 8 + lane / 4];
      if (!__any_sync(0xffffffffu, low != 1.f || high != 1.f)) continue;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        acc[t][n][0] *= low, acc[t][n][1] *= low;
        acc[t][n][2] *= high, acc[t][n][3] *= high;
      }
    }
  }

  // ---- softmax

  __device__ __forceinline__ int row_of_fold(int i) const {
    return warp * (kRows / kWarps) + i * kSideBySide + lane / kLanes;
  }

  __device__ __forceinline__ void clear(Fold &fold) const {
#pragma unroll
    for (int i = 0; i < kFolds; ++i) {
      const int row = s.row_begin + row_of_fold(i), token = row / p.group;
      fold.top[i] = -infinity(), fold.sum[i] = 0.f;
      fold.position[i] = token + s.request.kv_len - s.request.q_len;
      fold.slope[i] =
          p.alibi_slopes && row < s.row_end
              ? load_float(p.alibi_slopes,
                           s.request.index * p.alibi_batch_stride +
                               (s.kv_head * p.group + row - token * p.group) * p.alibi_head_stride)
              : 0.f;
    }
  }

  __device__ __forceinline__ static float max_of_row(float x) {
#pragma unroll
    for (int mask = kLanes / 2; mask; mask /= 2) {
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
    }
    return x;
  }

  // A score to base 2, in the order scale, soft cap, ALiBi, mask.
  template <bool kEdge>
  __device__ __forceinline__ float modified(float x, int key, const Fold &fold, int i) const {
    const int distance = fold.position[i] - key;
    if (p.softcap > 0.f) {
      x = p.softcap * tanh_fast(x * (s.scale / p.softcap)) * kLog2e;
    } else {
      x *= s.scale * kLog2e;
    }
    if (p.alibi_slopes) x -= fold.slope[i] * fabsf(static_cast<float>(distance)) * kLog2e;
    if constexpr (kEdge) {
      const bool seen = key < s.kv_end && key >= s.kv_begin &&
                        (p.window_left < 0 || distance <= p.window_left) &&
                        (p.window_right < 0 || -distance <= p.window_right);
      if (!seen) x = -infinity();
    }
    return x;
  }

  template <bool kEdge>
  __device__ __forceinline__ void fold_scores(int first_column, Fold &fold) const {
    const int column = lane % kLanes * 2, key = first_column + column;
#pragma unroll
    for (int i = 0; i < kFolds; ++i) {
      const int row = row_of_fold(i);
      float2 x = *reinterpret_cast<const float2 *>(scores_at(0, row) + column);
#pragma unroll
      for (int part = 1; part < kDepths; ++part) {
        const float2 y = *reinterpret_cast<const float2 *>(scores_at(part, row) + column);
        x.x += y.x, x.y += y.y;
      }
      x.x = modified<kEdge>(x.x, key, fold, i);
      x.y = modified<kEdge>(x.y, key + 1, fold, i);
      const float top = fmaxf(fold.top[i], max_of_row(fmaxf(x.x, x.y)));
      const float shift = top == -infinity() ? 0.f : top;
      const float factor = exp2_approx(fold.top[i] - shift);
      x.x = exp2_approx(x.x - shift), x.y = exp2_approx(x.y - shift);
      fold.sum[i] = fold.sum[i] * factor + (x.x + x.y);
      fold.top[i] = top;
      __syncwarp();  // every lane of the row has read its scores
      *reinterpret_cast<u32 *>(weights_at(row) + column * 2) = pack_pair<V::kCompute>(x.x, x.y);
      if (lane % kLanes == 0) factors()[row] = factor;
    }
  }

  // ---- the whole

  __device__ __forceinline__ void run() {
    float acc[kRowTiles][kOutTiles][4] = {};
    Fold fold;
    clear(fold);
    if (s.kv_begin < s.kv_end) attend(fold, acc);
    finish(fold, acc);
  }

  __device__ __forceinline__ void attend(Fold &fold,
                                         float (&acc)[kRowTiles][kOutTiles][4]) const {
    const int begin = s.kv_begin / kKeys, end = (s.kv_end + kKeys - 1) / kKeys;
    // A tile's blocks are looked up before they are needed.
    LatentSlot slot = slot_of(begin);
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      const LatentSlot next = slot_of(begin + i + 1);
      load_tile(begin + i, i, slot);
      cp_async_commit();
      slot = next;
    }
    load_latent_queries<kLatentThreads, kRows>(p, d, s, query_tile());
    __syncthreads();
    Queries q;
    hold_queries(shared_address(query_tile()), q);
    int stage = 0, free = kStages - 1;
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      cp_async_wait<kStages - 2>();
      __syncthreads();  // the tile is there, and its predecessor's stage, scores, weights are free
      const LatentSlot next = slot_of(tile + kStages);
      if (tile + kStages - 1 < end) load_tile(tile + kStages - 1, free, slot);
      cp_async_commit();
      slot = next;
      u32 at = shared_address(stage_at(stage));
      if constexpr (V::kWiden) {
        widen(at);
        at = shared_address(smem);
        __syncthreads();
      }
      score(at, q);
      __syncthreads();
      const int column = tile * kKeys;
      if (column < s.free_begin || column + kKeys > s.free_end || column < s.kv_begin) {
        fold_scores<true>(column, fold);
      } else {
        fold_scores<false>(column, fold);
      }
      __syncthreads();
      accumulate(at, acc);
      free = stage;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    cp_async_wait<0>();
  }

  __device__ __forceinline__ void finish(Fold &fold,
                                         const float (&acc)[kRowTiles][kOutTiles][4]) const {
    const float v_scale = value_scale(p, s.request.index, s.kv_head);
    __syncthreads();  // the factors of the last tile have been read
#pragma unroll
    for (int i = 0; i < kFolds; ++i) {
      float sum = fold.sum[i];
#pragma unroll
      for (int mask = kLanes / 2; mask; mask /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      }
      if (lane % kLanes == 0) {
        factors()[row_of_fold(i)] = sum == 0.f ? 0.f : v_scale / sum;
        factors()[kRows + row_of_fold(i)] =
            sum == 0.f ? -infinity() : fold.top[i] * kLn2 + logf(sum);
      }
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int in_tile = t * 16 + h * 8 + lane / 4, row = s.row_begin + in_tile;
        if (row >= s.row_end) continue;
        float value[kOutTiles][2];
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          value[n][0] = acc[t][n][2 * h], value[n][1] = acc[t][n][2 * h + 1];
        }
        store_row<kOutTiles>(p, s, s.kv_head, row,
                             {factors()[kRows + in_tile], factors()[in_tile]},
                             warp * kOutTiles * 8 + lane % 4 * 2, warp == 0 && lane % 4 == 0,
                             value, [](int n) { return n * 8; });
      }
    }
  }
};
