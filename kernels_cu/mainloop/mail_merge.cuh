// The ends of segments where every span is one piece of one of several equal segments: by mail,
// without a counter.
//
// Every span leaves its normalised output and its states (largest score to base 2, sum of weights)
// as words that are never 0, in memory that is 0 until they come. The last spans of a segment wait
// for the words themselves, which saves a fence and a way to the L2 cache and back, and put the 0s
// back. The states lie there once for every 32 columns, so that each is for one reader alone.
#pragma once

#include "mainloop/span_merge.cuh"

// A word that is never 0, for memory where 0 says that none came. NaN stays NaN.
__device__ __forceinline__ u32 posted(float value) { return ~min(__float_as_uint(value), ~1u); }
__device__ __forceinline__ float received(u32 word) { return __uint_as_float(~word); }

template <int kWarps, bool kManyRows = false>
class MailMerge : public SpanMerge<kWarps, kManyRows> {
  using Base = SpanMerge<kWarps, kManyRows>;

 public:
  using Base::Base;

 protected:
  using Base::d, Base::kAll, Base::kWide, Base::lse_of, Base::p, Base::partial_row;
  using Base::states_, Base::store_final, Base::values_;
  static constexpr int kSlice = 32;  // columns that have states of their own
  static constexpr int kMostHelpers = 16;  // blocks that merge a segment
  static constexpr int kAtOnce = 8;  // parts that a lane asks for together

  __device__ __forceinline__ uint4 *values_at(u32 row, int column) const {
    return reinterpret_cast<uint4 *>(d.mail + static_cast<u64>(row) * p.head_dim_v + column);
  }
  __device__ __forceinline__ uint2 *state_at(u32 row, int column) const {
    const u32 slices = (p.head_dim_v + kSlice - 1) / kSlice;
    const u64 rows = partial_row(d.spans, 0);
    return reinterpret_cast<uint2 *>(d.mail + rows * p.head_dim_v) + row * slices + column / kSlice;
  }

  // Four columns of a row of a span.
  __device__ __forceinline__ void post(u32 row, int column, const float (&value)[4], float top,
                                       float sum) const {
    store_relaxed(values_at(row, column), make_uint4(posted(value[0]), posted(value[1]),
                                                     posted(value[2]), posted(value[3])));
    if (column % kSlice == 0) {
      store_relaxed(state_at(row, column), make_uint2(posted(top), posted(sum)));
    }
  }

  // Sums of the warps' parts, which are not normalised; `top` is the largest score of all.
  __device__ __forceinline__ static void sum_warps(const float2 (&state)[kWarps],
                                                   const float4 (&v)[kWarps], float top,
                                                   float (&acc)[4], float &sum) {
    const float shift = top == -infinity() ? 0.f : top;
    sum = acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float factor = exp2_approx(state[w].x - shift);
      sum += factor * state[w].y;
      acc[0] += factor * v[w].x, acc[1] += factor * v[w].y;
      acc[2] += factor * v[w].z, acc[3] += factor * v[w].w;
    }
  }

  // After span `first + part` has posted all it has of a segment of `count` spans. All threads.
  // The last blocks of the segment merge: blocks start in their order, so that those before them
  // are over or run, and so few wait that those after them find room whatever else the GPU does.
  __device__ __forceinline__ void merge_mail(const Piece &piece, int first, int count,
                                             int part) const {
    const int rows = (piece.row_end - piece.row_begin) << d.unit_shift;
    // A task is a row of so many columns: of a warp where parts are few, else of a block.
    const int shared = count > 16 ? 0 : Base::kWarpsShift;
    const int helpers = min(count, kMostHelpers), turn = part - count + helpers;
    if (turn < 0) return;
    const int at_once = helpers << shared, warp = shared ? threadIdx.x / 32 : 0;
    const int row_shift = 32 - __clz(p.head_dim_v / 4 - 1);  // log2 of the lanes of a row
    int lanes_shift = 3;
    while (lanes_shift < 5 && rows << max(0, row_shift - lanes_shift) > at_once) ++lanes_shift;
    const int slices_shift = max(0, row_shift - lanes_shift), slices = 1 << slices_shift;
#pragma unroll 1
    for (int task = (turn << shared) + warp; task < rows << slices_shift; task += at_once) {
      const int row = task >> slices_shift, slice = task & (slices - 1);
      take_mail(piece, first, count, row, slice, lanes_shift, !shared);
    }
  }

 private:
  // One row of 4 << lanes_shift columns: groups of so many lanes take a part each. `block`: of all
  // warps, which take different parts.
  __device__ __forceinline__ void take_mail(const Piece &piece, int first, int count, int all_row,
                                            int slice, int lanes_shift, bool block) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, lanes = 1 << lanes_shift;
    const int side = all_row & ((1 << d.unit_shift) - 1), row = all_row >> d.unit_shift;
    const int in_slice = (lane & (lanes - 1)) * 4, column = slice * 4 * lanes + in_slice;
    const bool inside = column < p.head_dim_v;
    const int group = ((block ? warp * 32 : 0) + lane) >> lanes_shift;
    const int groups = (block ? kWarps * 32 : 32) >> lanes_shift;
    const u32 base = partial_row(first, side * d.row_block + row), step = partial_row(1, 0);
    float top = -infinity(), sum = 0.f, acc[4] = {};
