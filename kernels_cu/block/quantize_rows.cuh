// Rows (token, head) of a group of heads that share a scale; a warp takes one at a time.
#pragma once

#include "core/memory.cuh"
#include "core/quantize_params.cuh"

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
}

struct QuantizeRow {
  const char *source;
  char *out;

  __device__ __forceinline__ QuantizeRow(const QuantizeParams &p, int group, int row) {
    const i64 token = row / p.group_heads;
    const i64 head = group * p.group_heads + row % p.group_heads;
    source = p.source + token * p.source_token_stride + head * p.source_head_stride;
    out = p.out + token * p.out_token_stride + head * p.out_head_stride;
  }
};
