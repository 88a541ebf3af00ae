// The merge of a batch with shared prefixes: when all CTAs of the launch have arrived, warps take
// rows of the result. Partial results are added in the order of the keys.
#pragma once

#include "arch/tma_sm90.cuh"
#include "block/epilogue.cuh"
#include "block/shared_work.cuh"

constexpr int kMergeWarps = 12;

__device__ __forceinline__ float lse_of(float top, float sum) {
  return sum == 0.f ? -infinity() : fmaf(top, kLn2, logf(sum));
}

// The weight of the keys, and the log-sum-exp of all.
__device__ __forceinline__ float2 with_sink(float lse, float sink) {
  StateSum state(fmaxf(lse, sink));
  const float part = state.add(lse);
  state.add(sink);
  return {state.weight(part), state.lse()};
}

// Where everything is in shared memory, from its beginning on: so that one register says it all.
template <class V>
struct SharedPlaces {
  static constexpr int kStageBytes = kShareKeys * V::kHeadDim * 2;  // of shared keys, or values
  static constexpr int kQueryBytes = 64 * V::kHeadDim * 2;          // of a warpgroup
  static constexpr int kOwnStageBytes = 2 * V::kKeys * (V::kWiden ? 128 : V::kHeadDim * 2);
  // What copies fill: 8-bit keys and values, which are widened to stages beside; or those stages.
  static constexpr int kLoads = 2 * kQueryBytes;
  static constexpr int kLoadStages = V::kWiden ? V::kRawStages : V::kStages;
  static constexpr int kLoadBytes = V::kWiden ? kShareKeys * 128 : kStageBytes;
  static constexpr int kLoadedValues = kLoads + kLoadStages * kLoadBytes;
  static constexpr int kKeys = V::kWiden ? kLoadedValues + kLoadStages * kLoadBytes : kLoads;
  static constexpr int kValues = kKeys + V::kStages * kStageBytes;
  static constexpr int kRings = kValues + V::kStages * kStageBytes;
  // Barriers, 8 bytes each; those of stages one after the other.
  static constexpr int kKeyFull = kRings + kOwnWarps * V::kOwnStages * kOwnStageBytes;
  static constexpr int kKeyEmpty = kKeyFull + 8 * V::kStages;
  static constexpr int kValueFull = kKeyEmpty + 8 * V::kStages;
  static constexpr int kValueEmpty = kValueFull + 8 * V::kStages;
  static constexpr int kOwnFull = kValueEmpty + 8 * V::kStages;
  static constexpr int kDone = kOwnFull + 8 * kOwnWarps * V::kOwnStages;  // partial results stored
  static constexpr int kOpen = kDone + 8;                                 // those of all CTAs
  static constexpr int kNever = kOpen + 8;                                // no one arrives here
  static constexpr int kRows = kNever + 8;  // the schedule is there
  static constexpr int kTilesDone = kRows + 8;      // partial results of shared keys
  static constexpr int kTilesOpen = kTilesDone + 8;  // those of all CTAs
  static constexpr int kProgress = (kTilesOpen + 8 + 15) / 16 * 16;  // of warps on their lines
  static constexpr int kOwnStarts = kProgress + 16;
  static constexpr int kGroupStarts = kOwnStarts + kOwnWarps * sizeof(OwnStart);
  // Of 8-bit caches: barriers of what copies fill, else those of the stages; then of each gathered
  // row what its scores and its values are multiplied by.
  static constexpr int kRawFull = kGroupStarts + 64, kRawEmpty = kRawFull + 16 * V::kRawStages;
  static constexpr int kRowScales = kRawEmpty + 16 * V::kRawStages;
  static constexpr int kBytes = V::kWiden ? kRowScales + 8 * kShareRows : kRawFull;
  static constexpr int kLoadedKeyFull = V::kWiden ? kRawFull : kKeyFull;
  static constexpr int kLoadedKeyEmpty = V::kWiden ? kRawEmpty : kKeyEmpty;
  static constexpr int kLoadedValueFull = V::kWiden ? kRawFull + 8 * V::kRawStages : kValueFull;
  static constexpr int kLoadedValueEmpty = V::kWiden ? kRawEmpty + 8 * V::kRawStages : kValueEmpty;
};

