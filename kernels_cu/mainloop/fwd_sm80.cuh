// Attention of one segment on mma.sync: 4 warps, key tiles by cp.async in two stages.
//
// Warps either take rows of their own (kKeyWarps 1), or share 16 rows and split the keys of every
// tile (kKeyWarps 4, for decoding), and merge at the end.
#pragma once

#include "arch/mma_sm80.cuh"
#include "block/epilogue.cuh"
#include "block/page_table.cuh"
#include "block/query_tile.cuh"
#include "block/softmax.cuh"
#include "block/tile.cuh"

template <class V>
struct Forward {
  static constexpr int kD = V::kHeadDim, kDv = V::kHeadDimV, kKeys = V::kKeys;
  static constexpr int kRowTiles = V::kRowTiles, kKeyWarps = V::kKeyWarps;
  static constexpr int kRows = 16 * kRowTiles * 4 / kKeyWarps;  // of the CTA
  static constexpr int kWarpKeys = kKeys / kKeyWarps;
  static constexpr int kScoreTiles = kWarpKeys / 8, kOutTiles = kDv / 8;
  static constexpr int kQueryBytes = kRows * kD * 2;
  static constexpr int kKeyBytes = kKeys * kD * 2, kValueBytes = kKeys * kDv * 2;
  static constexpr int kKeysAt = kQueryBytes, kValuesAt = kKeysAt + 2 * kKeyBytes;
  static constexpr int kRowsAt = kValuesAt + 2 * kValueBytes;
  static constexpr int kInfoAt = kRowsAt + 2 * static_cast<int>(sizeof(KeyRows<kKeys>));
  static constexpr int kBytes = kInfoAt + kRows * static_cast<int>(sizeof(RowInfo));
  static_assert(kWarpKeys % 16 == 0, "a warp's keys are whole steps of a product");
  static_assert(kKeyWarps == 1 || (kRowTiles == 1 && kOutTiles % kKeyWarps == 0), "");
  static_assert(kBytes == V::kSharedBytes, "the host asks for another amount of shared memory");

  // One operand of the cache: rows of one KV head.
  struct Side {
    const char *base;
    int dim;
    bool vectorised;
  };

  // A thread's share of an 8-bit tile on its way to shared memory.
  template <int kDim>
  struct Fetched {
    u32 word[kKeys * kDim / 8 / kThreads][2];
  };

  using Accumulator = float[kRowTiles][kOutTiles][4];

  // Fragments of the queries, where registers allow; else they are read again for every tile.
  static constexpr bool kHoldQueries = kD <= 64 && kRowTiles == 1;
  // 8-bit rows wait in registers for their turn only where there are some left.
  static constexpr bool kLate = kD > 128;
  struct Queries {
    u32 word[kHoldQueries ? kD / 16 : 1][kRowTiles][4];
  };

  const AttentionParams &p;
  const Segment &s;
  const int &kv_head;
  char *const smem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp / kKeyWarps * 16 * kRowTiles;  // of this warp, in the tile
  const int first_key = warp % kKeyWarps * kWarpKeys;

  __device__ __forceinline__ Forward(const AttentionParams &p, const Segment &s, char *smem)
      : p(p),
        s(s),
        kv_head(s.kv_head),
        smem(smem) {}

  __device__ __forceinline__ Side keys() const {
    return {p.k + kv_head * p.k_head_stride, p.head_dim, p.k_vectorised != 0};
  }
  __device__ __forceinline__ Side values() const {
    return {p.v + kv_head * p.v_head_stride, p.head_dim_v, p.v_vectorised != 0};
  }

  __device__ __forceinline__ KeyRows<kKeys> *key_rows(int stage) const {
    return reinterpret_cast<KeyRows<kKeys> *>(smem + kRowsAt) + stage;
  }

  // A thread looks after one key of each tile: its block is read early, its rows written late.
  __device__ __forceinline__ int block_of(int tile) const {
    return threadIdx.x < kKeys ? find_block(p, s, tile * kKeys + threadIdx.x) : 0;
  }

  __device__ __forceinline__ void write_rows(int stage, int tile, int block) const {
    if (threadIdx.x < kKeys) {
      const KeyRow row = locate_key(p, s, tile * kKeys + threadIdx.x, block);
      key_rows(stage)->k[threadIdx.x] = row.k;
      key_rows(stage)->v[threadIdx.x] = row.v;
    }
  }

  // A number hidden from the compiler where registers are scarce: it would keep the addresses of
  // all fragments and chunks otherwise.
  __device__ __forceinline__ static int fresh(int number) {
    if constexpr (kD == 128 && kRowTiles == 2) asm volatile("" : "+r"(number));
    return number;
  }

