// The loading warps of the Hopper prefill: one claims tiles and loads queries and keys, one loads
// values. Shared memory, its barriers, and what travels through it.
#pragma once

#include "arch/mma_sm80.cuh"
#include "arch/tma_sm90.cuh"
#include "block/tile_order.cuh"

// Instead of a tile: the block has no other, and after it those that run again; it is done.
constexpr int kDrain = -1, kStop = -2;
constexpr int kNoLink = -1;
constexpr int kComputeWarps = 8;

struct PrefillMaps {
  const TensorMap *q, *k, *v;
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

// Tiles are panels of 128 bytes a row, with the swizzle of 128 bytes.
template <class V>
struct PrefillShared {
  static constexpr int kQueryStages = V::kQueryStages, kStages = V::kStages, kKeys = V::kKeys;
  static constexpr int kPanels = (V::kHeadDim + 63) / 64, kPanelsV = (V::kHeadDimV + 63) / 64;
  static constexpr int kQueryBytes = kTileRows * kPanels * 128;
  static constexpr int kKeyBytes = kKeys * kPanels * 128;
  static constexpr int kValueBytes = kKeys * kPanelsV * 128;
  static constexpr int kTiles = 4;  // a tile is read until the one after the next is begun

  struct Rest {
    u64 query_full[kQueryStages], query_empty[kQueryStages];
    u64 key_full[kStages], key_empty[kStages];
    u64 value_full[kStages], value_empty[kStages], value_raw;
    u64 drained;
    PrefillTile tile[kTiles];
    RequestOrder order;
    i32 again;  // the first tile to run again
  };
  static constexpr int kKeysAt = kQueryStages * kQueryBytes;
  static constexpr int kValuesAt = kKeysAt + kStages * kKeyBytes;
  static constexpr int kRestAt = kValuesAt + kStages * kValueBytes;
  static constexpr int kBytes = 1024 + kRestAt + static_cast<int>(sizeof(Rest));
  static_assert(kBytes <= V::kSharedBytes, "the host asks for less shared memory");
  static_assert(kQueryBytes % 1024 == 0 && kKeyBytes % 1024 == 0 && kValueBytes % 1024 == 0, "");
  static_assert(sizeof(OrderScratch) <= kStages * kKeyBytes, "");

  char *base;
  u32 address;  // of base: a multiple of 1024

  __device__ __forceinline__ explicit PrefillShared(char *smem)
      : base(smem + (-shared_address(smem) & 1023u)),
        address((shared_address(smem) + 1023u) & ~1023u) {}

  __device__ __forceinline__ Rest &rest() const { return *reinterpret_cast<Rest *>(base + kRestAt); }
  __device__ __forceinline__ OrderScratch &scratch() const {
    return *reinterpret_cast<OrderScratch *>(base + kKeysAt);
  }
  __device__ __forceinline__ u32 queries(int slot) const {
    return address + slot * kQueryBytes;
  }
  __device__ __forceinline__ u32 keys(int slot) const {
    return address + kKeysAt + slot * kKeyBytes;
  }
  __device__ __forceinline__ u32 values(int slot) const {
    return address + kValuesAt + slot * kValueBytes;
  }

  // By one thread.
  __device__ __forceinline__ void init() const {
    Rest &r = rest();
    for (int i = 0; i < kQueryStages; ++i) {
      mbarrier_init(shared_address(&r.query_full[i]), 1);
      mbarrier_init(shared_address(&r.query_empty[i]), kComputeWarps + 1);  // and the values' warp
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared_address(&r.key_full[i]), 1);
      mbarrier_init(shared_address(&r.key_empty[i]), kComputeWarps);
      mbarrier_init(shared_address(&r.value_full[i]), 1);
      mbarrier_init(shared_address(&r.value_empty[i]), kComputeWarps);
    }
    mbarrier_init(shared_address(&r.value_raw), 1);
    mbarrier_init(shared_address(&r.drained), kComputeWarps);
    mbarrier_init_fence();
    r.again = kNoLink;
  }
};

template <class V>
struct PrefillLoader {
  using S = PrefillShared<V>;
  static constexpr int kKeys = V::kKeys;

  const AttentionParams &p;
  const PrefillParams &x;
  const PrefillMaps &maps;
  const S &shared;
  const int lane = threadIdx.x & 31;

  __device__ __forceinline__ PrefillLoader(const AttentionParams &p, const PrefillParams &x,
                                           const PrefillMaps &maps, const S &shared)
      : p(p), x(x), maps(maps), shared(shared) {}

  // Boxes of one tile: lane i loads box i, i + 32, ...
  template <int kPanelCount>
  __device__ __forceinline__ void load_boxes(const TensorMap *map, const PrefillTile &t, int n,
                                             int kv_head, u32 to, u32 barrier) const {
#pragma unroll 1
    for (int i = lane;; i += 32) {
      const int panel = i % kPanelCount, at = i / kPanelCount * x.box_keys, key = n * kKeys + at;
      if (at >= kKeys) return;
      int row = t.kv_row + key, page = 0;
      if (p.block_table) {
        const int column = static_cast<u32>(key) / static_cast<u32>(p.page_size);
        row = key - column * p.page_size;
        page = x.outside_page;
        if (key < t.kv_end && key + x.box_keys > t.kv_begin) {
          page = reinterpret_cast<const i32 *>(p.block_table +
                                               t.request * p.table_row_stride)[column];
        }
      }
      tma_load4(to + panel * kKeys * 128 + at * 128, map, panel * 64, row, kv_head, page, barrier);
    }
  }

