// The ends of segments that spans share: states of spans, then the result.
//
// A segment that one span has whole is final. Of a split one every span leaves a normalised output
// and its state (largest score to base 2, sum of weights) in a slot of its own: 2c where span c
// begins inside of the segment, else 2c + 1. The last to arrive merge the slots in the order of the
// keys. A log-sum-exp instead of the state would be rounded once more.
#pragma once

#include "arch/memory_sm80.cuh"
#include "block/decode_rows.cuh"
#include "block/epilogue.cuh"
#include "block/spans.cuh"

// What a span has of a segment; tiles of the line.
struct Piece {
  Request request;
  int unit;
  int row_begin, row_end;
  int first, last;  // of the segment
  int start, end;   // of the piece
  int first_key;    // of the segment
  int chunk, chunks;

  // From tile `at` on, of a span up to tile `span_end`, where tile `line` is the request's first.
  __device__ __forceinline__ void begin(const AttentionParams &p, const DecodeParams &d,
                                        const RequestWork &w, int line, int at, int span_end) {
    const int segment = (at - line) / w.tiles;
    request = w.request;
    const int block = w.chunks == 1 ? segment : over_rare(segment, w.chunks);
    chunks = w.chunks;
    chunk = segment - block * chunks;
    unit = w.row_blocks == 1 ? block : over_rare(block, w.row_blocks);
    row_begin = (block - unit * w.row_blocks) * d.row_block;
    row_end = min(w.request.q_len * p.group, row_begin + d.row_block);
    first = line + segment * w.tiles;
    last = first + w.tiles;
    start = at;
    end = min(last, span_end);
    first_key = (w.first_tile + chunk * w.tiles) << d.tile_shift;
  }

  // Of all keys of its rows.
  __device__ __forceinline__ bool whole() const {
    return start == first && end == last && chunks == 1;
  }
};

// kManyRows: segments have many rows, and mostly few parts.
template <int kWarps, bool kManyRows = false>
class SpanMerge {
 public:
  static constexpr int kPad = 4;  // floats, against bank conflicts
  static constexpr int kWide = 128 + kPad;

  // In shared memory: `values` [warps * kWide], `states` [warps].
  __device__ __forceinline__ SpanMerge(const AttentionParams &p, const DecodeParams &d,
                                       float *values, float2 *states)
      : p(p), d(d), values_(values), states_(states) {}

  // Rows of requests without keys, dealt to all blocks.
  __device__ __forceinline__ void write_empty(const i32 *prefix, int cta) const {
    const int lane = threadIdx.x % 32, grid = gridDim.x;
#pragma unroll 1
    for (int first = cta; first < p.batch; first += 32 * grid) {
      const int mine = first + lane * grid;
      const bool none = mine < p.batch && prefix[mine] == prefix[mine + 1];
      u32 found = __ballot_sync(kAll, none);
      while (found) {
        const int request = first + (__ffs(found) - 1) * grid;
        found &= found - 1;
        const RequestWork w = request_work(p, d, request);
        if (w.segments) write_nothing(w.request);
      }
    }
  }

  // The end of a piece that is not whole, of block `cta`; `word` is in shared memory. All threads
  // of the block.
  template <class Cut>
  __device__ __forceinline__ void merge_spans(const Cut &cut, const Piece &piece,
                                              i32 *word) const {
    int first = piece_block(piece), count = piece.chunks;
    if (count == 1) cut.owners(piece.first, piece.last, first, count);
    const int rows = piece.row_end - piece.row_begin, all_rows = rows << d.unit_shift;
    // Of many parts each of the last arrivers takes one row. They wait for blocks that run already:
    // the grid is no larger than what runs at the same time. Not for chunks, of which a block may
    // have several: it would wait for itself.
    const bool shared = piece.chunks == 1 && all_rows > 1 && count * all_rows > 32 * kWarps &&
                        count >= 4 * all_rows;
    const int helpers = shared ? all_rows : 1;
    if (threadIdx.x == 0) {
      u32 *const counter = d.arrivals + first;
      const int before = static_cast<int>(arrive_and_wrap(counter, count - 1));
      const int turn = before + helpers - count;
      if (turn >= 0 && before != count - 1) {
        while (load_acquire(counter) != 0) {
        }
      }
      *word = turn;
    }
    __syncthreads();
    const int turn = *word;
    if (turn < 0) return;
    if (kManyRows && count <= kFewParts) {
      merge_few(piece, first, count, all_rows);
      return;
    }
    const int warp = threadIdx.x / 32;
    // Warps a row: a power of two. With several, every warp takes one row and meets the others.
    const int split = 32 - __clz(all_rows - 1);  // log2 of the rows, rounded up
    const int each_shift = shared ? kWarpsShift : max(0, kWarpsShift - split);
    int row = shared ? turn : warp >> each_shift;
    do {
      merge_row(piece, first, count, row, row < all_rows, each_shift);
      row += kWarps;
    } while (each_shift == 0 && row < all_rows);
    __syncthreads();
  }

