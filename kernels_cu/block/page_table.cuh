// Where keys lie in global memory, packed or paged.
#pragma once

#include "block/segment.cuh"

constexpr i64 kNoRow = -0x7fffffffffffffffll - 1;

// Byte offsets of a key: {key, value}.
struct KeyRow {
  i64 at[2];
};

// A key's cache block, and its place in there; packed keys are one block.
struct KeySlot {
  int block, slot;
};

// Keys outside of the segment have no slot: neither their table entries nor their rows are read.
__device__ __forceinline__ KeySlot find_slot(const AttentionParams &p, const Segment &s, int key) {
  if (!p.block_table) return {0, s.request.kv_begin + key};
  if (key < s.kv_begin || key >= s.kv_end) return {0, 0};
  const int column = static_cast<u32>(key) / static_cast<u32>(p.page_size);
  const char *row = p.block_table + s.request.index * p.table_row_stride;
  return {reinterpret_cast<const i32 *>(row)[column], key - column * p.page_size};
}

__device__ __forceinline__ KeyRow locate(const AttentionParams &p, KeySlot at) {
  return {{at.block * p.k_block_stride + at.slot * p.k_token_stride,
           at.block * p.v_block_stride + at.slot * p.v_token_stride}};
}
