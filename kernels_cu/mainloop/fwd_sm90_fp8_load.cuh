// The loading warps of the 8-bit Hopper prefill: one claims tiles and loads queries and keys, one
// loads values. Shared memory, its barriers, and what travels through it.
#pragma once

#include "mainloop/fwd_sm90_boxes.cuh"

constexpr int kTransposingWarps = 2;

// What the warp that loads keys does without while it looks the next tile up.
struct Parked {
  i32 n, loaded, number;
  i32 again;  // going through the list of tiles that run again
};

// Transposed values are panels of kPanelKeys bytes a row, a row for each column of V, with the
// swizzle of that width.
template <class V>
struct Fp8Shared : AlignedShared {
  static constexpr ScalarType kType = kE4m3;
  static constexpr bool kHold = V::kHold, kNarrow = V::kNarrow;
  static constexpr int kQueryStages = V::kQueryStages, kKeyStages = V::kKeyStages;
  static constexpr int kValueStages = V::kValueStages, kTurnedStages = V::kTurnedStages;
  static constexpr int kKeys = V::kKeys, kDim = V::kHeadDim;
  static constexpr int kOperandStages = kTurnedStages;
  static constexpr int kTiles = 8;  // that warps may still read: a power of two
  static constexpr int kPanels = (kDim + 127) / 128;
  static constexpr int kRowSteps = kDim / 32;  // of the product of queries and keys
  static constexpr int kPanelKeys = kKeys % 128 == 0 ? 128 : 64;
  static constexpr int kTileRows = V::kTileRows, kComputeWarps = kTileRows / 16;
  static constexpr int kThreads = 128 + 32 * kComputeWarps;
  static constexpr int kQueryBytes = kTileRows * kPanels * 128;
  static constexpr int kKeyBytes = kKeys * kPanels * 128;
  static constexpr int kTurnedDim = kDim + 8 * V::kSumColumn;  // columns of V, then ones
  static constexpr int kTurnedBytes = kKeys * kTurnedDim;

  struct Rest {
    u64 tile_full[kTiles];
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

  // Barriers from the address of the first buffer on; 8 bytes a buffer.
  static constexpr int kKeyFullAt = kRestAt + 8 * (kTiles + 2 * kQueryStages);
  static constexpr int kKeyEmptyAt = kKeyFullAt + 8 * kKeyStages;
  static constexpr int kTurnedFullAt = kKeyEmptyAt + 8 * (kKeyStages + 2 * kValueStages);
  static constexpr int kTurnedEmptyAt = kTurnedFullAt + 8 * kTurnedStages;

  using AlignedShared::AlignedShared;

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
  __device__ __forceinline__ u32 operand(int slot) const {
    return address + kTurnedAt + slot * kTurnedBytes;
  }

  // By all threads, before the barrier in front of the first product. Nothing else writes there.
  __device__ __forceinline__ void write_ones() const {
    if constexpr (V::kSumColumn) {
      constexpr int kWords = kKeys * 8 / 4;
      static_assert(kPanelKeys == kKeys, "");
      for (int i = static_cast<int>(threadIdx.x); i < kTurnedStages * kWords; i += kThreads) {
        const int at = i / kWords * kTurnedBytes + kKeys * kDim + i % kWords * 4;
        *reinterpret_cast<u32 *>(base + kTurnedAt + at) = 0x38383838u;  // 1 in e4m3
      }
      fence_async_proxy();
    }
  }

