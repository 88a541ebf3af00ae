// Which work a CTA does: a row block of one request and KV head, and a range of its keys.
//
// Rows are (token, head of the group) pairs, tokens outermost, so that a decode step of grouped
// heads fills a block too. Key tiles and chunks lie at multiples of their size from key 0, so the
// bits of a row do not depend on the block it is in, nor on its neighbours.
#pragma once

#include "core/attention_params.cuh"

struct Request {
  int index;
  int q_begin, q_len;
  int kv_begin, kv_len;  // kv_begin: first row of packed keys
};

struct KeyRange {
  int begin, end;  // end <= begin: none
};

struct Segment {
  Request request;
  int kv_head;
  int row_begin, row_end;  // of the request's q_len * group
  int kv_begin, kv_end;
  int free_begin, free_end;  // keys that no row masks
  int slot;     // of the partial result; -1: the result itself
  float scale;  // of the scores, without its sign
  bool negate;  // the queries, for a negative scale

  __device__ __forceinline__ void find_free_keys(const AttentionParams &p) {
    const int shift = request.kv_len - request.q_len;
    const int first = row_begin / p.group + shift, last = (row_end - 1) / p.group + shift;
    free_begin = p.window_left < 0 ? 0 : last - p.window_left;
    free_end = p.window_right < 0 ? kv_end : min(kv_end, first + p.window_right + 1);
  }
};

__device__ __forceinline__ Request load_request(const AttentionParams &p, int i) {
  Request r;
  r.index = i;
  r.q_begin = p.cu_seqlens_q[i];
  r.q_len = p.cu_seqlens_q[i + 1] - r.q_begin;
  r.kv_begin = p.cu_seqlens_k ? p.cu_seqlens_k[i] : 0;
  r.kv_len = p.seqused_k ? p.seqused_k[i] : p.cu_seqlens_k[i + 1] - r.kv_begin;
  return r;
}

// The largest i in [0, batch) with start(i) <= target, for starts that never fall; start(0) is
// taken to be. Every lane of the warp takes part.
template <class Start>
__device__ __forceinline__ int find_last(int batch, i64 target, Start start) {
  const int lane = threadIdx.x & 31;
  int low = 0, high = batch;
  while (high - low > 1) {
    const int step = (high - low + 31) / 32, at = low + (lane + 1) * step;
    const bool below = at < high && start(at) <= target;
    const int passed = __popc(__ballot_sync(0xffffffffu, below));
    low += passed * step;
    high = min(high, low + step);
  }
  return low;
}

// Keys that the tokens first..last of a request see, all together.
__device__ __forceinline__ KeyRange visible_keys(const AttentionParams &p, const Request &r,
                                                 int first, int last) {
  const int shift = r.kv_len - r.q_len;
  const int begin = p.window_left < 0 ? 0 : max(0, first + shift - p.window_left);
  const int end = p.window_right < 0 ? r.kv_len : min(r.kv_len, last + shift + p.window_right + 1);
  return {begin, end};
}

__device__ __forceinline__ KeyRange block_keys(const AttentionParams &p, const Request &r,
                                               int row_begin, int row_end) {
  return visible_keys(p, r, row_begin / p.group, (row_end - 1) / p.group);
}

// Chunks that a range touches.
__device__ __forceinline__ int count_chunks(const AttentionParams &p, KeyRange keys) {
  return keys.end <= keys.begin ? 0 : (keys.end - 1) / p.chunk - keys.begin / p.chunk + 1;
}

// Row block `index` in the order of the requests, with 0 to 2 empty ones a request: the number of
// earlier ones follows from cu_seqlens_q alone, so nothing needs to be summed up.
template <int kRows>
__device__ __forceinline__ bool find_segment(const AttentionParams &p, int index, int split,
                                          Segment &segment) {
  int request, block;
  if (p.blocks_a_request) {
    request = index / p.blocks_a_request;
    block = index - request * p.blocks_a_request;
  } else {
    const auto start = [&](int i) {
      return static_cast<i64>(p.cu_seqlens_q[i]) * p.group / kRows + i;
    };
    request = find_last(p.batch, index, start);
    block = index - static_cast<int>(start(request));
  }
  segment.request = load_request(p, request);
  const int rows = segment.request.q_len * p.group;
  if (rows <= p.skipped_rows) return false;
  segment.row_begin = block * kRows;
  segment.row_end = min(rows, segment.row_begin + kRows);
  if (segment.row_begin >= rows) return false;
  const KeyRange keys = block_keys(p, segment.request, segment.row_begin, segment.row_end);
  const int chunks = count_chunks(p, keys);
  if (split >= max(1, chunks)) return false;
  const i64 begin = static_cast<i64>(keys.begin / p.chunk + split) * p.chunk;
  segment.kv_begin = static_cast<int>(max(begin, static_cast<i64>(keys.begin)));
  segment.kv_end = static_cast<int>(min(begin + p.chunk, static_cast<i64>(keys.end)));
  segment.find_free_keys(p);
  segment.slot = chunks > 1 ? split : -1;
  return true;
}

// Where a row is: token of the request, and head.
struct RowPlace {
  u32 token, head;
};

// The rows of a segment, 0 being its first one.
struct SegmentRows {
  int count;
  u32 token, head;  // of row 0; the head within its group
  u32 first_head, group;
  u32 inverse;  // 2^32 over the group size, rounded up; 0: it is 1, or not below 2^15

  __device__ __forceinline__ static SegmentRows of(const AttentionParams &p, const Segment &s) {
    const u32 group = p.group, row = s.row_begin, token = row / group;
    return {s.row_end - s.row_begin, token, row - token * group, s.kv_head * group, group,
            group > 1 && group < 1u << 15 ? 0xffffffffu / group + 1 : 0};
  }

  // A product does for the quotient of a number below group + 128; a large group goes into it at
  // most once.
  __device__ __forceinline__ RowPlace operator[](u32 row) const {
    const u32 at = head + row, whole = group == 1 ? at : at >= group;
    const u32 product = __umulhi(at, inverse), tokens = inverse ? product : whole;
    return {token + tokens, first_head + at - tokens * group};
  }
};
