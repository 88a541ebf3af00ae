// Attention of one segment on mma.sync, key tiles by cp.async.
//
// Warps either take rows of their own (kKeyWarps 1), or share 16 rows and split the keys of every
// tile (kKeyWarps 4, for decoding), and merge at the end.
#pragma once

#include "block/query_tile.cuh"
#include "block/score_mod.cuh"
#include "mainloop/fwd_sm80_store.cuh"
#include "mainloop/key_copy_sm80.cuh"

template <class V>
struct Forward {
  static constexpr int kD = V::kHeadDim, kDv = V::kHeadDimV, kKeys = V::kKeys;
  static constexpr int kStages = V::kStages, kItem = KeyCopy<V>::kItem;
  static constexpr int kRowTiles = V::kRowTiles, kKeyWarps = V::kKeyWarps;
  static constexpr int kRows = kRowTiles * V::kThreads / 2 / kKeyWarps;  // of the CTA
  static constexpr int kWarpKeys = kKeys / kKeyWarps;  // of a tile
  static constexpr int kStepKeys = V::kStepKeys;       // of those, at a time
  static constexpr int kScoreTiles = kStepKeys / 8, kOutTiles = kDv / 8;
  static constexpr int kQueryChunks = kD / 8;  // of 16 bytes
  static constexpr int kKeyChunks = kD * kItem / 16, kValueChunks = kDv * kItem / 16;
  static constexpr int kKeyBytes = kKeys * kD * kItem, kValueBytes = kKeys * kDv * kItem;
  static constexpr int kKeysAt = kRows * kD * 2, kValuesAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kListAt = kValuesAt + kStages * kValueBytes;
  static constexpr int kInfoAt = kListAt + KeyCopy<V>::kBytes;
  static constexpr int kBytes = kInfoAt + kRows * static_cast<int>(sizeof(RowInfo));
  static_assert(kWarpKeys % kStepKeys == 0 && kStepKeys % 16 == 0, "");
  static_assert(kStages > 1 || kStepKeys == kWarpKeys, "");
  static_assert(kKeyWarps == 1 || (kRowTiles == 1 && V::kThreads == 32 * kKeyWarps), "");
  static_assert(kBytes == V::kSharedBytes, "the host asks for another amount of shared memory");

  using Accumulator = float[kRowTiles][kOutTiles][4];
  using Scores = float[kRowTiles][kScoreTiles][4];

  // Fragments of the queries, where registers allow; else they are read again for every tile.
  static constexpr bool kHold = kRowTiles * (kOutTiles * 4 + kScoreTiles * 4 + kD / 4) <= V::kHold;
  struct Queries {
    u32 word[kHold ? kD / 16 : 1][kRowTiles][4];
  };

  const AttentionParams &p;
  const Segment &s;
  const SegmentRows &shared_rows;
  char *const smem;
  const KeyCopy<V> copy;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 first_row = warp / kKeyWarps * 16 * kRowTiles;  // of this warp, in the tile
  const u32 first_key = warp % kKeyWarps * kWarpKeys;

  __device__ __forceinline__ Forward(const AttentionParams &p, const Segment &s,
                                     const SegmentRows &rows, char *smem)
      : p(p), s(s), shared_rows(rows), smem(smem), copy(p, s, smem + kListAt) {}

  // The lane, made new: what follows from it is not kept from tile to tile, which costs registers.
  __device__ __forceinline__ u32 new_lane() const {
    u32 same = lane;
    asm volatile("" : "+r"(same));
    return same;
  }

  __device__ __forceinline__ u32 key_tile(u32 stage) const {
    return shared_address(smem) + kKeysAt + stage * kKeyBytes;
  }
  __device__ __forceinline__ u32 value_tile(u32 stage) const {
    return shared_address(smem) + kValuesAt + stage * kValueBytes;
  }
  __device__ __forceinline__ RowInfo *row_info() const {
    return reinterpret_cast<RowInfo *>(smem + kInfoAt);
  }

