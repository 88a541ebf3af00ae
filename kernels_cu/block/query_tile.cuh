// The rows of a segment's queries, gathered from (token, head) into a tile.
#pragma once

#include "block/softmax.cuh"
#include "block/tile.cuh"
#include "core/memory.cuh"

// Eight elements of storage type kType as float; zero from `count` on.
template <ScalarType kType>
__device__ __forceinline__ void load_chunk(const char *from, int count, bool vectorised,
                                           float (&value)[8]) {
  if (vectorised && count >= 8) {
    Elements<kType, 8> chunk;
    chunk.load(from);
    chunk.to_floats(value);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float one[1] = {0.f};
    if (i < count) {
      Elements<kType, 1> element;
      element.load(from + i * kItemBytes<kType>);
      element.to_floats(one);
    }
    value[i] = one[0];
  }
}

__device__ __forceinline__ void load_query_chunk(const AttentionParams &p, const char *row,
                                                 int chunk, float (&value)[8]) {
  const int count = p.head_dim - chunk * 8;
  const char *from = row + chunk * 8 * (p.q_type <= kBf16 ? 2 : 1);
  if (p.q_type == kFp16) {
    load_chunk<kFp16>(from, count, p.q_vectorised, value);
  } else if (p.q_type == kBf16) {
    load_chunk<kBf16>(from, count, p.q_vectorised, value);
  } else if (p.q_type == kE4m3) {
    load_chunk<kE4m3>(from, count, p.q_vectorised, value);
  } else {
    load_chunk<kE5m2>(from, count, p.q_vectorised, value);
  }
}

// 2^e such that rows scaled by 2^-e have their largest element in [2^14, 2^15): the upper end of
// fp16, whose subnormals would otherwise cut small elements off.
__device__ __forceinline__ int narrowing_exponent(float largest) {
  if (largest == 0.f) return 0;
  return max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -100) - 14;
}

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<u32>(exponent + 127) << 23);
}

// Stores eight elements of a row. Where keys are 8-bit, the 16 dims of a step are in the order that
// fragments of such keys have them in: 0 1 4 5 8 9 12 13, then 2 3 6 7 10 11 14 15.
template <bool kNarrow, int kDim>
__device__ __forceinline__ void store_query_chunk(char *tile, int row, int chunk,
                                                  const u32 (&word)[4]) {
  if constexpr (kNarrow) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      char *to = tile + tile_offset<kDim / 8>(row, (chunk & ~1) + half) + chunk % 2 * 8;
      *reinterpret_cast<uint2 *>(to) = make_uint2(word[half], word[half + 2]);
    }
  } else {
    *reinterpret_cast<uint4 *>(tile + tile_offset<kDim / 8>(row, chunk)) =
        make_uint4(word[0], word[1], word[2], word[3]);
  }
}

// Queries of a row of the tile, from those of token 0 of the request and head 0.
__device__ __forceinline__ i64 query_offset(const AttentionParams &p, RowPlace at) {
  return at.token * p.q_token_stride + at.head * p.q_head_stride;
}
__device__ __forceinline__ const char *first_query(const AttentionParams &p, const Segment &s) {
  return p.q + s.request.q_begin * p.q_token_stride;
}

// What rows bring along, one a thread; but for the factors of narrowed ones.
template <int kRows, int kThreads, bool kFactors>
__device__ __forceinline__ void fill_info(const AttentionParams &p, const Segment &s,
                                          const SegmentRows &rows, RowInfo *info) {
#pragma unroll
  for (int first = 0; first < kRows; first += kThreads) {
    const int row = first + threadIdx.x;
    if (row >= kRows) break;
    const RowPlace at = rows[row];
    info[row].position = static_cast<int>(at.token) + s.request.kv_len - s.request.q_len;
    info[row].slope = p.alibi_slopes && row < rows.count
                          ? load_float(p.alibi_slopes, s.request.index * p.alibi_batch_stride +
                                                           at.head * p.alibi_head_stride)
                          : 0.f;
    if constexpr (kFactors) info[row].factor = 1.f;
  }
}

// Threads side by side take the chunks of a row.
template <int kDim>
constexpr int kQueryLanes = kDim <= 64 ? 8 : kDim <= 128 ? 16 : 32;

// Fills kRows x kDim. bf16 rows that are computed with in fp16 are narrowed by a power of two a
// row, which `info` [kRows] says. `negate` is for a negative scale: softmax then works with its
// absolute value, so that the largest score stays the largest.
template <ScalarType kCompute, bool kNarrow, int kDim, int kRows, int kThreads>
__device__ __forceinline__ void load_queries(const AttentionParams &p, const Segment &s,
                                             const SegmentRows &rows, bool negate, char *tile,
                                             RowInfo *info) {
  constexpr int kChunks = kDim / 8, kLanes = kQueryLanes<kDim>;
  const int chunk = threadIdx.x % kLanes;
  const char *const first = first_query(p, s);
  fill_info<kRows, kThreads, !kNarrow>(p, s, rows, info);
#pragma unroll 1
  for (int row = threadIdx.x / kLanes; row < kRows; row += kThreads / kLanes) {
    float value[8] = {};
    if (chunk < kChunks && row < rows.count) {
      load_query_chunk(p, first + query_offset(p, rows[row]), chunk, value);
    }
    int exponent = 0;
    if constexpr (kNarrow) {
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(value[i]));
#pragma unroll
      for (int mask = kLanes / 2; mask; mask /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
      }
      if (p.q_type == kBf16) exponent = narrowing_exponent(largest);
#pragma unroll
      for (int i = 0; i < 8; ++i) value[i] *= power_of_two(-exponent);
      if (chunk == 0) info[row].factor = power_of_two(exponent);
    }
    if (chunk < kChunks) {
      u32 word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        word[i] = pack_pair<kCompute>(value[2 * i], value[2 * i + 1]) ^ (negate ? 0x80008000u : 0u);
      }
      store_query_chunk<kNarrow, kDim>(tile, row, chunk, word);
    }
  }
}

// The same for rows that are taken as they are, by `copy(to, from, bytes)`, which fills 16 bytes of
// the tile of which `bytes` (16 or 0) are read and the rest is zero.
template <int kDim, int kRows, int kThreads, class Copy>
__device__ __forceinline__ void copy_queries(const AttentionParams &p, const Segment &s,
                                             const SegmentRows &rows, RowInfo *info, Copy copy) {
  constexpr int kChunks = kDim / 8, kLanes = kQueryLanes<kDim>;
  const int chunk = threadIdx.x % kLanes;
  const bool read = chunk * 8 < p.head_dim;
  const char *const first = first_query(p, s) + (read ? chunk * 16 : 0);
  fill_info<kRows, kThreads, true>(p, s, rows, info);
  if (chunk >= kChunks) return;
#pragma unroll 4
  for (int row = threadIdx.x / kLanes; row < kRows; row += kThreads / kLanes) {
    copy(tile_offset<kChunks>(row, chunk),
         first + query_offset(p, rows[min(row, rows.count - 1)]),
         read && row < rows.count ? 16 : 0);
  }
}