  // 16-bit rows to a tile; what lies outside of the segment or the head is zero.
  template <int kDim>
  __device__ __forceinline__ void copy_tile(const Side &side, const i64 *row_offset,
                                            char *tile) const {
    constexpr int kChunks = kDim / 8;
    const int thread = fresh(static_cast<int>(threadIdx.x));
#pragma unroll(kDim == 128 && kRowTiles == 2 ? 2 : 4)
    for (int i = 0; i < kKeys * kChunks / kThreads; ++i) {
      const int index = thread + i * kThreads, row = index / kChunks, chunk = index % kChunks;
      const i64 offset = row_offset[row];
      const bool inside = offset != kNoRow && chunk * 8 < side.dim;
      const char *from = side.base + (inside ? offset + chunk * 16 : 0);
      char *to = tile + tile_offset<kDim>(row, chunk);
      if (side.vectorised) {
        cp_async16(shared_address(to), from, inside ? 16 : 0);
      } else {
        u32 word[4] = {};
        if (inside) {
          const u16 *element = reinterpret_cast<const u16 *>(from);
#pragma unroll
          for (int j = 0; j < 4; ++j) word[j] = element[2 * j] | element[2 * j + 1] << 16;
        }
        store_shared16(shared_address(to), word);
      }
    }
    cp_async_commit();
  }

  template <int kDim>
  __device__ __forceinline__ void fetch_tile(const Side &side, const i64 *row_offset,
                                             Fetched<kDim> &fetched) const {
    constexpr int kChunks = kDim / 8;
#pragma unroll
    for (int i = 0; i < kKeys * kChunks / kThreads; ++i) {
      const int index = threadIdx.x + i * kThreads, row = index / kChunks, chunk = index % kChunks;
      const i64 offset = row_offset[row];
      u32 low = 0, high = 0;
      if (offset != kNoRow && chunk * 8 < side.dim) {
        const char *from = side.base + offset + chunk * 8;
        if (side.vectorised) {
          const uint2 both = *reinterpret_cast<const uint2 *>(from);
          low = both.x, high = both.y;
        } else {
          const u8 *byte = reinterpret_cast<const u8 *>(from);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            low |= static_cast<u32>(byte[j]) << 8 * j;
            high |= static_cast<u32>(byte[4 + j]) << 8 * j;
          }
        }
      }
      fetched.word[i][0] = low, fetched.word[i][1] = high;
    }
  }

  template <int kDim>
  __device__ __forceinline__ void widen_tile(const Fetched<kDim> &fetched, char *tile) const {
    constexpr int kChunks = kDim / 8;
#pragma unroll
    for (int i = 0; i < kKeys * kChunks / kThreads; ++i) {
      const int index = threadIdx.x + i * kThreads, row = index / kChunks, chunk = index % kChunks;
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        word[j] = fp8_to_fp16<V::kCache>(fetched.word[i][j / 2] >> 16 * (j % 2) & 0xffffu);
      }
      store_shared16(shared_address(tile + tile_offset<kDim>(row, chunk)), word);
    }
  }

  __device__ __forceinline__ char *key_tile(int stage) const {
    return smem + kKeysAt + stage * kKeyBytes;
  }
  __device__ __forceinline__ char *value_tile(int stage) const {
    return smem + kValuesAt + stage * kValueBytes;
  }

  __device__ __forceinline__ void load_query(int step, int lane, u32 (&a)[kRowTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const int row = first_row + i * 16 + lane % 16;
      ldmatrix4(a[i], shared_address(smem) + tile_offset<kD>(row, step * 2 + lane / 16));
    }
  }

  __device__ __forceinline__ Queries hold_queries() const {
    Queries queries = {};
    if constexpr (kHoldQueries) {
#pragma unroll
      for (int step = 0; step < kD / 16; ++step) load_query(step, lane, queries.word[step]);
    }
    return queries;
  }

  // scores = queries * keys^T
  __device__ __forceinline__ void score(int stage, const Queries &queries,
                                        float (&out)[kRowTiles][kScoreTiles][4]) const {
    const int lane = fresh(threadIdx.x % 32);
    const u32 k = shared_address(key_tile(stage));
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][n][e] = 0.f;
      }
    }
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      u32 a[kRowTiles][4];
      if constexpr (kHoldQueries) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) a[i][e] = queries.word[step][i][e];
        }
      } else {
        load_query(step, lane, a);
      }
