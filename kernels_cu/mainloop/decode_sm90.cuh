// Attention of few query rows over many keys: the rows of one KV head, its keys and values by TMA.
//
// Every warp has a ring of tiles of its own in shared memory and takes every kWarps-th tile of the
// CTA's span. It asks for another tile as soon as it has read one, also across the ends of
// segments, so that no warp waits for another inside of a segment.
//
// Or the warps of heads side by side, one a head, share a ring of tiles of all of them, and the
// last of them to have read one asks for another: what lies side by side is asked for at once.
#pragma once

#include "block/even_span.cuh"
#include "mainloop/decode_products_sm90.cuh"

template <class V>
struct DecodeLoop : DecodeProducts<V> {
  using Products = DecodeProducts<V>;
  using Rows = DecodeRows<V>;
  using Products::kD, Products::kKeys, Products::kPanelBytes, Products::kSideBytes;
  using Products::kStageBytes, Products::lane, Products::p;

  const DecodeParams &d;
  const Spans &spans;
  const EvenSpan &even;
  const TensorMap *const k_map, *const v_map;
  const int warp = threadIdx.x / 32;
  const int side_head = warp & ((1 << d.unit_shift) - 1);  // of the heads side by side, the warp's
  const int step = V::kWarps >> d.unit_shift;  // tiles from one of its own to the next
  const int sharers_shift;                     // log2 of the warps that share the warp's ring
  const u32 stage_bytes = kStageBytes << sharers_shift;
  const u32 ring, barrier, readers;  // readers: how many of them are done with a stage
  const int span_end;
  int next, asked = 0;   // the next tile to ask for
  int taken;             // the next tile to take
  int stage = 0;
  u32 parity = 0;

  // What a lane looked up: the warp's lane-th tile from the last look-up on.
  struct Ahead {
    int head, request, key;
    u32 boxes;  // that hold keys which some row sees
    int block[2], slot[2];
  } ahead;

  __device__ __forceinline__ DecodeLoop(const AttentionParams &p, const DecodeParams &d,
                                        const Spans &spans, const EvenSpan &even,
                                        const TensorMap *k_map, const TensorMap *v_map, u32 ring,
                                        u32 barriers, int begin, int end)
      : Products(p, V::kSharedRings ? d.unit_shift : 0),
        d(d),
        spans(spans),
        even(even),
        k_map(k_map),
        v_map(v_map),
        sharers_shift(V::kSharedRings ? d.unit_shift : 0),
        ring(ring + (threadIdx.x / 32 >> sharers_shift) * d.stages * stage_bytes),
        barrier(barriers + (threadIdx.x / 32 >> sharers_shift) * d.stages * 8),
        readers(barriers +
                (V::kWarps / 2 * 8 + (threadIdx.x / 32 >> sharers_shift) * 4) * d.stages),
        span_end(end),
        next(begin + static_cast<int>(threadIdx.x / 32 >> d.unit_shift)),
        taken(next) {}

  // The barriers and counters of a warp's ring, there after a barrier of all that share it.
  __device__ __forceinline__ static void open_rings(const DecodeParams &d, u32 barriers) {
    const int stage = threadIdx.x % 32, shift = V::kSharedRings ? d.unit_shift : 0;
    const int warp = threadIdx.x / 32, at = (warp >> shift) * d.stages + stage;
    if (stage >= d.stages || warp & ((1 << shift) - 1)) return;
    mbarrier_init(barriers + at * 8, 1);
    if (V::kSharedRings) store_shared4(barriers + (V::kWarps / 2 * d.stages * 8 + at * 4), 0);
    mbarrier_init_fence();
  }

  // ---- loads

  // Of the heads side by side, the first that the warp asks for.
  __device__ __forceinline__ int first_head() const { return V::kSharedRings ? 0 : side_head; }

  // The cache block and the slot in it of a key that some row sees.
  __device__ __forceinline__ void locate(int request, int key, int &block, int &slot) const {
    if (p.block_table) {
      const int column = d.page_shift >= 0 ? key >> d.page_shift : key / p.page_size;
      block = reinterpret_cast<const i32 *>(p.block_table + request * p.table_row_stride)[column];
      slot = key - column * p.page_size;
    } else {
      block = 0;
      slot = (p.cu_seqlens_k ? p.cu_seqlens_k[request] : 0) + key;
    }
  }

