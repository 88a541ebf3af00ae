// The loading warps of the 8-bit Hopper prefill: one claims tiles and loads queries and keys, one
// loads values. Shared memory, its barriers, and what travels through it.
#pragma once

#include "arch/mma_sm80.cuh"
#include "arch/tma_sm90.cuh"
#include "block/tile_order.cuh"
#include "mainloop/fwd_sm90_load.cuh"

constexpr int kTransposingWarps = 2;

// What the warp that loads keys does without while it looks the next tile up.
struct Parked {
  i32 n, loaded, number;
};

// Tiles are panels of 128 bytes a row, with the swizzle of 128 bytes; transposed values are panels
// of kPanelKeys bytes a row, a row for each column of V, with the swizzle of that width.
template <class V>
struct Fp8Shared {
  static constexpr int kQueryStages = V::kQueryStages, kKeyStages = V::kKeyStages;
  static constexpr int kValueStages = V::kValueStages, kTurnedStages = V::kTurnedStages;
  static constexpr int kKeys = V::kKeys, kDim = V::kHeadDim;
  static constexpr int kPanels = (kDim + 127) / 128;
  static constexpr int kPanelKeys = kKeys % 128 == 0 ? 128 : 64;
  static constexpr int kQueryBytes = kTileRows * kPanels * 128;
  static constexpr int kKeyBytes = kKeys * kPanels * 128;
  static constexpr int kTurnedBytes = kKeys * kDim;
  static constexpr int kTiles = 4;  // a tile is read until the one after the next is begun

  struct Rest {
    u64 query_full[kQueryStages], query_empty[kQueryStages];
    u64 key_full[kKeyStages], key_empty[kKeyStages];
    u64 value_full[kValueStages], value_empty[kValueStages];
    u64 turned_full[kTurnedStages], turned_empty[kTurnedStages];
    u64 drained;
    i32 from[kValueStages], until[kValueStages];  // rows that count; from kStop: no more values
    PrefillTile tile[kTiles];
    RequestOrder order;
    Parked parked;
    i32 again;  // the first tile to run again
  };
  static constexpr int kKeysAt = kQueryStages * kQueryBytes;
  static constexpr int kValuesAt = kKeysAt + kKeyStages * kKeyBytes;
  static constexpr int kTurnedAt = kValuesAt + kValueStages * kKeyBytes;
  static constexpr int kRestAt = kTurnedAt + kTurnedStages * kTurnedBytes;
  static constexpr int kBytes = 1024 + kRestAt + static_cast<int>(sizeof(Rest));
  static_assert(kBytes <= V::kSharedBytes, "the host asks for less shared memory");
  static_assert(kKeyBytes % 1024 == 0 && kTurnedBytes % 1024 == 0, "");
  static_assert(sizeof(OrderScratch) <= kKeyStages * kKeyBytes, "");

  char *base;
  u32 address;  // of base: a multiple of 1024

  __device__ __forceinline__ explicit Fp8Shared(char *smem)
      : base(smem + (-shared_address(smem) & 1023u)),
        address((shared_address(smem) + 1023u) & ~1023u) {}

  __device__ __forceinline__ Rest &rest() const {
    return *reinterpret_cast<Rest *>(base + kRestAt);
  }
  __device__ __forceinline__ OrderScratch &scratch() const {
    return *reinterpret_cast<OrderScratch *>(base + kKeysAt);
  }
  __device__ __forceinline__ u32 queries(int slot) const { return address + slot * kQueryBytes; }
  __device__ __forceinline__ u32 keys(int slot) const {
    return address + kKeysAt + slot * kKeyBytes;
  }
  __device__ __forceinline__ u32 values(int slot) const {
    return address + kValuesAt + slot * kKeyBytes;
  }
  __device__ __forceinline__ u32 turned(int slot) const {
    return address + kTurnedAt + slot * kTurnedBytes;
  }

  // By one thread.
  __device__ __forceinline__ void init() const {
    Rest &r = rest();
    for (int i = 0; i < kQueryStages; ++i) {
      mbarrier_init(shared_address(&r.query_full[i]), 1);
      mbarrier_init(shared_address(&r.query_empty[i]), kComputeWarps + 1);  // and the values' warp
    }
    for (int i = 0; i < kKeyStages; ++i) {
      mbarrier_init(shared_address(&r.key_full[i]), 1);
      mbarrier_init(shared_address(&r.key_empty[i]), kComputeWarps);
    }
    for (int i = 0; i < kValueStages; ++i) {
      mbarrier_init(shared_address(&r.value_full[i]), 1);
      mbarrier_init(shared_address(&r.value_empty[i]), kTransposingWarps);
    }
    for (int i = 0; i < kTurnedStages; ++i) {
      mbarrier_init(shared_address(&r.turned_full[i]), kTransposingWarps);
      mbarrier_init(shared_address(&r.turned_empty[i]), kComputeWarps);
    }
    mbarrier_init(shared_address(&r.drained), kComputeWarps);
    mbarrier_init_fence();
    r.again = kNoLink;
  }
};