  // Where this lane's rows of query fragments begin.
  __device__ __forceinline__ u32 query_at(u32 lane) const {
    return shared_address(smem) + tile_offset<kQueryChunks>(first_row + lane % 16, lane / 16);
  }

  __device__ __forceinline__ void load_query(u32 at, int step, u32 (&a)[kRowTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      ldmatrix4(a[i], tile_pair<kQueryChunks>(at, step) + i * 16 * kQueryChunks * 16);
    }
  }

  __device__ __forceinline__ Queries hold_queries() const {
    Queries queries = {};
    if constexpr (kHold) {
#pragma unroll
      for (int step = 0; step < kD / 16; ++step) {
        load_query(query_at(lane), step, queries.word[step]);
      }
    }
    return queries;
  }

  __device__ __forceinline__ void query(const Queries &queries, u32 at, int step,
                                        u32 (&a)[kRowTiles][4]) const {
    if constexpr (kHold) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[i][e] = queries.word[step][i][e];
      }
    } else {
      load_query(at, step, a);
    }
  }

  // out += a * b for 16 columns of all row tiles, which are column tiles 2n and 2n + 1.
  template <int kTiles>
  __device__ __forceinline__ static void multiply(float (&out)[kRowTiles][kTiles][4], int n,
                                                  const u32 (&a)[kRowTiles][4], u32 even0,
                                                  u32 even1, u32 odd0, u32 odd1) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      mma_16x8x16<V::kCompute>(out[i][2 * n], a[i], even0, even1);
      mma_16x8x16<V::kCompute>(out[i][2 * n + 1], a[i], odd0, odd1);
    }
  }

  // scores = queries * keys^T
  __device__ __forceinline__ void score(u32 keys, const Queries &queries, Scores &out) const {
    const u32 lane = new_lane(), queries_at = query_at(lane);
    const u32 row = first_key + lane % 8 + lane / 16 * 8;
    const u32 at = keys + tile_offset<kKeyChunks>(row, lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][n][e] = 0.f;
      }
    }
    // One ldmatrix brings 16 keys, and 16 bits of 16 dims or 8 bits of 32.
