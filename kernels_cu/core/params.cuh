// What a launch passes: one struct a kernel, by value. Fields of 8 bytes come first; the host packs
// the same fields in the same order. Strides are in bytes.
#pragma once

#include "numeric.cuh"

struct MergeParams {
  char *out;               // [tokens, heads, head_dim]
  const char *prefix_out;  // [tokens, heads, head_dim]
  const char *prefix_lse;  // [heads, tokens] fp32
  const char *suffix_out;  // [tokens, heads, head_dim]
  const char *suffix_lse;  // [heads, tokens] fp32
  char *out_lse;           // [heads, tokens] fp32, or null
  const char *sink;        // [heads], or null
  const float *out_scale;  // [1], or null: out_scale_value
  i32 prefix_tokens;       // tokens from here on have no prefix
  float out_scale_value;
  i64 out_token_stride, out_head_stride;
  i64 prefix_token_stride, prefix_head_stride;
  i64 prefix_lse_head_stride, prefix_lse_token_stride;
  i64 suffix_token_stride, suffix_head_stride;
  i64 suffix_lse_head_stride, suffix_lse_token_stride;
  i64 out_lse_head_stride, out_lse_token_stride;
  i32 tokens;
  i32 heads;
  i32 head_dim;
  i32 sink_type;   // ScalarType
  i32 vectorised;  // pointers and strides allow wide accesses
  i32 unused;
};

struct CacheSide {
  i64 source_token_stride, source_head_stride;
  i64 block_stride, slot_stride, head_stride;
  i64 scale_stride;  // 0: one scale for all heads
};

// Two of each: key, value.
struct CacheWriteParams {
  const char *source[2];  // [tokens, heads, head_dim]
  char *cache[2];         // [num_blocks, block_size, heads, head_dim]
  const char *slots;      // [num_tokens] int32 or int64; negative = skip
  const char *scale[2];   // [1] or [heads] fp32, or null: scale_value
  float scale_value[2];
  CacheSide side[2];
  i64 num_slots;      // of the cache: slots from here on are not written either
  u64 block_inverse;  // 2^64 / block_size, rounded up (0 for 1)
  i32 num_tokens;
  i32 heads;
  i32 head_dim[2];
  i32 block_size;
  i32 wide_slots;  // int64
  i32 vectorised;
  i32 unused;
};
