// Where keys lie in global memory, packed or paged.
#pragma once

#include "block/segment.cuh"

constexpr i64 kNoRow = -0x7fffffffffffffffll - 1;

// Byte offsets of the rows of one key tile.
template <int kKeys>
struct KeyRows {
  i64 k[kKeys];
  i64 v[kKeys];
};

struct KeyRow {
  i64 k, v;
};

// kNoRow outside of the segment's keys: such rows are never read, nor are their table entries.
__device__ __forceinline__ KeyRow locate_key(const AttentionParams &p, const Segment &s, int key) {
  if (key < s.kv_begin || key >= s.kv_end) return {kNoRow, kNoRow};
  if (!p.block_table) {
    const i64 row = static_cast<i64>(s.request.kv_begin) + key;
    return {row * p.k_token_stride, row * p.v_token_stride};
  }
  const int column = static_cast<u32>(key) / static_cast<u32>(p.page_size);
  const i64 slot = key - column * p.page_size;
  const i64 block = reinterpret_cast<const i32 *>(
      p.block_table + s.request.index * p.table_row_stride)[column];
  return {block * p.k_block_stride + slot * p.k_token_stride,
          block * p.v_block_stride + slot * p.v_token_stride};
}
