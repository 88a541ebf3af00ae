// What the kernels of shared prefixes are passed besides AttentionParams and DecodeParams, by
// value.
//
// Requests stand in an order in which the members of every group are neighbours; place i is the
// i-th of that order. A group shares a range of keys; groups of the next level are inside of it and
// share keys behind that range.
#pragma once

#include "numeric.cuh"

constexpr int kMostLevels = 3;

// Of a row of the result: where partial ones are, so many of each level, then of own keys; in rows
// of `partial_out`.
struct __align__(16) MergeRow {
  i32 first[kMostLevels + 1], count[kMostLevels + 1];
  i32 half[kMostLevels];  // rows from one warpgroup's to the other's; 0: they have other rows
  i32 total;              // -1: nothing to be done
  i32 token, head;        // of q
  // Of those that are merged where their own keys are: bits of the warps that have them, and where
  // on their line those end.
  i32 warps, line_end;
};

// A request with keys of its own: where a window hides the first shared ones, those before the
// shared ones that it sees, then those behind.
struct __align__(16) OwnRequest {
  i32 q_begin, q_len, kv_len;
  i32 first_key;  // behind the shared ones
  i32 request;
  i32 place_levels;  // 16 times its place, 4 times the first level that it shares, and the last + 1
  i32 line, tiles;   // of the first row block and KV head, on the line; of each
  i32 early_key, early_tiles;  // before the shared ones
  i32 row_blocks;
  i32 unused;

  __device__ __forceinline__ int place() const { return place_levels >> 4; }
  __device__ __forceinline__ int first_level() const { return place_levels >> 2 & 3; }
  __device__ __forceinline__ int levels() const { return place_levels & 3; }
};

// What a warp takes of them.
struct __align__(16) OwnStart {
  int4 span;  // begin and end, index of the first request
  OwnRequest request;
};

struct SharedParams {
  const i32 *order;  // [batch] request of each place, or null: as they stand
  // [levels, batch] of a place: members of the group that begins here, 0: in no group, -n: n places
  // behind the first; then where its keys end. Or null: all requests share common_keys.
  const int2 *tree;
  // Made by mainloop/shared_schedule.cuh; every CTA reads what it is to do, and nothing else.
  OwnRequest *own;       // [batch + ctas], of those that have some
  OwnStart *own_starts;  // [4 * ctas]
  int4 *groups;          // [levels * batch + ctas, 2] first key, last key + 1, first of `tokens`,
                         // count; request, its begin and end on the line of shared keys
  int4 *group_starts;    // [ctas, 4]; see block/shared_work.cuh
  int4 *tokens;          // [levels * total_q + 128 * ctas] row of q, position, request
  MergeRow *rows;        // [2, batch, heads_kv, most_tokens * group] where own keys are; elsewhere
  float *partial_out;    // [rows, head_dim]
  float2 *partial_state;  // [rows] largest score to base 2, sum of weights
  u32 *arrivals;          // [2] with shared keys, with own ones; 0 between launches
  i32 levels;
  i32 common_keys;     // without `tree`
  i32 added_keys;      // of every request besides seqused_k
  i32 box_shift;       // log2 of the keys of a TMA box of shared keys
  i32 tile_rows;       // partial rows of shared keys, before those of own keys
  i32 most_tokens;     // of a request
  i32 row_blocks;      // of own keys and a request, at most
  i32 ahead;           // the schedule is there already; 0: every CTA makes its part
  i32 near;            // rows are merged where their own keys are, if those are in one CTA
  i32 ctas;            // of the attention
  float scale;         // of scores, to base 2, as they are or modified
  float modify_scale;  // of scores that are capped, over the cap; or of those with ALiBi, to base 2
};