 protected:
  static constexpr int kWarpsShift = kWarps == 8 ? 3 : 2;
  static constexpr int kAtOnce = 16;  // partial rows that are asked for together
  static constexpr int kFewParts = 4, kRowsAtOnce = kAtOnce / kFewParts;
  static constexpr u32 kAll = 0xffffffffu;

  // Which of the (request, unit) pairs, where there are chunks; they have one row block.
  __device__ __forceinline__ int piece_block(const Piece &piece) const {
    return piece.request.index * d.units + piece.unit;
  }

  __device__ __forceinline__ static float lse_of(float shift, float sum) {
    return sum == 0.f ? -infinity() : fmaf(shift, kLn2, logf(sum));
  }

  __device__ __forceinline__ u32 partial_row(u32 slot, u32 row) const {
    return slot * (d.row_block << d.unit_shift) + row;
  }

  __device__ __forceinline__ void store_four(char *to, const float (&value)[4]) const {
    if (d.out_wide) {
      uint2 both;
      both.x = p.out_type == kFp16 ? pack_fp16(value[0], value[1]) : pack_bf16(value[0], value[1]);
      both.y = p.out_type == kFp16 ? pack_fp16(value[2], value[3]) : pack_bf16(value[2], value[3]);
      *reinterpret_cast<uint2 *>(to) = both;
    } else {
      store_pair(p, to, value[0], value[1]);
      store_pair(p, to + 4, value[2], value[3]);
    }
  }

  // Four columns of the result, and with the first ones the log-sum-exp.
  __device__ __forceinline__ void store_final(const Piece &piece, int side, int row, int column,
                                              float (&value)[4], float lse) const {
    const int in_request = token_of(d, piece.row_begin + row);
    const int head = ((piece.unit << d.unit_shift) + side) * p.group + piece.row_begin + row -
                     in_request * p.group;
    const i64 token = static_cast<i64>(piece.request.q_begin) + in_request;
    if (p.sink) {
      const float2 found = with_sink(lse, load_sink(p, head));
#pragma unroll
      for (int e = 0; e < 4; ++e) value[e] *= found.x;
      lse = found.y;
    }
    store_four(p.out + token * p.out_token_stride + head * p.out_head_stride + column * 2, value);
    if (column == 0) store_lse(p, token, head, lse);
  }

  // The weight of the keys, and the log-sum-exp of all. Rare enough to be one function.
  __device__ __noinline__ static float2 with_sink(float lse, float sink) {
    StateSum state(fmaxf(lse, sink));
    const float part = state.add(lse);
    state.add(sink);
    return {state.weight(part), state.lse()};
  }

  __device__ __forceinline__ void write_nothing(const Request &request) const {
    const int quads = p.head_dim_v / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < request.q_len * p.heads_q * quads; i += 32 * kWarps) {
      const int row = i / quads, column = (i - row * quads) * 4;
      const int in_request = row / p.heads_q, head = row - in_request * p.heads_q;
      const i64 token = static_cast<i64>(request.q_begin) + in_request;
      const float zero[4] = {};
      store_four(p.out + token * p.out_token_stride + head * p.out_head_stride + column * 2, zero);
      if (column == 0) store_lse(p, token, head, p.sink ? load_sink(p, head) : -infinity());
    }
  }

  // Where the parts of a row lie.
  struct Parts {
    u32 opening, step, later;  // rows; the first span's slot may be its second one, so much later

    __device__ __forceinline__ u32 row_of(int part) const {
      return opening + part * step + (part == 0 ? later : 0);
    }
  };

  __device__ __forceinline__ Parts parts_of(const Piece &piece, int first, int row) const {
    const u32 rows = partial_row(1, 0);
    if (piece.chunks > 1) return {partial_row(first * d.chunks, row), rows, 0};
    return {partial_row(2 * first, row), 2 * rows, rows};
  }

  // Sums of every each-th slot of one row, from the warp's own on; then, by barriers, of its warps.
  __device__ __forceinline__ void merge_row(const Piece &piece, int first, int count, int all_row,
                                            bool valid, int each_shift) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int each = 1 << each_shift, sub = warp & (each - 1);
    const int side = all_row & ((1 << d.unit_shift) - 1), row = all_row >> d.unit_shift;
    const Parts parts = parts_of(piece, first, side * d.row_block + row);
    const int mine = valid ? (count - sub + each - 1) >> each_shift : 0;
    float shift = 0.f;
