// What the kernels of shared prefixes are passed besides AttentionParams and DecodeParams, by
// value.
//
// Requests stand in an order in which the members of every group are neighbours; place i is the
// i-th of that order. A group shares a range of keys; groups of the next level are inside of it and
// share keys behind that range.
#pragma once

#include "numeric.cuh"

constexpr int kMostLevels = 3;

// Of the results of a token and a KV head: where partial ones are, so many of each level, then of
// own keys; in rows of `partial_out`, of the first head of the group.
struct __align__(16) MergeUnit {
  i32 first[kMostLevels + 1], count[kMostLevels + 1];
  i32 half[kMostLevels];  // rows from one warpgroup's to the other's; 0: they have other rows
  i32 total;              // -1: nothing to be done
  i32 token;              // row of q
  i32 unused[3];
};

// A request with keys of its own.
struct __align__(16) OwnRequest {
  i32 q_begin, q_len, kv_len;
  i32 first_key;     // of its own
  i32 request;
  i32 place_levels;  // 4 times its place, and how many levels it shares
  i32 line, tiles;   // of the first KV head, on the line; of each head

  __device__ __forceinline__ int place() const { return place_levels >> 2; }
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
  // Made by block/shared_schedule.cuh
  OwnRequest *own;       // [batch], of those that have some
  OwnStart *own_starts;  // [4 * ctas]
  i32 *group_line;       // [levels * batch + 1] blocks of shared keys before each group
  int4 *groups;          // [levels * batch, 2] first key, last key + 1, first of `tokens`, count;
                         // request
  int4 *group_starts;    // [ctas] begin and end of its span, group
  i32 *tokens;           // [levels * total_q] rows of q, those of a group one after the other
  MergeUnit *units;      // [batch * most_tokens * heads_kv]
  float *partial_out;    // [rows, head_dim]
  float2 *partial_state;  // [rows] largest score to base 2, sum of weights
  u32 *arrivals;          // [1], 0 between launches
  i32 levels;
  i32 common_keys;     // without `tree`
  i32 added_keys;      // of every request besides seqused_k
  i32 box_shift;       // log2 of the keys of a TMA box of shared keys
  i32 tile_rows;       // partial rows of shared keys, before those of own keys
  i32 most_tokens;     // of a request
  i32 ctas;            // of the attention
  float scale;         // of scores, to base 2, as they are or capped
  float cap_scale;     // of scores that are capped, over the cap
};
