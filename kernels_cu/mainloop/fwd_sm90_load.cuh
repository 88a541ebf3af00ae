// The first warpgroup of the Hopper prefill: one warp claims tiles and loads queries, one loads
// keys, one values, one stores results. Shared memory, its barriers, and what travels through it.
#pragma once

#include "mainloop/fwd_sm90_boxes.cuh"

template <class V>
struct PrefillShared : AlignedShared {
  static constexpr ScalarType kType = V::kCompute;
  static constexpr bool kHold = V::kHold, kNarrow = V::kNarrow;
  static constexpr int kQueryStages = V::kQueryStages, kStages = V::kStages, kKeys = V::kKeys;
  static constexpr int kKeyStages = kStages, kOperandStages = kStages;
  static constexpr int kTiles = kTilesKept;
  static constexpr int kRowSteps = V::kHeadDim / 16;  // of the product of queries and keys
  static constexpr int kPanels = (V::kHeadDim + 63) / 64, kPanelsV = (V::kHeadDimV + 63) / 64;
  static constexpr int kTileRows = V::kTileRows, kComputeWarps = kTileRows / 16;
  static constexpr int kThreads = 128 + 32 * kComputeWarps + V::kExtraThreads;
  static constexpr int kQueryBytes = kTileRows * kPanels * 128;
  static constexpr int kKeyBytes = kKeys * kPanels * 128;
  static constexpr int kValueBytes = kKeys * kPanelsV * 128;
  // Results of whole tiles leave through the buffer of their queries.
  static constexpr bool kStaged = kQueryStages > 1 && kPanelsV <= kPanels;

  struct Rest {
    u64 tile_full[kTilesKept], claim;
    u64 query_full[kQueryStages], query_empty[kQueryStages], staged[kQueryStages];
    u64 key_full[kStages], key_empty[kStages];
    u64 value_full[kStages], value_empty[kStages], value_raw;
    u64 drained;
    PrefillTile tile[kTilesKept];
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

  using AlignedShared::AlignedShared;

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
  __device__ __forceinline__ u32 operand(int slot) const {
    return address + kValuesAt + slot * kValueBytes;
  }

  // By one thread.
  __device__ __forceinline__ void init() const {
    Rest &r = rest();
    for (int i = 0; i < kTilesKept; ++i) mbarrier_init(shared_address(&r.tile_full[i]), 1);
    mbarrier_init(shared_address(&r.claim), 1);
    for (int i = 0; i < kQueryStages; ++i) {
      mbarrier_init(shared_address(&r.query_full[i]), 1);
      mbarrier_init(shared_address(&r.query_empty[i]), kStaged ? 1 : kComputeWarps);
      mbarrier_init(shared_address(&r.staged[i]), kComputeWarps);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared_address(&r.key_full[i]), V::kFillers);
      mbarrier_init(shared_address(&r.key_empty[i]), kComputeWarps);
      mbarrier_init(shared_address(&r.value_full[i]), V::kFillers);
      mbarrier_init(shared_address(&r.value_empty[i]), kComputeWarps);
    }
    mbarrier_init(shared_address(&r.value_raw), 1);
    mbarrier_init(shared_address(&r.drained), kComputeWarps + (kStaged ? 3 : 2));
    mbarrier_init_fence();
    r.again = kNoLink;
  }
};

template <class V>
struct PrefillLoader : BoxLoader<V, 64> {
  using Boxes = BoxLoader<V, 64>;
  using S = PrefillShared<V>;
  static constexpr int kKeys = V::kKeys;

  using Boxes::p, Boxes::x, Boxes::maps, Boxes::lane, Boxes::count_dealt, Boxes::claim;
  using typename Boxes::Box;

  const S &shared;

  __device__ __forceinline__ PrefillLoader(const AttentionParams &p, const PrefillParams &x,
                                           const PrefillMaps &maps, const S &shared)
      : Boxes(p, x, maps), shared(shared) {}

  __device__ __forceinline__ PrefillTile &tile(int number) const {
    return shared.rest().tile[number % kTilesKept];
  }

  // ---- tiles and queries

  // Claims tiles, describes them for the other warps, and loads their queries. Little is kept from
  // a tile to the next, as the look-up takes the registers that there are: an item of the list of
  // tiles that run again has kAgain added, which makes it negative.
  __device__ __forceinline__ void run_tiles() const {
    typename S::Rest &r = shared.rest();
    int item = x.most_skipped ? next_item() : static_cast<int>(blockIdx.x);
#pragma unroll 1
    for (int number = 0;; ++number) {
      const bool found = seek(item, number);
      const PrefillTile &t = tile(number);
      if (lane == 0) {
        if (!found) tile(number).item = item < 0 ? kStop : kDrain;
        mbarrier_arrive(shared_address(&r.tile_full[number % kTilesKept]));
        // A phase of `claim` for each number; the warp that loads keys ends those of long tiles.
        if (!found || is_short(t)) mbarrier_arrive(shared_address(&r.claim));
      }
      __syncwarp();
      load_queries(t, found, number);
      mbarrier_wait(shared_address(&r.claim), number & 1);
      if (!found) {
        if (item < 0) return;
        mbarrier_wait(shared_address(&r.drained), 0);
        item = listed(r.again);
      } else if (item < 0) {
        item = listed(*reinterpret_cast<const volatile i32 *>(x.links + (item - kAgain)));
      } else {
        item = next_item();
      }
    }
  }

