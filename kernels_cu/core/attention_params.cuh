// What attention_fwd_sm80 and attention_combine are passed, by value. Fields of 8 bytes come first;
// the host packs the same fields in the same order. Strides are in bytes.
#pragma once

#include "numeric.cuh"

struct AttentionParams {
  const char *q;             // [total_q, heads_q, head_dim]
  const char *k;             // [total_k, heads_kv, head_dim], or [blocks, page, ...]
  const char *v;             // the same with head_dim_v
  char *out;                 // [total_q, heads_q, head_dim_v]
  char *lse;                 // [heads_q, total_q] fp32, or null
  const i32 *cu_seqlens_q;   // [batch + 1] i32
  const i32 *cu_seqlens_k;   // [batch + 1] i32, or null
  const i32 *seqused_k;      // [batch] i32, or null
  const char *block_table;   // [batch, columns] i32, or null: packed keys
  const char *alibi_slopes;  // [heads_q] or [batch, heads_q] fp32, or null
  const char *sink;          // [heads_q], or null
  const char *q_descale;     // [batch, heads_kv] fp32, or null: part of softmax_scale
  const char *k_descale;     // the same
  const char *v_descale;     // the same, or null: v_scale
  // [splits, total_q, heads_q, head_dim_v], or null: never split. Of spans [slots, row_block, ...].
  float *partial_out;
  float *partial_lse;  // the same without the last; of spans float2, DecodeParams::partial_state
  i64 q_token_stride, q_head_stride;
  i64 k_block_stride, k_token_stride, k_head_stride;
  i64 v_block_stride, v_token_stride, v_head_stride;
  i64 out_token_stride, out_head_stride;
  i64 lse_head_stride, lse_token_stride;
  i64 table_row_stride;
  i64 alibi_batch_stride, alibi_head_stride, sink_stride;
  i64 q_descale_batch_stride, q_descale_head_stride;
  i64 k_descale_batch_stride, k_descale_head_stride;
  i64 v_descale_batch_stride, v_descale_head_stride;
  i32 batch;
  i32 total_q;
  i32 heads_q;
  i32 heads_kv;
  i32 group;
  i32 head_dim;
  i32 head_dim_v;
  i32 page_size;
  i32 window_left;       // -1: open
  i32 window_right;      // -1: open
  i32 chunk;             // keys a split takes at most: a multiple of the key tile
  i32 blocks_a_request;  // row blocks of each request, or 0: by cu_seqlens_q
  i32 row_block;         // rows a CTA takes, for the combine kernel
  i32 q_type;            // ScalarType
  i32 out_type;
  i32 sink_type;
  i32 q_vectorised;  // pointer and strides allow loads of 8 elements; of 16 bytes for k and v
  i32 k_vectorised;
  i32 v_vectorised;
  i32 out_vectorised;   // stores of 2 elements
  float softmax_scale;
  float v_scale;
  float softcap;  // 0: off
  i32 skipped_rows;  // requests with so many rows (tokens times group) are left to another launch
};