  __device__ __forceinline__ int kv_head(const PrefillTile &t) const {
    return t.head_group / (p.group >> x.pack_shift);
  }

  // ---- queries and keys

  __device__ __forceinline__ void run_keys() const {
    typename S::Rest &r = shared.rest();
    Ring<S::kQueryStages> q;
    Ring<S::kStages> k;
    const int items = count_items(x, r.order);
    int item = blockIdx.x;
    bool again = false;  // going through the list of tiles that run again
#pragma unroll 1
    for (int number = 0;;) {
      PrefillTile &t = r.tile[number % S::kTiles];
      const bool none = again ? item == kNoLink : item >= items;
      if (!none && !locate_tile<kKeys>(p, x, r.order, item, t)) {
        item = gridDim.x + __shfl_sync(0xffffffffu, claim(items), 0);
        continue;
      }
      mbarrier_wait(shared_address(&r.query_empty[q.slot]), q.parity ^ 1);
      const u32 query_full = shared_address(&r.query_full[q.slot]);
      if (none) {
        if (lane == 0) {
          t.item = again ? kStop : kDrain;
          mbarrier_arrive(query_full);
        }
        __syncwarp();
        if (again) return;
        mbarrier_wait(shared_address(&r.drained), 0);
        again = true;
        item = r.again;
      } else {
        if (lane == 0) mbarrier_arrive_expect(query_full, S::kQueryBytes);
        __syncwarp();
        if (lane < S::kPanels) {
          tma_load3(shared.queries(q.slot) + lane * kTileRows * 128, maps.q, lane * 64,
                    t.head_group << x.pack_shift, t.q_begin + t.token, query_full);
        }
        const int claimed = load_keys(t, k, again ? 0 : items);
        item = again ? *reinterpret_cast<const volatile i32 *>(x.links + item)
                     : static_cast<int>(gridDim.x) + claimed;
      }
      q.next(), ++number;
    }
  }

  // Each item claims another one, so the counter is 0 again after the last.
  __device__ __forceinline__ int claim(int items) const {
    return lane == 0 ? static_cast<int>(atomicInc(x.counter, items - 1)) : 0;
  }

  // Returns what was claimed meanwhile; nothing of 0 items.
  __device__ __forceinline__ int load_keys(const PrefillTile &t, Ring<S::kStages> &k,
                                           int items) const {
    typename S::Rest &r = shared.rest();
    // Late enough for the order of the tiles, early enough to hide the latency.
    const int end = t.n_end, claim_at = min(t.n_begin + 2, end - 1), head = kv_head(t);
    int claimed = 0;
#pragma unroll 1
    for (int n = end - 1; n >= t.n_begin; --n) {
      if (n == claim_at && items) claimed = claim(items);
      mbarrier_wait(shared_address(&r.key_empty[k.slot]), k.parity ^ 1);
      const u32 full = shared_address(&r.key_full[k.slot]);
      if (lane == 0) mbarrier_arrive_expect(full, S::kKeyBytes);
      __syncwarp();
      load_boxes<S::kPanels>(maps.k, t, n, head, shared.keys(k.slot), full);
      k.next();
    }
    return __shfl_sync(0xffffffffu, claimed, 0);
  }

  // ---- values

  __device__ __forceinline__ void run_values() const {
    typename S::Rest &r = shared.rest();
    Ring<S::kQueryStages> q;
    Ring<S::kStages> v;
    u32 raw_parity = 0;
    for (int number = 0;; ++number) {
      mbarrier_wait(shared_address(&r.query_full[q.slot]), q.parity);
      const PrefillTile &t = r.tile[number % S::kTiles];
      const int item = t.item;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared_address(&r.query_empty[q.slot]));
      q.next();
      if (item == kStop) return;
      if (item == kDrain) continue;
      const int head = kv_head(t);
#pragma unroll 1
      for (int n = t.n_end - 1; n >= t.n_begin; --n) {
        mbarrier_wait(shared_address(&r.value_empty[v.slot]), v.parity ^ 1);
        const u32 full = shared_address(&r.value_full[v.slot]), to = shared.values(v.slot);
        const int from = max(0, t.own_begin - n * kKeys), until = t.own_end - n * kKeys;
        if (from == 0 && until >= kKeys) {
          if (lane == 0) mbarrier_arrive_expect(full, S::kValueBytes);
          __syncwarp();
          load_boxes<S::kPanelsV>(maps.v, t, n, head, to, full);
        } else {
          const u32 raw = shared_address(&r.value_raw);
          if (lane == 0) mbarrier_arrive_expect(raw, S::kValueBytes);
          __syncwarp();
          load_boxes<S::kPanelsV>(maps.v, t, n, head, to, raw);
          mbarrier_wait(raw, raw_parity);
          raw_parity ^= 1;
          clear_rows(to, 0, min(from, kKeys));
          clear_rows(to, max(until, 0), kKeys);
          fence_async_proxy();
          __syncwarp();
          if (lane == 0) mbarrier_arrive(full);
        }
        v.next();
      }
    }
  }

  // What these rows hold may be NaN, which no weight of 0 undoes.
  __device__ __forceinline__ void clear_rows(u32 tile, int from, int until) const {
    const u32 zero[4] = {};
#pragma unroll 1
    for (int panel = 0; panel < S::kPanelsV; ++panel) {
#pragma unroll 1
      for (int i = from * 8 + lane; i < until * 8; i += 32) {
        store_shared16(tile + panel * kKeys * 128 + i * 16, zero);
      }
    }
  }
};
