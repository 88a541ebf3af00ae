// The Hopper prefill over an 8-bit cache: keys and values as they are stored come by TMA, and two
// warps each widen them to 16 bits into the buffers that the products read. All else is as over a
// 16-bit cache.
#pragma once

#include "mainloop/fwd_sm90_load.cuh"
#include "mainloop/widen_tile_sm90.cuh"

// A part of a key tile, as boxes see it.
template <class V>
struct RawPart {
  static constexpr int kKeys = V::kRawRows, kTileRows = V::kTileRows;
};

// Behind what the kernel has over a 16-bit cache, and buffers for parts of tiles as they are
// stored: a part is asked for again as soon as it has been widened, well before the tile that it is
// of is.
template <class V>
struct WidenShared : PrefillShared<V> {
  using Base = PrefillShared<V>;
  static constexpr int kRawStages = V::kRawStages, kParts = V::kKeys / V::kRawRows;
  static constexpr int kRawPanels = (V::kHeadDim + 127) / 128;
  static constexpr int kRawPanelsV = (V::kHeadDimV + 127) / 128;
  static constexpr int kRawKeyBytes = V::kRawRows * kRawPanels * 128;
  static constexpr int kRawValueBytes = V::kRawRows * kRawPanelsV * 128;

  struct Raw {
    u64 key_full[kRawStages], key_empty[kRawStages];
    u64 value_full[kRawStages], value_empty[kRawStages];
    // Of a tile, with its first part: -1, keys are negated; rows of values that count. Of `sign`
    // and `from` kStop: no more.
    i32 sign[kRawStages], from[kRawStages], until[kRawStages];
  };
  static constexpr int kRawAt = Base::kRestAt + (sizeof(typename Base::Rest) + 7) / 8 * 8;
  static constexpr int kRawKeysAt = (kRawAt + static_cast<int>(sizeof(Raw)) + 1023) / 1024 * 1024;
  static constexpr int kRawValuesAt = kRawKeysAt + kRawStages * kRawKeyBytes;
  static constexpr int kWidenBytes = 1024 + kRawValuesAt + kRawStages * kRawValueBytes;
  static_assert(kWidenBytes <= V::kSharedBytes, "the host asks for less shared memory");
  static_assert(kRawKeyBytes % 1024 == 0 && kRawValueBytes % 1024 == 0, "");

  using Base::Base, Base::base, Base::address;

  __device__ __forceinline__ Raw &raw() const { return *reinterpret_cast<Raw *>(base + kRawAt); }
  __device__ __forceinline__ u32 raw_keys(int slot) const {
    return address + kRawKeysAt + slot * kRawKeyBytes;
  }
  __device__ __forceinline__ u32 raw_values(int slot) const {
    return address + kRawValuesAt + slot * kRawValueBytes;
  }

  // By one thread.
  __device__ __forceinline__ void init() const {
    Raw &r = raw();
    for (int i = 0; i < kRawStages; ++i) {
      mbarrier_init(shared_address(&r.key_full[i]), 1);
      mbarrier_init(shared_address(&r.key_empty[i]), V::kFillers);
      mbarrier_init(shared_address(&r.value_full[i]), 1);
      mbarrier_init(shared_address(&r.value_empty[i]), V::kFillers);
    }
    Base::init();
  }
};

// Tiles, queries and results as over a 16-bit cache; keys and values into the buffers of those that
// are stored in 8 bits.
template <class V>
struct WidenLoader : PrefillLoader<V> {
  using Loader = PrefillLoader<V>;
  using S = WidenShared<V>;
  using Boxes = BoxLoader<RawPart<V>, 128>;
  static constexpr int kRows = V::kRawRows;

  using Loader::p, Loader::x, Loader::maps, Loader::lane, Loader::wait_tile, Loader::note_drain;

  const S &shared;

  __device__ __forceinline__ WidenLoader(const AttentionParams &p, const PrefillParams &x,
                                         const PrefillMaps &maps, const S &shared)
      : Loader(p, x, maps, shared), shared(shared) {}