template <class V>
struct Fp8Loader {
  using S = Fp8Shared<V>;
  static constexpr int kKeys = V::kKeys, kPanels = S::kPanels;

  const AttentionParams &p;
  const PrefillParams &x;
  const PrefillMaps &maps;
  const S &shared;
  const int lane = threadIdx.x & 31;

  __device__ __forceinline__ Fp8Loader(const AttentionParams &p, const PrefillParams &x,
                                       const PrefillMaps &maps, const S &shared)
      : p(p), x(x), maps(maps), shared(shared) {}

  // ---- boxes: lane i loads boxes i, i + 32, ... of a key tile

  // Its rows in global memory.
  struct Box {
    int row, page;
  };

  __device__ __forceinline__ int first_key(int i) const { return i / kPanels * x.box_keys; }

  // Looks the page up: well before the box is needed.
  __device__ __forceinline__ Box locate_box(const PrefillTile &t, int n, int i) const {
    const int at = first_key(i), key = n * kKeys + at;
    if (!p.block_table) return {t.kv_row + key, 0};
    const int column = static_cast<u32>(key) / static_cast<u32>(p.page_size);
    Box box = {key - column * p.page_size, x.outside_page};
    if (at < kKeys && key < t.kv_end && key + x.box_keys > t.kv_begin) {
      box.page =
          reinterpret_cast<const i32 *>(p.block_table + t.request * p.table_row_stride)[column];
    }
    return box;
  }

  __device__ __forceinline__ void load_box(const TensorMap *map, int i, const Box &box, int kv_head,
                                           u32 to, u32 barrier) const {
    const int panel = i % kPanels;
    tma_load4(to + (panel * kKeys + first_key(i)) * 128, map, panel * 128, box.row, kv_head,
              box.page, barrier);
  }

  __device__ __forceinline__ void load_boxes(const TensorMap *map, const PrefillTile &t, int n,
                                             const Box &first, u32 to, u32 barrier) const {
    if (first_key(lane) < kKeys) load_box(map, lane, first, t.kv_head, to, barrier);
    if (x.box_keys * 32 < kKeys * kPanels) {
#pragma unroll 1
      for (int i = lane + 32; first_key(i) < kKeys; i += 32) {
        load_box(map, i, locate_box(t, n, i), t.kv_head, to, barrier);
      }
    }
  }

  __device__ __forceinline__ PrefillTile &tile(int number) const {
    return shared.rest().tile[number % S::kTiles];
  }

  // ---- queries and keys

  // Registers are few here: what the loop over keys holds waits in shared memory while the next
  // tile is looked up, and places in rings follow from counts.
  __device__ __forceinline__ void run_keys() const {
    typename S::Rest &r = shared.rest();
    volatile Parked &parked = r.parked;
    int loaded = 0;  // key tiles
    int item = count_dealt() ? static_cast<int>(blockIdx.x) : claim();
    bool again = false;  // going through the list of tiles that run again
    bool real = false;   // `number` is a tile, and no message
#pragma unroll 1
    for (int number = -1;;) {
      bool found = false;
#pragma unroll 1
      for (int n = real ? tile(number).n_end - 1 : 0;;) {
        const int begin = real ? tile(number).n_begin : 0;
        // The next tile is claimed late enough for the order of the tiles, and looked up and its
        // queries asked for while keys of this one are waited for.
        const int claim_at = real ? min(begin + 2, tile(number).n_end - 1) : 0;
        if (real) {
          if (n == claim_at && !again) item = claim();
          load_keys(tile(number), n, loaded++);
        }
        if (n == max(begin, claim_at - 1)) {
          if (real && again) {
            item = *reinterpret_cast<const volatile i32 *>(x.links + tile(number).item);
          }
          if (lane == 0) parked.n = n, parked.loaded = loaded, parked.number = number;
          __syncwarp();
          found = seek(item, again, number + 1);
          n = parked.n, loaded = parked.loaded, number = parked.number;
          __syncwarp();
          if (S::kQueryStages > 1 && found) load_queries(number + 1);
        }
        if (!real || --n < tile(number).n_begin) break;
      }
      ++number;
      real = found;
      if (found) {
        if (S::kQueryStages == 1) load_queries(number);
        continue;
      }
      post(again ? kStop : kDrain, number);
      if (again) return;
      mbarrier_wait(shared_address(&r.drained), 0);
      again = true;
      item = r.again;
    }
  }