// Two neighbours of an output row.
template <class V>
__device__ __forceinline__ u32 pack_result(const AttentionParams &p, float lo, float hi) {
  if constexpr (V::kWiden) return p.out_type == kFp16 ? pack_fp16(lo, hi) : pack_bf16(lo, hi);
  return pack_pair<V::kWiden ? kFp16 : V::kCompute>(lo, hi);
}

// A warp takes a row; or 32 columns of one where there are few rows, so that four times as many
// partial results are asked for at once. One kernel has one of both: code that is not there is not
// fetched.
template <class V>
class SharedMerge {
  using S = SharedPlaces<V>;
  static constexpr int kD = V::kHeadDim, kParts = V::kParts ? kD / 32 : 1;
  static constexpr int kAtOnce = 10, kFew = 4;  // partial results
  static constexpr int kLook = 30;              // lanes that look ahead
  static constexpr u32 kAll = 0xffffffffu;

  // A row, and where its n-th partial result is.
  struct Row {
    int total = -1, found = 0, token = 0, head = 0, warps = 0, line_end = 0;
  };

 public:
  __device__ __forceinline__ SharedMerge(const AttentionParams &p, const DecodeParams &d,
                                         const SharedParams &s)
      : p(p), d(d), s(s), rows(p.batch * s.most_tokens * p.heads_q) {}

  // `warp` of those that merge, first those of own keys; `near` as in SharedStarts. Warps of shared
  // keys take the rows whose own keys are here, while others still are read; then all take others.
  __device__ __forceinline__ void run(u32 base, int warp, int4 near) {
    const int lane = threadIdx.x % 32;
    const bool tiles = warp >= kOwnWarps;
    if constexpr (V::kInside) mbarrier_wait(base + S::kRows, 0);
    if (!V::kParts && tiles) {
      mbarrier_arrive(base + S::kTilesDone);
      if (warp == kOwnWarps) meet(base, S::kTilesDone, S::kTilesOpen, s.arrivals, lane);
    } else {
      mbarrier_arrive(base + S::kDone);
    }
#pragma unroll 1
    for (bool here = !V::kParts && tiles;; here = false) {
      int at, end, step;
      if (here) {
        const int pair = (warp - kOwnWarps) >> 1, count = near.y - near.x;
        at = near.x + count * pair / kOwnWarps + (warp & 1), step = 2;
        end = s.near ? near.x + count * (pair + 1) / kOwnWarps : at;
      } else {
        if (near.z) return;
        const int first = kParts > 1 ? warp / kParts : warp;
        at = rows + blockIdx.x + first * gridDim.x, end = 2 * rows;
        step = kMergeWarps / kParts * gridDim.x;
      }
      Row now = look(at, end, lane);
      if (!V::kParts) mbarrier_wait(base + S::kTilesOpen, 0);
      if (!here) {
        if (warp == 0) meet(base, S::kDone, S::kOpen, s.arrivals + 1, lane);
        mbarrier_wait(base + S::kOpen, 0);
      }
#pragma unroll 1
      while (at < end) {
        const Row of = now;
        const int row = at;
        at += step;
        now = look(at, end, lane);  // while this row's partial results come
        if (of.total < 0) continue;
        if constexpr (kParts > 1) {
          merge_part(base, of, row, warp % kParts, lane);
        } else {
          if (here) wait_for_own(base, of);
          merge_row(base, of, row, lane);
        }
      }
      if (!here) return;
    }
  }

 private:
  // Waits for this CTA, then for all.
  __device__ __forceinline__ void meet(u32 base, int done, int open, u32 *arrivals,
                                       int lane) const {
    mbarrier_wait(base + done, 0);
    if (lane == 0) {
      if (arrive_and_wrap(arrivals, gridDim.x - 1) != gridDim.x - 1) {
        while (load_acquire(arrivals) != 0) {
        }
      }
      mbarrier_arrive(base + open);
    }
    __syncwarp();
  }

