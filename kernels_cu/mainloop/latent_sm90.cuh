// Latent attention of one piece on wgmma: 64 rows, key tiles of 64 by TMA in a ring of 3 stages.
//
// One warpgroup holds the queries in registers and makes the weights; two hold half of the 512
// output columns each and add up the values. What takes longest is the way from scores to weights
// and on to the next scores, so the warpgroup on it does nothing else: the others load panels again
// as soon as they have been read. The ring goes on from piece to piece.
#pragma once

#include "block/epilogue.cuh"
#include "block/softmax.cuh"
#include "mainloop/latent_tiles_sm90.cuh"

constexpr float kSlack = 8.f;  // log2 of the largest weight before sums are rescaled

template <class V>
struct LatentScores {
  static_assert(LatentTiles::kBytes <= V::kSharedBytes, "the host asks for less shared memory");

  const LatentLoader &load;
  const AttentionParams &p;
  const LatentTiles &tiles;

  u32 q[kHeldSteps][4];
  float shift[2], sum[2];

  __device__ __forceinline__ explicit LatentScores(const LatentLoader &load)
      : load(load), p(load.p), tiles(load.tiles) {}

  // The rows of a piece to a stage, and on to registers; what these do not hold goes to tiles of
  // its own. `meanwhile` runs while they are on their way. Barriers of this warpgroup inside.
  template <class Meanwhile>
  __device__ __forceinline__ void hold_queries(const Segment &s, int stage,
                                               const Meanwhile &meanwhile) {
    char *const tile = tiles.stage(stage);
    const bool wide = load.l.vectorised && p.q_vectorised;
    if (wide) {
      copy_queries(s, shared_address(tile));
      meanwhile();
      cp_async_wait<0>();
    } else {
      meanwhile();
      load_latent_queries<128, kLatentRows>(p, load.l, s, tile);
    }
    named_barrier_sync(kScoresOnly, 128);
    const u32 flip = wide && s.negate ? 0x80008000u : 0u;
    const int thread = fresh(threadIdx.x);
#pragma unroll 1
    for (int i = thread; i < kLatentRows * 8; i += 128) {
      uint4 chunk = *reinterpret_cast<const uint4 *>(
          tile + latent_chunk_at(i / 8, kLatentChunks) - (i / 8 % 8) * 16 + i % 8 * 16);
      chunk.x ^= flip, chunk.y ^= flip, chunk.z ^= flip, chunk.w ^= flip;
      *reinterpret_cast<uint4 *>(tiles.base + LatentTiles::kRopeAt + i * 16) = chunk;
    }
    // Rows of 32 bytes with the swizzle of that size: every other four rows have their halves
    // swapped.
    const int step_row = thread / 2, half = thread % 2;
    uint4 chunk = *reinterpret_cast<const uint4 *>(
        tile + latent_chunk_at(step_row, kHeldSteps * 2 + half));
    chunk.x ^= flip, chunk.y ^= flip, chunk.z ^= flip, chunk.w ^= flip;
    *reinterpret_cast<uint4 *>(tiles.base + LatentTiles::kStepAt + step_row * 32 +
                               (half ^ (step_row / 4 & 1)) * 16) = chunk;
    const int row = thread / 32 * 16 + thread % 16, right = thread / 16 % 2;
#pragma unroll
    for (int i = 0; i < kHeldSteps; ++i) {
      ldmatrix4(q[i], shared_address(tile) + latent_chunk_at(row, i * 2 + right));
#pragma unroll
      for (int j = 0; j < 4; ++j) q[i][j] ^= flip;
    }
    shift[0] = shift[1] = -infinity(), sum[0] = sum[1] = 0.f;
    fence_async_proxy();
    named_barrier_sync(kScoresOnly, 128);
  }

