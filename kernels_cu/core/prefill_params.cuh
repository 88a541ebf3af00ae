// What attention_fwd_sm90 is passed besides AttentionParams, by value.
#pragma once

#include "numeric.cuh"

struct PrefillParams {
  u32 *counter;      // tiles claimed; 0 between launches
  i32 *links;        // [items] of the lists of tiles that run again
  i32 items;         // (tile, split) pairs, at most
  i32 splits;        // of a tile, at most
  i32 pack_shift;    // log2 of the query heads in the rows of a tile
  i32 head_groups;   // query heads over those of a tile
  i32 blocks;        // tiles of every request and head group; 0: by its length
  i32 lead;          // (request, head group) pairs that are walked one by one, if `blocks`
  i32 together;      // and of the others so many together
  i32 pairs;         // (request, head group) pairs that are ordered as one
  i32 l2_keys;       // keys whose K and V of one head fill a share of the L2
  i32 box_keys;      // keys of a TMA box
  i32 outside_page;  // a page past the last one: its boxes read as 0
  i32 most_skipped;  // requests of at most so many rows are left to another kernel
};

// And attention_fwd_sm90_fp8: the last tiles may have their keys cut into pieces.
struct TailParams : PrefillParams {
  float4 *pieces;  // what these leave each other, see mainloop/tail_merge.cuh
  u32 *arrivals;   // [tiles that are cut, warps that compute]; 0 between launches
  i32 whole;       // items before those that are pieces
  i32 cut;         // pieces of a tile
  u32 inverse;     // 2^32 over these, rounded up

  // A number below 2^28 over the pieces of a tile.
  __device__ __forceinline__ int share(int of) const {
    return __umulhi(static_cast<u32>(of), inverse);
  }
  // How many of the tiles that are cut are before that of an item.
  __device__ __forceinline__ int cut_before(int item) const { return share(item - whole); }
};
