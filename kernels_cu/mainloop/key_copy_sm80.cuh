// Tiles of keys and values on their way from global to shared memory, as they are stored.
//
// A list says where the keys of a tile are, or where the first one is if the others follow it at
// equal distances. It serves every page size and stride, and the ends of a segment.
#pragma once

#include "arch/mma_sm80.cuh"
#include "block/page_table.cuh"
#include "block/tile.cuh"

// Where a thread's chunks are, less what the list says.
struct LanePlace {
  const char *at[2];
};

template <class V>
class KeyCopy {
 public:
  static constexpr int kKeys = V::kKeys;
  static constexpr int kItem = kItemBytes<V::kCache>;
  // Places are kept where there is room, else made again.
  static constexpr int kPlaces = V::kHeadDim <= 128 ? V::kThreads : 0;
  // Blocks are asked for so many tiles before they are needed for a list.
  static constexpr int kEarly = V::kStages > 2 ? V::kStages - 1 : 1;
  static constexpr int kBytes = 2 * kKeys * static_cast<int>(sizeof(KeyRow)) +
                                kEarly * V::kThreads * 4 +
                                kPlaces * static_cast<int>(sizeof(LanePlace));

  // `shared` [kBytes]: lists of tiles of even and odd number, a place for each thread, and blocks
  // that have been asked for.
  __device__ __forceinline__ KeyCopy(const AttentionParams &p, const Segment &s, char *shared)
      : p_(p),
        s_(s),
        lists_(reinterpret_cast<KeyRow *>(shared)),
        places_(reinterpret_cast<LanePlace *>(lists_ + 2 * kKeys)),
        blocks_(reinterpret_cast<i32 *>(places_ + kPlaces)) {}

  // Once, before all else. Chunks past the real head sizes are zero: they are cleared here, and
  // copies leave them alone.
  __device__ __forceinline__ void start(u32 tiles, int bytes) const {
    if constexpr (kPlaces > 0) places_[threadIdx.x] = make_place(threadIdx.x);
    if (p_.head_dim == V::kHeadDim && p_.head_dim_v == V::kHeadDimV) return;
    const u32 zero[4] = {};
    for (int i = threadIdx.x * 16; i < bytes; i += V::kThreads * 16) {
      store_shared16(tiles + i, zero);
    }
    __syncthreads();
  }

  // A thread looks after one key of each tile; one alone does for keys that follow each other. It
  // asks for the key's block with the copies of the time, and writes the list when those have come.
  __device__ __forceinline__ void ask(u32 tile) const {
    const u32 number = listed(tile);
    if (number >= kKeys) return;
    const i32 *at = find_block(p_, s_, tile * kKeys + number);
    if (at) cp_async4(shared_address(asked(tile)), at);
  }

  __device__ __forceinline__ void write_list(u32 tile) const {
    const u32 number = listed(tile);
    if (number < kKeys) write_row(tile, number, *asked(tile));
  }

  // The same at once, for the first tiles.
  __device__ __forceinline__ int find(u32 tile) const {
    const u32 number = listed(tile);
    const i32 *at = number < kKeys ? find_block(p_, s_, tile * kKeys + number) : nullptr;
    return at ? *at : 0;
  }
  __device__ __forceinline__ void write_list(u32 tile, int block) const {
    const u32 number = listed(tile);
    if (number < kKeys) write_row(tile, number, block);
  }

  __device__ __forceinline__ void both(u32 tile, u32 keys_to, u32 values_to) const {
    if (is_plain(tile)) {
      const LanePlace place = this_place();
      const KeyRow *const list = lists_ + tile % 2 * kKeys;
      if (follow()) {
        const KeyRow first = list[0];
        run<V::kHeadDim>(place.at[0] + first.at[0], p_.k_token_stride, p_.head_dim, keys_to);
        run<V::kHeadDimV>(place.at[1] + first.at[1], p_.v_token_stride, p_.head_dim_v, values_to);
      } else {
        rows<V::kHeadDim, 0>(place.at[0], list, p_.head_dim, keys_to);
        rows<V::kHeadDimV, 1>(place.at[1], list, p_.head_dim_v, values_to);
      }
    } else {
      any<V::kHeadDim, 0>(tile, keys_base(), p_.k_token_stride, p_.head_dim, p_.k_vectorised,
                          keys_to);
      any<V::kHeadDimV, 1>(tile, values_base(), p_.v_token_stride, p_.head_dim_v, p_.v_vectorised,
                           values_to);
    }
  }

  __device__ __forceinline__ void keys(u32 tile, u32 to) const {
    one<V::kHeadDim, 0>(tile, keys_base(), p_.k_token_stride, p_.head_dim, p_.k_vectorised, to);
  }
  __device__ __forceinline__ void values(u32 tile, u32 to) const {
    one<V::kHeadDimV, 1>(tile, values_base(), p_.v_token_stride, p_.head_dim_v, p_.v_vectorised,
                         to);
  }

 private:
  // Made new: what follows from it is not kept from tile to tile, which costs registers.
  __device__ __forceinline__ static u32 new_thread() {
    u32 thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
  }

  // Threads side by side take the chunks of a row, kStep rows at a time.
  template <int kDim>
  struct Lane {
    static constexpr int kChunks = kDim * kItem / 16;
    static constexpr int kLanes = kChunks <= 4 ? 4 : kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
    static constexpr int kStep = V::kThreads / kLanes, kCount = kKeys / kStep;
    static_assert(kCount * kStep == kKeys && (kStep % 8 == 0 || kChunks % 8 == 0), "");

