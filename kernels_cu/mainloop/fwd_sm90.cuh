// The computing warpgroups of the Hopper prefill: 64 rows of a tile each, on wgmma.
//
// They run one pipeline over the flattened list of (tile, key tile): S = Q K(j)^T and
// O += P(j-1) V(j-1) are issued together, and the softmax of S(j) runs while the tensor cores are
// at P(j-1) V(j-1). The last product of a tile shares a turn with the first one of the next.
//
// softmax(x) = softmax(x - c) for any c. c follows the maximum through the first key tile of a row
// and those with a mask; afterwards it stays, so that the inner loop has no maximum, no shuffle and
// no rescaling of O. Where sums grow, c moves by a power of two. Only a jump past float32's range
// within one key tile is lost: sums are not finite then, and the tile runs again with the maximum.
#pragma once

#include "arch/wgmma_sm90.cuh"
#include "block/soft_cap.cuh"
#include "mainloop/fwd_sm90_load.cuh"
#include "mainloop/fwd_sm90_store.cuh"

template <class V>
struct PrefillCompute {
  using S = PrefillShared<V>;
  static constexpr int kKeys = V::kKeys, kD = V::kHeadDim, kDv = V::kHeadDimV;
  static constexpr int kWarpgroupRows = 64;
  static constexpr ScalarType kType = V::kCompute;
  // Weights up to here are exact in 16 bits, and sums far from the end of float32.
  static constexpr float kLargestSum = kType == kFp16 ? 0x1p15f : 0x1p40f;
  // The maximum may grow by this (to base 2) before sums are rescaled.
  static constexpr float kSlack = 8.f;
  // Tiles that run again have their weights scaled down: O stays finite whatever V holds.
  static constexpr float kHeadroom = kType == kFp16 ? 0.f : 24.f;
  // Scores of a key tile so far apart (to base 2) that the shift is not fixed.
  static constexpr float kWildSpread = 120.f;
  static constexpr int kManyKeyTiles = 4;

  const AttentionParams &p;
  const PrefillParams &x;
  const S &shared;
  const int warpgroup, warp, lane;  // 0 or 1; of the warpgroup; of the warp
  float scale;                      // of scores, to base 2; of modified ones 1
  Ring<S::kQueryStages> q;
  Ring<S::kStages> k, v;
  int number = 0;  // of the tile
  float s[kKeys / 2], o[kDv / 2];
  u32 weight[kKeys / 16][4];
  float c[2], sum[2];  // of rows lane / 4 and 8 after: the shift to base 2, and the sum
  float slope[2];      // of ALiBi

