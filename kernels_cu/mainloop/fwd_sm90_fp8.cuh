// The computing warpgroups of the 8-bit Hopper prefill: 64 rows of a tile each, on wgmma in e4m3.
//
// S = Q K(j)^T and O = P(j+1) V(j+1) are issued together, and the softmax of S(j) runs while the
// tensor cores are at P(j+1) V(j+1). They keep about 14 bits of a sum, so O is added up in float32
// registers after every kFlush key tiles.
//
// Weights are rounded to e4m3, which holds 2^-9 .. 448, so the shift c of softmax(x - c) needs care.
// The first key tile of a row and those with a mask take the maximum: the largest weight is 2^8
// exactly. After the first one c is raised by powers of two until the row's sum is below 2^8; that
// leaves room for later tiles, which keep c: no maximum, no shuffle. Their sums, which are needed
// anyway, bound each weight; where one exceeds 448, c moves so that the row's largest weight is a
// power of two, exact in e4m3, and the sum below 2^8 again. Only a weight past float32 is lost: the
// sum is not finite then, and the tile runs again with the maximum in every key tile.
#pragma once

#include "arch/wgmma_fp8_sm90.cuh"
#include "block/soft_cap.cuh"
#include "mainloop/fwd_sm90_fp8_load.cuh"
#include "mainloop/fwd_sm90_fp8_store.cuh"
#include "mainloop/fwd_sm90_fp8_turn.cuh"

template <class V>
struct Fp8Compute {
  using S = Fp8Shared<V>;
  static constexpr int kKeys = V::kKeys, kDim = V::kHeadDim, kFlush = V::kFlush;
  static constexpr int kWarpgroupRows = 64;
  static constexpr float kTop = 8.f;  // of weights after a maximum, to base 2
  static constexpr float kLargestWeight = 448.f, kSmallWeight = 64.f;
  static constexpr int kSettled = 4;

  const AttentionParams &p;
  const PrefillParams &x;
  const S &shared;
  const int warpgroup, warp, lane;  // 0 or 1; of the warpgroup; of the warp
  Ring<S::kQueryStages> q;
  Ring<S::kKeyStages> k;
  Ring<S::kTurnedStages> v;
  int number = 0;  // of the tile
  int held;        // key tiles in o
  float s[kKeys / 2], o[kDim / 2], total[kFlush ? kDim / 2 : 1];
  u32 weight[kKeys / 32][4];
  float scale;         // of scores, to base 2; of modified ones 1
  float natural;       // of scores
  float c[2], sum[2];  // of rows lane / 4 and 8 after: the shift to base 2, and the sum

  __device__ __forceinline__ Fp8Compute(const AttentionParams &p, const PrefillParams &x,
                                        const S &shared, int warpgroup)
      : p(p),
        x(x),
        shared(shared),
        warpgroup(warpgroup),
        warp(static_cast<int>(threadIdx.x / 32) & 3),
        lane(static_cast<int>(threadIdx.x) & 31) {}

  // ---- barriers