  __device__ __forceinline__ void look_up() {
    const int tile = next + lane * step;
    ahead.boxes = 0;
    if (tile >= span_end) return;
    KeyRange seen;
    if (even.there) {
      ahead.request = even.request.index;
      ahead.head = (even.unit << d.unit_shift) + first_head();
      ahead.key = tile * kKeys;
      seen = even.keys;
    } else {
      ahead.request = spans.find(tile);
      const RequestWork w = request_work(p, d, ahead.request);
      const u32 rest = tile - spans.prefix[ahead.request], segment = rest / w.tiles;
      const u32 block = w.chunks == 1 ? segment : over_rare(segment, w.chunks);
      const u32 unit = w.row_blocks == 1 ? block : over_rare(block, w.row_blocks);
      ahead.head = (unit << d.unit_shift) + first_head();
      ahead.key = (w.first_tile + (rest - block * w.chunks * w.tiles)) * kKeys;
      seen = visible_keys(p, w.request, 0, w.request.q_len - 1);
    }
    if (ahead.key >= seen.end) return;
    const int first = max(0, seen.begin - ahead.key) >> d.box_shift;
    const int last = (min(kKeys, seen.end - ahead.key) - 1) >> d.box_shift;
    ahead.boxes = (2u << last) - (1u << first);
    if (many_boxes()) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (ahead.boxes >> i & 1) {
        locate(ahead.request, ahead.key + (i << d.box_shift), ahead.block[i], ahead.slot[i]);
      }
    }
  }

  // More than are looked up ahead.
  __device__ __forceinline__ bool many_boxes() const { return kKeys >> d.box_shift > 2; }

  // Box `box` of a tile, of K and of V.
  __device__ __forceinline__ void load_box(u32 tile, u32 full, int box, int head, int block,
                                           int slot) const {
    const int key = box << d.box_shift;
    const u32 to = tile + key / 16 * 2 * Products::values + key % 16 * 128;
    if (d.whole_boxes) {
      const i32 at[5] = {0, slot, 0, head, block};
      tma_load5(to, k_map, at, full, kEvictFirst);
      tma_load5(to + Products::values, v_map, at, full, kEvictFirst);
      return;
    }
    constexpr int kWidth = 128 / kItemBytes<V::kCache>;
#pragma unroll 1
    for (int i = 0; i < d.k_panels + d.v_panels; ++i) {
      const bool value = i >= d.k_panels;
      const int panel = value ? i - d.k_panels : i;
      const i32 at[5] = {panel * kWidth, slot, 0, head, block};
      tma_load5(to + (value ? kSideBytes : 0) + panel * kPanelBytes, value ? v_map : k_map, at,
                full, kEvictFirst);
    }
  }

  // Asks for the warp's next tile, or leaves that to another of its ring.
  __device__ __forceinline__ void ask(int stage, bool own) {
    if (next >= span_end) return;
    const int source = asked % 32;
    if (source == 0) look_up();
    constexpr u32 kAll = 0xffffffffu;
    const u32 boxes = __shfl_sync(kAll, ahead.boxes, source);
    const int head = __shfl_sync(kAll, ahead.head, source);
    const u32 to = ring + stage * stage_bytes, full = barrier + stage * 8;
    int block[2], slot[2];
    if (many_boxes()) {  // a box a lane
      const int request = __shfl_sync(kAll, ahead.request, source);
      const int key = __shfl_sync(kAll, ahead.key, source) + (lane << d.box_shift);
      if (boxes >> lane & 1) locate(request, key, block[0], slot[0]);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        block[i] = __shfl_sync(kAll, ahead.block[i], source);
        slot[i] = __shfl_sync(kAll, ahead.slot[i], source);
      }
    }
    const int panels = (d.k_panels + d.v_panels) << sharers_shift;
    own &= lane == 0;
    if (own) mbarrier_arrive_expect(full, (__popc(boxes) << d.box_shift) * panels * 128);
#pragma unroll 1
    for (u32 left = boxes; left; left &= left - 1) {
      const int box = __ffs(left) - 1;
      int from = block[0], first = slot[0];
      if (many_boxes()) {
        from = __shfl_sync(kAll, from, box), first = __shfl_sync(kAll, first, box);
      } else if (box) {
        from = block[1], first = slot[1];
      }
      if (own) load_box(to, full, box, head, from, first);
    }
    next += step;
    ++asked;
  }

  __device__ __forceinline__ void start() {
#pragma unroll 1
    for (int i = 0; i < d.stages; ++i) ask(i, !V::kSharedRings || side_head == 0);
  }

  // Whether the other warps of the ring are done with a stage, as this one is.
  __device__ __forceinline__ bool is_last(int stage) const {
    if (!V::kSharedRings) return true;
    const u32 others = (1u << sharers_shift) - 1;
    u32 before = 0;
    if (lane == 0) before = arrive_and_wrap_shared(readers + stage * 4, others);
    return __shfl_sync(0xffffffffu, before, 0) == others;
  }

  // ---- segments

  // The warp's tiles of a segment, which begins at tile `start` of the line and key `first_key`.
  __device__ __forceinline__ void run(int start, int end, int first_key, const Rows &rows,
                                      DecodeState<V> &state) {
#pragma unroll 1
    for (; taken < end; taken += step) {
      const int key = first_key + (taken - start) * kKeys;
      mbarrier_wait(barrier + stage * 8, parity);
      const u32 tile =
          ring + stage * stage_bytes + (V::kSharedRings ? side_head * kSideBytes : 0);
      if (rows.all_see(key, kKeys)) {
        if (V::kRowTiles > 1 && rows.few()) {
          Products::template take_tile<false, 1>(tile, key, rows, state);
        } else {
          Products::template take_tile<false>(tile, key, rows, state);
        }
      } else {
        Products::template take_tile<true>(tile, key, rows, state);
      }
      __syncwarp();
      ask(stage, is_last(stage));
      if (++stage == d.stages) stage = 0, parity ^= 1;
    }
  }
};