  // 16 rows a warp; zero where there is none.
  __device__ __forceinline__ void copy_queries(const Segment &s, u32 tile) const {
    const int thread = fresh(threadIdx.x), lane = thread % 32, first = thread / 32 * 16;
    const int rows = s.row_end - s.row_begin, begin = s.row_begin + min(first, rows - 1);
    const int in_request = begin / p.group;
    int in_group = begin - in_request * p.group;
    const i64 token = static_cast<i64>(s.request.q_begin) + in_request;
    const int head = s.kv_head * p.group + in_group;
    const char *latent = load.l.q_v + token * load.l.token_stride + head * load.l.head_stride;
    const char *rope = p.q + token * p.q_token_stride + head * p.q_head_stride;
#pragma unroll 1
    for (int row = first; row < first + 16; ++row) {
#pragma unroll
      for (int chunk = lane; chunk < kLatentChunks; chunk += 32) {
        const bool there = row < rows && chunk * 8 < p.head_dim_v;
        cp_async16(tile + latent_chunk_at(row, chunk), there ? latent + chunk * 16 : load.l.q_v,
                   there ? 16 : 0);
      }
      if (lane < kRowChunks - kLatentChunks) {
        const bool there = row < rows && lane * 8 < p.head_dim;
        cp_async16(tile + latent_chunk_at(row, kLatentChunks + lane),
                   there ? rope + lane * 16 : p.q, there ? 16 : 0);
      }
      latent += load.l.head_stride;
      rope += p.q_head_stride;
      if (++in_group == p.group) {
        in_group = 0;
        latent += load.l.token_stride - p.group * load.l.head_stride;
        rope += p.q_token_stride - p.group * p.q_head_stride;
      }
    }
    cp_async_commit();
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

  __device__ __forceinline__ void mask(const Segment &s, int first_column, float (&x)[32]) const {
    const int thread = fresh(threadIdx.x), lane = thread % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position =
          (s.row_begin + thread / 32 * 16 + h * 8 + lane / 4) / p.group + s.request.kv_len -
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
  __device__ __forceinline__ void fold(float scores_scale, int tile, int stage, float (&x)[32]) {
    const float scale = fmaxf(scores_scale * kLog2e, 1e-30f);  // never 0, as it meets -inf
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -infinity();
#pragma unroll
      for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(x[4 * n + 2 * h], x[4 * n + 2 * h + 1]));
      // The shift follows the largest score only where weights would outgrow 2^8: the sums before
      // it are rarely rescaled. An unchanged shift must give a factor of exactly 1.
      const float largest = __fmul_rn(quad_max(top), scale);
      const float grown = largest > shift[h] + kSlack ? largest : shift[h];
      const float from = grown == -infinity() ? 0.f : grown;
      factor[h] = exp2_approx(shift[h] - from);
      shift[h] = grown;
      float even = sum[h] * factor[h], odd = 0.f;  // the sum is on the way to the next scores
#pragma unroll
      for (int e = 2 * h; e < 32; e += 4) {
        x[e] = exp2_approx(fmaf(x[e], scale, -from));
        x[e + 1] = exp2_approx(fmaf(x[e + 1], scale, -from));
        even += x[e], odd += x[e + 1];
      }
      sum[h] = even + odd;
    }
    named_barrier_sync(kScoresOnly, 128);  // no warp reads the rope panel any more
    const int thread = fresh(threadIdx.x), lane = thread % 32, row = thread / 32 * 16 + lane % 16;
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
      float *const to = tiles.rest().factor[tile & 1] + thread / 32 * 16 + lane / 4;
      to[0] = factor[0], to[8] = factor[1];
    }
  }

  // All tiles of a piece; `at` is the place of the first one, and then of the one after the last.
  __device__ __forceinline__ void run(const Segment &s, LatentPlace &at) {
    LatentTiles::Rest &r = tiles.rest();
    // In registers that a warp shares: nothing is asked of memory on the way from tile to tile.
    const auto shared = [](int x) { return static_cast<int>(uniform_lane(x)); };
    const int begin = shared(first_tile_of(s)), end = shared(end_tile_of(s));
    const int plain_begin = shared(tile_after(max(s.free_begin, s.kv_begin)));
    const int plain_end = shared(s.free_end >> kLatentKeysShift);
    const float scale = __uint_as_float(uniform_lane(__float_as_uint(s.scale)));
    int tile = begin;
    bool more = tile < end, landed = false;
#pragma unroll 1
    while (more) {
      if (tile >= begin + 2) {
        // The tile before the last, whose factors the next ones replace, has been rescaled.
        LatentPlace before = at;  // two tiles ago is the place after this one
        before.next();
        mbarrier_wait(shared_address(&r.done[before.stage]), before.parity ^ 1);
      }
      if (!landed) mbarrier_wait(shared_address(&r.full[at.stage]), at.parity);
      float x[32];
      score(at.stage, x);
      mbarrier_arrive(shared_address(&r.scored[at.stage]));
      if (tile < plain_begin || tile >= plain_end) mask(s, tile * kLatentKeys, x);
      // Asked for the next tile here, where nobody waits for the answer.
      LatentPlace next = at;
      next.next();
      landed = tile + 1 < end &&
               mbarrier_try_wait(shared_address(&r.full[next.stage]), next.parity);
      fold(scale, tile, at.stage, x);
      fence_async_proxy();
      mbarrier_arrive(shared_address(&r.weights[at.stage]));
      ++tile;
      more = tile < end;
      at = next;
    }
  }

  // After the last tile has been used, whose stage has its turn next at `at`: results that the
  // others store.
  __device__ __forceinline__ void conclude(const LatentPlace &at) const {
    mbarrier_wait(shared_address(&tiles.rest().done[at.stage]), at.parity ^ 1);
    LatentTiles::Results &r = tiles.rest().results;
    const int thread = fresh(threadIdx.x);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = quad_sum(sum[h]);
      if (thread % 4 == 0) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + h * 8;
        r.top[row] = shift[h];
        r.sum[row] = total;
      }
    }
    named_barrier_sync(kPieceDone, 384);
  }
};

template <class V>
struct LatentValues {
  static constexpr int kColumns = kLatentDim / 2;