#pragma unroll
      for (int n = 0; n < kScoreTiles / 2; ++n) {
        u32 b[4];
        const int row = first_key + n * 16 + lane % 8 + lane / 16 * 8;
        ldmatrix4(b, k + tile_offset<kD>(row, step * 2 + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          mma_16x8x16<V::kCompute>(out[i][2 * n], a[i], b[0], b[1]);
          mma_16x8x16<V::kCompute>(out[i][2 * n + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  // acc += weights * values; fragments of scores are those of a left operand.
  __device__ __forceinline__ void accumulate(int stage,
                                             const float (&weight)[kRowTiles][kScoreTiles][4],
                                             Accumulator &acc) const {
    const int lane = fresh(threadIdx.x % 32);
    const u32 v = shared_address(value_tile(stage));
#pragma unroll
    for (int step = 0; step < kWarpKeys / 16; ++step) {
      u32 a[kRowTiles][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float *pair = &weight[i][2 * step + e / 2][e % 2 * 2];
          a[i][e] = pack_pair<V::kCompute>(pair[0], pair[1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kOutTiles / 2; ++n) {
        u32 b[4];
        const int row = first_key + step * 16 + lane % 16;
        ldmatrix4_trans(b, v + tile_offset<kDv>(row, n * 2 + lane / 16));
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          mma_16x8x16<V::kCompute>(acc[i][2 * n], a[i], b[0], b[1]);
          mma_16x8x16<V::kCompute>(acc[i][2 * n + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ RowInfo *row_info() const {
    return reinterpret_cast<RowInfo *>(smem + kInfoAt);
  }

  // Whether some row sees only a part of a tile.
  __device__ __forceinline__ bool is_edge(int first_column) const {
    return first_column < s.free_begin || first_column + kKeys > s.free_end;
  }

  __device__ __forceinline__ void run() {
    Accumulator acc = {};
    Softmax<kRowTiles> state;
    state.clear();
    const Rows<V::kWiden> rows = {row_info() + first_row + lane / 4, s.scale};
    const int begin = s.kv_begin / kKeys;
    if (s.kv_begin < s.kv_end) {
      const int first_block = block_of(begin), second_block = block_of(begin + 1);
      write_rows(0, begin, first_block);
      write_rows(1, begin + 1, second_block);
      __syncthreads();
      load_first();
      load_queries<V::kCompute, V::kWiden, kD, kRows>(
          p, s, kv_head, s.negate, smem, row_info());
      cp_async_wait<0>();
      __syncthreads();
      const Queries queries = hold_queries();
      const bool idle = s.row_begin + first_row >= s.row_end;
      int stage = 0;
      for (int tile = begin; tile * kKeys < s.kv_end; ++tile) {
        step(tile, stage, (tile + 1) * kKeys < s.kv_end, idle, queries, rows, state, acc);
        stage ^= 1;
      }
    }
    finish(rows, state, acc);
  }

  __device__ __forceinline__ void load_first() const {
    if constexpr (V::kWiden) {
      Fetched<kD> k;
      Fetched<kDv> v;
      fetch_tile(keys(), key_rows(0)->k, k);
      fetch_tile(values(), key_rows(0)->v, v);
      widen_tile(k, key_tile(0));
      widen_tile(v, value_tile(0));
    } else {
      copy_tile<kD>(keys(), key_rows(0)->k, key_tile(0));
      copy_tile<kDv>(values(), key_rows(0)->v, value_tile(0));
    }
  }

  // One key tile, in stage `stage`; the next one is on its way to the other stage meanwhile, whose
  // last reader passed the barrier at the end of the step before.
  __device__ __forceinline__ void step(int tile, int stage, bool more, bool idle,
                                       const Queries &queries, const Rows<V::kWiden> &rows,
                                       Softmax<kRowTiles> &state, Accumulator &acc) const {
    const int next = stage ^ 1;
    Fetched<V::kWiden ? kD : 64> next_keys;
    Fetched<V::kWiden ? kDv : 64> next_values;
    if (more) {
      if constexpr (V::kWiden) {
        if constexpr (!kLate) fetch_tile(keys(), key_rows(next)->k, next_keys);
      } else {
        copy_tile<kD>(keys(), key_rows(next)->k, key_tile(next));
        copy_tile<kDv>(values(), key_rows(next)->v, value_tile(next));
      }
    }
    const int later_block = block_of(tile + 2);
    float scores[kRowTiles][kScoreTiles][4];
    if (!idle) score(stage, queries, scores);
    if constexpr (V::kWiden && !kLate) {
      if (more) {
        widen_tile(next_keys, key_tile(next));
        fetch_tile(values(), key_rows(next)->v, next_values);
      }
    }
    if (!idle) {
      const int column = tile * kKeys + first_key + lane % 4 * 2;
      if constexpr (V::kScoreMod) {
        if (p.softcap > 0.f) {
          modify_scores<true>(p, rows, column, scores);
        } else {
          modify_scores<false>(p, rows, column, scores);
        }
      }
      if (is_edge(tile * kKeys)) mask_scores(p, rows, s.kv_end, column, scores);
      float rescale[kRowTiles][2];
      const bool same = fold_scores<V::kScoreMod>(rows, scores, state, rescale,
                                                  [](float x) { return exp2_approx(x); });
      if (__any_sync(0xffffffffu, !same)) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[i][n][e] *= rescale[i][e / 2];
          }
        }
      }
      accumulate(stage, scores, acc);
    }
    if constexpr (V::kWiden) {
      if (more) {
        if constexpr (kLate) {
          fetch_tile(keys(), key_rows(next)->k, next_keys);
          widen_tile(next_keys, key_tile(next));
          fetch_tile(values(), key_rows(next)->v, next_values);
        }
        widen_tile(next_values, value_tile(next));
      }
    } else {
      cp_async_wait<0>();
    }
    write_rows(stage, tile + 2, later_block);
    __syncthreads();
  }

  __device__ __forceinline__ void finish(const Rows<V::kWiden> &rows, Softmax<kRowTiles> &state,
                                         Accumulator &acc) {
    const float v_scale = value_scale(p, s.request.index, kv_head);
    RowResult result[kRowTiles][2];
    float shift[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        state.sum[i][h] = quad_sum(state.sum[i][h]);
        shift[i][h] = state.top[i][h] == -infinity()
                          ? -infinity()
                          : state.top[i][h] * (V::kScoreMod ? 1.f : rows.scale(i, h));
      }
    }
    if constexpr (kKeyWarps == 1) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          result[i][h] = conclude(shift[i][h], state.sum[i][h], v_scale);
          store_half<kOutTiles>(i, h, result[i][h], 0, true, acc[i]);
        }
      }
    } else {
      merge_warps(shift[0], state.sum[0], acc[0], v_scale);
    }
  }

  __device__ __forceinline__ static RowResult conclude(float shift, float sum, float v_scale) {
    if (shift == -infinity()) return {-infinity(), 0.f};
    return {shift * kLn2 + logf(sum), v_scale / sum};
  }

  template <int kTiles>
  __device__ __forceinline__ void store_half(int i, int h, RowResult result, int first_tile,
                                             bool with_lse,
                                             const float (&acc)[kTiles][4]) const {
    const int row = s.row_begin + first_row + i * 16 + h * 8 + lane / 4;
    if (row >= s.row_end) return;
    float value[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) value[n][0] = acc[n][2 * h], value[n][1] = acc[n][2 * h + 1];
    store_row<kTiles>(p, s, kv_head, row, result, first_tile * 8 + lane % 4 * 2,
                      with_lse && lane % 4 == 0, value);
  }

  // The warps hold states of the same rows over different keys; each then stores a share of the
  // columns.
  __device__ __forceinline__ void merge_warps(const float (&shift)[2], const float (&sum)[2],
                                              const float (&acc)[kOutTiles][4],
                                              float v_scale) const {
    constexpr int kShare = kOutTiles / kKeyWarps;
    static_assert(kKeyWarps * 16 * (kDv * 4 + 8) <= kRowsAt - kKeysAt || kKeyWarps == 1, "");
    float *const values_at = reinterpret_cast<float *>(smem + kKeysAt);
    float *const shifts_at = values_at + kKeyWarps * kOutTiles * 4 * 32;
    float *const sums_at = shifts_at + kKeyWarps * 16;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) values_at[((warp * kOutTiles + n) * 4 + e) * 32 + lane] = acc[n][e];
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
      float top = -infinity(), total = 0.f, factor[kKeyWarps], merged[kShare][4] = {};
#pragma unroll
      for (int w = 0; w < kKeyWarps; ++w) top = fmaxf(top, shifts_at[w * 16 + row]);
#pragma unroll
      for (int w = 0; w < kKeyWarps; ++w) {
        factor[w] = exp2_approx(shifts_at[w * 16 + row] - (top == -infinity() ? 0.f : top));
        total += factor[w] * sums_at[w * 16 + row];
#pragma unroll
        for (int n = 0; n < kShare; ++n) {
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) {
            merged[n][e] +=
                factor[w] *
                values_at[((w * kOutTiles + warp * kShare + n) * 4 + e) * 32 + lane];
          }
        }
      }
      store_half<kShare>(0, h, conclude(top, total, v_scale), warp * kShare, warp == 0, merged);
    }
  }
};
