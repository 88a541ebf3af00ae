// Rows of latent attention: 512 elements of the latent, then 64 of the rope part. Queries have both,
// and so have the rows of the cache, whose latent part serves as the values too.
#pragma once

#include "arch/mma_sm80.cuh"
#include "block/segment.cuh"
#include "core/latent_params.cuh"

constexpr int kLatentDim = 512, kRopeDim = 64, kRowDim = kLatentDim + kRopeDim;
constexpr int kRowChunks = kRowDim / 8, kLatentChunks = kLatentDim / 8;

// A chunk of 8 elements in a tile of such rows, permuted within its row against bank conflicts.
__device__ __forceinline__ u32 latent_chunk_at(int row, int chunk) {
  return static_cast<u32>(row * kRowChunks + (chunk ^ (row & 7))) * 16;
}

__device__ __forceinline__ void load_elements(const char *from, u32 (&word)[4]) {
  const u16 *element = reinterpret_cast<const u16 *>(from);
#pragma unroll
  for (int j = 0; j < 4; ++j) word[j] = element[2 * j] | element[2 * j + 1] << 16;
}

__device__ __forceinline__ void load_shared8(u32 from, u32 (&word)[2]) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "r"(from)
               : "memory");
}

__device__ __forceinline__ void store_shared8(u32 to, const u32 (&word)[2]) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(word[0]), "r"(word[1])
               : "memory");
}

// Eight 8-bit elements to 16 bits, exactly.
template <ScalarType kFrom, ScalarType kTo>
__device__ __forceinline__ void widen_eight(const u32 (&from)[2], u32 (&to)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    to[j] = fp8_to_fp16<kFrom>(from[j / 2] >> j % 2 * 16);
    if constexpr (kTo == kBf16) {
      const float2 pair = unpack_fp16(to[j]);
      to[j] = pack_bf16(pair.x, pair.y);
    }
  }
}

// The rows of a segment to a tile of kRows; zero where there is none.
template <int kBlock, int kRows>
__device__ __forceinline__ void load_latent_queries(const AttentionParams &p,
                                                    const LatentParams &d, const Segment &s,
                                                    char *tile) {
  const int rows = s.row_end - s.row_begin;
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * kRowChunks; i += kBlock) {
    const int row = i / kRowChunks, chunk = i % kRowChunks;
    const int in_request = (s.row_begin + row) / p.group;
    const int head = s.kv_head * p.group + s.row_begin + row - in_request * p.group;
    const i64 token = static_cast<i64>(s.request.q_begin) + in_request;
    const bool is_latent = chunk < kLatentChunks;
    const int at = is_latent ? chunk : chunk - kLatentChunks;
    u32 word[4] = {};
    if (row < rows && at * 8 < (is_latent ? p.head_dim_v : p.head_dim)) {
      const char *from = (is_latent ? d.q_v + token * d.token_stride + head * d.head_stride
                                    : p.q + token * p.q_token_stride + head * p.q_head_stride) +
                         at * 16;
      if (is_latent ? d.vectorised : p.q_vectorised) {
        const uint4 v = *reinterpret_cast<const uint4 *>(from);
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
      } else {
        load_elements(from, word);
      }
      if (s.negate) {
#pragma unroll
        for (int j = 0; j < 4; ++j) word[j] ^= 0x80008000u;
      }
    }
    store_shared16(shared_address(tile + latent_chunk_at(row, chunk)), word);
  }
}

// Where a key stands: its cache block, and its place in there; packed keys are one block.
struct LatentSlot {
  int block, slot;
};

// Keys outside of the segment have no slot: neither their table entries nor their rows are read.
__device__ __forceinline__ bool is_inside(const Segment &s, int key) {
  return key >= s.kv_begin && key < s.kv_end;
}

__device__ __forceinline__ LatentSlot find_latent(const AttentionParams &p, const Segment &s,
                                                  int key) {
  if (!p.block_table) return {0, s.request.kv_begin + key};
  if (!is_inside(s, key)) return {0, 0};
  const int column = static_cast<u32>(key) / static_cast<u32>(p.page_size);
  const char *row = p.block_table + s.request.index * p.table_row_stride;
  return {reinterpret_cast<const i32 *>(row)[column], key - column * p.page_size};
}