  const LatentLoader &load;
  const AttentionParams &p;
  const LatentTiles &tiles;
  const int half;
  float acc[kColumns / 2];

  __device__ __forceinline__ LatentValues(const LatentLoader &load, int half)
      : load(load), p(load.p), tiles(load.tiles), half(half) {}

  // Of this thread; the other one is 8 below.
  __device__ __forceinline__ static int first_row() {
    const int thread = fresh(threadIdx.x);
    return thread / 32 % 4 * 16 + thread % 32 / 4;
  }

  __device__ __forceinline__ void rescale(int tile) {
    const float *factor = tiles.rest().factor[tile & 1] + first_row();
    const float low = factor[0], high = factor[8];
    if (!__any_sync(0xffffffffu, low != 1.f || high != 1.f)) return;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      acc[4 * i] *= low, acc[4 * i + 1] *= low;
      acc[4 * i + 2] *= high, acc[4 * i + 3] *= high;
    }
  }

  // Weights of 0 must not meet what lies behind the last key, or before the first one.
  // Returns whether there was any.
  __device__ __forceinline__ bool clear_outside(const Segment &s, int tile, int stage) const {
    const int low = s.kv_begin - tile * kLatentKeys, high = s.kv_end - tile * kLatentKeys;
    if (low <= 0 && high >= kLatentKeys) return false;
    const u32 zero[4] = {};
    for (int i = threadIdx.x % 128; i < kHalfPanels * kLatentKeys * 8; i += 128) {
      const int row = i / 8 % kLatentKeys;
      if (row < low || row >= high) {
        store_shared16(tiles.panel(stage, half * kHalfPanels) + i * 16, zero);
      }
    }
    fence_async_proxy();
    named_barrier_sync(2 + half, 128);
    return true;
  }

  // Values wait for the scores of the next tile, so that the tensor cores have work while these
  // become weights, and none of it while they do not. `next` is its place, `more` whether there is
  // one.
  __device__ __forceinline__ void accumulate(int stage, const LatentPlace &next, bool more) {
    const u64 weights =
        matrix_descriptor(uniform_lane(tiles.panel(stage, kLatentPanels)), 16, 1024);
    const u64 values = matrix_descriptor(uniform_lane(tiles.panel(stage, half * kHalfPanels)),
                                         kPanelBytes, 1024);
    if (more) {
      mbarrier_wait(shared_address(&tiles.rest().scored[next.stage]), next.parity);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kLatentKeys / 16; ++i) {
      Wgmma<kColumns>::template shared_columns<V::kCompute>(acc, weights + i * 2,
                                                            values + i * 2048 / 16, 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(acc);
  }

  // All tiles of a piece, as in LatentScores. Bit i of `parities` is that of `released` of stage i.
  __device__ __forceinline__ void run(const Segment &s, LatentPlace &at, u32 &parities) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc[i] = 0.f;
    LatentTiles::Rest &r = tiles.rest();
    const int end = end_tile_of(s);
#pragma unroll 1
    for (int tile = first_tile_of(s); tile < end; ++tile) {
      const int page = load.page_of(s, tile + kLatentStages);
      mbarrier_wait(shared_address(&r.full[at.stage]), at.parity);
      mbarrier_wait(shared_address(&r.weights[at.stage]), at.parity);
      rescale(tile);
      const bool cleared = clear_outside(s, tile, at.stage);
      LatentPlace next = at;
      next.next();
      accumulate(at.stage, next, tile + 1 < end);
      mbarrier_arrive(shared_address(&r.done[at.stage]));
      if (tile + kLatentStages < end) {
        load_again(s, tile + kLatentStages, at, page, parities >> at.stage & 1, cleared);
        parities ^= 1 << at.stage;
      }
      at = next;
    }
  }

  // When all warps of both halves are done with a stage, of all blocks that share keys, each block
  // loads its part of the next tile in there.
  __device__ __forceinline__ void load_again(const Segment &s, int tile, const LatentPlace &at,
                                             int page, u32 parity, bool cleared) const {
    const int thread = fresh(threadIdx.x) % 128, lane = thread % 32;
    LatentTiles::Rest &r = tiles.rest();
    if constexpr (V::kSide == 1) {
      if (half == 0 || thread >= 32) return;
      if (thread == 0) load.expect(at.stage);
      mbarrier_wait(shared_address(&r.done[at.stage]), at.parity);
      load.load(s, tile, at.stage, page, 0, 0, 1);
    } else {
      const u32 released = shared_address(&r.released[at.stage]);
      if (half == 0 && thread == 0) load.expect(at.stage);
      __syncwarp();
      if (lane < V::kSide) cluster_barrier_arrive(cluster_address(released, lane), cleared);
      if (half == 0 || thread >= 32) return;
      if (cleared) {
        cluster_barrier_wait(released, parity);
      } else {
        mbarrier_wait(released, parity);
      }
      load.load(s, tile, at.stage, page, (1 << V::kSide) - 1,
                static_cast<int>(blockIdx.x % V::kSide), V::kSide);
    }
  }
};
