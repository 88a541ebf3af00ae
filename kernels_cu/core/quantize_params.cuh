// What fp8_scale and quantize_fp8 are passed, by value. Strides are in bytes.
#pragma once

#include "numeric.cuh"

struct QuantizeParams {
  const char *source;  // [tokens, heads, head_dim]
  char *out;           // the same in 8 bits
  const char *scale;   // [groups] fp32, or null: from `largest`, or scale_value where that is null
  float *made;         // [groups]: scales that were found, or null
  float *largest;      // [groups, pieces]: of absolute values, or null
  i64 source_token_stride, source_head_stride;
  i64 out_token_stride, out_head_stride;
  i64 scale_stride;
  i32 tokens;
  i32 group_heads;  // of each group
  i32 head_dim;
  i32 pieces;      // of the rows of a group
  i32 vectorised;  // 16 bytes of the source at a time
  i32 rotated;     // elements of a row that a lane has, where rows are rotated: 2, 4 or 8; else 0
  float scale_value;
  float rotation;  // what rotated rows are multiplied by
  i32 unused;
};
