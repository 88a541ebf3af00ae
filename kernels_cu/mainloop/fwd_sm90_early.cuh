// The computing warpgroups of the Hopper prefill where rows are concluded early: their sums and LSE
// before the turn that a tile shares with the next one, and its output is waited for before the
// exponentials of that one.
#pragma once

#include "mainloop/fwd_sm90.cuh"

template <class V>
struct PrefillEarlyCompute : PrefillCompute<V> {
  using Compute = PrefillCompute<V>;
  using Rows = PrefillRows<V>;
  using S = PrefillShared<V>;
  static constexpr int kKeys = V::kKeys, kDv = V::kHeadDimV;
  static constexpr ScalarType kType = V::kQuery;
  static_assert(!Compute::kOneBuffer, "tiles that are joined");
  using Rows::p, Rows::warpgroup, Rows::warp, Rows::lane;
  using Rows::o, Rows::s, Rows::c, Rows::sum, Rows::largest, Rows::exponentiate;
  using Compute::seen_end, Compute::pass_keys, Compute::pass_values, Compute::have_output;
  using Compute::next_queries, Compute::leave_queries, Compute::run_steps, Compute::end_output;
  using Compute::shared, Compute::release, Compute::wait_tile, Compute::tile, Compute::row_of;

  __device__ __forceinline__ PrefillEarlyCompute(const AttentionParams &p, const PrefillParams &x,
                                                 const S &shared, int warpgroup)
      : Compute(p, x, shared, warpgroup) {}

  // Of the rows of this lane.
  struct Results {
    float norm[2];     // what O is due
    float test = 0.f;  // or NaN where anything is not finite
    StagedRows<kType, kDv> staged;
  };

  __device__ __forceinline__ void run() {
    if (wait_tile().item < 0) {
      leave_queries(next_queries());
      release(shared.rest().drained);
      return;
    }
    run_joined();
    leave_queries(next_queries());
    release(shared.rest().drained);
    run_failed();
  }

  __device__ __forceinline__ void run_joined() {
    bool wild = begin_tile<false>(tile(), 0);
    while (true) {
      PrefillTile &t = tile();
      const int keep = run_steps(t, seen_end(t) - 2, wild);
      const int slot = next_queries();
      Results last = conclude(t, slot);
      const PrefillTile &next = wait_tile();
      const bool more = next.item >= 0;
      // Products stay in flight on one side of a branch only, or the compiler serialises them.
      if (more) {
        wild = begin_tile<true>(next, keep);
      } else {
        end_output(keep);
      }
      finish_tile(t, slot, last);
      if (!more) return;
    }
  }

  __device__ __forceinline__ void run_failed() {
    while (true) {
      const PrefillTile &t = wait_tile();
      if (t.item < 0) return;
      this->attend_again(t);
      const int slot = next_queries();
      Results last = conclude(t, slot);
      store(t, last);
      leave_queries(slot);
    }
  }

  // The first scores of a tile; kJoin: with the last output of the tile before.
  template <bool kJoin>
  __device__ __forceinline__ bool begin_tile(const PrefillTile &t, int keep) {
    const int end = seen_end(t);
    this->enter(t);
    this->hold_queries();
    pass_keys(t.n_end - end);
    this->template multiply<kJoin>(keep);
    const auto output = [&] {
      if constexpr (kJoin) {
        wgmma_wait<0>();
        have_output();
      }
    };
    const bool wild = fold_first(t, end - 1, output);
    this->pack_weights();
    pass_values(t.n_end - end);
    return wild;
  }

  // output() comes between the maximum and the exponentials.
  template <class Output>
  __device__ __forceinline__ bool fold_first(const PrefillTile &t, int n, Output output) {
    this->modify(t, n);
    const bool masked = n >= t.mask_from || n < t.mask_below;
    if (masked) this->mask(t, n);
    float shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      c[h] = largest(h) * Rows::row_scale(h);
      shift[h] = c[h] == -infinity() ? 0.f : c[h];
      sum[h] = 0.f;
    }
    output();
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] = exponentiate(h, j, shift[h], sum[h]);
    }
    if (masked || t.n_end - t.n_begin < Rows::kManyKeyTiles) return false;
    float least = 1.f;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) least = fminf(least, s[i]);
    const float spread = __uint_as_float(static_cast<u32>(127 - Rows::kWildSpread) << 23);
    return named_barrier_any(1 + V::kTileRows / 64 + warpgroup, 128, least < spread);
  }

  // All but O, and the LSE stored.
  __device__ __forceinline__ Results conclude(const PrefillTile &t, int slot) const {
    const u32 rows = shared.queries(slot) + (warpgroup * Rows::kWarpgroupRows + warp * 16) * 128;
    Results last = {{}, 0.f, {rows, S::kTileRows * 128, lane}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const OutputRow to = row_of(t, h);
      const float by = Rows::value_factor(t);
      last.norm[h] = to.template finish<true>(Rows::conclude_row(t, c[h], sum[h], by));
      if (to.token < t.q_len) last.test = fmaf(sum[h], 0.f, last.test);
    }
    return last;
  }

  // Returns 0, or NaN where anything is not finite.
  __device__ __forceinline__ float store(const PrefillTile &t, Results &last) const {
    if (S::kStaged && t.staged) {
#pragma unroll
      for (int j = 0; j < kDv / 16; ++j) last.staged.put(j, last.norm, o);
      fence_async_proxy();
      return last.test + last.staged.sum();
    }
    float test = last.test, norm[2] = {last.norm[0], last.norm[1]};
    pin(norm);  // or the products above are kept for this
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const OutputRow to = row_of(t, h);
      const bool inside = to.token < t.q_len;
      float row = 0.f;
      if (t.slot < 0) {
        row = sum_pairs<kType>(to.template store_columns<kType, kDv>(inside, norm[h], h, o));
      } else if (inside) {
        float *const at = p.partial_out + to.partial_row() * p.head_dim_v;
        row = to.template store_partial<kDv>(at, norm[h], h, o);
      }
      if (inside) test += row;
    }
    return test;
  }

  __device__ __forceinline__ void finish_tile(PrefillTile &t, int slot, Results &last) const {
    const float test = store(t, last);
    Compute::note_failure(t, test != 0.f);
    leave_queries(slot);
  }
};

// Early is 1 to 4 % faster for head size 128, 2 % slower for 64 and nothing for 256; with modified
// scores it has not been timed.
template <class V, bool kEarly = V::kHeadDim == 128 && !V::kScoreMod>
struct PrefillComputing {
  using Type = PrefillCompute<V>;
};
template <class V>
struct PrefillComputing<V, true> {
  using Type = PrefillEarlyCompute<V>;
};
