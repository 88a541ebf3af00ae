// Latent attention of one segment on wgmma: 64 rows, key tiles of 64 by TMA in a ring of 3 stages.
//
// One warpgroup holds the queries in registers and makes the weights; two hold half of the 512 output
// columns each and add up the values. A stage is 9 panels of 64 keys and 128 bytes: 8 of the latent,
// which are keys and values, and one of the rope part. Once a tile's scores are known its rope panel
// is free, and the weights take its place: they need no memory, nor a barrier, of their own.
//
// A panel is loaded again as soon as its last reader is done: its columns' warpgroup does so for the
// latent, and the scores' warpgroup for the rope part, when both others are done with the weights.
#pragma once

#include "arch/tma_sm90.cuh"
#include "arch/wgmma_sm90.cuh"
#include "block/epilogue.cuh"
#include "block/softmax.cuh"
#include "mainloop/latent_rows.cuh"

constexpr int kLatentRows = 64, kLatentKeys = 64, kLatentStages = 3;
constexpr int kLatentSteps = kRowDim / 16, kHeldSteps = kLatentDim / 16 - 1;
constexpr bool kLatentTurns = true;
constexpr int kPanelBytes = kLatentKeys * 128, kLatentPanels = 8, kHalfPanels = kLatentPanels / 2;
constexpr int kLatentStageBytes = (kLatentPanels + 1) * kPanelBytes;

struct LatentTiles {
  struct Rest {
    u64 full[kLatentStages];     // all of a tile has landed
    u64 scored[kLatentStages];   // its scores are there
    u64 weights[kLatentStages];  // its weights are there
    u64 done[kLatentStages];     // its weights and values have been used
    float factor[kLatentStages][kLatentRows];  // of the sums before this tile
    Segment segment;
  };
  struct Results {
    float norm[kLatentRows], lse[kLatentRows];
  };
  // Of the queries, what registers do not hold: the rope part, and a step of the latent.
  static constexpr int kRopeAt = kLatentStages * kLatentStageBytes;
  static constexpr int kStepAt = kRopeAt + kPanelBytes;
  static constexpr int kRestAt = kStepAt + kLatentRows * 32;
  static constexpr int kBytes = kRestAt + static_cast<int>(sizeof(Rest));

  char *base;
  u32 address;

  __device__ __forceinline__ explicit LatentTiles(char *smem)
      : base(smem), address(shared_address(smem)) {}

  __device__ __forceinline__ Rest &rest() const { return *reinterpret_cast<Rest *>(base + kRestAt); }
  // In the place of queries that are done with.
  __device__ __forceinline__ Results &results() const {
    return *reinterpret_cast<Results *>(base + kRopeAt);
  }
  __device__ __forceinline__ u32 panel(int stage, int i) const {
    return address + stage * kLatentStageBytes + i * kPanelBytes;
  }
  __device__ __forceinline__ char *stage(int i) const { return base + i * kLatentStageBytes; }
  __device__ __forceinline__ char *rope_panel(int i) const {
    return stage(i) + kLatentPanels * kPanelBytes;
  }

  // By one thread.
  __device__ __forceinline__ void init() const {
    Rest &r = rest();
    for (int i = 0; i < kLatentStages; ++i) {
      mbarrier_init(shared_address(&r.full[i]), 3);  // a loading thread of each warpgroup
      mbarrier_init(shared_address(&r.scored[i]), 128);
      mbarrier_init(shared_address(&r.weights[i]), 128);
      mbarrier_init(shared_address(&r.done[i]), 256);
    }
    mbarrier_init_fence();
  }
};

// The place of a tile in the ring, and the parity of its barriers there.
struct LatentPlace {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kLatentStages) stage = 0, parity ^= 1;
  }
};

struct LatentLoader {
  const AttentionParams &p;
  const LatentParams &d;
  const Segment &s;
  const LatentTiles &tiles;
  const TensorMap *rope_map, *latent_map;

  __device__ __forceinline__ int first_tile() const { return s.kv_begin / kLatentKeys; }
  __device__ __forceinline__ int end_tile() const {
    return s.kv_begin < s.kv_end ? (s.kv_end + kLatentKeys - 1) / kLatentKeys : first_tile();
  }

