// The ends of pieces of latent attention: results, or partial results and their merge.
//
// A segment that one span has whole is final. Of a split one every span leaves a normalised output
// and its state (largest score to base 2, sum of weights) in a slot of its own: 2c where span c
// begins inside of the segment, else 2c + 1. The last to arrive merge the slots in the order of the
// keys. All of it is work of the 256 threads that hold the values.
#pragma once

#include "mainloop/latent_sm90.cuh"

template <class V>
struct LatentEnd {
  static constexpr int kColumns = LatentValues<V>::kColumns, kPairs = kColumns / 8;
  static constexpr u32 kAll = 0xffffffffu;
  static constexpr int kMostSpans = 160;  // that the host plans

  const AttentionParams &p;
  const DecodeParams &d;
  const LatentParams &l;
  const LatentTiles &tiles;

  // What a thread holds of the outputs of a piece goes where it belongs.
  __device__ __forceinline__ void store(const LatentValues<V> &values,
                                        const LatentPiece &piece) const {
    const Segment &s = piece.segment;
    const LatentTiles::Results &r = tiles.rest().results;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int thread = fresh(threadIdx.x), quad = thread % 4;
      const bool with_state = values.half == 0 && quad == 0;
      const int in_tile = thread / 32 % 4 * 16 + h * 8 + thread % 32 / 4;
      const int row = min(s.row_begin + in_tile, s.row_end - 1);
      const bool there = s.row_begin + in_tile < s.row_end;
      const int in_request = row / p.group;
      const int head = s.kv_head * p.group + row - in_request * p.group;
      const i64 token = static_cast<i64>(s.request.q_begin) + in_request;
      char *to = p.out + token * p.out_token_stride + head * p.out_head_stride;
      const float2 state = {r.top[in_tile], r.sum[in_tile]};
      float scale = value_scale(p, s.request.index, s.kv_head);
      scale = state.y == 0.f ? 0.f : scale / state.y;
      if (s.slot < 0) {
        float lse = lse_of(state.x, state.y);
        scale *= with_sink(head, lse);
        if (with_state && there) store_lse(p, token, head, lse);
      } else {
        const i64 slot = static_cast<i64>(s.slot) * kLatentRows + in_tile;
        if (with_state && there) d.partial_state[slot] = state;
        to = reinterpret_cast<char *>(d.partial_out + slot * p.head_dim_v);
      }
#pragma unroll
      for (int n = 0; n < kPairs; n += 4) {
        // A quad has 8 columns of each of 4 groups; each lane gets those of one of them.
        float x[4], y[4], value[8];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[j] = values.acc[4 * (n + j) + 2 * h], y[j] = values.acc[4 * (n + j) + 2 * h + 1];
        }
        transpose_quad(quad, x), transpose_quad(quad, y);
#pragma unroll
        for (int j = 0; j < 4; ++j) value[2 * j] = x[j] * scale, value[2 * j + 1] = y[j] * scale;
        const int column = values.half * kColumns + (n + quad) * 8;
        if (!there || column >= p.head_dim_v) continue;
        if (s.slot < 0) {
          store_eight(to + column * 2, value);
        } else {
          float4 *const wide = reinterpret_cast<float4 *>(to + column * 4);
          wide[0] = make_float4(value[0], value[1], value[2], value[3]);
          wide[1] = make_float4(value[4], value[5], value[6], value[7]);
        }
      }
    }
  }

  // After `store` of a piece that is not whole. A function of its own: what it could keep in
  // registers from piece to piece would cost the products theirs.
  __device__ __noinline__ static void merge(const AttentionParams &p, const DecodeParams &d,
                                            const LatentParams &l, char *smem,
                                            const LatentPiece *piece) {
    const LatentTiles tiles(smem);
    LatentEnd{p, d, l, tiles}.merge(*piece, blockIdx.x % l.side);
  }

  __device__ __forceinline__ void merge(const LatentPiece &piece, int lane_of_side) const {
    const int rows = piece.segment.row_end - piece.segment.row_begin, count = piece.spans;
    // Of many parts each of the last arrivers takes some rows. They wait for blocks that run
    // already: the grid is no larger than what runs at the same time. The first two never wait:
    // theirs may be the ends of spans that have more to do.
    const int helpers = count >= 8 ? min(count - 2, rows) : 1;
    int &turn = tiles.rest().turn;  // results have been read
    named_barrier_sync(kValuesOnly, 256);
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
    const int slots = 2 * l.side, opening = (2 * piece.first_span + 1) * l.side + lane_of_side;
    const auto slot_of = [&](int part) {
      return opening + (part == 0 ? 0 : part * slots - l.side);
    };
    if (count <= 2) {
      merge_rows<8, 2>(piece, first, helpers, slot_of);
    } else if (count <= 8) {
      merge_rows<2, 8>(piece, first, helpers, slot_of);
    } else {
      merge_rows<1, 32>(piece, first, helpers, slot_of);
    }
  }

  // Rows of requests without keys, dealt to all blocks. All threads.
  __device__ __forceinline__ void write_empty(const i32 *prefix) const {
#pragma unroll 1
    for (int request = blockIdx.x; request < p.batch; request += gridDim.x) {
      if (prefix[request] != prefix[request + 1]) continue;
      const RequestWork w = request_work(p, d, request);
      if (!w.segments) continue;
      const int pairs = p.head_dim_v / 2;
#pragma unroll 1
      for (int i = threadIdx.x; i < w.request.q_len * p.heads_q * pairs; i += blockDim.x) {
        const int row = i / pairs, column = (i - row * pairs) * 2;
        const int in_request = row / p.heads_q, head = row - in_request * p.heads_q;
        const i64 token = static_cast<i64>(w.request.q_begin) + in_request;
        store_pair(p, p.out + token * p.out_token_stride + head * p.out_head_stride + column * 2,
                   0.f, 0.f);
        if (column == 0) store_lse(p, token, head, p.sink ? load_sink(p, head) : -infinity());
      }
    }
  }

 private:
  // x[j] of lane i of a quad becomes x[i] of lane j.
  __device__ __forceinline__ static void transpose_quad(int lane, float (&x)[4]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const bool upper = lane & step;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j & step) continue;
        const float other = __shfl_xor_sync(kAll, upper ? x[j] : x[j + step], step);
        if (upper) {
          x[j] = other;
        } else {
          x[j + step] = other;
        }
      }
    }
  }

  __device__ __forceinline__ void store_eight(char *to, const float (&value)[8]) const {
    if (stores_wide(p)) {
      const bool fp16 = p.out_type == kFp16;
      uint4 word;
      u32 *const pair = &word.x;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pair[j] = fp16 ? pack_fp16(value[2 * j], value[2 * j + 1])
                       : pack_bf16(value[2 * j], value[2 * j + 1]);
      }
      *reinterpret_cast<uint4 *>(to) = word;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) store_pair(p, to + j * 4, value[2 * j], value[2 * j + 1]);
    }
  }

  // The weight of the keys beside a sink, which the log-sum-exp then has.
  __device__ __forceinline__ float with_sink(int head, float &lse) const {
    if (!p.sink) return 1.f;
    const float sink = load_sink(p, head);
    StateSum state(fmaxf(lse, sink));
    const float part = state.add(lse);
    state.add(sink);
    lse = state.lse();
    return state.weight(part);
  }

  __device__ __forceinline__ static float lse_of(float top, float sum) {
    return sum == 0.f ? -infinity() : fmaf(top, kLn2, logf(sum));
  }

  // Rows first, first + step, ...; kRows and kParts slots of each at a time, a power of two. A
  // thread takes two columns.
  template <int kRows, int kParts, class SlotOf>
  __device__ __forceinline__ void merge_rows(const LatentPiece &piece, int first, int step,
                                             const SlotOf &slot_of) const {
    constexpr int kAtOnce = kRows * kParts, kStates = kParts == 32 ? kMostSpans / 32 : 1;
    const Segment &s = piece.segment;
    const int rows = s.row_end - s.row_begin, count = piece.spans, lane = threadIdx.x % 32;
    const int column = (threadIdx.x - 128) * 2, from = column < p.head_dim_v ? column : 0;
    // The states that this lane looks after: of the row `lane / kParts` of a step, and every part
    // that leaves the remainder `lane % kParts`.
    const int my_row = lane / kParts % kRows, my_part = lane % kParts;
#pragma unroll 1
    for (int row = first; row < rows; row += kRows * step) {
      const auto row_at = [&](int i) { return min(row + i * step, rows - 1); };
      const auto state_of = [&](int part) {
        return load_from_l2(d.partial_state + slot_of(part) * kLatentRows + row_at(my_row));
      };
      float top = -infinity(), sum = 0.f, acc[kRows][2] = {};
#pragma unroll
      for (int j = 0; j < kStates; ++j) {
        top = fmaxf(top, state_of(min(my_part + j * kParts, count - 1)).x);
      }
#pragma unroll
      for (int mask = 1; mask < kParts; mask *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kAll, top, mask));
      }
      if (top == -infinity()) top = 0.f;
