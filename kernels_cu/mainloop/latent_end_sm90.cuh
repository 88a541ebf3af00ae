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

  const AttentionParams &p;
  const DecodeParams &d;
  const LatentParams &l;
  const LatentTiles &tiles;

  // What a thread holds of the outputs of a piece goes where it belongs.
  __device__ __forceinline__ void store(const LatentValues<V> &values, const LatentPiece &piece,
                                        const float (&norm)[2], const float2 (&state)[2]) const {
    const Segment &s = piece.segment;
    const int first_column = fresh(values.half * kColumns + values.lane % 4 * 2);
    const bool with_state = values.half == 0 && values.lane % 4 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int in_tile = values.warp * 16 + h * 8 + values.lane / 4, row = s.row_begin + in_tile;
      if (row >= s.row_end) continue;
      float value[kPairs][2];
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        value[n][0] = values.acc[4 * n + 2 * h], value[n][1] = values.acc[4 * n + 2 * h + 1];
      }
      if (s.slot < 0) {
        store_row<kPairs>(p, s, s.kv_head, row, {lse_of(state[h].x, state[h].y), norm[h]},
                          first_column, with_state, value, [](int n) { return n * 8; });
      } else {
        const i64 at = static_cast<i64>(s.slot) * kLatentRows + in_tile;
        if (with_state) d.partial_state[at] = state[h];
        float *const to = d.partial_out + at * p.head_dim_v;
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
          const int column = first_column + n * 8;
          if (column < p.head_dim_v) {
            *reinterpret_cast<float2 *>(to + column) =
                make_float2(value[n][0] * norm[h], value[n][1] * norm[h]);
          }
        }
      }
    }
  }

  // After `store` of a piece that is not whole. A function of its own: what it could keep in registers
  // from piece to piece would cost the products theirs.
  __device__ __noinline__ static void merge(const AttentionParams &p, const DecodeParams &d,
                                            const LatentParams &l, char *smem, u32 turn) {
    const LatentTiles tiles(smem);
    LatentEnd{p, d, l, tiles}.merge(tiles.piece(turn), blockIdx.x % l.side);
  }

  __device__ __forceinline__ void merge(const LatentPiece &piece, int lane_of_side) const {
    const int rows = piece.segment.row_end - piece.segment.row_begin, count = piece.spans;
    // Of many parts each of the last arrivers takes some rows. They wait for blocks that run already:
    // the grid is no larger than what runs at the same time. The first two never wait: theirs may be
    // the ends of spans that have more to do.
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
  __device__ __forceinline__ static float lse_of(float top, float sum) {
    return sum == 0.f ? -infinity() : fmaf(top, kLn2, logf(sum));
  }

  // Rows first, first + step, ...; kRows and kParts slots of each at a time, a power of two. A thread
  // takes two columns.
  template <int kRows, int kParts, class SlotOf>
  __device__ __forceinline__ void merge_rows(const LatentPiece &piece, int first, int step,
                                             const SlotOf &slot_of) const {
    constexpr int kAtOnce = kRows * kParts;
    const Segment &s = piece.segment;
    const int rows = s.row_end - s.row_begin, count = piece.spans, lane = threadIdx.x % 32;
    const int column = (threadIdx.x - 128) * 2, from = column < p.head_dim_v ? column : 0;
    // The state that this lane looks after: of the row `lane / kParts` of a step, and every part
    // that leaves the remainder `lane % kParts`.
    const int my_row = lane / kParts % kRows, my_part = lane % kParts;
#pragma unroll 1
    for (int row = first; row < rows; row += kRows * step) {
      const auto row_at = [&](int i) { return min(row + i * step, rows - 1); };
      float top = -infinity();
#pragma unroll 1
      for (int part = my_part; part < count; part += kParts) {
        top = fmaxf(top, load_from_l2(d.partial_state + slot_of(part) * kLatentRows +
                                      row_at(my_row)).x);
      }
#pragma unroll
      for (int mask = 1; mask < kParts; mask *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kAll, top, mask));
      }
      if (top == -infinity()) top = 0.f;
      float sum = 0.f, acc[kRows][2] = {};
#pragma unroll 1
      for (int part = 0; part < count; part += kParts) {
        float2 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const i64 at = static_cast<i64>(slot_of(min(part + i % kParts, count - 1))) * kLatentRows +
                         row_at(i / kParts);
          v[i] = load_from_l2(
              reinterpret_cast<const float2 *>(d.partial_out + at * p.head_dim_v + from));
        }
        float weight = 0.f;
        if (part + my_part < count) {
          const float2 state = load_from_l2(d.partial_state +
                                            slot_of(part + my_part) * kLatentRows + row_at(my_row));
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
        if (p.sink) {
          const float sink = load_sink(p, head);
          StateSum state(fmaxf(lse, sink));
          const float part = state.add(lse);
          state.add(sink);
          norm *= state.weight(part);
          lse = state.lse();
        }
        if (column < p.head_dim_v) {
          store_pair(p, p.out + token * p.out_token_stride + head * p.out_head_stride + column * 2,
                     acc[i][0] * norm, acc[i][1] * norm);
        }
        if (column == 0) store_lse(p, token, head, lse);
      }
    }
  }
};