#pragma unroll
    for (int pair = 0; pair < kKeyChunks / 2; ++pair) {
      u32 a[2 / kItem][kRowTiles][4];
#pragma unroll
      for (int i = 0; i < 2 / kItem; ++i) {
        query(queries, queries_at, pair * (2 / kItem) + i, a[i]);
      }
#pragma unroll
      for (int n = 0; n < kScoreTiles / 2; ++n) {
        u32 b[4];
        ldmatrix4(b, tile_pair<kKeyChunks>(at, pair) + n * 16 * kKeyChunks * 16);
        if constexpr (V::kWiden) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            multiply(out, n, a[i], widen(b[i]), widen(b[i] >> 16), widen(b[i + 2]),
                     widen(b[i + 2] >> 16));
          }
        } else {
          multiply(out, n, a[0], b[0], b[1], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ static u32 widen(u32 pair) {
    return fp8_to_fp16<V::kCache>(pair & 0xffffu);
  }

  // acc += weights * values; fragments of scores are those of a left operand. Of 8-bit values a
  // lane gets two neighbours of two keys: column tile 2n has the even ones of 16.
  __device__ __forceinline__ void accumulate(u32 values, const Scores &weight,
                                             Accumulator &acc) const {
    const u32 lane = new_lane();
    const u32 at = values + tile_offset<kValueChunks>(first_key + lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < kStepKeys / 16; ++step) {
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
      for (int n = 0; n < kValueChunks / 2; ++n) {
        u32 b[4];
        ldmatrix4_trans(b, tile_pair<kValueChunks>(at, n) + step * 16 * kValueChunks * 16);
        if constexpr (V::kWiden) {
#pragma unroll
          for (int e = 0; e < 4; ++e) b[e] = __byte_perm(b[e], 0, 0x3120);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            multiply(acc, 2 * n + i, a, widen(b[2 * i]), widen(b[2 * i + 1]),
                     widen(b[2 * i] >> 16), widen(b[2 * i + 1] >> 16));
          }
        } else {
          multiply(acc, n, a, b[0], b[1], b[2], b[3]);
        }
      }
    }
  }

  // What a warp carries from tile to tile.
  struct State {
    Queries queries;
    Softmax<kRowTiles> softmax;
    Accumulator acc;
  };

  // Whether some row sees only a part of a step's keys.
  __device__ __forceinline__ bool is_edge(int first_key) const {
    return first_key < s.free_begin || first_key + kStepKeys > s.free_end;
  }

  // The weights of keys from `first` on. Rarely a second pass: where a row outgrows its shift.
  __device__ __forceinline__ void weigh(int first, u32 keys, State &state, Scores &scores) const {
    const auto exp2 = [](float x) { return exp2_approx(x); };
    const bool edge = is_edge(first);
    bool shifts = __any_sync(0xffffffffu, state.softmax.fresh & Softmax<kRowTiles>::kNoKeyYet);
    u32 outgrown = 0;
#pragma unroll 1
    for (;;) {
      score(keys, state.queries, scores);
      const u32 lane = new_lane();
      const Rows<V::kWiden> rows = {row_info() + first_row + lane / 4, s.scale};
      const int column = first + lane % 4 * 2;
      if constexpr (V::kScoreMod) {
        // What a row does not see must not decide how its soft cap is computed: another block of
        // the same row may not have it.
        if (edge) mask_scores(p, rows, s.kv_end, column, 0.f, scores);
        modify_scores(p, rows, column, scores);
      }
      if (edge) mask_scores(p, rows, s.kv_end, column, -infinity(), scores);
      if (shifts) {
        float rescale[kRowTiles][2];
        shift_rows<V::kScoreMod>(rows, scores, state.softmax, outgrown, rescale, exp2);
        if (__any_sync(0xffffffffu, outgrown != 0)) {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
              for (int e = 0; e < 4; ++e) state.acc[i][n][e] *= rescale[i][e / 2];
            }
          }
        }
      }
      if (fold_scores<V::kCompute, V::kScoreMod>(rows, scores, state.softmax, shifts, outgrown,
                                                 exp2)) {
        return;
      }
      shifts = true;
    }
  }

  __device__ __forceinline__ void run() {
    State state;
    start(state);
    if (s.kv_begin < s.kv_end) {
      copy.start(key_tile(0), kStages * (kKeyBytes + kValueBytes));
      if constexpr (kStages == 1) {
        run_alternating(state);
      } else {
        run_staged(state);
      }
    }
    store(state);
  }

  __device__ __forceinline__ void store(State &state) const {
    using Store = ForwardStore<V>;
    static_assert(Store::kMergeBytes <= kListAt - kKeysAt, "");
    Store(p, s, shared_rows, smem, kKeysAt).finish(state.softmax, state.acc);
  }

  // Rows past the last are all zero: they need no look at a maximum.
  __device__ __forceinline__ void start(State &state) const {
    state.softmax.fresh = Softmax<kRowTiles>::kNoKeyYet;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (row_of(i, h) < s.row_end) state.softmax.fresh |= 1u << (2 * i + h);
        state.softmax.shift[i][h] = state.softmax.sum[i][h] = 0.f;
      }
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.acc[i][n][e] = 0.f;
      }
    }
  }

  __device__ __forceinline__ int row_of(int i, int h) const {
    return s.row_begin + first_row + i * 16 + h * 8 + lane / 4;
  }

  __device__ __forceinline__ bool is_idle() const {
    return s.row_begin + static_cast<int>(first_row) >= s.row_end;
  }

  __device__ __forceinline__ void start_queries() const {
    const SegmentRows rows = shared_rows;
    if (!V::kWiden && p.q_type == V::kCompute && p.q_vectorised && !s.negate) {
      copy_queries<kD, kRows, V::kThreads>(
          p, s, rows, row_info(), [&](u32 to, const char *from, int bytes) {
            cp_async16(shared_address(smem) + to, from, bytes ? 16 : 0);
          });
      cp_async_commit();
    } else {
      load_queries<V::kCompute, V::kWiden, kD, kRows, V::kThreads>(p, s, rows, s.negate, smem,
                                                                   row_info());
    }
  }

  // A ring of tiles. The barrier of a tile says that it is there, and that all are done with the
  // one before, whose place the next copy takes.
  __device__ __forceinline__ void run_staged(State &state) const {
    constexpr int kAhead = kStages - 1;
    constexpr bool kPowerOfTwo = (kStages & kAhead) == 0;  // the place follows from the tile
    const u32 begin = static_cast<u32>(s.kv_begin) / kKeys;
    int at[kStages];
#pragma unroll
    for (int i = 0; i < kStages; ++i) at[i] = copy.find(begin + i);
#pragma unroll
    for (int i = 0; i < KeyCopy<V>::kEarly; ++i) copy.ask(begin + kStages + i);
    if constexpr (kStages > 2) start_queries();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      copy.write_list(begin + i, at[i]);
      __syncthreads();
      issue(begin + i, kPowerOfTwo ? (begin + i) & kAhead : i);
    }
    copy.write_list(begin + kAhead, at[kAhead]);
    if constexpr (kStages == 2) start_queries();  // the first wait is for all
    u32 stage = 0, free = kAhead;
    for (u32 tile = begin; has(tile); ++tile) {
      if constexpr (kPowerOfTwo) stage = tile & kAhead, free = (tile + kAhead) & kAhead;
      cp_async_wait<kAhead - 1>();
      __syncthreads();
      if (kHold && tile == begin) state.queries = hold_queries();
      copy.write_list(tile + kStages);
      copy.ask(tile + kStages + KeyCopy<V>::kEarly);
      issue(tile + kAhead, free);
      if (!is_idle()) {
#pragma unroll 1
        for (int key = 0; key < kWarpKeys; key += kStepKeys) {
          const int first = tile * kKeys + first_key + key;
          if (key > 0 && first >= s.kv_end) break;
          Scores scores;
          weigh(first, key_tile(stage) + key * kD * kItem, state, scores);
          accumulate(value_tile(stage) + key * kDv * kItem, scores, state.acc);
        }
      }
      if constexpr (!kPowerOfTwo) {
        free = stage;
        stage = stage == kAhead ? 0 : stage + 1;
      }
    }
  }

  __device__ __forceinline__ bool has(u32 tile) const {
    return tile * kKeys < static_cast<u32>(s.kv_end);
  }

  __device__ __forceinline__ void issue(u32 tile, u32 stage) const {
    if (has(tile)) copy.both(tile, key_tile(stage), value_tile(stage));
    cp_async_commit();
  }

  // One place for keys and one for values: either is filled while the other is worked on.
  __device__ __forceinline__ void run_alternating(State &state) const {
    const u32 begin = static_cast<u32>(s.kv_begin) / kKeys;
    copy.write_list(begin, copy.find(begin));
    copy.ask(begin + 1);
    __syncthreads();
    copy.keys(begin, key_tile(0));
    cp_async_commit();
    start_queries();
    for (u32 tile = begin; has(tile); ++tile) {
      cp_async_wait<0>();
      __syncthreads();
      if (kHold && tile == begin) state.queries = hold_queries();
      copy.write_list(tile + 1);
      copy.ask(tile + 2);
      copy.values(tile, value_tile(0));
      cp_async_commit();
      Scores scores;
      if (!is_idle()) weigh(tile * kKeys + first_key, key_tile(0), state, scores);
      cp_async_wait<0>();
      __syncthreads();
      if (has(tile + 1)) copy.keys(tile + 1, key_tile(0));
      cp_async_commit();
      if (!is_idle()) accumulate(value_tile(0), scores, state.acc);
    }
  }
};