  // By one warp: panels [first, first + count) of a tile to a stage. A box has the keys of one block
  // of the cache; lane i takes the i-th, and boxes that no row of the segment sees are zero.
  __device__ __forceinline__ void load(int tile, int stage, int first, int count,
                                       const TensorMap *map) const {
    const u32 full = shared_address(&tiles.rest().full[stage]);
    if (threadIdx.x % 32 == 0) {
      mbarrier_arrive_expect(full, static_cast<u32>(count * kPanelBytes));
    }
    __syncwarp();
    const int at = static_cast<int>(threadIdx.x % 32) * d.box_keys, key = tile * kLatentKeys + at;
    if (at >= kLatentKeys) return;
    int slot = s.request.kv_begin + key, page = 0;
    if (p.block_table) {
      const int column = static_cast<u32>(key) / static_cast<u32>(p.page_size);
      slot = key - column * p.page_size;
      page = d.outside_page;
      if (key < s.kv_end && key + d.box_keys > s.kv_begin) {
        page = reinterpret_cast<const i32 *>(p.block_table +
                                             s.request.index * p.table_row_stride)[column];
      }
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int panel = first + i;
      tma_load4(tiles.panel(stage, panel) + at * 128, map, panel % kLatentPanels * 64, slot,
                s.kv_head, page, full);
    }
  }

  // What a warpgroup loads of a tile: 0: the rope part; 1, 2: a half of the latent.
  __device__ __forceinline__ void load_share(int tile, int stage, int warpgroup) const {
    if (warpgroup == 0) {
      load(tile, stage, kLatentPanels, 1, rope_map);
    } else {
      load(tile, stage, (warpgroup - 1) * kHalfPanels, kHalfPanels, latent_map);
    }
  }
};

