// What the loading warps of both Hopper prefills, 16-bit and 8-bit, share: messages, rings of
// buffers, boxes of keys, and the claims of tiles.
//
// In shared memory a tile is panels of 128 bytes a row, with the swizzle of 128 bytes.
#pragma once

#include "arch/mma_sm80.cuh"
#include "arch/tma_sm90.cuh"
#include "block/tile_order.cuh"

// Instead of a tile: the block has no other, and after it those that run again; it is done.
constexpr int kDrain = -1, kStop = -2;
constexpr int kNoLink = -1;
constexpr int kTilesKept = 4;  // a tile is read until the one after the next is begun

struct PrefillMaps {
  const TensorMap *q, *k, *v;
  const TensorMap *out = nullptr;
};

// A place in a ring of kSlots buffers, and the parity of its barriers.
template <int kSlots>
struct Ring {
  int slot = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (kSlots == 1) {
      parity ^= 1;
    } else if (++slot == kSlots) {
      slot = 0, parity ^= 1;
    }
  }
};

// Shared memory from the first multiple of 1024 bytes on, which the swizzles count from.
struct AlignedShared {
  char *base;
  u32 address;

  __device__ __forceinline__ explicit AlignedShared(char *smem)
      : base(smem + (-shared_address(smem) & 1023u)),
        address((shared_address(smem) + 1023u) & ~1023u) {}
};

// kPanelSize: elements in the 128 bytes of a panel.
template <class V, int kPanelSize>
struct BoxLoader {
  static constexpr int kKeys = V::kKeys;

  const AttentionParams &p;
  const PrefillParams &x;
  const PrefillMaps &maps;
  const int lane = threadIdx.x & 31;

  __device__ __forceinline__ BoxLoader(const AttentionParams &p, const PrefillParams &x,
                                       const PrefillMaps &maps)
      : p(p), x(x), maps(maps) {}

  // ---- boxes: lane i loads boxes i, i + 32, ... of a key tile

  // Its rows in global memory.
  struct Box {
    int row, page;
  };

  template <int kPanels>
  __device__ __forceinline__ int first_key(int i) const {
    return i / kPanels * x.box_keys;
  }

  // Looks the page up: well before the box is needed.
  template <int kPanels>
  __device__ __forceinline__ Box locate_box(const PrefillTile &t, int n, int i) const {
    const int at = first_key<kPanels>(i), key = n * kKeys + at;
    if (!p.block_table) return {t.kv_row + key, 0};
    const int column = static_cast<u32>(key) / static_cast<u32>(p.page_size);
    Box box = {key - column * p.page_size, x.outside_page};
    if (at < kKeys && key < t.kv_end && key + x.box_keys > t.kv_begin) {
      box.page =
          reinterpret_cast<const i32 *>(p.block_table + t.request * p.table_row_stride)[column];
    }
    return box;
  }

  template <int kPanels>
  __device__ __forceinline__ void load_box(const TensorMap *map, int i, const Box &box, int kv_head,
                                           u32 to, u32 barrier) const {
    const int panel = i % kPanels, at = first_key<kPanels>(i);
    tma_load4(to + (panel * kKeys + at) * 128, map, panel * kPanelSize, box.row, kv_head, box.page,
              barrier);
  }

  template <int kPanels>
  __device__ __forceinline__ void load_boxes(const TensorMap *map, const PrefillTile &t, int n,
                                             const Box &first, u32 to, u32 barrier) const {
    if (first_key<kPanels>(lane) < kKeys) {
      load_box<kPanels>(map, lane, first, t.kv_head, to, barrier);
    }
    if (x.box_keys * 32 < kKeys * kPanels) {
#pragma unroll 1
      for (int i = lane + 32; first_key<kPanels>(i) < kKeys; i += 32) {
        load_box<kPanels>(map, i, locate_box<kPanels>(t, n, i), t.kv_head, to, barrier);
      }
    }
  }

  // ---- queries: lane i loads panel i

  template <int kPanels>
  __device__ __forceinline__ void load_rows(int head, int token, u32 to, u32 barrier) const {
    if (lane < kPanels) {
      tma_load3(to + lane * V::kTileRows * 128, maps.q, lane * kPanelSize, head, token, barrier);
    }
  }

  // ---- claims

  // Items that blocks have without a claim: one each. None beside another kernel, where some blocks
  // start late.
  __device__ __forceinline__ int count_dealt() const {
    return x.most_skipped ? 0 : static_cast<int>(gridDim.x);
  }

  // Without those dealt, in lane 0. Each item, and each block that was dealt none, claims one: the
  // counter is 0 again after the last.
  __device__ __forceinline__ int claim(int items) const {
    const u32 claims = items + gridDim.x - count_dealt();
    return lane == 0 ? static_cast<int>(atomicInc(x.counter, claims - 1)) : 0;
  }
};
