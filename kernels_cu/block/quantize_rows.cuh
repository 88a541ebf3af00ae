// Rows (token, head) of a group of heads that share a scale; a warp takes one at a time.
#pragma once

#include "core/memory.cuh"
#include "core/quantize_params.cuh"

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
}

// A row times a diagonal of signs and a Hadamard matrix, a warp a row: lane l has elements
// kCount * l and after. Dot products of rows stay the same, and what one element holds is spread.
template <ScalarType kIn, int kCount>
__device__ __forceinline__ void rotate_row(const char *row, float factor, float (&value)[kCount]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const u32 at = lane * kCount + i;
    Elements<kIn, 1> in;
    in.load(row + at * kItemBytes<kIn>);
    float one[1];
    in.to_floats(one);
    value[i] = (at + 1) * 0x9e3779b1u >> 31 ? -one[0] : one[0];
  }
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i & step) continue;
      const float a = value[i], b = value[i + step];
      value[i] = a + b;
      value[i + step] = a - b;
    }
  }
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, value[i], bit);
      value[i] = lane & bit ? other - value[i] : value[i] + other;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) value[i] *= factor;
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