  // One warp for keys, one for values.
  template <bool kOfKeys>
  __device__ __forceinline__ void run() const {
    constexpr int kPanels = kOfKeys ? S::kRawPanels : S::kRawPanelsV;
    constexpr int kBytes = kOfKeys ? S::kRawKeyBytes : S::kRawValueBytes;
    typename S::Raw &r = shared.raw();
    const u64 *const full = kOfKeys ? r.key_full : r.value_full;
    const u64 *const empty = kOfKeys ? r.key_empty : r.value_empty;
    const Boxes boxes(p, x, maps);
    Ring<S::kRawStages> at;
#pragma unroll 1
    for (int number = 0;; ++number) {
      const PrefillTile t = wait_tile(number);
      __syncwarp();  // it may be replaced once the first of its keys are there
      const int item = t.item, begin = t.n_begin;
      if (item == kStop) break;
      if (item == kDrain) {
        note_drain();
        continue;
      }
      const float factor = kOfKeys ? score_scale(p, t.request, t.kv_head) : 0.f;
      const int claim_at = Loader::is_short(t) ? begin - 1 : begin + Loader::kClaimAhead;
#pragma unroll 1
      for (int n = t.n_end - 1; n >= begin; --n) {
        if (kOfKeys && n == claim_at && lane == 0) {
          mbarrier_arrive(shared_address(&shared.rest().claim));
        }
#pragma unroll 1
        for (int part = n * S::kParts; part < (n + 1) * S::kParts; ++part) {
          const typename Boxes::Box box = boxes.template locate_box<kPanels>(t, part, lane);
          mbarrier_wait(shared_address(&empty[at.slot]), at.parity ^ 1);
          const u32 barrier = shared_address(&full[at.slot]);
          if (lane == 0) {
            if (kOfKeys) {
              r.sign[at.slot] = factor < 0.f ? -1 : 1;
            } else {
              r.from[at.slot] = max(0, t.own_begin - n * V::kKeys);
              r.until[at.slot] = t.own_end - n * V::kKeys;
            }
            mbarrier_arrive_expect(barrier, kBytes);
          }
          __syncwarp();
          boxes.template load_boxes<kPanels>(
              kOfKeys ? maps.k : maps.v, t, part, box,
              kOfKeys ? shared.raw_keys(at.slot) : shared.raw_values(at.slot), barrier);
          at.next();
        }
      }
    }
    mbarrier_wait(shared_address(&empty[at.slot]), at.parity ^ 1);
    if (lane == 0) {
      (kOfKeys ? r.sign : r.from)[at.slot] = kStop;
      mbarrier_arrive(shared_address(&full[at.slot]));
    }
  }
};

// A warp of two that widen keys, or of two that widen values: every other eight rows.
template <class V>
struct PrefillWidener {
  using S = WidenShared<V>;
  static constexpr int kKeys = V::kKeys, kRows = V::kRawRows;

  const S &shared;
  const int warp;  // 0 or 1
  const int lane = threadIdx.x & 31;

  __device__ __forceinline__ PrefillWidener(const S &shared, int warp)
      : shared(shared), warp(warp) {}

  __device__ __forceinline__ void run_keys() const {
    typename S::Raw &r = shared.raw();
    typename S::Rest &wide = shared.rest();
    int sign = 0;
#pragma unroll 1
    for (Place at;; ++at.count) {
      mbarrier_wait(shared_address(&r.key_full[at.raw()]), at.raw_parity());
      if (at.part() == 0) sign = note(r.sign[at.raw()]);
      if (sign == kStop) return;
      const u32 from = shared.raw_keys(at.raw());
      const u32 to = shared.keys(at.slot()) + at.part() * kRows * 128;
      const auto wait = [&] { wait_empty(at, wide.key_empty[at.slot()]); };
      if (sign < 0) {
        widen<V::kHeadDim>(from, to, wait, [](auto &step) { step.negate(); });
      } else {
        widen<V::kHeadDim>(from, to, wait, [](auto &) {});
      }
      hand_on(at, wide.key_full[at.slot()], r.key_empty[at.raw()]);
    }
  }

