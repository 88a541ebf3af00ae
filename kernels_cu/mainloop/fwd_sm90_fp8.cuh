// The computing warpgroups of the 8-bit Hopper prefill: 64 rows of a tile each, on wgmma in e4m3.
//
// S = Q K(j)^T and O = P(j+1) V(j+1) are issued together, and the largest of S(j) is looked for
// while the tensor cores are at P(j+1) V(j+1). They keep about 14 bits of a sum, so O is added up
// in float32 registers after every key tile; there each row gets what its weights were divided by.
//
// Tiles whose sums are too large run again, with the maximum in every key tile.
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
  using Pipeline::issue_scores, Pipeline::release, Pipeline::wait_tile, Pipeline::tile;
  using Pipeline::shared, Pipeline::k, Pipeline::v, Pipeline::number;
  using W::kKeys, W::p, W::lane, W::s, W::weight, W::c, W::sum;
  static constexpr int kDim = V::kHeadDim;

  float o[S::kTurnedDim / 2], total[kDim / 2];
  float due[2];  // to the output of the weights that are packed
  const u32 first_queries, first_keys, first_values;  // of descriptors

  __device__ __forceinline__ Fp8Compute(const AttentionParams &p, const PrefillParams &x,
                                        const S &shared, int warpgroup)
      : Pipeline(p, x, shared, warpgroup),
        first_queries(low(shared.queries(0))),
        first_keys(low(shared.keys(0))),
        first_values(low(shared.operand(0))) {}

  // ---- barriers

  // One address a buffer, and offsets in the instructions.
  __device__ __forceinline__ void wait_keys() const {
    mbarrier_wait<S::kKeyFullAt>(shared.address + 8 * k.slot, k.parity);
  }
  __device__ __forceinline__ void wait_values() const {
    mbarrier_wait<S::kTurnedFullAt>(shared.address + 8 * v.slot, v.parity);
  }
  // After the wait for the products that read them.
  __device__ __forceinline__ void have_scores() {
    pin(s);
    if (lane == 0) mbarrier_arrive<S::kKeyEmptyAt>(shared.address + 8 * k.slot);
    k.next();
  }
  __device__ __forceinline__ void leave_queries() {
    __syncwarp();  // all lanes have read the tile before this one
    release(shared.rest().query_empty[this->query_slot()]);
    ++number;
  }
  // After the wait for the products that read them.
  __device__ __forceinline__ void have_output() {
    pin(o);
    if (lane == 0) mbarrier_arrive<S::kTurnedEmptyAt>(shared.address + 8 * v.slot);
    v.next();
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) total[i] = fmaf(o[i], due[i / 2 % 2], total[i]);
    if constexpr (V::kSumColumn) {
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] = fmaf(o[kDim / 2 + 2 * h], due[h], sum[h]);
    }
  }

  // ---- products

  struct Descriptors {
    u64 queries, keys, values;
  };
  // Only lower halves differ. Those of the first buffers are made once, and a step adds to them.
  // Pinned here: else they are made where they are used, after a wait.
  __device__ __forceinline__ Descriptors descriptors() const {
    static_assert(S::kPanelKeys == 128, "");
    const u32 rows =
        this->query_slot() * S::kQueryBytes + this->warpgroup * W::kWarpgroupRows * 128;
    Descriptors made = {whole(first_queries + rows / 16),
                        whole(first_keys + k.slot * (S::kKeyBytes / 16)),
                        whole(first_values + v.slot * (S::kTurnedBytes / 16))};
    asm volatile("" : "+l"(made.queries), "+l"(made.keys), "+l"(made.values));
    return made;
  }
  __device__ __forceinline__ static u32 low(u32 address) {
    return static_cast<u32>(matrix_descriptor(address, 16, 1024));
  }
  __device__ __forceinline__ static u64 whole(u32 low) {
    return (matrix_descriptor(0, 16, 1024) >> 32 << 32) | low;
  }

  __device__ __forceinline__ void issue_output(u64 values) {
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      WgmmaFp8<S::kTurnedDim>::registers(o, weight[i], values + i * 32 / 16, i > 0);
    }
    wgmma_commit();
  }

  // ---- steps

  __device__ __forceinline__ void begin_tile(const PrefillTile &t) {
    W::load_scale(t);
    W::begin_rows();
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) total[i] = 0.f;
  }

  template <bool kMasked>
  __device__ __forceinline__ void pack_scores() {
    float less[2];
    W::template find_shift<kMasked>(less, due);
    W::template weigh<kMasked>(less, due);
  }

  // The first key tile of a tile, whose scores are there.
  __device__ __forceinline__ void fold_first(const PrefillTile &t) {
    begin_tile(t);
    const int n = t.n_end - 1;
    W::modify(t, n);
    W::orient();
    if (n >= t.mask_from || n < t.mask_below) W::mask(t, n);
    pack_scores<true>();
  }

  // The scores of key tile n with the output of the one before.
  template <bool kMasked>
  __device__ __forceinline__ void step(const PrefillTile &t, int n) {
    const Descriptors from = descriptors();
    wait_keys();
    wgmma_fence();
    issue_scores(from.queries, from.keys);
    wait_values();
    wgmma_fence();
    issue_output(from.values);
    if constexpr (kMasked || V::kScoreMod) {
      // Values first: masks take registers.
      wgmma_wait<0>();
      have_scores();
      have_output();
      W::modify(t, n);
      if constexpr (kMasked) {
        W::orient();
        W::mask(t, n);
      }
      pack_scores<kMasked>();
    } else {
      wgmma_wait<1>();
      have_scores();
      float less[2], next[2];
      W::template find_shift<false>(less, next);
      wgmma_wait<0>();
      have_output();
      due[0] = next[0], due[1] = next[1];
      W::template weigh<false>(less, due);
    }
  }

  // All key tiles but the first.
  __device__ __forceinline__ void run_steps(const PrefillTile &t) {
    const int begin = t.n_begin;
    // Scores of a negative scale are turned about before they are compared, which masked steps do.
    const int mask_from = !V::kScoreMod && W::scale < 0.f ? begin : max(W::mask_from(t), begin);
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
    const Descriptors first = descriptors();
    wait_keys();
    wgmma_fence();
    issue_scores(first.queries, first.keys);
    wgmma_wait<0>();
    have_scores();
    fold_first(tile());
    while (true) {
      PrefillTile &t = tile();
      run_steps(t);
      leave_queries();
      const PrefillTile &next = wait_tile();
      const bool more = next.item >= 0;
      const Descriptors from = descriptors();
      // Products stay in flight on one side of a branch only, or the compiler serialises them.
      if (more) {
        wait_keys();
        wgmma_fence();
        issue_scores(from.queries, from.keys);
        wait_values();
        wgmma_fence();
        issue_output(from.values);
        wgmma_wait<0>();
        have_scores();
        have_output();
      } else {
        wait_values();
        wgmma_fence();
        issue_output(from.values);
        wgmma_wait<0>();
        have_output();
      }
      finish_tile(t);
      if (!more) break;
      fold_first(next);
    }
    leave_queries();
    release(shared.rest().drained);
    run_failed();
  }

  // Tiles whose sums were too large: rare, so plain.
  __device__ __forceinline__ void run_failed() {
    while (true) {
      const PrefillTile &t = wait_tile();
      if (t.item < 0) return;
      begin_tile(t);
      for (int n = t.n_end - 1; n >= t.n_begin; --n) {
        const Descriptors from = descriptors();
        wait_keys();
        wgmma_fence();
        issue_scores(from.queries, from.keys);
        wgmma_wait<0>();
        have_scores();
        W::modify(t, n);
        W::orient();
        W::mask(t, n);
        float factor[2];
        W::grow_shift(factor);
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) total[i] *= factor[i / 2 % 2];
        pack_scores<true>();
        wait_values();
        wgmma_fence();
        issue_output(from.values);
        wgmma_wait<0>();
        have_output();
      }
      if (gather_again(t)) store(t);
      leave_queries();
    }
  }

  // ---- results

  __device__ __forceinline__ bool too_large(const PrefillTile &t, const float (&sum)[2]) const {
    bool failed = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) failed |= W::token(t, h) < t.q_len && !(sum[h] < W::kLargestSum);
    return failed;
  }

  // Whether the sums are those of all keys that the rows see: of a piece once every other one is
  // there. One that failed is not, until it has run again.
  __device__ __forceinline__ bool gather(const PrefillTile &t, bool again = false) {
    if (!is_cut<V>(this->x, t.item)) return true;
    const Merge merge = merge_of(t);
    merge.leave(total, c, sum);
    const bool failed = !again && too_large(t, sum);
    return !__any_sync(0xffffffffu, failed) && merge.arrive(total, c, sum);
  }

  // The same of a tile that ran again. Warps whose rows had not failed have arrived before.
  __device__ __forceinline__ bool gather_again(const PrefillTile &t) {
    if (!is_cut<V>(this->x, t.item)) return true;
    const Merge merge = merge_of(t);
    float left[2];
    merge.left(left);
    return __any_sync(0xffffffffu, too_large(t, left)) && gather(t, true);
  }

  using Merge = TailMerge<kDim / 2, S::kComputeWarps>;
  __device__ __forceinline__ Merge merge_of(const PrefillTile &t) const {
    // As new: these would take registers from one tile to the next.
    const int thread = static_cast<int>(read_thread_anew()) - 128;
    return {tail_of(this->x), t.item, thread / 32, thread & 31};
  }

  __device__ __forceinline__ void store(const PrefillTile &t) const {
    const float by = value_scale(p, t.request, t.kv_head);
    const RowResult result[2] = {W::conclude(t, 0, by), W::conclude(t, 1, by)};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Fp8OutputRow to = {p, t, W::token(t, h), W::head(t, h), lane % 4};
      to.template store<kDim>(result[h], h, total);
    }
  }

  __device__ __forceinline__ void finish_tile(PrefillTile &t) {
    if (gather(t)) store(t);
    Pipeline::note_failure(t, too_large(t, sum));
  }
};