// A number that is the same in all lanes, so that the compiler knows it.
__device__ __forceinline__ u32 uniform_lane(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

template <class V>
struct LatentScores {
  static_assert(LatentTiles::kBytes <= V::kSharedBytes, "the host asks for less shared memory");

  const LatentLoader &load;
  const AttentionParams &p;
  const Segment &s;
  const LatentTiles &tiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  u32 q[kHeldSteps][4];
  float shift[2], sum[2];

  __device__ __forceinline__ explicit LatentScores(const LatentLoader &load)
      : load(load), p(load.p), s(load.s), tiles(load.tiles) {}

  __device__ __forceinline__ int row_of(int h) const { return warp * 16 + h * 8 + lane / 4; }

  // From the last stage, where the block has put them, to registers; what these do not hold goes to
  // tiles of its own.
  __device__ __forceinline__ void hold_queries() {
    const char *tile = tiles.stage(kLatentStages - 1);
    for (int i = threadIdx.x; i < kLatentRows * 8; i += 128) {
      const uint4 chunk = *reinterpret_cast<const uint4 *>(
          tile + latent_chunk_at(i / 8, kLatentChunks) - (i / 8 % 8) * 16 + i % 8 * 16);
      *reinterpret_cast<uint4 *>(tiles.base + LatentTiles::kRopeAt + i * 16) = chunk;
    }
    // Rows of 32 bytes with the swizzle of that size: every other four rows have their halves swapped.
    const int step_row = threadIdx.x / 2, half = threadIdx.x % 2;
    *reinterpret_cast<uint4 *>(tiles.base + LatentTiles::kStepAt + step_row * 32 +
                               (half ^ (step_row / 4 & 1)) * 16) =
        *reinterpret_cast<const uint4 *>(tile + latent_chunk_at(step_row, kHeldSteps * 2 + half));
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < kHeldSteps; ++i) {
      ldmatrix4(q[i], shared_address(tile) + latent_chunk_at(row, i * 2 + lane / 16));
    }
    shift[0] = shift[1] = -infinity(), sum[0] = sum[1] = 0.f;
  }

  __device__ __forceinline__ void score(int stage, float (&out)[32]) const {
    const u64 keys = matrix_descriptor(uniform_lane(tiles.panel(stage, 0)), 16, 1024);
    const u64 rows = matrix_descriptor(tiles.address + LatentTiles::kRopeAt, 16, 1024);
    const u64 step = matrix_descriptor32(tiles.address + LatentTiles::kStepAt);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kLatentSteps; ++i) {
      const u64 right = keys + i / 4 * (kPanelBytes / 16) + i % 4 * 2;
      if (i < kHeldSteps) {
        Wgmma<64>::template registers_rows<V::kCompute>(out, q[i < kHeldSteps ? i : 0], right,
                                                        i > 0);
      } else {
        const u64 left = i == kHeldSteps ? step : rows + i % 4 * 2;
        Wgmma<64>::template shared<V::kCompute>(out, left, right, 1);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(out);
  }

  __device__ __forceinline__ void mask(int first_column, float (&x)[32]) const {
    const int lane = fresh(threadIdx.x % 32);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position =
          (s.row_begin + warp * 16 + h * 8 + lane / 4) / p.group + s.request.kv_len -
          s.request.q_len;
      const int low = p.window_left < 0 ? s.kv_begin : max(s.kv_begin, position - p.window_left);
      const int high =
          p.window_right < 0 ? s.kv_end : min(s.kv_end, position + p.window_right + 1);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = first_column + n * 8 + lane % 4 * 2 + e;
          if (column < low || column >= high) x[4 * n + 2 * h + e] = -infinity();
        }
      }
    }
  }

  // Scores become weights, in the rope panel of their stage.
  __device__ __forceinline__ void fold(int stage, float (&x)[32]) {
    const float scale = fmaxf(s.scale * kLog2e, 1e-30f);  // never 0, as it meets -inf
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -infinity();
#pragma unroll
      for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(x[4 * n + 2 * h], x[4 * n + 2 * h + 1]));
      // A rounded product: an unchanged shift must give a factor of exactly 1.
      const float grown = fmaxf(shift[h], __fmul_rn(quad_max(top), scale));
      const float from = grown == -infinity() ? 0.f : grown;
      factor[h] = exp2_approx(shift[h] - from);
      shift[h] = grown;
      float total = sum[h] * factor[h];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 4 * n + 2 * h; e < 4 * n + 2 * h + 2; ++e) {
          x[e] = exp2_approx(fmaf(x[e], scale, -from));
          total += x[e];
        }
      }
      sum[h] = total;
    }
    named_barrier_sync(5, 128);  // no warp reads the rope panel any more
    const int lane = fresh(threadIdx.x % 32), row = warp * 16 + lane % 16;
    const u32 to = tiles.panel(stage, kLatentPanels) + row * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      u32 word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        word[i] = pack_pair<V::kCompute>(x[8 * k + 2 * i], x[8 * k + 2 * i + 1]);
      }
      stmatrix4(to + ((2 * k + lane / 16) ^ (row & 7)) * 16, word);
    }
    if (lane % 4 == 0) {
      tiles.rest().factor[stage][warp * 16 + lane / 4] = factor[0];
      tiles.rest().factor[stage][warp * 16 + lane / 4 + 8] = factor[1];
    }
  }

  // A number hidden from the compiler, which would keep what follows from it in registers.
  __device__ __forceinline__ static int fresh(int number) {
    asm volatile("" : "+r"(number));
    return number;
  }

  __device__ __forceinline__ void run() {
    LatentTiles::Rest &r = tiles.rest();
    LatentPlace at;
    const int begin = load.first_tile(), end = load.end_tile();
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      if (warp == 0 && tile >= begin + 2 && tile + 1 < end) {
        // The next tile takes the stage of the one before the last.
        LatentPlace next = at;
        next.next();
        mbarrier_wait(shared_address(&r.done[next.stage]), next.parity ^ 1);
        load.load_share(tile + 1, next.stage, 0);
      }
      mbarrier_wait(shared_address(&r.full[at.stage]), at.parity);
      float x[32];
      score(at.stage, x);
      mbarrier_arrive(shared_address(&r.scored[at.stage]));
      const int column = tile * kLatentKeys;
      if (column < s.free_begin || column + kLatentKeys > s.free_end || column < s.kv_begin) {
        mask(column, x);
      }
      fold(at.stage, x);
      fence_async_proxy();
      mbarrier_arrive(shared_address(&r.weights[at.stage]));
      at.next();
    }
    const float v_scale = value_scale(p, s.request.index, s.kv_head);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = quad_sum(sum[h]);
      if (lane % 4 == 0) {
        tiles.results().norm[row_of(h)] = total == 0.f ? 0.f : v_scale / total;
        tiles.results().lse[row_of(h)] = total == 0.f ? -infinity() : shift[h] * kLn2 + logf(total);
      }
    }
    named_barrier_arrive(1, 384);
  }
};

