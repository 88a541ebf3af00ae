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

// The cache block of a key; 0 for packed keys. Keys outside of the segment have none: neither their
// table entries nor their rows are ever read.
__device__ __forceinline__ int find_block(const AttentionParams &p, const Segment &s, int key) {
  if (!p.block_table || key < s.kv_begin || key >= s.kv_end) return 0;
  const int column = static_cast<u32>(key) / static_cast<u32>(p.page_size);
  return reinterpret_cast<const i32 *>(p.block_table +
                                       s.request.index * p.table_row_stride)[column];
}

// Where a key's rows are, given its block; kNoRow outside of the segment.
__device__ __forceinline__ KeyRow locate_key(const AttentionParams &p, const Segment &s, int key,
                                             int block) {
  if (key < s.kv_begin || key >= s.kv_end) return {kNoRow, kNoRow};
  const i64 slot = p.block_table ? static_cast<u32>(key) % static_cast<u32>(p.page_size)
                                 : static_cast<i64>(s.request.kv_begin) + key;
  return {block * p.k_block_stride + slot * p.k_token_stride,
          block * p.v_block_stride + slot * p.v_token_stride};
}