  // Until the warps that have own keys of a row have stored what comes of them.
  __device__ __forceinline__ void wait_for_own(u32 base, const Row &of) const {
    const u32 at = base + S::kProgress + threadIdx.x % kOwnWarps * 4;
    const bool mine = of.warps >> threadIdx.x % kOwnWarps & 1;
    while (__any_sync(kAll, mine && load_acquire_shared(at) < of.line_end)) pause();
    __syncwarp();
  }

  __device__ __forceinline__ Row look(int row, int end, int n) const {
    if (row >= end) return {};
    const MergeRow r = s.rows[row];
    return {r.total, partial(r, n), r.token, r.head, r.warps, r.line_end};
  }
  __device__ __forceinline__ int look_on(int row, int n) const { return partial(s.rows[row], n); }

  // Row of the n-th partial result; of any if there are not so many.
  __device__ __forceinline__ int partial(const MergeRow &r, int n) const {
    int row = r.first[kMostLevels] + n * d.row_block;
#pragma unroll
    for (int l = kMostLevels - 1; l >= 0; --l) {
      int before = 0;
#pragma unroll
      for (int k = 0; k < l; ++k) before += r.count[k];
      const int m = n - before, after = before + r.count[l];
      if (n < after) {
        row = r.half[l] ? r.first[l] + (m >> 1) * kShareRows + (m & 1) * r.half[l]
                        : r.first[l] + m * kShareRows;
      } else if (l == kMostLevels - 1) {
        row -= after * d.row_block;
      }
    }
    return row;
  }

  __device__ __forceinline__ float4 values_of(int row, int column) const {
    return load_from_l2(reinterpret_cast<const float4 *>(s.partial_out +
                                                         static_cast<i64>(row) * kD + column));
  }

  // All loads of a round are asked for before a weight is known, without a condition: a load under
  // one is followed by copies that wait for it. A wait that is over at once keeps them in front.
  __device__ __forceinline__ void keep_in_front(u32 base) const {
    mbarrier_wait(base + S::kNever, 1);
  }

