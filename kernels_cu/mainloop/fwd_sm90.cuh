// The computing warpgroups of the Hopper prefill: 64 rows of a tile each, on wgmma.
//
// They run one pipeline over the flattened list of (tile, key tile): S = Q K(j)^T and
// O += P(j-1) V(j-1) are issued together, and the softmax of S(j) runs while the tensor cores are
// at P(j-1) V(j-1). The last product of a tile shares a turn with the first one of the next.
#pragma once

#include "mainloop/fwd_sm90_load.cuh"
#include "mainloop/fwd_sm90_softmax.cuh"
#include "mainloop/fwd_sm90_store.cuh"

template <class V>
struct PrefillCompute : PrefillRows<V> {
  using Rows = PrefillRows<V>;
  using S = PrefillShared<V>;
  static constexpr int kKeys = V::kKeys, kD = V::kHeadDim, kDv = V::kHeadDimV;
  static constexpr ScalarType kType = V::kCompute;
  using Rows::p, Rows::warpgroup, Rows::warp, Rows::lane;
  using Rows::s, Rows::o, Rows::weight, Rows::c, Rows::sum;
  using Rows::token, Rows::head;

  const PrefillParams &x;
  const S &shared;
  Ring<S::kQueryStages> q;
  Ring<S::kStages> k, v;
  int number = 0;  // of the tile

  __device__ __forceinline__ PrefillCompute(const AttentionParams &p, const PrefillParams &x,
                                            const S &shared, int warpgroup)
      : Rows(p, x.pack_shift, warpgroup), x(x), shared(shared) {}

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
  // After the last product with them; `slot` is handed on when the tile's results are there.
  __device__ __forceinline__ int next_queries() {
    const int slot = q.slot;
    if constexpr (!S::kStaged) release(shared.rest().query_empty[slot]);
    q.next(), ++number;
    return slot;
  }
  __device__ __forceinline__ void leave_queries(int slot) const {
    __syncwarp();
    if constexpr (S::kStaged) release(shared.rest().staged[slot]);
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
    return {uniform(shared.queries(q.slot) + warpgroup * Rows::kWarpgroupRows * 128),
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

  // ---- steps

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
      this->modify(t, n);
      this->mask(t, n);
      float factor[2];
      const bool grown = this->template fold_exact<false>(0.f, factor);
      wgmma_wait<0>();
      have_output();
      if (grown) this->rescale(factor);
      this->pack_weights();
    } else {
      this->fold_fixed(t, n);
      wgmma_wait<0>();
      have_output();
      this->pack_weights();
      this->settle_sums();
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
      leave_queries(next_queries());
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
    bool wild = this->fold_first(tile());
    this->pack_weights();
    while (true) {
      PrefillTile &t = tile();
      const int keep = run_steps(t, wild);
      const int slot = next_queries();
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
        wild = this->fold_first(next);
        wgmma_wait<0>();
        have_output();
        this->pack_weights();
      } else {
        wait_values();
        begin_turn();
        wgmma_fence();
        issue_output(from, keep);
        end_turn();
        wgmma_wait<0>();
        have_output();
      }
      finish_tile(t, slot, last_c, last_sum);
      if (!more) break;
    }
    leave_queries(next_queries());
    release(shared.rest().drained);
    run_failed();
  }

  // Tiles whose sums were not finite: rare, so plain.
  __device__ __forceinline__ void run_failed() {
    while (true) {
      const PrefillTile &t = wait_tile();
      if (t.item < 0) return;
      this->load_slopes(t);
      c[0] = c[1] = -infinity(), sum[0] = sum[1] = 0.f;
      for (int n = t.n_end - 1; n >= t.n_begin; --n) {
        const Operands from = operands();
        wait_keys();
        wgmma_fence();
        issue_scores(from);
        wgmma_wait<0>();
        have_scores();
        this->modify(t, n);
        this->mask(t, n);
        float factor[2];
        if (this->template fold_exact<false>(Rows::kHeadroom, factor)) this->rescale(factor);
        this->pack_weights();
        wait_values();
        wgmma_fence();
        issue_output(from, n < t.n_end - 1);
        wgmma_wait<0>();
        have_output();
      }
      const int slot = next_queries();
      store(t, slot, c, sum);
      leave_queries(slot);
    }
  }

  // ---- results

  // Returns 0, or NaN where anything of this lane's rows is not finite.
  __device__ __forceinline__ float store(const PrefillTile &t, int slot, const float (&c)[2],
                                         const float (&part)[2]) const {
    float norm[2], test = 0.f;
    RowResult result[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = quad_sum(part[h]);
      result[h] = {-infinity(), 0.f};
      if (total != 0.f) {
        result[h].norm = __fdividef(1.f, total);  // sums stay far below 2^126
        if (p.lse || p.sink || t.slot >= 0) result[h].lse = c[h] * kLn2 + logf(total);
      }
      norm[h] = row_of(t, h).finish(result[h]);
    }
    if (S::kStaged && t.staged) {
      const u32 rows = shared.queries(slot) + (warpgroup * Rows::kWarpgroupRows + warp * 16) * 128;
      test = stage_rows<kType, kDv>(rows, kTileRows * 128, lane, norm, o);
      fence_async_proxy();
      return fmaf(part[0] + part[1], 0.f, test);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const OutputRow to = row_of(t, h);
      const bool inside = to.token < t.q_len;
      float row = part[h] * 0.f;
      if (t.slot < 0) {
        row += sum_pairs<kType>(to.template store_columns<kType, kDv>(inside, norm[h], h, o));
      } else if (inside) {
        row += to.template store_partial<kDv>(result[h], h, o);
      }
      if (inside) test += row;
    }
    return test;
  }

  __device__ __forceinline__ OutputRow row_of(const PrefillTile &t, int h) const {
    return {p, t, token(t, h), head(t, h), lane % 4};
  }

  __device__ __forceinline__ void finish_tile(PrefillTile &t, int slot, const float (&c)[2],
                                              const float (&part)[2]) const {
    const float test = store(t, slot, c, part);
    if (__any_sync(0xffffffffu, test != 0.f) && lane == 0 && atomicExch(&t.failed, 1) == 0) {
      x.links[t.item] = atomicExch(&shared.rest().again, t.item);
    }
    leave_queries(slot);
  }
};
