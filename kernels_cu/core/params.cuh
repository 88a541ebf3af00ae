// What a launch passes: one struct a kernel, by value. Fields of 8 bytes come first; the host packs
// the same fields in the same order. Strides are in bytes.
#pragma once

#include "divide.cuh"
#include "numeric.cuh"

struct MergeParams {
  char *out;               // [tokens, heads, head_dim]
  const char *prefix_out;  // [tokens, heads, head_dim]
  const char *suffix_out;  // [tokens, heads, head_dim]
  const char *prefix_lse;  // [heads, tokens] fp32
  const char *suffix_lse;  // [heads, tokens] fp32
  char *out_lse;           // [heads, tokens] fp32, or null
  const char *sink;        // [heads], or null
  const float *out_scale;  // [1], or null: out_scale_value
  i64 out_token_stride, out_head_stride;
  i64 prefix_token_stride, prefix_head_stride;
  i64 suffix_token_stride, suffix_head_stride;
  i64 prefix_lse_head_stride, prefix_lse_token_stride;
  i64 suffix_lse_head_stride, suffix_lse_token_stride;
  i64 out_lse_head_stride, out_lse_token_stride;
  i64 sink_stride;
  i32 tokens;
  i32 heads;
  i32 head_dim;
  i32 prefix_tokens;  // tokens from here on have no prefix
  i32 sink_type;      // ScalarType
  i32 vectorised;     // pointers and strides allow wide accesses
  float out_scale_value;
};

struct CacheWriteSide {
  const char *source;  // [tokens, heads, head_dim]
  char *cache;         // [num_blocks, block_size, heads, head_dim]
  const char *scale;   // [1] or [heads] fp32, or null: scale_value
  i64 source_token_stride, source_head_stride;
  i64 block_stride, slot_stride, head_stride;
  i64 scale_stride;  // 0: one scale for all heads
  i32 head_dim;
  float scale_value;
};

struct CacheWriteParams {
  CacheWriteSide side[2];  // key, value
  const char *slots;       // [num_tokens] int32 or int64; negative = skip
  i64 num_slots;           // of the cache: slots from here on are not written either
  u64 block_inverse;       // 2^64 / block_size, rounded up (0 for 1)
  i32 num_tokens;
  i32 heads;
  i32 block_size;
  i32 wide_slots;  // int64
  i32 vectorised;
  i32 unused;
};

// Where the work of an attention launch is written down, for one mainloop.
struct Schedule {
  i64 total;        // units of all requests
  i32 equal;        // every request has the same number of units
  i32 splits;       // tile mainloop: pieces of an item, at most
  i64 prefix[1];    // [batch + 1] units before each request
};

struct AttentionParams {
  const char *q;           // [total_q, heads_q, head_dim]
  const char *k;           // [total_k, heads_kv, head_dim] or [pages, page_size, ...]
  const char *v;
  char *out;               // [total_q, heads_q, head_dim_v]
  char *lse;               // [heads_q, total_q] fp32, or null
  const i32 *cu_seqlens_q; // [batch + 1]
  const i32 *cu_seqlens_k; // [batch + 1], null if paged
  const i32 *seqused_k;    // [batch], or null
  const i32 *block_table;  // [batch, pages of a request], null if packed
  const char *alibi;       // [heads_q] or [batch, heads_q] fp32, or null
  const char *sink;        // [heads_q], or null
  const char *q_descale;   // [batch, heads_kv] fp32, or null: the value below
  const char *k_descale;
  const char *v_descale;
  const Schedule *schedule;  // null: every block derives it from the lengths
  float *partial_out;        // [slots, rows, head bucket]
  float *partial_lse;        // [slots, rows]
  u32 *counters;             // zero between launches
  i64 q_token_stride, q_head_stride;
  i64 k_page_stride, k_token_stride, k_head_stride;
  i64 v_page_stride, v_token_stride, v_head_stride;
  i64 out_token_stride, out_head_stride;
  i64 lse_head_stride;
  i64 table_stride;
  i64 alibi_batch_stride;
  i64 q_descale_batch_stride, q_descale_head_stride;
  i64 k_descale_batch_stride, k_descale_head_stride;
  i64 v_descale_batch_stride, v_descale_head_stride;
  i32 batch, heads_kv, group;
  i32 head_dim, head_dim_v;
  i32 page_size;                 // 1 if packed
  Divisor by_group, by_page;
  i32 window_left, window_right; // an open side is a large number
  i32 min_rows, max_rows;        // rows a request must have to be this launch's
  i32 max_splits;                // pieces of an item, at most; 1: whole items
  i32 max_slots;                 // partial states that fit
  i32 align_units;               // up to so many units in all, equal lengths are cut at item ends
  i32 q_type, out_type, sink_type;
  i32 wide_q, wide_kv, wide_out; // rows allow accesses of 16, 16 and 8 bytes
  float softmax_scale, softcap;
  float q_descale_value, k_descale_value, v_descale_value;
};

// Units of each request for the two mainloops; grid = how many of them are wanted.
struct ScheduleParams {
  Schedule *schedule[2];
  const i32 *cu_seqlens_q;
  const i32 *cu_seqlens_k;
  const i32 *seqused_k;
  i32 decodes[2];     // whether units are those of the decode mainloop
  i32 min_rows[2], max_rows[2];
  i32 unit_rows[2], unit_keys[2];
  i32 batch, heads_kv, group;
  i32 window_left, window_right;
  i32 unused;
};
