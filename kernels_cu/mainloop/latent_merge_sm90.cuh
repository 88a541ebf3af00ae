// The merge of what several spans have of a segment of latent attention, by the 256 threads that
// hold the values.
//
// Of a split segment every span leaves a normalised output and its state (largest score to base 2,
// sum of weights) in a slot of its own: 2c where span c begins inside of the segment, else 2c + 1.
// The last to arrive merge the slots in the order of the keys.
#pragma once

#include "block/epilogue.cuh"
#include "mainloop/latent_tiles_sm90.cuh"

__device__ __forceinline__ float latent_lse(float top, float sum) {
  return sum == 0.f ? -infinity() : fmaf(top, kLn2, logf(sum));
}

// The weight of the keys beside a sink, which the log-sum-exp then has.
__device__ __forceinline__ float beside_sink(const AttentionParams &p, int head, float &lse) {
  if (!p.sink) return 1.f;
  const float sink = load_sink(p, head);
  StateSum state(fmaxf(lse, sink));
  const float part = state.add(lse);
  state.add(sink);
  lse = state.lse();
  return state.weight(part);
}

struct LatentMerge {
  static constexpr u32 kAll = 0xffffffffu;
  static constexpr int kRoom = 96;        // partial rows that the stages of keys take at a time
  static constexpr int kRowBytes = kLatentDim * 4;
  static constexpr int kFew = 7;  // parts that a warp adds up by itself
  static_assert((kRoom + 1) * kRowBytes <= kLatentStages * kLatentStageBytes, "");

  const AttentionParams &p;
  const DecodeParams &d;
  const LatentParams &l;
  const LatentTiles &tiles;
  const Segment &s;
  const int count, opening, side;  // parts, the slot of the first one, blocks side by side

  // After a piece that is not whole has been stored. A function of its own: what it could keep in
  // registers from piece to piece would cost the products theirs.
  __device__ __noinline__ static void merge(const AttentionParams &p, const DecodeParams &d,
                                            const LatentParams &l, char *smem,
                                            const LatentPiece *piece) {
    const LatentTiles tiles(smem);
    const int lane = static_cast<int>(blockIdx.x) % l.side;
    const int opening = (2 * piece->first_span + 1) * l.side + lane;
    const LatentMerge m = {p, d, l, tiles, piece->segment, piece->spans, opening, l.side};
    m.run(*piece, lane);
  }

 private:
  __device__ __forceinline__ void run(const LatentPiece &piece, int lane_of_side) const {
    const int rows = s.row_end - s.row_begin;
    // Of many parts each of the last arrivers takes some rows. They wait for blocks that run
    // already: the grid is no larger than what runs at the same time. The first two never wait:
    // theirs may be the ends of spans that have more to do.
    const int helpers = count > kFew ? min(count - 2, rows) : 1;
    int &turn = tiles.rest().turn;
    named_barrier_sync(kValuesOnly, 256);  // all of the piece is stored
    if (threadIdx.x == 128) {
      u32 *const counter = d.arrivals + piece.first_span * l.side + lane_of_side;
      const int before = static_cast<int>(arrive_and_wrap(counter, count - 1));
      const int mine = before + helpers - count;
      if (mine >= 0 && before != count - 1) {
        while (load_acquire(counter) != 0) {
        }
      }
      turn = mine;
    }
    named_barrier_sync(kValuesOnly, 256);
    const int first = turn;
    if (first < 0) return;
    if (count <= kFew) {
      by_rows();
    } else if (piece.last) {
      by_memory(first, helpers);
    } else {
      by_registers(first, helpers);
    }
  }

  __device__ __forceinline__ int slot_of(int part) const {
    return opening + (part == 0 ? 0 : (2 * part - 1) * side);
  }
  __device__ __forceinline__ const char *partial_at(int part, int row) const {
    const i64 at = static_cast<i64>(slot_of(part)) * kLatentRows + row;
    return reinterpret_cast<const char *>(d.partial_out + at * p.head_dim_v);
  }
  __device__ __forceinline__ float2 state_at(int part, int row) const {
    return load_from_l2(d.partial_state + slot_of(part) * kLatentRows + row);
  }

