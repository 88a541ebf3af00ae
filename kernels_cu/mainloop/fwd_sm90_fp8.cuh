// The computing warpgroups of the 8-bit Hopper prefill: 64 rows of a tile each, on wgmma in e4m3.
//
// S = Q K(j)^T and O = P(j+1) V(j+1) are issued together, and the softmax of S(j) runs while the
// tensor cores are at P(j+1) V(j+1). They keep about 14 bits of a sum, so O is added up in float32
// registers after every kFlush key tiles.
//
// Tiles whose sums are not finite run again, with the maximum in every key tile.
#pragma once

#include "mainloop/fwd_sm90_fp8_load.cuh"
#include "mainloop/fwd_sm90_fp8_store.cuh"
#include "mainloop/fwd_sm90_fp8_turn.cuh"
#include "mainloop/fwd_sm90_fp8_weights.cuh"
#include "mainloop/fwd_sm90_pipeline.cuh"

template <class V>
struct Fp8Compute : PrefillPipeline<Fp8Weights<V>, Fp8Shared<V>> {
  using W = Fp8Weights<V>;
  using S = Fp8Shared<V>;
  using Pipeline = PrefillPipeline<W, S>;
  using typename Pipeline::Operands;
  using W::kKeys, W::kSettled;
  using W::p, W::lane, W::weight, W::scale, W::c, W::sum;
  using Pipeline::shared, Pipeline::v, Pipeline::number;
  using Pipeline::release, Pipeline::wait_keys, Pipeline::wait_tile, Pipeline::tile;
  using Pipeline::have_scores, Pipeline::operands, Pipeline::issue_scores;
  static constexpr int kDim = V::kHeadDim, kFlush = V::kFlush;

  int held;        // key tiles in o
  float o[kDim / 2], total[kFlush ? kDim / 2 : 1];

  __device__ __forceinline__ Fp8Compute(const AttentionParams &p, const PrefillParams &x,
                                        const S &shared, int warpgroup)
      : Pipeline(p, x, shared, warpgroup) {}

  // ---- barriers

  __device__ __forceinline__ void wait_values() const {
    mbarrier_wait(shared_address(&shared.rest().turned_full[v.slot]), v.parity);
  }
  __device__ __forceinline__ void leave_queries() {
    __syncwarp();  // all lanes have read the tile before this one
    release(shared.rest().query_empty[this->query_slot()]);
    ++number;
  }
  // After the wait for the products that read them.
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

  __device__ __forceinline__ void issue_output(const Operands &from) {
    constexpr int kSteps = S::kPanelKeys / 32;  // of a panel
    const u64 values = S::kPanelKeys == 128 ? matrix_descriptor(from.values, 16, 1024)
                                            : matrix_descriptor64(from.values);
    const int keep = kFlush == 1 ? 0 : held;
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      WgmmaFp8<kDim>::registers(o, weight[i],
                                values + (i / kSteps * kDim * S::kPanelKeys + i % kSteps * 32) / 16,
                                i > 0 ? 1 : keep);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) total[kFlush ? i : 0] += o[i];
    held = 0;
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

  // ---- steps

  __device__ __forceinline__ void begin_tile(const PrefillTile &t) {
    W::load_scale(t);
    held = 0;
    if constexpr (kFlush > 0) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) total[i] = 0.f;
    }
  }

  // The first key tile of a tile, whose scores are there.
  __device__ __forceinline__ void fold_first(const PrefillTile &t) {
    begin_tile(t);
    W::fold_first(t);
  }

  // The scores of key tile n with the output of the one before. kExact: with mask and maximum.
  template <bool kExact>
  __device__ __forceinline__ void step(const PrefillTile &t, int n) {
    const Operands from = operands();
    float factor[2];
    wait_keys();
    wgmma_fence();
    issue_scores(from);
    wait_values();
    wgmma_fence();
    issue_output(from);
    if constexpr (kExact) {
      // Values first: masks take registers.
      wgmma_wait<0>();
      have_scores();
      have_output();
      W::modify(t, n);
      W::orient();
      W::mask(t, n);
      if (W::template fold_exact<false>(factor)) rescale(factor);
      W::pack_weights();
    } else {
      if constexpr (V::kScoreMod) {
        wgmma_wait<0>();
        have_scores();
        have_output();
        W::modify(t, n);
      } else {
        wgmma_wait<1>();
        have_scores();
      }
      const bool settled = n < t.n_end - kSettled;
      const float added[2] = {W::exponentiate(0, scale, c[0]), W::exponentiate(1, scale, c[1])};
      const bool fits = added[0] <= W::largest_sum(0, settled) &&
                        added[1] <= W::largest_sum(1, settled);  // not for NaN
      const bool moves = !__all_sync(0xffffffffu, fits);
      if constexpr (!V::kScoreMod) {
        wgmma_wait<0>();
        have_output();
      }
      // Before `moves` is known.
      W::pack_weights();
      if (moves) {
        W::move_shift(added, settled, factor);
        rescale(factor);
        W::pack_weights();
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
    wgmma_fence();
    issue_scores(first);
    wgmma_wait<0>();
    have_scores();
    fold_first(tile());
    W::pack_weights();
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
        wgmma_fence();
        issue_scores(from);
        wait_values();
        wgmma_fence();
        issue_output(from);
        wgmma_wait<0>();
        have_scores();
        have_output();
      } else {
        wait_values();
        wgmma_fence();
        issue_output(from);
        wgmma_wait<0>();
        have_output();
      }
      finish_tile(t);
      if (!more) break;
      fold_first(next);
      W::pack_weights();
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
        W::modify(t, n);
        W::orient();
        W::mask(t, n);
        float factor[2];
        if (W::template fold_exact<false>(factor)) rescale(factor);
        W::pack_weights();
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
      const RowResult result = W::conclude(t, h, by);
      const Fp8OutputRow to = {p, t, W::token(t, h), W::head(t, h), lane % 4};
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
    for (int h = 0; h < 2; ++h) failed |= W::token(t, h) < t.q_len && !(sum[h] < infinity());
    Pipeline::note_failure(t, failed);
  }
};