  __device__ __forceinline__ void begin_turn() const {
    if constexpr (V::kTurns) named_barrier_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void end_turn() const {
    if constexpr (V::kTurns) named_barrier_arrive(2 - warpgroup, 256);
  }
  __device__ __forceinline__ void release(const u64 &barrier) const {
    if (lane == 0) mbarrier_arrive(shared_address(&barrier));
  }
  __device__ __forceinline__ void wait_keys() const {
    mbarrier_wait(shared_address(&shared.rest().key_full[k.slot]), k.parity);
  }
  __device__ __forceinline__ void wait_values() const {
    mbarrier_wait(shared_address(&shared.rest().turned_full[v.slot]), v.parity);
  }
  __device__ __forceinline__ const PrefillTile &wait_tile() const {
    mbarrier_wait(shared_address(&shared.rest().query_full[q.slot]), q.parity);
    return tile();
  }
  __device__ __forceinline__ PrefillTile &tile() const {
    return shared.rest().tile[number % S::kTiles];
  }
  __device__ __forceinline__ void leave_queries() {
    __syncwarp();  // all lanes have read the tile before this one
    release(shared.rest().query_empty[q.slot]);
    q.next(), ++number;
  }
  // After the wait for the products that read them.
  __device__ __forceinline__ void have_scores() {
    pin(s);
    release(shared.rest().key_empty[k.slot]);
    k.next();
  }
  __device__ __forceinline__ void have_output() {
    pin(o);
    release(shared.rest().turned_empty[v.slot]);
    v.next();
    ++held;
    if constexpr (kFlush > 0) {
      if (kFlush == 1 || held == kFlush) flush();
    }
  }

  // ---- products

  // What the compiler does not know to be the same in all lanes costs a move an instruction.
  __device__ __forceinline__ static u32 uniform(u32 address) {
    return __shfl_sync(0xffffffffu, address, 0);
  }

  // The operands of the next products. Made before their barriers are waited for.
  struct Operands {
    u32 queries, keys, values;
  };
  __device__ __forceinline__ Operands operands() const {
    return {uniform(shared.queries(q.slot) + warpgroup * kWarpgroupRows * 128),
            uniform(shared.keys(k.slot)), uniform(shared.turned(v.slot))};
  }

  __device__ __forceinline__ void issue_scores(const Operands &from) {
    const u64 keys = matrix_descriptor(from.keys, 16, 1024);
    const u64 rows = matrix_descriptor(from.queries, 16, 1024);
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      WgmmaFp8<kKeys>::shared(s, rows + (i / 4 * kTileRows * 128 + i % 4 * 32) / 16,
                              keys + (i / 4 * kKeys * 128 + i % 4 * 32) / 16, i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_output(const Operands &from) {
    constexpr int kSteps = S::kPanelKeys / 32;  // of a panel
    const u64 values = S::kPanelKeys == 128 ? matrix_descriptor(from.values, 16, 1024)
                                            : matrix_descriptor64(from.values);
    const int keep = kFlush == 1 ? 0 : held;
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      WgmmaFp8<kDim>::registers(
          o, weight[i],
          values + (i / kSteps * kDim * S::kPanelKeys + i % kSteps * 32) / 16, i > 0 ? 1 : keep);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) total[kFlush ? i : 0] += o[i];
    held = 0;
  }

  // ---- scores

  // This lane's first row in the tile; the other one is 8 after.
  __device__ __forceinline__ int row() const {
    return warpgroup * kWarpgroupRows + warp * 16 + lane / 4;
  }
  __device__ __forceinline__ int token(const PrefillTile &t, int h) const {
    return t.token + ((row() + 8 * h) >> x.pack_shift);
  }
  __device__ __forceinline__ int head(const PrefillTile &t, int h) const {
    return (t.head_group << x.pack_shift) + ((row() + 8 * h) & ((1 << x.pack_shift) - 1));
  }

  __device__ __forceinline__ void begin_tile(const PrefillTile &t) {
    natural = score_scale(p, t.request, t.kv_head);
    // Never 0, as it meets -inf.
    natural = copysignf(fmaxf(fabsf(natural), 1e-30f), natural);
    scale = V::kScoreMod ? 1.f : natural * kLog2e;
    held = 0;
    if constexpr (kFlush > 0) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) total[i] = 0.f;
    }
  }

  // The keys that a row sees, from the first one of key tile n on.
  __device__ __forceinline__ KeyRange visible(const PrefillTile &t, int n, int h) const {
    const int position = token(t, h) + t.shift;
    const int low = p.window_left < 0 ? 0 : position - p.window_left;
    const int high = p.window_right < 0 ? t.kv_end : min(t.kv_end, position + p.window_right + 1);
    return {low - n * kKeys, high - n * kKeys};
  }
  __device__ __forceinline__ int seen_keys(const PrefillTile &t, int n, int h) const {
    const KeyRange keys = visible(t, n, h);
    return min(keys.end, kKeys) - max(keys.begin, 0);
  }