  __device__ __forceinline__ void merge_row(u32 base, const Row &at, int row, int lane) const {
    const int column = lane * 4 < kD ? lane * 4 : 0;
    int found = at.found;
    float top = -infinity(), sum = 0.f, acc[4] = {}, weight = 0.f;
    float2 state = make_float2(-infinity(), 0.f);
#pragma unroll 1
    for (int done = 0, page = 0; done < at.total; done += kAtOnce, page += kAtOnce) {
      if (page == kLook) page = 0, found = look_on(row, done + lane);
      const int left = at.total - done, last = page + left - 1;
      if (page == 0) {
        state = make_float2(-infinity(), 0.f);
        if (lane < kLook && lane < left) state = load_from_l2(s.partial_state + found);
      }
      const auto weigh = [&] {
        if (page) return;
        const float most = fmaxf(most_of<32>(state.x), top);
        const float shift = most == -infinity() ? 0.f : most;
        const float factor = top == -infinity() ? 0.f : exp2_of(top - shift);
        sum *= factor;
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[e] *= factor;
        top = most;
        weight = exp2_of(state.x - shift) * state.y;
      };
      const auto add = [&](auto round) {
        constexpr int kCount = decltype(round)::kCount;
        float4 v[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          v[i] = values_of(__shfl_sync(kAll, found, min(page + i, last)), column);
        }
        keep_in_front(base);
        weigh();
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const float w = __shfl_sync(kAll, weight, page + i);
          sum += w;
          add_weighted(acc, w, v[i]);
        }
      };
      if (at.total <= kFew) {
        add(Round<kFew>());
      } else {
        add(Round<kAtOnce>());
      }
    }
    const float norm = finish(top, sum, at.token, at.head, lane == 0);
    if (lane * 4 < kD) store(at.token, at.head, column, acc, norm);
  }

  // Columns 32 * part and on; eight lanes have all of them, the others other partial results.
  __device__ __forceinline__ void merge_part(u32 base, const Row &at, int row, int part,
                                             int lane) const {
    const int group = lane / 8, column = part * 32 + lane % 8 * 4;
    int found = at.found;
    float top = -infinity(), sum = 0.f, acc[4] = {};
#pragma unroll 1
    for (int done = 0; done < at.total; done += 32) {
      if (done) found = look_on(row, done + lane);
      const int left = at.total - done, last = min(left, 32) - 1;
      float2 state = make_float2(-infinity(), 0.f);
      if (lane < left) state = load_from_l2(s.partial_state + found);
      float4 v[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        v[k] = values_of(__shfl_sync(kAll, found, min(4 * k + group, last)), column);
      }
      keep_in_front(base);
      const float most = fmaxf(most_of<32>(state.x), top);
      const float shift = most == -infinity() ? 0.f : most;
      const float factor = top == -infinity() ? 0.f : exp2_of(top - shift);
      const float weight = exp2_of(state.x - shift) * state.y;
      top = most, sum = fmaf(sum, factor, weight);
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] *= factor;
#pragma unroll
      for (int k = 0; k < 8; ++k) add_weighted(acc, __shfl_sync(kAll, weight, 4 * k + group), v[k]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      acc[e] += __shfl_xor_sync(kAll, acc[e], 8);
      acc[e] += __shfl_xor_sync(kAll, acc[e], 16);
    }
    const float norm = finish(top, sum_of<32>(sum), at.token, at.head, lane == 0 && part == 0);
    if (group == 0) store(at.token, at.head, column, acc, norm);
  }

  // One over the sum, the sink included; and the log-sum-exp is stored, by one lane.
  __device__ __forceinline__ float finish(float top, float sum, int token, int head,
                                          bool speaks) const {
    float norm = sum == 0.f ? 0.f : __fdividef(1.f, sum), lse = lse_of(top, sum);
    if (p.sink) {
      const float2 both = with_sink(lse, load_sink(p, head));
      norm *= both.x, lse = both.y;
    }
    if (speaks) store_lse(p, token, head, lse);
    return norm;
  }

  __device__ __forceinline__ void store(int token, int head, int column, const float (&acc)[4],
                                        float norm) const {
    if (column >= p.head_dim_v) return;
    char *const to = p.out + token * p.out_token_stride + head * p.out_head_stride + column * 2;
    if (d.out_wide) {
      *reinterpret_cast<uint2 *>(to) =
          make_uint2(pack_result<V>(p, acc[0] * norm, acc[1] * norm),
                     pack_result<V>(p, acc[2] * norm, acc[3] * norm));
    } else {
      store_pair(p, to, acc[0] * norm, acc[1] * norm);
      store_pair(p, to + 4, acc[2] * norm, acc[3] * norm);
    }
  }

  template <int kN>
  struct Round {
    static constexpr int kCount = kN;
  };

  __device__ __forceinline__ static void add_weighted(float (&acc)[4], float w, float4 v) {
    acc[0] += w * v.x, acc[1] += w * v.y, acc[2] += w * v.z, acc[3] += w * v.w;
  }
  // Of neighbouring lanes.
  template <int kLanes>
  __device__ __forceinline__ static float most_of(float x) {
#pragma unroll
    for (int mask = kLanes / 2; mask; mask /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, mask));
    return x;
  }
  template <int kLanes>
  __device__ __forceinline__ static float sum_of(float x) {
#pragma unroll
    for (int mask = kLanes / 2; mask; mask /= 2) x += __shfl_xor_sync(kAll, x, mask);
    return x;
  }
  __device__ __forceinline__ static float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  const AttentionParams &p;
  const DecodeParams &d;
  const SharedParams &s;
  const int rows;
};
