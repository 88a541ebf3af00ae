// The computing warpgroups of the 8-bit Hopper prefill for head size 256, where registers are few:
// the float32 sums of 64 rows take 128. Each does one thing after the other, and O in parts of
// kColumns columns; the tensor cores are kept busy by the other warpgroup.
#pragma once

#include "mainloop/fwd_sm90_fp8_kept.cuh"
#include "mainloop/fwd_sm90_fp8_load.cuh"
#include "mainloop/fwd_sm90_fp8_store.cuh"
#include "mainloop/fwd_sm90_fp8_turn.cuh"
#include "mainloop/fwd_sm90_pipeline.cuh"

template <class V>
struct Fp8Serial : PrefillPipeline<Fp8KeptWeights<V>, Fp8Shared<V>> {
  using W = Fp8KeptWeights<V>;
  using S = Fp8Shared<V>;
  using Pipeline = PrefillPipeline<W, S>;
  using Pipeline::have_scores, Pipeline::operands, Pipeline::issue_scores;
  using Pipeline::release, Pipeline::wait_keys, Pipeline::wait_tile, Pipeline::tile;
  using Pipeline::shared, Pipeline::k, Pipeline::number;
  using typename Pipeline::Operands;
  using W::kKeys, W::kSettled;
  using W::p, W::lane, W::weight, W::scale, W::c, W::sum;
  static constexpr int kDim = V::kHeadDim, kColumns = V::kColumns, kParts = kDim / kColumns;

  float total[kDim / 2];

  __device__ __forceinline__ Fp8Serial(const AttentionParams &p, const PrefillParams &x,
                                       const S &shared, int warpgroup)
      : Pipeline(p, x, shared, warpgroup) {}

  __device__ __forceinline__ void leave_queries() {
    __syncwarp();  // all lanes have read the tile before this one
    release(shared.rest().query_empty[this->query_slot()]);
    ++number;
  }

  // ---- products

  __device__ __forceinline__ void find_scores() {
    const Operands from = operands();
    wait_keys();
    wgmma_fence();
    issue_scores(from);
    wgmma_wait<0>();
    have_scores();
  }

  // The descriptor of what lies `bytes` after: only its lower half differs.
  __device__ __forceinline__ static u64 beside(u64 descriptor, int bytes) {
    return (descriptor & ~0xffffffffull) | (static_cast<u32>(descriptor) + bytes / 16);
  }

  __device__ __forceinline__ void issue_part(int part, u64 values, float (&o)[kColumns / 2]) {
    constexpr int kSteps = S::kPanelKeys / 32;  // of a panel
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      const int row = i / kSteps * kDim + part * kColumns;
      WgmmaFp8<kColumns>::registers(o, weight[i],
                                    beside(values, row * S::kPanelKeys + i % kSteps * 32), i > 0);
    }
    wgmma_commit();
  }

  // O in parts, each added up in float32. kMore: with the scores of the next key tile.
  template <bool kMore>
  __device__ __forceinline__ void add_output() {
    // Of two buffers, values are in the one that the next keys are not.
    static_assert(S::kKeyStages == 2 && S::kOperandStages == 2, "");
    const int slot = k.slot ^ 1;
    Operands from = operands();
    from.values = Pipeline::uniform(shared.operand(slot));
    const u64 values = S::kPanelKeys == 128 ? matrix_descriptor(from.values, 16, 1024)
                                            : matrix_descriptor64(from.values);
    mbarrier_wait(shared_address(&shared.rest().turned_full[slot]), k.parity ^ slot);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float o[kColumns / 2];
      issue_part(part, values, o);
      wgmma_wait<0>();
      pin(o);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) total[part * kColumns / 2 + i] += o[i];
    }
    if constexpr (kMore) {
      wait_keys();
      wgmma_fence();
      issue_scores(from);
    }
    release(shared.rest().turned_empty[slot]);
    if constexpr (kMore) {
      wgmma_wait<0>();
      have_scores();
    }
  }

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) total[i] *= factor[i / 2 % 2];
  }

  // ---- steps

  __device__ __forceinline__ void begin_tile(const PrefillTile &t) {
    W::load_scale(t);
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) total[i] = 0.f;
  }

  // Key tile n, with mask and maximum.
  __device__ __forceinline__ void step_exact(const PrefillTile &t, int n) {
    add_output<true>();
    if (n == t.n_begin) leave_queries();
    fold_masked(t, n);
  }

  __device__ __forceinline__ void fold_masked(const PrefillTile &t, int n) {
    W::modify(t, n);
    W::orient();
    W::mask(t, n);
    float factor[2];
    if (W::template fold_exact<false>(factor)) rescale(factor);
    W::pack_weights();
  }

  __device__ __forceinline__ void step_kept(const PrefillTile &t, int n) {
    add_output<true>();
    if (n == t.n_begin) leave_queries();
    W::modify(t, n);
    const bool settled = n < t.n_end - kSettled;
    const float added[2] = {W::exponentiate(0, scale, c[0]), W::exponentiate(1, scale, c[1])};
    const bool fits = added[0] <= W::largest_sum(0, settled) &&
                      added[1] <= W::largest_sum(1, settled);  // not for NaN
    if (__all_sync(0xffffffffu, fits)) {
      sum[0] += added[0], sum[1] += added[1];
    } else {
      float factor[2];
      W::move_shift(added, settled, factor);
      rescale(factor);
    }
    W::pack_weights();
  }

  __device__ __forceinline__ void run() {
    while (true) {
      PrefillTile &t = const_cast<PrefillTile &>(wait_tile());
      if (t.item < 0) break;
      begin_tile(t);
      find_scores();
      if (t.n_end - 1 == t.n_begin) leave_queries();
      W::fold_first(t);
      W::pack_weights();
      int n = t.n_end - 2;
      for (const int end = max(t.mask_from, t.n_begin); n >= end; --n) step_exact(t, n);
      for (const int end = max(t.mask_below, t.n_begin); n >= end; --n) step_kept(t, n);
      for (; n >= t.n_begin; --n) step_exact(t, n);
      add_output<false>();
      finish_tile(t);
    }
    leave_queries();
    release(shared.rest().drained);
    run_failed();
  }

  // Tiles whose sums were not finite: rare.
  __device__ __forceinline__ void run_failed() {
    while (true) {
      const PrefillTile &t = wait_tile();
      if (t.item < 0) return;
      begin_tile(t);
      c[0] = c[1] = -infinity(), sum[0] = sum[1] = 0.f;
      for (int n = t.n_end - 1; n >= t.n_begin; --n) {
        find_scores();
        fold_masked(t, n);
        add_output<false>();
      }
      store(t);
      leave_queries();
    }
  }

  // ---- results

  __device__ __forceinline__ void store(const PrefillTile &t) const {
    const float by = value_scale(p, t.request, t.kv_head);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowResult result = W::conclude(t, h, by);
      const Fp8OutputRow to = {p, t, W::token(t, h), W::head(t, h), lane % 4};
      to.template store<kDim>(result, h, total);
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
