// What find_prefixes.cu is passed, by value.
#pragma once

#include "shared_params.cuh"

struct PrefixParams {
  const char *block_table;  // [batch, columns] i32
  const i32 *cu_seqlens_q;  // [batch + 1], or null: one query each
  const i32 *seqused_k;     // [batch]
  i32 *order;               // [batch]
  int2 *tree;               // [levels, batch]
  i64 table_row_stride;
  i32 batch, levels, page_size, columns;
  i32 null_block;  // no block; -1: there is none
  i32 unused;
};