  // As the `count`-th key tile of the block.
  __device__ __forceinline__ void load_keys(const PrefillTile &t, int n, u32 count) const {
    const int slot = count % S::kKeyStages;
    const Box box = locate_box(t, n, lane);
    mbarrier_wait(shared_address(&shared.rest().key_empty[slot]), count / S::kKeyStages % 2 ^ 1);
    const u32 full = shared_address(&shared.rest().key_full[slot]);
    if (lane == 0) mbarrier_arrive_expect(full, S::kKeyBytes);
    __syncwarp();
    load_boxes(maps.k, t, n, box, shared.keys(slot), full);
  }

  // Describes `item`, or the first one after it that is anything. False: there is none.
  __device__ __forceinline__ bool seek(int item, bool again, int number) const {
    const RequestOrder &order = shared.rest().order;
    if (!again) item = __shfl_sync(0xffffffffu, item, 0);
    while (again ? item != kNoLink : item < count_items(x, order)) {
      if (locate_tile<kKeys>(p, x, order, item, tile(number))) return true;
      item = __shfl_sync(0xffffffffu, claim(), 0);
    }
    return false;
  }

  // Items that blocks have without a claim: one each. None beside another kernel, where some blocks
  // start late.
  __device__ __forceinline__ int count_dealt() const {
    return x.most_skipped ? 0 : static_cast<int>(gridDim.x);
  }

  // The next item, in lane 0. Each item, and each block that was dealt none, claims one: the
  // counter is 0 again after the last.
  __device__ __forceinline__ int claim() const {
    if (lane > 0) return 0;
    const u32 claims = count_items(x, shared.rest().order) + gridDim.x - count_dealt();
    return count_dealt() + static_cast<int>(atomicInc(x.counter, claims - 1));
  }

  __device__ __forceinline__ static int query_slot(int number) { return number % S::kQueryStages; }

  __device__ __forceinline__ void wait_for_room(int number) const {
    mbarrier_wait(shared_address(&shared.rest().query_empty[query_slot(number)]),
                  number / S::kQueryStages % 2 ^ 1);
  }

  __device__ __forceinline__ void load_queries(int number) const {
    const PrefillTile &t = tile(number);
    const int slot = query_slot(number);
    wait_for_room(number);
    const u32 full = shared_address(&shared.rest().query_full[slot]);
    if (lane == 0) mbarrier_arrive_expect(full, S::kQueryBytes);
    __syncwarp();
    if (lane < kPanels) {
      tma_load3(shared.queries(slot) + lane * kTileRows * 128, maps.q, lane * 128,
                t.head_group << x.pack_shift, t.q_begin + t.token, full);
    }
  }

  // A message without a tile.
  __device__ __forceinline__ void post(int item, int number) const {
    wait_for_room(number);
    if (lane == 0) {
      tile(number).item = item;
      mbarrier_arrive(shared_address(&shared.rest().query_full[query_slot(number)]));
    }
    __syncwarp();
  }

  // ---- values

  __device__ __forceinline__ void run_values() const {
    typename S::Rest &r = shared.rest();
    Ring<S::kQueryStages> q;
    Ring<S::kValueStages> v;
#pragma unroll 1
    for (int number = 0;; ++number) {
      mbarrier_wait(shared_address(&r.query_full[q.slot]), q.parity);
      const PrefillTile &t = tile(number);
      const int item = t.item;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared_address(&r.query_empty[q.slot]));
      q.next();
      if (item == kStop) break;
      if (item == kDrain) continue;
      const int begin = t.n_begin;
#pragma unroll 1
      for (int n = t.n_end - 1; n >= begin; --n) {
        const Box box = locate_box(t, n, lane);
        mbarrier_wait(shared_address(&r.value_empty[v.slot]), v.parity ^ 1);
        const u32 full = shared_address(&r.value_full[v.slot]);
        if (lane == 0) {
          r.from[v.slot] = max(0, t.own_begin - n * kKeys);
          r.until[v.slot] = t.own_end - n * kKeys;
          mbarrier_arrive_expect(full, S::kKeyBytes);
        }
        __syncwarp();
        load_boxes(maps.v, t, n, box, shared.values(v.slot), full);
        v.next();
      }
    }
    mbarrier_wait(shared_address(&r.value_empty[v.slot]), v.parity ^ 1);
    if (lane == 0) {
      r.from[v.slot] = kStop;
      mbarrier_arrive(shared_address(&r.value_full[v.slot]));
    }
  }
};
