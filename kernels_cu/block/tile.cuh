// Tiles in shared memory: rows of kChunks chunks of 16 bytes.
#pragma once

#include "core/numeric.cuh"

// Where a chunk lies. Its index is permuted within the row, so that the same chunk of eight
// successive rows falls into eight different groups of banks.
template <int kChunks>
__device__ __forceinline__ u32 tile_offset(u32 row, u32 chunk) {
  static_assert(kChunks % 2 == 0, "the permutation acts on 2, 4 or 8 chunks");
  const u32 flip = kChunks % 8 == 0   ? row & 7
                   : kChunks % 4 == 0 ? row >> 1 & 3
                                      : row >> 2 & 1;
  return (row * kChunks + (chunk ^ flip)) * 16;
}

// Chunk 2 * pair + h of a row of a tile, from the address of its chunk h: one operation or none
// where `pair` is known to the compiler. Tiles lie at multiples of 128 bytes.
template <int kChunks>
__device__ __forceinline__ u32 tile_pair(u32 first, int pair) {
  constexpr int kMixed = kChunks % 8 == 0 ? 4 : kChunks % 4 == 0 ? 2 : 1;  // pairs
  return (first ^ (pair % kMixed * 32)) + pair / kMixed * kMixed * 32;
}
