// The first warpgroup of the Hopper prefill: one warp claims tiles and loads queries, one loads keys,
// one values, one stores results. Shared memory, its barriers, and what travels through it.
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

// Tiles are panels of 128 bytes a row, with the swizzle of 128 bytes.
template <class V>
struct PrefillShared {
  static constexpr int kQueryStages = V::kQueryStages, kStages = V::kStages, kKeys = V::kKeys;
  static constexpr int kPanels = (V::kHeadDim + 63) / 64, kPanelsV = (V::kHeadDimV + 63) / 64;
  static constexpr int kQueryBytes = kTileRows * kPanels * 128;
  static constexpr int kKeyBytes = kKeys * kPanels * 128;
  static constexpr int kValueBytes = kKeys * kPanelsV * 128;
  static constexpr int kTiles = 4;  // a tile is read until the one after the next is begun
  // Results of whole tiles leave through the buffer of their queries.
  static constexpr bool kStaged = kQueryStages > 1 && kPanelsV <= kPanels;

  struct Rest {
    u64 tile_full[kTiles], claim;
    u64 query_full[kQueryStages], query_empty[kQueryStages], staged[kQueryStages];
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

  __device__ __forceinline__ Rest &rest() const {
    return *reinterpret_cast<Rest *>(base + kRestAt);
  }
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
    for (int i = 0; i < kTiles; ++i) mbarrier_init(shared_address(&r.tile_full[i]), 1);
    mbarrier_init(shared_address(&r.claim), 1);
    for (int i = 0; i < kQueryStages; ++i) {
      mbarrier_init(shared_address(&r.query_full[i]), 1);
      mbarrier_init(shared_address(&r.query_empty[i]), kStaged ? 1 : kComputeWarps);
      mbarrier_init(shared_address(&r.staged[i]), kComputeWarps);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared_address(&r.key_full[i]), 1);
      mbarrier_init(shared_address(&r.key_empty[i]), kComputeWarps);
      mbarrier_init(shared_address(&r.value_full[i]), 1);
      mbarrier_init(shared_address(&r.value_empty[i]), kComputeWarps);
    }
    mbarrier_init(shared_address(&r.value_raw), 1);
    mbarrier_init(shared_address(&r.drained), kComputeWarps + (kStaged ? 1 : 0));
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
      box.page = reinterpret_cast<const i32 *>(p.block_table +
                                               t.request * p.table_row_stride)[column];
    }
    return box;
  }

  template <int kPanels>
  __device__ __forceinline__ void load_box(const TensorMap *map, int i, const Box &box,
                                           int kv_head, u32 to, u32 barrier) const {
    const int panel = i % kPanels, at = first_key<kPanels>(i);
    tma_load4(to + (panel * kKeys + at) * 128, map, panel * 64, box.row, kv_head, box.page,
              barrier);
  }

  template <int kPanels>
  __device__ __forceinline__ void load_boxes(const TensorMap *map, const PrefillTile &t, int n,
                                             const Box &first, u32 to, u32 barrier) const {
    if (first_key<kPanels>(lane) < kKeys) load_box<kPanels>(map, lane, first, t.kv_head, to, barrier);
    if (x.box_keys * 32 < kKeys * kPanels) {
#pragma unroll 1
      for (int i = lane + 32; first_key<kPanels>(i) < kKeys; i += 32) {
        load_box<kPanels>(map, i, locate_box<kPanels>(t, n, i), t.kv_head, to, barrier);
      }
    }
  }

  __device__ __forceinline__ PrefillTile &tile(int number) const {
    return shared.rest().tile[number % S::kTiles];
  }

  // ---- tiles and queries

  // Claims tiles, describes them for the other warps, and loads their queries.
  __device__ __forceinline__ void run_tiles() const {
    typename S::Rest &r = shared.rest();
    Ring<S::kQueryStages> q;
    const int items = count_items(x, r.order), dealt = count_dealt();
    int item = dealt ? static_cast<int>(blockIdx.x) : __shfl_sync(0xffffffffu, claim(items), 0);
    u32 claim_parity = 0;
    bool again = false;  // going through the list of tiles that run again
#pragma unroll 1
    for (int number = 0;; ++number) {
      const bool found = seek(item, items, again, number);
      const PrefillTile &t = tile(number);
      if (lane == 0) {
        if (!found) tile(number).item = again ? kStop : kDrain;
        mbarrier_arrive(shared_address(&r.tile_full[number % S::kTiles]));
      }
      __syncwarp();
      load_queries(t, found, q);
      if (found) {
        if (!is_short(t)) {
          mbarrier_wait(shared_address(&r.claim), claim_parity);
          claim_parity ^= 1;
        }
        item = again ? *reinterpret_cast<const volatile i32 *>(x.links + item)
                     : dealt + __shfl_sync(0xffffffffu, claim(items), 0);
      } else if (again) {
        return;
      } else {
        mbarrier_wait(shared_address(&r.drained), 0);
        again = true;
        item = r.again;
      }
    }
  }

  // The next tile is claimed late, for the sake of the order of the tiles, but early enough that
  // its keys follow those of this one: at once, or when this many keys are left to ask for.
  static constexpr int kClaimAhead = 3;
  __device__ __forceinline__ static bool is_short(const PrefillTile &t) {
    return t.n_end - t.n_begin <= kClaimAhead;
  }

  // Describes `item`, or the first one after it that is anything. False: there is none.
  __device__ __forceinline__ bool seek(int &item, int items, bool again, int number) const {
    while (again ? item != kNoLink : item < items) {
      if (locate_tile<kKeys>(p, x, shared.rest().order, item, tile(number))) return true;
      item = count_dealt() + __shfl_sync(0xffffffffu, claim(items), 0);
    }
    return false;
  }

  // Items that blocks have without a claim: one each. None beside another kernel, where some blocks
  // start late.
  __device__ __forceinline__ int count_dealt() const {
    return x.most_skipped ? 0 : static_cast<int>(gridDim.x);
  }

  // Each item, and each block that was dealt none, claims one: the counter is 0 again after the last.
  __device__ __forceinline__ int claim(int items) const {
    const u32 claims = items + gridDim.x - count_dealt();
    return lane == 0 ? static_cast<int>(atomicInc(x.counter, claims - 1)) : 0;
  }

  // A message comes without queries.
  __device__ __forceinline__ void load_queries(const PrefillTile &t, bool found,
                                               Ring<S::kQueryStages> &q) const {
    typename S::Rest &r = shared.rest();
    const int head = t.head_group << x.pack_shift, token = t.q_begin + t.token;
    // One buffer is free late: what takes its place is in the L2 by then.
    if (S::kQueryStages == 1 && found && lane < S::kPanels) {
      tma_prefetch3(maps.q, lane * 64, head, token);
    }
    mbarrier_wait(shared_address(&r.query_empty[q.slot]), q.parity ^ 1);
    const u32 full = shared_address(&r.query_full[q.slot]);
    if (lane == 0) {
      if (found) {
        mbarrier_arrive_expect(full, S::kQueryBytes);
      } else {
        mbarrier_arrive(full);
      }
    }
    __syncwarp();
    if (found && lane < S::kPanels) {
      tma_load3(shared.queries(q.slot) + lane * kTileRows * 128, maps.q, lane * 64,
                head, token, full);
    }
    q.next();
  }

  // By the warps that load keys, load values and store: the next tile or message.
  __device__ __forceinline__ const PrefillTile &wait_tile(int number) const {
    const int slot = number % S::kTiles;
    mbarrier_wait(shared_address(&shared.rest().tile_full[slot]), number / S::kTiles & 1);
    return shared.rest().tile[slot];
  }

  // ---- keys

  __device__ __forceinline__ void run_keys() const {
    typename S::Rest &r = shared.rest();
    Ring<S::kStages> k;
#pragma unroll 1
    for (int number = 0;; ++number) {
      const PrefillTile t = wait_tile(number);
      __syncwarp();  // it may be replaced once the first of its keys are there
      const int item = t.item, begin = t.n_begin;
      if (item == kStop) return;
      if (item == kDrain) continue;
      const int claim_at = is_short(t) ? begin - 1 : begin + kClaimAhead;
#pragma unroll 1
      for (int n = t.n_end - 1; n >= begin; --n) {
        if (n == claim_at && lane == 0) mbarrier_arrive(shared_address(&r.claim));
        const Box box = locate_box<S::kPanels>(t, n, lane);
        mbarrier_wait(shared_address(&r.key_empty[k.slot]), k.parity ^ 1);
        const u32 full = shared_address(&r.key_full[k.slot]);
        if (lane == 0) mbarrier_arrive_expect(full, S::kKeyBytes);
        __syncwarp();
        load_boxes<S::kPanels>(maps.k, t, n, box, shared.keys(k.slot), full);
        k.next();
      }
    }
  }

  // ---- values

  __device__ __forceinline__ void run_values() const {
    typename S::Rest &r = shared.rest();
    Ring<S::kStages> v;
    u32 raw_parity = 0;
#pragma unroll 1
    for (int number = 0;; ++number) {
      const PrefillTile t = wait_tile(number);
      __syncwarp();  // it may be replaced once the first of its keys are there
      const int item = t.item, begin = t.n_begin;
      if (item == kStop) return;
      if (item == kDrain) continue;
#pragma unroll 1
      for (int n = t.n_end - 1; n >= begin; --n) {
        const int from = max(0, t.own_begin - n * kKeys), until = t.own_end - n * kKeys;
        const bool whole = from == 0 && until >= kKeys;
        const Box box = locate_box<S::kPanelsV>(t, n, lane);
        mbarrier_wait(shared_address(&r.value_empty[v.slot]), v.parity ^ 1);
        const u32 full = shared_address(&r.value_full[v.slot]), to = shared.values(v.slot);
        const u32 loaded = whole ? full : shared_address(&r.value_raw);
        if (lane == 0) mbarrier_arrive_expect(loaded, S::kValueBytes);
        __syncwarp();
        load_boxes<S::kPanelsV>(maps.v, t, n, box, to, loaded);
        if (!whole) {
          mbarrier_wait(loaded, raw_parity);
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

  // ---- results

  // Stores what the computing warps left in place of the queries, and hands the buffer on.
  __device__ __forceinline__ void run_stores() const {
    typename S::Rest &r = shared.rest();
    Ring<S::kQueryStages> q;
#pragma unroll 1
    for (int number = 0;; ++number) {
      const PrefillTile &t = wait_tile(number);
      const int item = t.item;
      if (item == kStop) return;
      mbarrier_wait(shared_address(&r.staged[q.slot]), q.parity);
      if (item == kDrain) {
        tma_wait_stored();  // those that run again write the same memory
        if (lane == 0) mbarrier_arrive(shared_address(&r.drained));
      } else if (t.staged && lane < S::kPanelsV) {
        tma_store3(maps.out, shared.queries(q.slot) + lane * kTileRows * 128, lane * 64,
                   t.head_group << x.pack_shift, t.q_begin + t.token);
        tma_wait_read();
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared_address(&r.query_empty[q.slot]));
      q.next();
    }
  }
};
