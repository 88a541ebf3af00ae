// The computing warpgroups of the Hopper prefill: 64 rows of a tile each, on wgmma.
//
// They run one pipeline over the flattened list of (tile, key tile): S = Q K(j)^T and
// O += P(j-1) V(j-1) are issued together, and the softmax of S(j) runs while the tensor cores are
// at P(j-1) V(j-1). The last product of a tile shares a turn with the first one of the next.
#pragma once

#include "mainloop/fwd_sm90_load.cuh"
#include "mainloop/fwd_sm90_pipeline.cuh"
#include "mainloop/fwd_sm90_softmax.cuh"
#include "mainloop/fwd_sm90_store.cuh"

template <class V>
struct PrefillCompute : PrefillPipeline<PrefillRows<V>, PrefillShared<V>> {
  using Rows = PrefillRows<V>;
  using S = PrefillShared<V>;
  using Pipeline = PrefillPipeline<Rows, S>;
  static constexpr int kKeys = V::kKeys, kDv = V::kHeadDimV;
  static constexpr int kGroups = V::kTileRows / 64;
  // The next queries take the place of those of this tile: its last output does not wait for them.
  static constexpr bool kOneBuffer = V::kQueryStages == 1;
  static constexpr bool kPasses = kKeys < V::kTileRows;  // else causal tiles end with their keys
  static constexpr ScalarType kType = V::kQuery;
  using typename Pipeline::Operands;
  using Rows::p, Rows::warpgroup, Rows::warp, Rows::lane;
  using Rows::o, Rows::weight, Rows::c, Rows::sum;
  using Rows::token, Rows::head;
  using Pipeline::x, Pipeline::shared, Pipeline::k, Pipeline::v, Pipeline::number;
  using Pipeline::release, Pipeline::wait_keys, Pipeline::wait_tile, Pipeline::tile;
  using Pipeline::have_scores, Pipeline::operands, Pipeline::issue_scores;

  __device__ __forceinline__ PrefillCompute(const AttentionParams &p, const PrefillParams &x,
                                            const S &shared, int warpgroup)
      : Pipeline(p, x, shared, warpgroup) {}

  // ---- barriers