  __device__ __forceinline__ void run_values() const {
    typename S::Raw &r = shared.raw();
    typename S::Rest &wide = shared.rest();
    int begin = 0, end = 0;
#pragma unroll 1
    for (Place at;; ++at.count) {
      mbarrier_wait(shared_address(&r.value_full[at.raw()]), at.raw_parity());
      if (at.part() == 0) begin = note(r.from[at.raw()]), end = note(r.until[at.raw()]);
      if (begin == kStop) return;
      const u32 from = shared.raw_values(at.raw()), first = at.part() * kRows;
      const u32 to = shared.operand(at.slot()) + first * 128;
      if (begin > 0 || end < kKeys) clear_rows(from, begin - first, end - first);
      widen<V::kHeadDimV>(
          from, to, [&] { wait_empty(at, wide.value_empty[at.slot()]); }, [](auto &) {});
      hand_on(at, wide.value_full[at.slot()], r.value_empty[at.raw()]);
    }
  }

 private:
  // Registers are few here: all places follow from a count of parts.
  struct Place {
    u32 count = 0;
    __device__ __forceinline__ u32 raw() const { return count % S::kRawStages; }
    __device__ __forceinline__ u32 raw_parity() const { return count / S::kRawStages & 1; }
    __device__ __forceinline__ u32 part() const { return count % S::kParts; }
    __device__ __forceinline__ u32 slot() const { return count / S::kParts % S::kStages; }
    __device__ __forceinline__ u32 parity() const { return count / (S::kParts * S::kStages) & 1; }
  };

  // Read by the lane that gives the buffer back.
  __device__ __forceinline__ int note(const i32 &at) const {
    return __shfl_sync(0xffffffffu, lane == 0 ? at : 0, 0);
  }

  // Before the first part of a tile.
  __device__ __forceinline__ void wait_empty(const Place &at, const u64 &empty) const {
    if (at.part() == 0) mbarrier_wait(shared_address(&empty), at.parity() ^ 1);
  }

  // The buffer is given back; with its last part a tile is there.
  __device__ __forceinline__ void hand_on(const Place &at, const u64 &full,
                                          const u64 &empty) const {
    const bool last = at.part() == S::kParts - 1;
    if (last) fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(shared_address(&empty));
      if (last) mbarrier_arrive(shared_address(&full));
    }
  }

  // All but rows begin..end of this warp's half of stored values. What they hold may be NaN, which
  // no weight of 0 undoes.
  __device__ __forceinline__ void clear_rows(u32 from, int begin, int end) const {
    const u32 zero[4] = {};
#pragma unroll 1
    for (int i = lane; i < kRows * 4 * S::kRawPanelsV; i += 32) {
      const int row = (i / 64 * 2 + warp) * 8 + i / 8 % 8;  // of all panels
      if (row % kRows < begin || row % kRows >= end) {
        store_shared16(from + row * 128 + i % 8 * 16, zero);
      }
    }
    fence_async_proxy();  // they are loaded over
    __syncwarp();
  }

  // This warp's half of a part. wait() comes before the first store, change(step) before each.
  // Loads are asked for kAhead steps before they are used: next to the products each takes hundreds
  // of cycles.
  template <int kDim, class Wait, class Change>
  __device__ __forceinline__ void widen(u32 from, u32 to, Wait wait, Change change) const {
    constexpr int kPanels = (kDim + 63) / 64, kPanelBytes = kKeys * 128;
    constexpr int kColumns = kPanels == 1 ? 64 : 128, kParts = kColumns / 64;
    using Step = WidenStep<V::kCache, kColumns, V::kCompute>;
    constexpr int kSteps = kRows / 16 * kPanels, kAhead = kSteps < 2 ? kSteps : 2;
    from += warp * 1024;
    to += warp * 1024;
    Step step[kAhead];
    const auto load = [&](int i, int at) {
      const int panel = at % kPanels, octet = at / kPanels;
      step[i].load(from + panel / 2 * kRows * 128 + octet * 2048, panel % 2 * (kParts - 1));
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i, i);
    wait();
#pragma unroll
    for (int at = 0; at < kSteps; ++at) {
      const int panel = at % kPanels, octet = at / kPanels;
      change(step[at % kAhead]);
      step[at % kAhead].store(to + panel / 2 * 2 * kPanelBytes + octet * 2048, kPanelBytes,
                              panel % 2);
      if (at + kAhead < kSteps) load(at % kAhead, at + kAhead);
    }
  }
};