  __device__ __forceinline__ PrefillCompute(const AttentionParams &p, const PrefillParams &x,
                                            const S &shared, int warpgroup)
      : p(p),
        x(x),
        shared(shared),
        warpgroup(warpgroup),
        warp(static_cast<int>(threadIdx.x / 32) & 3),
        lane(static_cast<int>(threadIdx.x) & 31),
        scale(V::kScoreMod ? 1.f : p.softmax_scale * kLog2e) {}

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
    mbarrier_wait(shared_address(&shared.rest().value_full[v.slot]), v.parity);
  }
  __device__ __forceinline__ const PrefillTile &wait_tile() const {
    mbarrier_wait(shared_address(&shared.rest().query_full[q.slot]), q.parity);
    return tile();
  }
  __device__ __forceinline__ PrefillTile &tile() const {
    return shared.rest().tile[number % S::kTiles];
  }
  __device__ __forceinline__ void leave_queries() {
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
    release(shared.rest().value_empty[v.slot]);
    v.next();
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
            uniform(shared.keys(k.slot)), uniform(shared.values(v.slot))};
  }

  __device__ __forceinline__ void issue_scores(const Operands &from) {
    const u64 keys = matrix_descriptor(from.keys, 16, 1024);
    const u64 rows = matrix_descriptor(from.queries, 16, 1024);
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      Wgmma<kKeys>::template shared<kType>(
          s, rows + (i / 4 * kTileRows * 128 + i % 4 * 32) / 16,
          keys + (i / 4 * kKeys * 128 + i % 4 * 32) / 16, i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_output(const Operands &from, int keep) {
    const u64 values = matrix_descriptor(from.values, kKeys * 128, 1024);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      Wgmma<kDv>::template registers<kType>(o, weight[i], values + i * 2048 / 16,
                                            i > 0 ? 1 : keep);
    }
    wgmma_commit();
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

  __device__ __forceinline__ void load_slopes(const PrefillTile &t) {
    if constexpr (V::kScoreMod) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        slope[h] = p.alibi_slopes ? load_float(p.alibi_slopes, t.request * p.alibi_batch_stride +
                                                                   head(t, h) * p.alibi_head_stride)
                                  : 0.f;
      }
    }
  }

  __device__ __forceinline__ void mask(const PrefillTile &t, int n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = token(t, h) + t.shift, column = n * kKeys + lane % 4 * 2;
      const int low = p.window_left < 0 ? 0 : position - p.window_left;
      const int high =
          p.window_right < 0 ? t.kv_end : min(t.kv_end, position + p.window_right + 1);
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = 8 * j + e;
          if (at < low - column || at >= high - column) s[4 * j + 2 * h + e] = -infinity();
        }
      }
    }
  }

  __device__ __forceinline__ SoftCap soft_cap() const {
    return SoftCap(p.softmax_scale / p.softcap, p.softcap * kLog2e);
  }

  // Soft cap and ALiBi; scores are to base 2 then.
  __device__ __forceinline__ void modify(const PrefillTile &t, int n) {
    if constexpr (V::kScoreMod) {
      if (p.softcap > 0.f) {
        soft_cap().apply(s);
      } else {
        const float natural = p.softmax_scale * kLog2e;
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) s[i] *= natural;
      }
      if (p.alibi_slopes) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float steep = -slope[h] * kLog2e;
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

  // ---- softmax

  // Scores become weights. kFirst: of a tile. Returns whether O is to be rescaled by `factor`.
  template <bool kFirst>
  __device__ __forceinline__ bool fold_exact(float headroom, float (&factor)[2]) {
    bool grown = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = s[2 * h];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      }
      const float wanted = quad_max(top) * scale + headroom;
      const float before = kFirst ? -infinity() : c[h];
      // Without a key so far both are -inf and the comparison does not hold.
      const bool grows = wanted - before > kSlack;
      c[h] = grows ? wanted : before;
      const float shift = c[h] == -infinity() ? 0.f : c[h];
      factor[h] = grows ? exp2_approx(before - shift) : 1.f;
      grown |= grows;
      const float added = exponentiate(h, shift);
      sum[h] = kFirst ? added : fmaf(sum[h], factor[h], added);
    }
    return !kFirst && __any_sync(0xffffffffu, grown);
  }

  __device__ __forceinline__ void fold_fixed(const PrefillTile &t, int n) {
    if constexpr (V::kScoreMod) {
      if (p.softcap > 0.f && !p.alibi_slopes && fold_capped()) return;
    }
    modify(t, n);
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += exponentiate(h, c[h]);
  }

  // Cap, shift and scale in one multiply-add, where scores are small enough.
  __device__ __forceinline__ bool fold_capped() {
    const SoftCap soft = soft_cap();
    if (!soft.is_small(s)) return false;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int h = i / 2 % 2;
      s[i] = exp2_approx(fmaf(s[i], soft.small(s[i] * s[i]), -c[h]));
      sum[h] += s[i];
    }
    return true;
  }

  __device__ __forceinline__ float exponentiate(int h, float shift) {
    float total = 0.f;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float &at = s[4 * j + 2 * h + e];
        at = exp2_approx(V::kScoreMod ? at - shift : fmaf(at, scale, -shift));
        total += at;
      }
    }
    return total;
  }

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < kDv / 8; ++j) {
      o[4 * j] *= factor[0], o[4 * j + 1] *= factor[0];
      o[4 * j + 2] *= factor[1], o[4 * j + 3] *= factor[1];
    }
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weight[i][j] = pack_pair<kType>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
      }
    }
  }

  // Moves the shift of rows whose sums have grown, so that theirs are below 4 again. Depends on
  // the row alone.
  __device__ __forceinline__ void settle_sums() {
    if (!__any_sync(0xffffffffu, sum[0] > kLargestSum || sum[1] > kLargestSum)) return;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = quad_max(sum[h]);
      // 2^-127 would be flushed to 0.
      const int exponent = min(static_cast<int>(__float_as_uint(largest) >> 23) - 127, 126);
      const bool moves = largest > kLargestSum && largest < infinity();
      factor[h] = moves ? __uint_as_float(static_cast<u32>(127 - exponent) << 23) : 1.f;
      c[h] += moves ? static_cast<float>(exponent) : 0.f;
      sum[h] *= factor[h];
    }
    rescale(factor);
    // bf16 takes what float32 does: scores need not be kept for this.
    if constexpr (kType == kFp16) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) s[i] *= factor[i / 2 % 2];
      pack_weights();
    } else {
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack_bf16(weight[i][j]);
          weight[i][j] = pack_bf16(pair.x * factor[j % 2], pair.y * factor[j % 2]);
        }
      }
    }
  }

  // ---- steps

  // The first key tile of a tile, whose scores are there. Returns whether they are so far apart
  // that the shift follows the maximum throughout.
  __device__ __forceinline__ bool fold_first(const PrefillTile &t) {
    const int n = t.n_end - 1;
    load_slopes(t);
    modify(t, n);
    const bool masked = n >= t.mask_from || n < t.mask_below;
    if (masked) mask(t, n);
    float unused[2];
    fold_exact<true>(0.f, unused);
    // A weight of 0 beside the 1 of the maximum. Masked ones say nothing; a short tile had better
    // run again.
    if (masked || t.n_end - t.n_begin < kManyKeyTiles) return false;
    float least = 1.f;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) least = fminf(least, s[i]);
    const float spread = __uint_as_float(static_cast<u32>(127 - kWildSpread) << 23);
    return named_barrier_any(3 + warpgroup, 128, least < spread);
  }

  // The scores of key tile n with the output of the one before. kExact: with mask and maximum.
  template <bool kExact>
  __device__ __forceinline__ void step(const PrefillTile &t, int n, int keep) {
    const Operands from = operands();
    wait_keys();
    begin_turn();
    wgmma_fence();
    issue_scores(from);
    wait_values();
    wgmma_fence();
    issue_output(from, keep);
    end_turn();
    wgmma_wait<1>();
    have_scores();
    if constexpr (kExact) {
      modify(t, n);
      mask(t, n);
      float factor[2];
      const bool grown = fold_exact<false>(0.f, factor);
      wgmma_wait<0>();
      have_output();
      if (grown) rescale(factor);
      pack_weights();
    } else {
      fold_fixed(t, n);
      wgmma_wait<0>();
      have_output();
      pack_weights();
      settle_sums();
    }
  }

  // All key tiles but the first.
  __device__ __forceinline__ int run_steps(const PrefillTile &t, bool wild) {
    const int begin = t.n_begin, mask_from = max(t.mask_from, begin);
    const int mask_below = wild ? t.n_end : max(t.mask_below, begin);
    int n = t.n_end - 2, keep = 0;
    for (; n >= mask_from; --n, keep = 1) step<true>(t, n, keep);
    for (; n >= mask_below; --n, keep = 1) step<false>(t, n, keep);
    for (; n >= begin; --n, keep = 1) step<true>(t, n, keep);
    return keep;
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
    bool wild = fold_first(tile());
    pack_weights();
    while (true) {
      PrefillTile &t = tile();
      const int keep = run_steps(t, wild);
      leave_queries();
      const PrefillTile &next = wait_tile();
      const float last_c[2] = {c[0], c[1]}, last_sum[2] = {sum[0], sum[1]};
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
        issue_output(from, keep);
        end_turn();
        wgmma_wait<1>();
        have_scores();
        wild = fold_first(next);
        wgmma_wait<0>();
        have_output();
        pack_weights();
      } else {
        wait_values();
        begin_turn();
        wgmma_fence();
        issue_output(from, keep);
        end_turn();
        wgmma_wait<0>();
        have_output();
      }
      finish_tile(t, last_c, last_sum);
      if (!more) break;
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
      load_slopes(t);
      c[0] = c[1] = -infinity(), sum[0] = sum[1] = 0.f;
      for (int n = t.n_end - 1; n >= t.n_begin; --n) {
        const Operands from = operands();
        wait_keys();
        wgmma_fence();
        issue_scores(from);
        wgmma_wait<0>();
        have_scores();
        modify(t, n);
        mask(t, n);
        float factor[2];
        if (fold_exact<false>(kHeadroom, factor)) rescale(factor);
        pack_weights();
        wait_values();
        wgmma_fence();
        issue_output(from, n < t.n_end - 1);
        wgmma_wait<0>();
        have_output();
      }
      store(t, c, sum);
      leave_queries();
    }
  }

  // ---- results

  __device__ __forceinline__ void store(const PrefillTile &t, const float (&c)[2],
                                        const float (&part)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = quad_sum(part[h]);
      RowResult result = {-infinity(), 0.f};
      if (total != 0.f) {
        result.norm = __fdividef(1.f, total);  // sums stay far below 2^126
        if (p.lse || p.sink || t.slot >= 0) result.lse = c[h] * kLn2 + logf(total);
      }
      const OutputRow to = {p, t, token(t, h), head(t, h), lane % 4};
      to.template store<kType, kDv>(result, h, o);
    }
  }

  __device__ __forceinline__ void finish_tile(PrefillTile &t, const float (&c)[2],
                                              const float (&part)[2]) const {
    store(t, c, part);
    // 0 unless something is not finite.
    float test = 0.f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float row = part[h] * 0.f;
#pragma unroll
      for (int j = 0; j < kDv / 8; ++j) {
        row = fmaf(o[4 * j + 2 * h], 0.f, fmaf(o[4 * j + 2 * h + 1], 0.f, row));
      }
      if (token(t, h) < t.q_len) test += row;
    }
    if (__any_sync(0xffffffffu, test != 0.f) && lane == 0 && atomicExch(&t.failed, 1) == 0) {
      x.links[t.item] = atomicExch(&shared.rest().again, t.item);
    }
  }
};