#pragma unroll 1
    for (int base = 0; base < p.head_dim_v; base += 128) {
      const int column = base + lane * 4, from = column < p.head_dim_v ? column : 0;
      float acc[4] = {}, sum = 0.f;
#pragma unroll 1
      for (int part = 0; part < mine; part += kAtOnce) {
        // Asked for before their weights are known: one way to the L2 cache, not three.
        float4 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const u64 at = parts.row_of(sub + min(part + i, mine - 1) * each);
          v[i] = load_from_l2(
              reinterpret_cast<const float4 *>(d.partial_out + at * p.head_dim_v + from));
        }
        float2 state = {-infinity(), 0.f};
        if (lane < kAtOnce && part + lane < mine) {
          state = load_from_l2(d.partial_state + parts.row_of(sub + (part + lane) * each));
        }
        if (base == 0 && part == 0) shift = largest_score(count, parts);
        const float weight = exp2_approx(state.x - shift) * state.y;
        sum += weight;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float w = __shfl_sync(kAll, weight, i);
          acc[0] += w * v[i].x, acc[1] += w * v[i].y, acc[2] += w * v[i].z, acc[3] += w * v[i].w;
        }
      }
#pragma unroll
      for (int mask = 16; mask; mask /= 2) sum += __shfl_xor_sync(kAll, sum, mask);
      if (each > 1) {
        if (base) __syncthreads();  // the sums of the columns before have been read
        *reinterpret_cast<float4 *>(values_ + warp * kWide + lane * 4) =
            make_float4(acc[0], acc[1], acc[2], acc[3]);
        if (lane == 0) states_[warp].y = sum;
        __syncthreads();
        if (sub) continue;
        for (int w = 1; w < each; ++w) {
          const float4 v =
              *reinterpret_cast<const float4 *>(values_ + (warp + w) * kWide + lane * 4);
          acc[0] += v.x, acc[1] += v.y, acc[2] += v.z, acc[3] += v.w;
          sum += states_[warp + w].y;
        }
      }
      if (!valid || column >= p.head_dim_v) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] = sum == 0.f ? 0.f : __fdividef(acc[e], sum);
      store_final(piece, side, row, column, acc, lse_of(shift, sum));
    }
  }

  // Few parts of many rows: a warp asks for those of several rows together.
  __device__ __forceinline__ void merge_few(const Piece &piece, int first, int count,
                                            int all_rows) const {
    const int column = threadIdx.x % 32 * 4, from = column < p.head_dim_v ? column : 0;
#pragma unroll 1
    for (int begin = threadIdx.x / 32; begin < all_rows; begin += kRowsAtOnce * kWarps) {
      float4 v[kRowsAtOnce][kFewParts];
      float2 state[kRowsAtOnce][kFewParts];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const int all_row = min(begin + r * kWarps, all_rows - 1);
        const int side = all_row & ((1 << d.unit_shift) - 1), row = all_row >> d.unit_shift;
        const Parts parts = parts_of(piece, first, side * d.row_block + row);
#pragma unroll
        for (int i = 0; i < kFewParts; ++i) {
          const u64 at = parts.row_of(min(i, count - 1));
          v[r][i] = load_from_l2(
              reinterpret_cast<const float4 *>(d.partial_out + at * p.head_dim_v + from));
          state[r][i] = load_from_l2(d.partial_state + at);
        }
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const int all_row = begin + r * kWarps;
        float most = -infinity(), sum = 0.f, acc[4] = {};
#pragma unroll
        for (int i = 0; i < kFewParts; ++i) {
          if (i >= count) state[r][i] = {-infinity(), 0.f};
          most = fmaxf(most, state[r][i].x);
        }
        const float shift = most == -infinity() ? 0.f : most;
#pragma unroll
        for (int i = 0; i < kFewParts; ++i) {
          const float w = exp2_approx(state[r][i].x - shift) * state[r][i].y;
          sum += w;
          acc[0] += w * v[r][i].x, acc[1] += w * v[r][i].y;
          acc[2] += w * v[r][i].z, acc[3] += w * v[r][i].w;
        }
        if (all_row >= all_rows || column >= p.head_dim_v) continue;
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[e] = sum == 0.f ? 0.f : __fdividef(acc[e], sum);
        store_final(piece, all_row & ((1 << d.unit_shift) - 1), all_row >> d.unit_shift, column,
                    acc, lse_of(shift, sum));
      }
    }
  }

  // Of all parts of a row.
  __device__ __forceinline__ float largest_score(int count, const Parts &parts) const {
    constexpr int kEach = kMostPieces / 32;
    float top = -infinity();
#pragma unroll 1
    for (int part = threadIdx.x % 32; part < count; part += 32 * kEach) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const u32 row = parts.row_of(min(part + 32 * i, count - 1));
        top = fmaxf(top, load_from_l2(d.partial_state + row).x);
      }
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, mask));
    return top == -infinity() ? 0.f : top;
  }

  const AttentionParams &p;
  const DecodeParams &d;
  float *const values_;
  float2 *states_;
};