  __device__ __forceinline__ void mask(const PrefillTile &t, int n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const KeyRange keys = visible(t, n, h);
      const int low = keys.begin - lane % 4 * 2, high = keys.end - lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = 8 * j + e;
          if (at < low || at >= high) s[4 * j + 2 * h + e] = -infinity();
        }
      }
    }
  }

  // Soft cap and ALiBi; scores are to base 2 then.
  __device__ __forceinline__ void modify(const PrefillTile &t, int n) {
    if constexpr (V::kScoreMod) {
      if (p.softcap > 0.f) {
        SoftCap(natural / p.softcap, p.softcap * kLog2e).apply(s);
      } else {
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) s[i] *= natural * kLog2e;
      }
      if (p.alibi_slopes) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float steep =
              -kLog2e * load_float(p.alibi_slopes, t.request * p.alibi_batch_stride +
                                                       head(t, h) * p.alibi_head_stride);
          const int position = token(t, h) + t.shift - n * kKeys - lane % 4 * 2;
#pragma unroll
          for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float distance = fabsf(static_cast<float>(position - 8 * j - e));
              s[4 * j + 2 * h + e] = fmaf(steep, distance, s[4 * j + 2 * h + e]);
            }
          }
        }
      }
    }
  }

  // Before scores are compared: the largest is the one that weighs most.
  __device__ __forceinline__ void orient() {
    if (!V::kScoreMod && scale < 0.f) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) s[i] = -s[i];
    }
  }

  // ---- softmax

  // Scores, oriented and masked, become weights. kFirst: of a tile. Returns whether sums of values
  // are to be rescaled by `factor`.
  template <bool kFirst>
  __device__ __forceinline__ bool fold_exact(float (&factor)[2]) {
    bool grown = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = s[2 * h];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      }
      const float wanted = quad_max(top) * fabsf(scale) - kTop;
      const float next = kFirst ? wanted : fmaxf(c[h], wanted);
      grown |= !kFirst && next > c[h];
      const float shift = next == -infinity() ? 0.f : next;
      factor[h] = kFirst ? 1.f : exp2_approx(c[h] - shift);
      c[h] = next;
      const float added = exponentiate(h, fabsf(scale), shift);
      sum[h] = kFirst ? added : fmaf(sum[h], factor[h], added);
    }
    return !kFirst && __any_sync(0xffffffffu, grown);
  }

  // The sum of a row's first weights is brought below 2^8, as it will be for a key tile of which the
  // row sees all: `rarity` is the number of keys over those that it sees in this one.
  __device__ __forceinline__ void make_room(int h, float rarity) {
    const float all = quad_sum(sum[h]) * rarity;
    const int exponent = static_cast<int>(__float_as_uint(all) >> 23 & 255) - 127;
    const int down = min(max(exponent - 7, 0), 16);
    c[h] += down;
    scale_row(h, __uint_as_float(static_cast<u32>(127 - down) << 23));
  }

  __device__ __forceinline__ void scale_row(int h, float by) {
    sum[h] *= by;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) s[4 * j + 2 * h] *= by, s[4 * j + 2 * h + 1] *= by;
  }

  __device__ __forceinline__ float exponentiate(int h, float by, float shift) {
    float added = 0.f;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float &at = s[4 * j + 2 * h + e];
        at = exp2_approx(V::kScoreMod ? at - shift : fmaf(at, by, -shift));
        added += at;
      }
    }
    return added;
  }

  // A lane's sum of a key tile that needs no other shift. It bounds each of its weights, so that none
  // is beyond e4m3; once `kSettled` key tiles are behind it is also below that of all before, so that
  // a key that outweighs them is exact.
  __device__ __forceinline__ float largest_sum(int h, bool settled) const {
    return settled ? fminf(fmaxf(sum[h], kSmallWeight), kLargestWeight) : kLargestWeight;
  }

  // Moves the shift of rows in which a lane's sum is too large: the largest weight of the key tile
  // becomes a power of two, and their sum is below 2^8.
  __device__ __forceinline__ void move_shift(const float (&added)[2], bool settled,
                                             float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float excess = added[h] <= largest_sum(h, settled) ? 0.f : 1.f;  // NaN: 1
      const bool over = quad_max(excess) > 0.f;
      float top = s[2 * h];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      }
      top = quad_max(top);
      const float all = quad_sum(added[h]), size = log2f(top);
      const float to = floorf(7.f + size - log2f(all));
      factor[h] = over ? exp2_approx(to) * __fdividef(1.f, top) : 1.f;
      c[h] += over ? size - to : 0.f;
      const float before = sum[h];
      sum[h] = added[h];
      scale_row(h, factor[h]);
      sum[h] = fmaf(before, factor[h], sum[h]);
    }
  }

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
    if constexpr (kFlush != 1) scale_output(o, factor);
    if constexpr (kFlush > 0) scale_output(total, factor);
  }

  __device__ __forceinline__ static void scale_output(float (&value)[kDim / 2],
                                                      const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) value[i] *= factor[i / 2 % 2];
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 16 * i + 8 * (j / 2) + 2 * (j % 2);
        weight[i][j] =
            pack_fp8<kE4m3>(s[at], s[at + 1]) | pack_fp8<kE4m3>(s[at + 4], s[at + 5]) << 16;
      }
    }
  }

  // ---- steps

  // The first key tile of a tile, whose scores are there.
  __device__ __forceinline__ void fold_first(const PrefillTile &t) {
    const int n = t.n_end - 1;
    begin_tile(t);
    modify(t, n);
    orient();
    const bool masked = n >= t.mask_from || n < t.mask_below;
    if (masked) mask(t, n);
    float unused[2];
    fold_exact<true>(unused);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool more = masked && n > t.n_begin;
      make_room(h, more ? static_cast<float>(kKeys) / max(1, seen_keys(t, n, h)) : 1.f);
    }
  }

  // The scores of key tile n with the output of the one before. kExact: with mask and maximum.
  template <bool kExact>
  __device__ __forceinline__ void step(const PrefillTile &t, int n) {
    const Operands from = operands();
    float factor[2];
    wait_keys();
    begin_turn();
    wgmma_fence();
    issue_scores(from);
    wait_values();
    wgmma_fence();
    issue_output(from);
    end_turn();
    if constexpr (kExact) {
      // Values first: masks take registers.
      wgmma_wait<0>();
      have_scores();
      have_output();
      modify(t, n);
      orient();
      mask(t, n);
      if (fold_exact<false>(factor)) rescale(factor);
      pack_weights();
    } else {
      if constexpr (V::kScoreMod) {
        wgmma_wait<0>();
        have_scores();
        have_output();
        modify(t, n);
      } else {
        wgmma_wait<1>();
        have_scores();
      }
      const bool settled = n < t.n_end - kSettled;
      const float added[2] = {exponentiate(0, scale, c[0]), exponentiate(1, scale, c[1])};
      const bool fits = added[0] <= largest_sum(0, settled) && added[1] <= largest_sum(1, settled);
      const bool moves = !__all_sync(0xffffffffu, fits);
      if constexpr (!V::kScoreMod) {
        wgmma_wait<0>();
        have_output();
      }
      // Before `moves` is known.
      pack_weights();
      if (moves) {
        move_shift(added, settled, factor);
        rescale(factor);
        pack_weights();
      } else {
        sum[0] += added[0], sum[1] += added[1];
      }
    }
  }

  // All key tiles but the first.
  __device__ __forceinline__ void run_steps(const PrefillTile &t) {
    const int begin = t.n_begin, mask_from = max(t.mask_from, begin);
    const int mask_below = max(t.mask_below, begin);
    int n = t.n_end - 2;
    for (; n >= mask_from; --n) step<true>(t, n);
    for (; n >= mask_below; --n) step<false>(t, n);
    for (; n >= begin; --n) step<true>(t, n);
  }

  __device__ __forceinline__ void run() {
    if (wait_tile().item < 0) {
      leave_queries();
      release(shared.rest().drained);
      return;
    }
    const Operands first = operands();
    wait_keys();
    begin_turn();
    wgmma_fence();
    issue_scores(first);
    end_turn();
    wgmma_wait<0>();
    have_scores();
    fold_first(tile());
    pack_weights();
    while (true) {
      PrefillTile &t = tile();
      run_steps(t);
      leave_queries();
      const PrefillTile &next = wait_tile();
      const bool more = next.item >= 0;
      const Operands from = operands();
      // Products stay in flight on one side of a branch only, or the compiler serialises them.
      if (more) {
        wait_keys();
        begin_turn();
        wgmma_fence();
        issue_scores(from);
        wait_values();
        wgmma_fence();
        issue_output(from);
        end_turn();
        wgmma_wait<0>();
        have_scores();
        have_output();
      } else {
        wait_values();
        begin_turn();
        wgmma_fence();
        issue_output(from);
        end_turn();
        wgmma_wait<0>();
        have_output();
      }
      finish_tile(t);
      if (!more) break;
      fold_first(next);
      pack_weights();
    }
    leave_queries();
    release(shared.rest().drained);
    run_failed();
  }

  // Tiles whose sums were not finite: rare, so plain.
  __device__ __forceinline__ void run_failed() {
    while (true) {
      const PrefillTile &t = wait_tile();
      if (t.item < 0) return;
      begin_tile(t);
      c[0] = c[1] = -infinity(), sum[0] = sum[1] = 0.f;
      for (int n = t.n_end - 1; n >= t.n_begin; --n) {
        const Operands from = operands();
        wait_keys();
        wgmma_fence();
        issue_scores(from);
        wgmma_wait<0>();
        have_scores();
        modify(t, n);
        orient();
        mask(t, n);
        float factor[2];
        if (fold_exact<false>(factor)) rescale(factor);
        pack_weights();
        wait_values();
        wgmma_fence();
        issue_output(from);
        wgmma_wait<0>();
        have_output();
      }
      store(t);
      leave_queries();
    }
  }

  // ---- results

  __device__ __forceinline__ void store(const PrefillTile &t) {
    if (kFlush > 1 && held > 0) flush();
    const float by = value_scale(p, t.request, t.kv_head);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float all = quad_sum(sum[h]);
      RowResult result = {-infinity(), 0.f};
      if (all != 0.f) {
        result.norm = __fdividef(by, all);  // sums stay far below 2^126
        if (p.lse || p.sink || t.slot >= 0) result.lse = c[h] * kLn2 + logf(all);
      }
      const Fp8OutputRow to = {p, t, token(t, h), head(t, h), lane % 4};
      if constexpr (kFlush > 0) {
        to.template store<kDim>(result, h, total);
      } else {
        to.template store<kDim>(result, h, o);
      }
    }
  }

  __device__ __forceinline__ void finish_tile(PrefillTile &t) {
    store(t);
    bool failed = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) failed |= token(t, h) < t.q_len && !(sum[h] < infinity());
    if (__any_sync(0xffffffffu, failed) && lane == 0 && atomicExch(&t.failed, 1) == 0) {
      x.links[t.item] = atomicExch(&shared.rest().again, t.item);
    }
  }
};