  static constexpr int kAgain = -0x7fffffff - 1;
  __device__ __forceinline__ static int listed(int item) {
    return item == kNoLink ? kNoLink : item + kAgain;
  }

  // The next tile is claimed late, for the sake of the order of the tiles, but early enough that
  // its keys follow those of this one: at once, or when this many keys are left to ask for.
  static constexpr int kClaimAhead = 3;
  __device__ __forceinline__ static bool is_short(const PrefillTile &t) {
    return t.n_end - t.n_begin <= kClaimAhead;
  }

  // Describes `item`, or the first one after it that is anything. False: there is none.
  __device__ __forceinline__ bool seek(int &item, int number) const {
    const RequestOrder &order = shared.rest().order;
    while (item < 0 ? item != kNoLink : item < count_items(x, order)) {
      const int plain = item < 0 ? item - kAgain : item;
      if (locate_tile<V>(p, x, order, plain, tile(number))) return true;
      item = next_item();
    }
    return false;
  }

  __device__ __forceinline__ int next_item() const {
    const int claimed = claim(count_items(x, shared.rest().order));
    return count_dealt() + __shfl_sync(0xffffffffu, claimed, 0);
  }

  // A message comes without queries.
  __device__ __forceinline__ void load_queries(const PrefillTile &t, bool found, int number) const {
    typename S::Rest &r = shared.rest();
    const int slot = number % S::kQueryStages, round = number / S::kQueryStages;
    const int head = t.head_group << x.pack_shift, token = t.q_begin + t.token;
    mbarrier_wait(shared_address(&r.query_empty[slot]), ~round & 1);
    const u32 full = shared_address(&r.query_full[slot]);
    if (lane == 0) {
      if (found) {
        mbarrier_arrive_expect(full, S::kQueryBytes);
      } else {
        mbarrier_arrive(full);
      }
    }
    __syncwarp();
    if (found) this->template load_rows<S::kPanels>(head, token, shared.queries(slot), full);
  }

  // By the warps that load keys, load values and store: the next tile or message.
  __device__ __forceinline__ const PrefillTile &wait_tile(int number) const {
    const int slot = number % kTilesKept;
    mbarrier_wait(shared_address(&shared.rest().tile_full[slot]), number / kTilesKept & 1);
    return shared.rest().tile[slot];
  }

  // The message may be replaced: no buffer that is given back says that this warp has read it.
  __device__ __forceinline__ void note_drain() const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&shared.rest().drained));
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
      if (item == kDrain) {
        note_drain();
        continue;
      }
      const int claim_at = is_short(t) ? begin - 1 : begin + kClaimAhead;
#pragma unroll 1
      for (int n = t.n_end - 1; n >= begin; --n) {
        if (n == claim_at && lane == 0) mbarrier_arrive(shared_address(&r.claim));
        const Box box = this->template locate_box<S::kPanels>(t, n, lane);
        mbarrier_wait(shared_address(&r.key_empty[k.slot]), k.parity ^ 1);
        const u32 full = shared_address(&r.key_full[k.slot]);
        if (lane == 0) mbarrier_arrive_expect(full, S::kKeyBytes);
        __syncwarp();
        this->template load_boxes<S::kPanels>(maps.k, t, n, box, shared.keys(k.slot), full);
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
      if (item == kDrain) {
        note_drain();
        continue;
      }
#pragma unroll 1
      for (int n = t.n_end - 1; n >= begin; --n) {
        const int from = max(0, t.own_begin - n * kKeys), until = t.own_end - n * kKeys;
        const bool whole = from == 0 && until >= kKeys;
        const Box box = this->template locate_box<S::kPanelsV>(t, n, lane);
        mbarrier_wait(shared_address(&r.value_empty[v.slot]), v.parity ^ 1);
        const u32 full = shared_address(&r.value_full[v.slot]), to = shared.operand(v.slot);
        const u32 loaded = whole ? full : shared_address(&r.value_raw);
        if (lane == 0) mbarrier_arrive_expect(loaded, S::kValueBytes);
        __syncwarp();
        this->template load_boxes<S::kPanelsV>(maps.v, t, n, box, to, loaded);
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
        tma_store3(maps.out, shared.queries(q.slot) + lane * S::kTileRows * 128, lane * 64,
                   t.head_group << x.pack_shift, t.q_begin + t.token);
        tma_wait_read();
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared_address(&r.query_empty[q.slot]));
      q.next();
    }
  }
};