template <class V>
struct LatentValues {
  static constexpr int kColumns = kLatentDim / 2;

  const LatentLoader &load;
  const AttentionParams &p;
  const Segment &s;
  const LatentTiles &tiles;
  const int half;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float acc[kColumns / 2];

  __device__ __forceinline__ LatentValues(const LatentLoader &load, int half)
      : load(load), p(load.p), s(load.s), tiles(load.tiles), half(half) {}

  __device__ __forceinline__ void rescale(int stage) {
    const float *factor = tiles.rest().factor[stage] + warp * 16 + lane / 4;
    const float low = factor[0], high = factor[8];
    if (!__any_sync(0xffffffffu, low != 1.f || high != 1.f)) return;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      acc[4 * i] *= low, acc[4 * i + 1] *= low;
      acc[4 * i + 2] *= high, acc[4 * i + 3] *= high;
    }
  }

  // Weights of 0 must not meet what lies behind the last key, or before the first one.
  __device__ __forceinline__ void clear_outside(int tile, int stage) const {
    const int low = s.kv_begin - tile * kLatentKeys, high = s.kv_end - tile * kLatentKeys;
    if (low <= 0 && high >= kLatentKeys) return;
    const u32 zero[4] = {};
    for (int i = threadIdx.x % 128; i < kHalfPanels * kLatentKeys * 8; i += 128) {
      const int row = i / 8 % kLatentKeys;
      if (row < low || row >= high) {
        store_shared16(tiles.panel(stage, half * kHalfPanels) + i * 16, zero);
      }
    }
    fence_async_proxy();
    named_barrier_sync(2 + half, 128);
  }

  // The second half waits for the scores of the next tile, so that the tensor cores have work while
  // these become weights. `next` is its place, `more` whether there is one.
  __device__ __forceinline__ void accumulate(int stage, const LatentPlace &next, bool more) {
    const u64 weights =
        matrix_descriptor(uniform_lane(tiles.panel(stage, kLatentPanels)), 16, 1024);
    const u64 values = matrix_descriptor(uniform_lane(tiles.panel(stage, half * kHalfPanels)),
                                         kPanelBytes, 1024);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kLatentKeys / 16; ++i) {
      if (kLatentTurns && i == 2 && more) {
        wgmma_commit();
        mbarrier_wait(shared_address(&tiles.rest().scored[next.stage]), next.parity);
      }
      Wgmma<kColumns>::template shared_columns<V::kCompute>(acc, weights + i * 2,
                                                            values + i * 2048 / 16, 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(acc);
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc[i] = 0.f;
    LatentTiles::Rest &r = tiles.rest();
    LatentPlace at;
    const int end = load.end_tile();
#pragma unroll 1
    for (int tile = load.first_tile(); tile < end; ++tile) {
      mbarrier_wait(shared_address(&r.full[at.stage]), at.parity);
      mbarrier_wait(shared_address(&r.weights[at.stage]), at.parity);
      rescale(at.stage);
      clear_outside(tile, at.stage);
      LatentPlace next = at;
      next.next();
      accumulate(at.stage, next, tile + 1 < end);
      mbarrier_arrive(shared_address(&r.done[at.stage]));
      if (tile + kLatentStages < end) {
        named_barrier_sync(2 + half, 128);  // no warp reads the columns any more
        if (warp == 0) load.load_share(tile + kLatentStages, at.stage, 1 + half);
      }
      at = next;
    }
    named_barrier_sync(1, 384);
    store();
  }

  __device__ __forceinline__ void store() const {
    const LatentTiles::Results &r = tiles.results();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int in_tile = warp * 16 + h * 8 + lane / 4, row = s.row_begin + in_tile;
      if (row >= s.row_end) continue;
      float value[kColumns / 8][2];
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        value[n][0] = acc[4 * n + 2 * h], value[n][1] = acc[4 * n + 2 * h + 1];
      }
      store_row<kColumns / 8>(p, s, s.kv_head, row, {r.lse[in_tile], r.norm[in_tile]},
                              half * kColumns + lane % 4 * 2, half == 0 && lane % 4 == 0, value,
                              [](int n) { return n * 8; });
    }
  }
};