#pragma unroll 1
      for (int part = 0; part < count; part += kParts) {
        float2 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const i64 slot = slot_of(min(part + i % kParts, count - 1));
          const i64 at = slot * kLatentRows + row_at(i / kParts);
          v[i] = load_from_l2(
              reinterpret_cast<const float2 *>(d.partial_out + at * p.head_dim_v + from));
        }
        float weight = 0.f;
        if (part + my_part < count) {
          const float2 state = state_of(part + my_part);
          weight = exp2_approx(state.x - top) * state.y;
        }
        sum += weight;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float w = __shfl_sync(kAll, weight, i);
          acc[i / kParts][0] += w * v[i].x, acc[i / kParts][1] += w * v[i].y;
        }
      }
#pragma unroll
      for (int mask = 1; mask < kParts; mask *= 2) sum += __shfl_xor_sync(kAll, sum, mask);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float total = __shfl_sync(kAll, sum, i * kParts);
        const float largest = __shfl_sync(kAll, top, i * kParts);
        if (row + i * step >= rows) continue;
        float lse = lse_of(largest, total), norm = total == 0.f ? 0.f : 1.f / total;
        const int in_segment = s.row_begin + row + i * step, in_request = in_segment / p.group;
        const int head = s.kv_head * p.group + in_segment - in_request * p.group;
        const i64 token = static_cast<i64>(s.request.q_begin) + in_request;
        norm *= with_sink(head, lse);
        if (column < p.head_dim_v) {
          store_pair(p, p.out + token * p.out_token_stride + head * p.out_head_stride + column * 2,
                     acc[i][0] * norm, acc[i][1] * norm);
        }
        if (column == 0) store_lse(p, token, head, lse);
      }
    }
  }
};
