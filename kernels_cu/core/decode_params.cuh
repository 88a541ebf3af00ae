// What the decode kernels are passed besides AttentionParams, by value.
#pragma once

#include "numeric.cuh"

struct DecodeParams {
  float *partial_out;  // [2 * spans, unit * row_block, head_dim_v]
  float2 *partial_state;  // [2 * spans, unit * row_block] largest score to base 2, sum of weights
  u32 *arrivals;       // [counters], 0 between launches
  i32 *prefix;         // [batch + 5] of schedule.cu, or null: every CTA adds the lengths up
  u32 *mail;           // instead of partial_* and arrivals where segments are cut alike: [spans,
                       // unit * row_block] rows as mainloop/mail_merge.cuh has them, 0 between
                       // launches; or null
  i32 spans;           // that there may be
  i32 tile_shift;      // log2 of the keys of a tile
  i32 row_block;       // rows of a segment, at most
  i32 units;           // KV heads over `unit`
  i32 unit_shift;      // log2 of the KV heads that a CTA takes side by side
  i32 fewest_shift;    // log2 of the tiles that a span has at least
  i32 align_most;      // tiles up to which equal segments are cut alike
  i32 most_pieces;     // of a segment; 0: as many as there are
  i32 chunks;          // at most, that are segments of their own: cut by a request's own length
                       // alone; 0: cut where spans end
  i32 counters;        // of arrivals
  i32 most_rows;       // requests with more are left to another kernel
  i32 segment_tiles;   // what a segment costs besides its tiles; counted as tiles after its keys
  i32 stages;          // tiles in flight, a warp
  i32 box_shift;       // log2 of the keys of a TMA box
  i32 k_panels, v_panels;  // of 128 bytes that a row has
  i32 whole_boxes;     // one box has all panels of its keys
  i32 column_shift;    // log2 of the columns of the outputs that warps merge at a time
  i32 page_shift;      // log2 of the page size; -1: it is no power of two
  u32 group_inverse;   // 2^32 over the group size, rounded up; 0: the group is 1
  // Of batches whose requests are all alike, see block/even_span.cuh.
  i32 even_pieces;     // of every segment; 0: such batches are not looked for
  u32 even_inverse;    // 2^32 over even_pieces, rounded up; 0: there is one
  u32 unit_inverse;    // 2^32 over units, rounded up; 0: there is one
  i32 even_least, even_most;  // tiles of a segment
  i32 table_bytes;     // of the block table, that are worth fetching ahead
  i32 out_wide;        // stores of four elements
  // Nanoseconds of one multiprocessor; all 0 where the launch has the GPU for itself.
  float tile_time;   // for a tile
  float tile_floor;  // for a tile at the rate of the memory: of the whole GPU
  float pair_time;   // for a query and a key of a request that another kernel takes meanwhile
};
