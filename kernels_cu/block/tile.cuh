// Tiles of 16-bit elements in shared memory: rows of kDim, in chunks of 8 elements (16 bytes).
#pragma once

#include "core/numeric.cuh"

constexpr int kThreads = 128;

// Where a chunk lies. Its index is permuted within the row, so that the same chunk of eight
// successive rows falls into eight different groups of banks.
template <int kDim>
__device__ __forceinline__ u32 tile_offset(int row, int chunk) {
  constexpr int kChunks = kDim / 8;
  static_assert(kChunks % 4 == 0, "the permutation acts on 4 or 8 chunks");
  const int flip = kChunks % 8 == 0 ? row & 7 : (row >> 1) & 3;
  return static_cast<u32>(row * kChunks + (chunk ^ flip)) * 16;
}
