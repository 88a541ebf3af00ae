// Where keys lie in global memory, packed or paged.
#pragma once

#include "block/segment.cuh"

constexpr i64 kNoRow = -0x7fffffffffffffffll - 1;

// Byte offsets of a key: {key, value}.
struct KeyRow {
  i64 at[2];
};

// Where the cache block of a key stands; null for packed keys, and for those outside of the segment:
// neither their table entries nor their rows are ever read.
__device__ __forceinline__ const i32 *find_block(const AttentionParams &p, const Segment &s,
                                                 int key) {
  if (!p.block_table || key < s.kv_begin || key >= s.kv_end) return nullptr;
  const char *row = p.block_table + s.request.index * p.table_row_stride;
  return reinterpret_cast<const i32 *>(row) +
         static_cast<u32>(key) / static_cast<u32>(p.page_size);
}

// Where a key's rows are, given its block; kNoRow outside of the segment.
__device__ __forceinline__ KeyRow locate(const AttentionParams &p, const Segment &s, int key,
                                         int block) {
  if (key < s.kv_begin || key >= s.kv_end) return {{kNoRow, kNoRow}};
  if (!p.block_table) block = 0;
  const i64 slot = p.block_table ? static_cast<u32>(key) % static_cast<u32>(p.page_size)
                                 : static_cast<i64>(s.request.kv_begin) + key;
  return {{block * p.k_block_stride + slot * p.k_token_stride,
           block * p.v_block_stride + slot * p.v_token_stride}};
}