#pragma unroll 1
    for (int at = group; inside && at < count; at += groups * kAtOnce) {
      uint4 v[kAtOnce];
      uint2 state[kAtOnce];
      bool missing;
      do {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const u32 from = base + min(at + i * groups, count - 1) * step;
          v[i] = load_relaxed(values_at(from, column));
          state[i] = load_relaxed(state_at(from, column));
        }
        missing = false;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          missing |= v[i].x == 0 || v[i].y == 0 || v[i].z == 0 || v[i].w == 0;
          missing |= state[i].x == 0 || state[i].y == 0;
        }
      } while (missing);
      float most = top;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (at + i * groups >= count) state[i] = {posted(-infinity()), posted(0.f)};
        most = fmaxf(most, received(state[i].x));
      }
      rescale(acc, sum, top, most);
      const float shift = most == -infinity() ? 0.f : most;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float w = exp2_approx(received(state[i].x) - shift) * received(state[i].y);
        sum += w;
        acc[0] += w * received(v[i].x), acc[1] += w * received(v[i].y);
        acc[2] += w * received(v[i].z), acc[3] += w * received(v[i].w);
      }
    }
    float most = top;
#pragma unroll 1
    for (int mask = lanes; mask < 32; mask *= 2) {
      most = fmaxf(most, __shfl_xor_sync(kAll, most, mask));
    }
    rescale(acc, sum, top, most);
#pragma unroll 1
    for (int mask = lanes; mask < 32; mask *= 2) {
      sum += __shfl_xor_sync(kAll, sum, mask);
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] += __shfl_xor_sync(kAll, acc[e], mask);
    }
    if (block) {
      __syncthreads();  // what lay there has been read
      if (lane < lanes) {
        *reinterpret_cast<float4 *>(values_ + warp * kWide + in_slice) =
            make_float4(acc[0], acc[1], acc[2], acc[3]);
        if (in_slice == 0) states_[warp] = {top, sum};
      }
      __syncthreads();
      if (warp == 0) add_warps(in_slice, acc, top, sum);
    }
    if (inside && lane < lanes && !(block && warp)) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] = sum == 0.f ? 0.f : __fdividef(acc[e], sum);
      store_final(piece, side, row, column, acc, lse_of(top == -infinity() ? 0.f : top, sum));
    }
    __syncwarp();  // every lane has the states
#pragma unroll 1
    for (int at = group; inside && at < count; at += groups) {
      store_relaxed(values_at(base + at * step, column), uint4{});
      if (column % kSlice == 0) store_relaxed(state_at(base + at * step, column), uint2{});
    }
  }

  __device__ __forceinline__ static void rescale(float (&acc)[4], float &sum, float &top,
                                                 float most) {
    const float factor = most == -infinity() ? 1.f : exp2_approx(top - most);
    top = most, sum *= factor;
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[e] *= factor;
  }

  __device__ __forceinline__ void add_warps(int in_slice, float (&acc)[4], float &top,
                                            float &sum) const {
    float2 state[kWarps];
    float4 v[kWarps];
    top = -infinity();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      state[w] = states_[w];
      v[w] = *reinterpret_cast<const float4 *>(values_ + w * kWide + in_slice);
      top = fmaxf(top, state[w].x);
    }
    sum_warps(state, v, top, acc, sum);
  }
};
