// The last tiles of a Hopper prefill, whose keys are cut into pieces so that the last round is as
// full as the others.
//
// Warps of a piece leave the sums of their 16 rows as registers hold them. The one that comes last
// of those with the same rows adds all up, in the order of the keys, and goes on as if it had seen
// every key. Nobody waits. Pieces without keys take part as well, so that each tile has as many.
#pragma once

#include "arch/memory_sm80.cuh"
#include "block/softmax.cuh"
#include "block/tile_order.cuh"

// kSums: accumulators of a lane; kWarps: that compute.
template <int kSums, int kWarps>
struct TailMerge {
  static constexpr int kParts = kSums / 4;

  const TailParams &x;
  const int item, warp, lane;

  // One lane's shifts to base 2 and parts of sums of weights, then its accumulators.
  __device__ __forceinline__ float4 *place(int of) const {
    const i64 first = static_cast<i64>(of - x.whole) * kWarps + warp;
    return x.pieces + first * (kParts + 1) * 32 + lane;
  }

  __device__ __forceinline__ void leave(const float (&total)[kSums], const float (&c)[2],
                                        const float (&sum)[2]) const {
    float4 *const to = place(item);
    to[0] = make_float4(c[0], c[1], sum[0], sum[1]);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      to[(i + 1) * 32] =
          make_float4(total[4 * i], total[4 * i + 1], total[4 * i + 2], total[4 * i + 3]);
    }
  }

  // The sums of weights that this lane left.
  __device__ __forceinline__ void left(float (&sum)[2]) const {
    const float4 state = load_from_l2(place(item));
    sum[0] = state.z, sum[1] = state.w;
  }

  // Once per piece, after `leave`. True: the others have, and the sums are those of all.
  __device__ __forceinline__ bool arrive(float (&total)[kSums], float (&c)[2],
                                         float (&sum)[2]) const {
    const int tile = x.cut_before(item);
    __syncwarp();
    u32 before = 0;
    if (lane == 0) before = arrive_and_wrap(x.arrivals + tile * kWarps + warp, x.cut - 1);
    before = __shfl_sync(0xffffffffu, before, 0);
    if (before + 1 != x.cut) return false;
    __syncwarp();  // what the others left is there for every lane
    merge(x.whole + tile * x.cut, total, c, sum);
    return true;
  }

 private:
  __device__ __forceinline__ void merge(int first, float (&total)[kSums], float (&c)[2],
                                        float (&sum)[2]) const {
    c[0] = c[1] = -infinity();
#pragma unroll 1
    for (int i = 0; i < x.cut; ++i) {
      const float4 state = load_from_l2(place(first + i));
      c[0] = fmaxf(c[0], state.x), c[1] = fmaxf(c[1], state.y);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) c[h] = c[h] == -infinity() ? 0.f : c[h], sum[h] = 0.f;
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] = 0.f;
#pragma unroll 1
    for (int piece = 0; piece < x.cut; ++piece) {
      const float4 *const from = place(first + piece);
      const float4 state = load_from_l2(from);
      // Sums may be far above 1: half of a factor is never flushed to 0 where they count.
      const float half[2] = {exp2_approx(0.5f * (state.x - c[0])),
                             exp2_approx(0.5f * (state.y - c[1]))};
      sum[0] = fmaf(state.z * half[0], half[0], sum[0]);
      sum[1] = fmaf(state.w * half[1], half[1], sum[1]);
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const float4 v = load_from_l2(from + (i + 1) * 32);
        const float value[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float &to = total[4 * i + e];
          to = fmaf(value[e] * half[e / 2], half[e / 2], to);
        }
      }
    }
  }
};
