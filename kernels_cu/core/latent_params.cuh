// What the kernels of latent attention are passed besides AttentionParams, by value: the part of
// the queries that meets v. There q and k are the rope part, v is the latent one.
#pragma once

#include "numeric.cuh"

struct LatentParams {
  const char *q_v;  // [total_q, heads_q, head_dim_v]
  i64 token_stride, head_stride;
  i32 vectorised;    // pointer and strides allow loads of 8 elements
  i32 box_keys;      // of a TMA box; 0 where none is used
  i32 box_panels;    // of 128 bytes of the latent that it has
  i32 outside_page;  // a block past the last one
  i32 side;          // blocks that take the row blocks of a segment, side by side
  u32 page_inverse;  // 2^32 over the page size, rounded up
};