  // By one thread.
  __device__ __forceinline__ void init() const {
    Rest &r = rest();
    for (int i = 0; i < kTiles; ++i) mbarrier_init(shared_address(&r.tile_full[i]), 1);
    for (int i = 0; i < kQueryStages; ++i) {
      mbarrier_init(shared_address(&r.query_full[i]), 1);
      mbarrier_init(shared_address(&r.query_empty[i]), kComputeWarps);
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
struct Fp8Loader : BoxLoader<V, 128> {
  using Boxes = BoxLoader<V, 128>;
  using S = Fp8Shared<V>;
  static constexpr int kKeys = V::kKeys, kPanels = S::kPanels;

  using Boxes::p, Boxes::x, Boxes::maps, Boxes::lane, Boxes::count_dealt;
  using typename Boxes::Box;

  const S &shared;

  __device__ __forceinline__ Fp8Loader(const AttentionParams &p, const PrefillParams &x,
                                       const PrefillMaps &maps, const S &shared)
      : Boxes(p, x, maps), shared(shared) {}

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
    if (lane == 0) parked.again = false;
    __syncwarp();
    bool real = false;  // `number` is a tile, and no message
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
          if (n == claim_at && !parked.again) item = claim();
          load_keys(tile(number), n, loaded++);
          // One buffer of queries is free late: not before keys have been asked for.
          if (S::kQueryStages == 1 && n == tile(number).n_end - 1) load_queries(number);
        }
        if (n == max(begin, claim_at - 1)) {
          if (real && parked.again) {
            item = *reinterpret_cast<const volatile i32 *>(x.links + tile(number).item);
          }
          if (lane == 0) parked.n = n, parked.loaded = loaded, parked.number = number;
          __syncwarp();
          found = seek(item, parked.again, number + 1);
          n = parked.n, loaded = parked.loaded, number = parked.number;
          __syncwarp();
          if (S::kQueryStages > 1 && found) load_queries(number + 1);
        }
        if (!real || --n < tile(number).n_begin) break;
      }
      ++number;
      real = found;
      if (found) continue;
      post(parked.again ? kStop : kDrain, number);
      if (parked.again) return;
      mbarrier_wait(shared_address(&r.drained), 0);
      __syncwarp();
      if (lane == 0) parked.again = true;
      __syncwarp();
      item = r.again;
    }
  }

  // As the `count`-th key tile of the block.
  __device__ __forceinline__ void load_keys(const PrefillTile &t, int n, u32 count) const {
    const int slot = count % S::kKeyStages;
    const Box box = this->template locate_box<kPanels>(t, n, lane);
    mbarrier_wait(shared_address(&shared.rest().key_empty[slot]), count / S::kKeyStages % 2 ^ 1);
    const u32 full = shared_address(&shared.rest().key_full[slot]);
    if (lane == 0) mbarrier_arrive_expect(full, S::kKeyBytes);
    __syncwarp();
    this->template load_boxes<kPanels>(maps.k, t, n, box, shared.keys(slot), full);
  }

  // Describes `item`, or the first one after it that is anything. False: there is none.
  __device__ __forceinline__ bool seek(int item, bool again, int number) const {
    const RequestOrder &order = shared.rest().order;
    if (!again) item = __shfl_sync(0xffffffffu, item, 0);
    while (again ? item != kNoLink : item < count_items(x, order)) {
      if (locate_tile<V>(p, x, order, item, tile(number))) {
        if (lane == 0) announce(number);
        return true;
      }
      item = __shfl_sync(0xffffffffu, claim(), 0);
    }
    return false;
  }

  // By one lane: the values of the tile may be asked for.
  __device__ __forceinline__ void announce(int number) const {
    mbarrier_arrive(shared_address(&shared.rest().tile_full[number % S::kTiles]));
  }

  // The next item, in lane 0.
  __device__ __forceinline__ int claim() const {
    return count_dealt() + Boxes::claim(count_items(x, shared.rest().order));
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
    this->template load_rows<kPanels>(t.head_group << x.pack_shift, t.q_begin + t.token,
                                      shared.queries(slot), full);
  }

  // A message without a tile.
  __device__ __forceinline__ void post(int item, int number) const {
    wait_for_room(number);
    if (lane == 0) {
      tile(number).item = item;
      announce(number);
      mbarrier_arrive(shared_address(&shared.rest().query_full[query_slot(number)]));
    }
    __syncwarp();
  }

  // ---- values

  __device__ __forceinline__ void run_values() const {
    typename S::Rest &r = shared.rest();
    Ring<S::kValueStages> v;
#pragma unroll 1
    for (int number = 0;; ++number) {
      mbarrier_wait(shared_address(&r.tile_full[number % S::kTiles]), number / S::kTiles & 1);
      const PrefillTile &t = tile(number);
      const int item = t.item;
      if (item == kStop) break;
      if (item == kDrain) continue;
      const int begin = t.n_begin;
#pragma unroll 1
      for (int n = t.n_end - 1; n >= begin; --n) {
        const Box box = this->template locate_box<kPanels>(t, n, lane);
        mbarrier_wait(shared_address(&r.value_empty[v.slot]), v.parity ^ 1);
        const u32 full = shared_address(&r.value_full[v.slot]);
        if (lane == 0) {
          r.from[v.slot] = max(0, t.own_begin - n * kKeys);
          r.until[v.slot] = t.own_end - n * kKeys;
          mbarrier_arrive_expect(full, S::kKeyBytes);
        }
        __syncwarp();
        this->template load_boxes<kPanels>(maps.v, t, n, box, shared.values(v.slot), full);
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