  __device__ __forceinline__ void begin_turn() const {
    if constexpr (V::kTurns) named_barrier_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void end_turn() const {
    if constexpr (V::kTurns) {
      named_barrier_arrive(warpgroup + 1 == kGroups ? 1 : 2 + warpgroup, 256);
    }
  }
  __device__ __forceinline__ void wait_values() const {
    mbarrier_wait(shared_address(&shared.rest().value_full[v.slot]), v.parity);
  }
  // After the last product with them; `slot` is handed on when the tile's results are there.
  __device__ __forceinline__ int next_queries() {
    const int slot = this->query_slot();
    if constexpr (!S::kStaged) release(shared.rest().query_empty[slot]);
    ++number;
    return slot;
  }
  __device__ __forceinline__ void leave_queries(int slot) const {
    __syncwarp();
    if constexpr (S::kStaged) release(shared.rest().staged[slot]);
  }
  // After the wait for the products that read them.
  __device__ __forceinline__ void have_output() {
    pin(o);
    release(shared.rest().value_empty[v.slot]);
    v.next();
  }

  // ---- products

  // 512 threads begin with 128 registers, and a product of 256 columns takes as many: two of them.
  static constexpr bool kHalves = V::kWiden && kDv > 192;

  __device__ __forceinline__ void issue_output(const Operands &from, int keep) {
    const u64 values = matrix_descriptor(from.values, kKeys * 128, 1024);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      if constexpr (kHalves) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float (&half)[kDv / 4] = reinterpret_cast<float (&)[kDv / 4]>(o[h * (kDv / 4)]);
          Wgmma<kDv / 2>::template registers<V::kCompute>(
              half, weight[i], values + (h * S::kPanelsV / 2 * kKeys * 128 + i * 2048) / 16,
              i > 0 ? 1 : keep);
        }
      } else {
        Wgmma<kDv>::template registers<V::kCompute>(o, weight[i], values + i * 2048 / 16,
                                                    i > 0 ? 1 : keep);
      }
    }
    wgmma_commit();
  }

  // The scores of the next key tile, and with kOutput the output of the one before, which stays in
  // flight.
  template <bool kOutput>
  __device__ __forceinline__ void multiply(int keep) {
    const Operands from = operands();
    wait_keys();
    begin_turn();
    wgmma_fence();
    issue_scores(from);
    if constexpr (kOutput) {
      wait_values();
      wgmma_fence();
      issue_output(from, keep);
    }
    end_turn();
    wgmma_wait<kOutput ? 1 : 0>();
    have_scores();
  }

  // ---- steps

  // The scores of key tile n with the output of the one before. kExact: with mask and maximum.
  template <bool kExact>
  __device__ __forceinline__ void step(const PrefillTile &t, int n, int keep) {
    multiply<true>(keep);
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

  // One past the last key tile that a row of this warpgroup sees: those after it are passed over.
  __device__ __forceinline__ int seen_end(const PrefillTile &t) const {
    if (!kPasses || p.window_right < 0) return t.n_end;
    const int last = t.token + ((warpgroup + 1) * Rows::kWarpgroupRows - 1 >> this->pack_shift);
    const int keys = last + t.shift + p.window_right + 1;
    return max(t.n_begin + 1, min(t.n_end, (keys + kKeys - 1) / kKeys));
  }
  __device__ __forceinline__ void pass_keys(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      wait_keys();
      begin_turn();
      end_turn();
      release(shared.rest().key_empty[k.slot]);
      k.next();
    }
  }
  __device__ __forceinline__ void pass_values(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      wait_values();
      release(shared.rest().value_empty[v.slot]);
      v.next();
    }
  }

  // The key tiles from n down.
  __device__ __forceinline__ int run_steps(const PrefillTile &t, int n, bool wild) {
    const int begin = t.n_begin, mask_from = max(t.mask_from, begin);
    const int mask_below = wild ? t.n_end : max(t.mask_below, begin);
    int keep = 0;
    for (; n >= mask_from; --n, keep = 1) step<true>(t, n, keep);
    for (; n >= mask_below; --n, keep = 1) step<false>(t, n, keep);
    for (; n >= begin; --n, keep = 1) step<true>(t, n, keep);
    return keep;
  }

  // The first scores of a tile; kJoin: with the last output of the tile before.
  template <bool kJoin>
  __device__ __forceinline__ bool begin_tile(const PrefillTile &t, int keep) {
    const int end = seen_end(t);
    this->enter(t);
    this->hold_queries();
    pass_keys(t.n_end - end);
    multiply<kJoin>(keep);
    const bool wild = this->fold_first(t, end - 1);
    if constexpr (kJoin) {
      wgmma_wait<0>();
      have_output();
    }
    this->pack_weights();
    pass_values(t.n_end - end);
    return wild;
  }

  // The last output of a tile, by itself.
  __device__ __forceinline__ void end_output(int keep) {
    const Operands from = operands();
    wait_values();
    begin_turn();
    wgmma_fence();
    issue_output(from, keep);
    end_turn();
    wgmma_wait<0>();
    have_output();
  }

  __device__ __forceinline__ void run() {
    if (wait_tile().item < 0) {
      leave_queries(next_queries());
      release(shared.rest().drained);
      return;
    }
    if constexpr (kOneBuffer) {
      run_alone();
    } else {
      run_joined();
    }
    leave_queries(next_queries());
    release(shared.rest().drained);
    run_failed();
  }

  __device__ __forceinline__ void run_alone() {
    while (wait_tile().item >= 0) {
      PrefillTile &t = tile();
      const bool wild = begin_tile<false>(t, 0);
      const int keep = run_steps(t, seen_end(t) - 2, wild);
      const int slot = next_queries();
      end_output(keep);
      finish_tile(t, slot, c, sum);
    }
  }

  __device__ __forceinline__ void run_joined() {
    bool wild = begin_tile<false>(tile(), 0);
    while (true) {
      PrefillTile &t = tile();
      const int keep = run_steps(t, seen_end(t) - 2, wild);
      const int slot = next_queries();
      const PrefillTile &next = wait_tile();
      const float last_c[2] = {c[0], c[1]}, last_sum[2] = {sum[0], sum[1]};
      const bool more = next.item >= 0;
      // Products stay in flight on one side of a branch only, or the compiler serialises them.
      if (more) {
        wild = begin_tile<true>(next, keep);
      } else {
        end_output(keep);
      }
      finish_tile(t, slot, last_c, last_sum);
      if (!more) return;
    }
  }

  // Tiles whose sums were not finite: rare, so plain.
  __device__ __forceinline__ void run_failed() {
    while (true) {
      const PrefillTile &t = wait_tile();
      if (t.item < 0) return;
      attend_again(t);
      const int slot = next_queries();
      store(t, slot, c, sum);
      leave_queries(slot);
    }
  }
  __device__ __forceinline__ void attend_again(const PrefillTile &t) {
    c[0] = c[1] = -infinity(), sum[0] = sum[1] = 0.f;
    this->enter(t);
    for (int n = t.n_end - 1; n >= t.n_begin; --n) {
      // Anew for each key tile: kept for the next one, ptxas 13.0 gave their registers to weights.
      this->hold_queries();
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
  }

  // ---- results

  // Returns 0, or NaN where anything of this lane's rows is not finite.
  __device__ __forceinline__ float store(const PrefillTile &t, int slot, const float (&c)[2],
                                         const float (&part)[2]) const {
    float norm[2], test = 0.f;
    RowResult result[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      result[h] = Rows::conclude_row(t, c[h], part[h], Rows::value_factor(t));
      norm[h] = row_of(t, h).finish(result[h]);
    }
    if (S::kStaged && t.staged) {
      const u32 rows = shared.queries(slot) + (warpgroup * Rows::kWarpgroupRows + warp * 16) * 128;
      test = stage_rows<kType, kDv>(rows, S::kTileRows * 128, lane, norm, o);
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
        float *const at = to.begin_partial({result[h].lse, norm[h]});
        row += to.template store_partial<kDv>(at, norm[h], h, o);
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
    Pipeline::note_failure(t, test != 0.f);
    leave_queries(slot);
  }
};
