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
  static constexpr int kOwnStageBytes = 2 * V::kKeys * V::kHeadDim * 2;
  static constexpr int kKeys = 2 * kQueryBytes, kValues = kKeys + V::kStages * kStageBytes;
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
  static constexpr int kBytes = kNever + 8;
};

template <class V>
class SharedMerge {
  using S = SharedPlaces<V>;
  static constexpr int kD = V::kHeadDim;
  static constexpr int kAtOnce = 10, kFew = 4;  // partial results
  static constexpr int kLook = 30;              // lanes that look ahead
  static constexpr u32 kAll = 0xffffffffu;

 public:
  __device__ __forceinline__ SharedMerge(const AttentionParams &p, const DecodeParams &d,
                                         const SharedParams &s)
      : p(p), d(d), s(s) {}

  // `warp` of those that merge; one speaks for the CTA.
  __device__ __forceinline__ void run(u32 base, int warp, bool speaks) {
    const int lane = threadIdx.x % 32, step = gridDim.x * kMergeWarps;
    const int rows = p.batch * s.most_tokens * p.heads_q;
    int row = blockIdx.x + warp * gridDim.x;
    MergeUnit now = look(row, rows);
    int head = head_of(row), mine = partial(now, lane);
    mbarrier_arrive(base + S::kDone);
    if (speaks) {
      mbarrier_wait(base + S::kDone, 0);
      if (lane == 0) {
        if (arrive_and_wrap(s.arrivals, gridDim.x - 1) != gridDim.x - 1) {
          while (load_acquire(s.arrivals) != 0) {
          }
        }
        mbarrier_arrive(base + S::kOpen);
      }
      __syncwarp();
    }
    mbarrier_wait(base + S::kOpen, 0);
#pragma unroll 1
    while (row < rows) {
      const MergeUnit at = now;
      const int found = mine, of = head;
      row += step;
      now = look(row, rows);  // while this row's partial results come
      head = head_of(row), mine = partial(now, lane);
      if (at.total >= 0) merge_row(base, at, of, found, lane);
    }
  }

 private:
  __device__ __forceinline__ int head_of(int row) const { return row % p.heads_q; }

  __device__ __forceinline__ MergeUnit look(int row, int rows) const {
    MergeUnit r = {};
    r.total = -1;
    if (row >= rows) return r;
    const int unit = row / p.group, in_group = row - unit * p.group;
    r = s.units[unit];
#pragma unroll
    for (int l = 0; l <= kMostLevels; ++l) r.first[l] += in_group;
    return r;
  }

  // Row of the n-th partial result; of any if there are not so many.
  __device__ __forceinline__ int partial(const MergeUnit &r, int n) const {
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

  // All loads of a round are asked for before a weight is known, without a condition: a load under
  // one is followed by copies that wait for it. A wait that is over at once keeps them in front.
  __device__ __forceinline__ void merge_row(u32 base, const MergeUnit &at, int head, int found,
                                            int lane) const {
    const int column = lane * 4;
    const float *const values = s.partial_out + (column < kD ? column : 0);
    float top = -infinity(), sum = 0.f, acc[4] = {}, weight = 0.f;
    float2 state = make_float2(-infinity(), 0.f);
#pragma unroll 1
    for (int done = 0, page = 0; done < at.total; done += kAtOnce, page += kAtOnce) {
      if (page == kLook) page = 0, found = partial(at, done + lane);
      const int left = at.total - done, last = page + left - 1;
      if (page == 0) {
        state = make_float2(-infinity(), 0.f);
        if (lane < kLook && lane < left) state = load_from_l2(s.partial_state + found);
      }
      const auto weigh = [&] {
        if (page) return;
        float most = state.x;
#pragma unroll
        for (int mask = 16; mask; mask /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, mask));
        most = fmaxf(most, top);
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
          const int row = __shfl_sync(kAll, found, min(page + i, last));
          v[i] = load_from_l2(
              reinterpret_cast<const float4 *>(values + static_cast<i64>(row) * kD));
        }
        mbarrier_wait(base + S::kNever, 1);
        weigh();
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const float w = __shfl_sync(kAll, weight, page + i);
          sum += w;
          acc[0] += w * v[i].x, acc[1] += w * v[i].y, acc[2] += w * v[i].z, acc[3] += w * v[i].w;
        }
      };
      if (at.total <= kFew) {
        add(Round<kFew>());
      } else {
        add(Round<kAtOnce>());
      }
    }
    float norm = sum == 0.f ? 0.f : __fdividef(1.f, sum), lse = lse_of(top, sum);
    if (p.sink) {
      const float2 both = with_sink(lse, load_sink(p, head));
      norm *= both.x, lse = both.y;
    }
    if (lane == 0) store_lse(p, at.token, head, lse);
    if (column >= p.head_dim_v) return;
    char *const to =
        p.out + at.token * p.out_token_stride + head * p.out_head_stride + column * 2;
    if (d.out_wide) {
      *reinterpret_cast<uint2 *>(to) =
          make_uint2(pack_pair<V::kCompute>(acc[0] * norm, acc[1] * norm),
                     pack_pair<V::kCompute>(acc[2] * norm, acc[3] * norm));
    } else {
      store_pair(p, to, acc[0] * norm, acc[1] * norm);
      store_pair(p, to + 4, acc[2] * norm, acc[3] * norm);
    }
  }

  template <int kN>
  struct Round {
    static constexpr int kCount = kN;
  };

  __device__ __forceinline__ static float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  const AttentionParams &p;
  const DecodeParams &d;
  const SharedParams &s;
};