    __device__ __forceinline__ static u32 row(u32 thread) { return thread / kLanes; }
    __device__ __forceinline__ static u32 chunk(u32 thread) { return thread % kLanes; }
    // Where the thread's chunk i goes, after the first one.
    __device__ __forceinline__ static u32 at(u32 first, int i) {
      return (kStep % 8 && i % 2 ? first ^ 64 : first) + i * kStep * kChunks * 16;
    }
    __device__ __forceinline__ static u32 first(u32 tile, u32 thread) {
      return tile + tile_offset<kChunks>(thread / kLanes, thread % kLanes);
    }
  };

  __device__ __forceinline__ LanePlace make_place(u32 thread) const {
    using K = Lane<V::kHeadDim>;
    using L = Lane<V::kHeadDimV>;
    const i64 follows = follow();
    return {{keys_base() + K::chunk(thread) * 16 + follows * K::row(thread) * p_.k_token_stride,
             values_base() + L::chunk(thread) * 16 + follows * L::row(thread) * p_.v_token_stride}};
  }
  __device__ __forceinline__ LanePlace this_place() const {
    if constexpr (kPlaces > 0) return places_[threadIdx.x];
    return make_place(new_thread());
  }

  __device__ __forceinline__ const char *keys_base() const {
    return p_.k + s_.kv_head * p_.k_head_stride;
  }
  __device__ __forceinline__ const char *values_base() const {
    return p_.v + s_.kv_head * p_.v_head_stride;
  }
  __device__ __forceinline__ bool is_whole(u32 tile) const {
    const u32 first = tile * kKeys;
    return first >= static_cast<u32>(s_.kv_begin) &&
           first + kKeys <= static_cast<u32>(s_.kv_end);
  }
  __device__ __forceinline__ bool follow() const {
    return !p_.block_table || p_.page_size % kKeys == 0;
  }
  // 8-bit rows may end with half a chunk.
  __device__ __forceinline__ static bool in_chunks(int dim) { return dim * kItem % 16 == 0; }

  __device__ __forceinline__ bool is_plain(u32 tile) const {
    return is_whole(tile) && p_.k_vectorised && p_.v_vectorised &&
           (kItem > 1 || in_chunks(p_.head_dim | p_.head_dim_v));
  }

  // What a thread has asked for; no other touches it.
  __device__ __forceinline__ i32 *asked(u32 tile) const {
    return blocks_ + tile % kEarly * V::kThreads + threadIdx.x;
  }

  __device__ __forceinline__ void write_row(u32 tile, u32 number, int block) const {
    lists_[tile % 2 * kKeys + number] = locate(p_, s_, tile * kKeys + number, block);
  }

  // The key of a tile that this thread looks after; kKeys or more: none. The warps take turns.
  __device__ __forceinline__ u32 listed(u32 tile) const {
    if (!follow() || !is_whole(tile)) return threadIdx.x;
    return threadIdx.x == tile % (V::kThreads / 32) * 32 ? 0 : kKeys;
  }

  template <int kDim>
  __device__ __forceinline__ static void run(const char *from, i64 stride, int dim, u32 tile) {
    using L = Lane<kDim>;
    const u32 thread = new_thread(), to = L::first(tile, thread);
    if (static_cast<int>(L::chunk(thread)) * 16 >= dim * kItem) return;
#pragma unroll
    for (int i = 0; i < L::kCount; ++i) {
      cp_async16(L::at(to, i), from);
      from += L::kStep * stride;
    }
  }

  template <int kDim, int kSide>
  __device__ __forceinline__ static void rows(const char *base, const KeyRow *list, int dim,
                                              u32 tile) {
    using L = Lane<kDim>;
    const u32 thread = new_thread(), to = L::first(tile, thread);
    if (static_cast<int>(L::chunk(thread)) * 16 >= dim * kItem) return;
#pragma unroll
    for (int i = 0; i < L::kCount; ++i) {
      cp_async16(L::at(to, i), base + list[L::row(thread) + i * L::kStep].at[kSide]);
    }
  }

  template <int kDim, int kSide>
  __device__ __forceinline__ void one(u32 tile, const char *base, i64 stride, int dim,
                                      int vectorised, u32 to) const {
    if (!is_plain(tile)) {
      any<kDim, kSide>(tile, base, stride, dim, vectorised, to);
    } else if (follow()) {
      run<kDim>(this_place().at[kSide] + lists_[tile % 2 * kKeys].at[kSide], stride, dim,
                to);
    } else {
      rows<kDim, kSide>(this_place().at[kSide], lists_ + tile % 2 * kKeys, dim, to);
    }
  }

  // Ends of a segment, and rows that are not aligned to 16 bytes.
  template <int kDim, int kSide>
  __device__ __forceinline__ void any(u32 tile, const char *base, i64 stride, int dim,
                                      int vectorised, u32 to) const {
    using L = Lane<kDim>;
    const KeyRow *const list = lists_ + tile % 2 * kKeys;
    const u32 thread = new_thread();
    const int bytes = dim * kItem - static_cast<int>(L::chunk(thread)) * 16;
    const bool follows = is_whole(tile) && follow(), wide = vectorised && in_chunks(dim);
    if (bytes <= 0) return;
    base += L::chunk(thread) * 16;
    to = L::first(to, thread);
#pragma unroll 1
    for (int i = 0; i < L::kCount; ++i) {
      const u32 row = L::row(thread) + i * L::kStep;
      const i64 offset = follows ? list[0].at[kSide] + row * stride : list[row].at[kSide];
      const bool inside = offset != kNoRow;
      if (wide) {
        cp_async16(L::at(to, i), base + (inside ? offset : 0), inside ? 16 : 0);
      } else {
        copy_plain(L::at(to, i), base + offset, inside ? bytes : 0);
      }
    }
  }

  // Element by element; zero from `bytes` on.
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
  LanePlace *const places_;
  i32 *const blocks_;
};