  // Where a row of the outputs is.
  struct Place {
    i64 token;
    int head;
  };
  __device__ __forceinline__ Place place_of(int row) const {
    const int in_segment = s.row_begin + row, in_request = in_segment / p.group;
    return {static_cast<i64>(s.request.q_begin) + in_request,
            s.kv_head * p.group + in_segment - in_request * p.group};
  }
  __device__ __forceinline__ char *out_at(const Place &at) const {
    return p.out + at.token * p.out_token_stride + at.head * p.out_head_stride;
  }

  // A warp takes some rows at a time, all parts of them one after the other. Nothing is shared, so
  // nobody waits.
  __device__ __forceinline__ void by_rows() const {
    constexpr int kRows = 2, kChunks = kLatentDim / 128, kEach = kFew + 1;
    const int rows = s.row_end - s.row_begin, lane = threadIdx.x % 32, width = p.head_dim_v * 4;
#pragma unroll 1
    for (int row = threadIdx.x / 32 - 4; row < rows; row += 8 * kRows) {
      // Lane 8i + j looks after part j of the i-th row.
      const int mine = row + lane / kEach % kRows * 8, part = lane % kEach;
      const bool there = mine < rows;
      float2 state = {-infinity(), 0.f};
      if (there && part < count) state = state_at(part, mine);
      float top = state.x;
#pragma unroll
      for (int mask = 1; mask < kEach; mask *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kAll, top, mask));
      }
      if (top == -infinity()) top = 0.f;
      float weight = state.y * exp2_approx(state.x - top), sum = weight;
#pragma unroll
      for (int mask = 1; mask < kEach; mask *= 2) sum += __shfl_xor_sync(kAll, sum, mask);
      if (there) weight *= finish(mine, top, sum, lane < kEach * kRows && part == 0);
      float4 total[kRows][kChunks] = {};
#pragma unroll 1
      for (int j = 0; j < count; ++j) {
        float4 v[kRows][kChunks];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const char *const from = partial_at(j, min(row + i * 8, rows - 1));
#pragma unroll
          for (int k = 0; k < kChunks; ++k) {
            const int at = min(k * 512 + lane * 16, width - 16);
            v[i][k] = load_from_l2(reinterpret_cast<const float4 *>(from + at));
          }
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const float w = __shfl_sync(kAll, weight, i * kEach + j);
#pragma unroll
          for (int k = 0; k < kChunks; ++k) {
            float4 &t = total[i][k];
            t.x = fmaf(w, v[i][k].x, t.x), t.y = fmaf(w, v[i][k].y, t.y);
            t.z = fmaf(w, v[i][k].z, t.z), t.w = fmaf(w, v[i][k].w, t.w);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (row + i * 8 >= rows) break;
        char *const to = out_at(place_of(row + i * 8)) + lane * 8;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          if (k * 512 + lane * 16 >= width) continue;
          store_pair(p, to + k * 256, total[i][k].x, total[i][k].y);
          store_pair(p, to + k * 256 + 4, total[i][k].z, total[i][k].w);
        }
      }
    }
  }

  // Rows first, first + step, ... of the last piece of a block, whose stages are free: all parts of
  // some rows at a time are copied there, so that no load waits for another.
  __device__ __forceinline__ void by_memory(int first, int step) const {
    const int rows = s.row_end - s.row_begin, thread = threadIdx.x - 128;
    const int each = max(1, kRoom / count);
    float *const weights = reinterpret_cast<float *>(tiles.base + kRoom * kRowBytes);
    float2 sum = {0.f, 0.f};
#pragma unroll 1
    for (int row = first; row < rows; row += each * step) {
      const int there = min(each, (rows - row + step - 1) / step);
#pragma unroll 1
      for (int begin = 0; begin < count; begin += kRoom) {
        const int parts = min(kRoom, count - begin);
        copy_parts(row, step, there, begin, parts);
#pragma unroll 1
        for (int i = thread / 32; i < there; i += 8) {
          weigh(row + i * step, begin, parts, weights + i * parts);
        }
        cp_async_wait<0>();
        named_barrier_sync(kValuesOnly, 256);
#pragma unroll 1
        for (int i = 0; i < there; ++i) {
          const char *from = tiles.base + i * parts * kRowBytes + thread * 8;
          if (begin == 0) sum = {0.f, 0.f};
#pragma unroll 8
          for (int j = 0; j < parts; ++j) {
            const float weight = weights[i * parts + j];
            const float2 v = *reinterpret_cast<const float2 *>(from + j * kRowBytes);
            sum.x = fmaf(weight, v.x, sum.x), sum.y = fmaf(weight, v.y, sum.y);
          }
          if (begin + parts == count && thread * 2 < p.head_dim_v) {
            store_pair(p, out_at(place_of(row + i * step)) + thread * 4, sum.x, sum.y);
          }
        }
        named_barrier_sync(kValuesOnly, 256);
      }
    }
  }

  // Row by row, part by part; half of the threads take every other one of these.
  __device__ __forceinline__ void copy_parts(int row, int step, int there, int begin,
                                             int parts) const {
    const int thread = threadIdx.x - 128, width = p.head_dim_v * 4, chunk = thread % 128 * 16;
    int part = thread / 128, r = part / parts;
    part -= r * parts;
#pragma unroll 4
    for (int i = thread / 128; i < there * parts; i += 2) {
      const char *from = partial_at(begin + part, row + r * step);
      cp_async16(shared_address(tiles.base) + i * kRowBytes + chunk, from + min(chunk, width - 16),
                 chunk < width ? 16 : 0);
      part += 2;
      while (part >= parts) part -= parts, ++r;
    }
    cp_async_commit();
  }

  // By one warp: what parts of a row count for, and its log-sum-exp.
  __device__ __forceinline__ void weigh(int row, int begin, int parts, float *weights) const {
    constexpr int kStates = kMostSpans / 32;
    const int lane = threadIdx.x % 32;
    float2 state[kStates];
    float top = -infinity(), sum = 0.f;
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      state[j] = state_at(min(lane + j * 32, count - 1), row);
      top = fmaxf(top, state[j].x);
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, mask));
    if (top == -infinity()) top = 0.f;
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      state[j].y = __fmul_rn(state[j].y, exp2_approx(state[j].x - top));  // never fused
      if (lane + j * 32 < count) sum += state[j].y;
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) sum += __shfl_xor_sync(kAll, sum, mask);
    const float norm = finish(row, top, sum, lane == 0 && begin == 0);
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      const int part = lane + j * 32 - begin;
      if (part >= 0 && part < parts) weights[part] = state[j].y * norm;
    }
  }

  // What sums of a row are multiplied by; its log-sum-exp is stored where a lane is `mine`.
  __device__ __forceinline__ float finish(int row, float top, float sum, bool mine) const {
    const Place at = place_of(row);
    float lse = latent_lse(top, sum), norm = sum == 0.f ? 0.f : 1.f / sum;
    norm *= beside_sink(p, at.head, lse);
    if (mine) store_lse(p, at.token, at.head, lse);
    return norm;
  }

  // The same sums, in the same order, where the stages are not free: which block is the last to
  // arrive must not show in the bits.
  __device__ __forceinline__ void by_registers(int first, int step) const {
    constexpr int kAtOnce = 8;
    const int rows = s.row_end - s.row_begin, thread = threadIdx.x - 128;
    const int each = min(8, kMostSpans / count), from = min(thread * 8, p.head_dim_v * 4 - 8);
    float *const weights = tiles.rest().part_weights;
#pragma unroll 1
    for (int row = first; row < rows; row += each * step) {
      const int there = min(each, (rows - row + step - 1) / step), total = there * count;
      if (thread / 32 < there) {
        weigh(row + thread / 32 * step, 0, count, weights + thread / 32 * count);
      }
      named_barrier_sync(kValuesOnly, 256);
      int part = 0, r = row, next_part = 0, next_row = row;  // added up, and loaded
      float2 sum = {0.f, 0.f};
#pragma unroll 1
      for (int begin = 0; begin < total; begin += kAtOnce) {
        float2 v[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          v[j] = load_from_l2(reinterpret_cast<const float2 *>(
              partial_at(next_part, min(next_row, rows - 1)) + from));
          if (++next_part == count) next_part = 0, next_row += step;
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (begin + j >= total) continue;
          const float weight = weights[begin + j];
          sum.x = fmaf(weight, v[j].x, sum.x), sum.y = fmaf(weight, v[j].y, sum.y);
          if (++part < count) continue;
          if (thread * 2 < p.head_dim_v) {
            store_pair(p, out_at(place_of(r)) + thread * 4, sum.x, sum.y);
          }
          sum = {0.f, 0.f}, part = 0, r += step;
        }
      }
      named_barrier_sync(kValuesOnly, 256);
    }
  }
};
