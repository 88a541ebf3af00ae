// Tiles of keys and values on their way from global to shared memory, as they are stored.
//
// A list says where the keys of a tile are, or where the first one is if the others follow it at
// equal distances. It serves every page size and stride, and the ends of a segment.
#pragma once

#include "arch/mma_sm80.cuh"
#include "block/page_table.cuh"
#include "block/tile.cuh"

template <class V>
class KeyCopy {
 public:
  static constexpr int kKeys = V::kKeys;
  static constexpr int kItem = kItemBytes<V::kCache>;

  // `lists` [2][kKeys]: of tiles of even and odd number.
  __device__ __forceinline__ KeyCopy(const AttentionParams &p, const Segment &s, KeyRow *lists)
      : p_(p), s_(s), lists_(lists) {}

  // Chunks past the real head sizes are zero: they are cleared once, and copies leave them alone.
  __device__ __forceinline__ void clear(u32 tiles, int bytes) const {
    if (p_.head_dim == V::kHeadDim && p_.head_dim_v == V::kHeadDimV) return;
    const u32 zero[4] = {};
    for (int i = threadIdx.x * 16; i < bytes; i += V::kThreads * 16) {
      store_shared16(tiles + i, zero);
    }
    __syncthreads();
  }

  // A thread looks after one key of each tile; the first one does it alone for keys that follow it.
  __device__ __forceinline__ KeySlot find(int tile) const {
    if (threadIdx.x >= listed(tile)) return {0, 0};
    return find_slot(p_, s_, tile * kKeys + threadIdx.x);
  }

  __device__ __forceinline__ void write_list(int tile, KeySlot at) const {
    if (threadIdx.x >= listed(tile)) return;
    const int key = tile * kKeys + threadIdx.x;
    lists_[tile % 2 * kKeys + threadIdx.x] =
        key >= s_.kv_begin && key < s_.kv_end ? locate(p_, at) : KeyRow{{kNoRow, kNoRow}};
  }

  __device__ __forceinline__ void keys(int tile, u32 to) const {
    copy<V::kHeadDim, 0>(tile, p_.k + s_.kv_head * p_.k_head_stride, p_.k_token_stride,
                         p_.head_dim * kItem, p_.k_vectorised && is_aligned(p_.head_dim), to);
  }
  __device__ __forceinline__ void values(int tile, u32 to) const {
    copy<V::kHeadDimV, 1>(tile, p_.v + s_.kv_head * p_.v_head_stride, p_.v_token_stride,
                          p_.head_dim_v * kItem, p_.v_vectorised && is_aligned(p_.head_dim_v), to);
  }

 private:
  // 8-bit rows may end with half a chunk.
  __device__ __forceinline__ static bool is_aligned(int dim) { return dim * kItem % 16 == 0; }

  __device__ __forceinline__ bool is_whole(int tile) const {
    return tile * kKeys >= s_.kv_begin && (tile + 1) * kKeys <= s_.kv_end;
  }
  __device__ __forceinline__ bool follow() const {
    return !p_.block_table || p_.page_size % kKeys == 0;
  }
  __device__ __forceinline__ u32 listed(int tile) const {
    return follow() && is_whole(tile) ? 1 : kKeys;
  }

  template <int kDim, int kSide>
  __device__ __forceinline__ void copy(int tile, const char *base, i64 stride, int row_bytes,
                                       bool vectorised, u32 to) const {
    constexpr int kChunks = kDim * kItem / 16;
    constexpr int kLanes = kChunks <= 4 ? 4 : kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
    constexpr int kStep = V::kThreads / kLanes, kCount = kKeys / kStep;
    static_assert(kCount * kStep == kKeys && (kStep % 8 == 0 || kChunks % 8 == 0), "");
    u32 thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // addresses made from it are not kept from tile to tile
    const u32 row = thread / kLanes, chunk = thread % kLanes;
    const int bytes = row_bytes - static_cast<int>(chunk) * 16;
    if (bytes <= 0) return;
    to += tile_offset<kChunks>(row, chunk);
    base += chunk * 16;
    const auto at = [&](int i) {
      return (kStep % 8 && i % 2 ? to ^ 64 : to) + i * kStep * kChunks * 16;
    };
    const KeyRow *const list = lists_ + tile % 2 * kKeys;
    const bool whole = is_whole(tile);
    if (whole && vectorised && follow()) {
      const char *from = base + list[0].at[kSide] + row * stride;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        cp_async16(at(i), from);
        from += kStep * stride;
      }
    } else if (whole && vectorised) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) cp_async16(at(i), base + list[row + i * kStep].at[kSide]);
    } else {
#pragma unroll 1
      for (int i = 0; i < kCount; ++i) {
        const bool follows = whole && follow();
        const i64 offset = follows ? list[0].at[kSide] + (row + i * kStep) * stride
                                   : list[row + i * kStep].at[kSide];
        if (vectorised) {
          cp_async16(at(i), base + (offset == kNoRow ? 0 : offset), offset == kNoRow ? 0 : 16);
        } else {
          copy_plain(at(i), base + offset, offset == kNoRow ? 0 : bytes);
        }
      }
    }
  }

  // Rows that are not aligned to 16 bytes, or not whole chunks: element by element.
  __device__ __forceinline__ static void copy_plain(u32 to, const char *from, int bytes) {
    u32 word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      word[j] = 0;
      if (j * 4 < bytes) {
#pragma unroll
        for (int b = 0; b < 4; b += kItem) {
          const u32 item = kItem == 2 ? *reinterpret_cast<const u16 *>(from + j * 4 + b)
                                      : *reinterpret_cast<const u8 *>(from + j * 4 + b);
          word[j] |= item << 8 * b;
        }
      }
    }
    store_shared16(to, word);
  }

  const AttentionParams &p_;
  const Segment &s_;
  KeyRow *const lists_;
};
