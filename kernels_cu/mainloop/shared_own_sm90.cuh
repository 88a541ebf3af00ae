// Own keys of requests beside shared ones: every warp walks a span of its own, by itself.
//
// A warp has a ring of tiles in shared memory and asks for another tile as soon as it has read one,
// also across the ends of segments. Results go from registers to memory.
#pragma once

#include "block/shared_work.cuh"
#include "mainloop/decode_products_sm90.cuh"
#include "mainloop/shared_merge_sm90.cuh"

template <class V>
struct OwnKeys : DecodeProducts<V> {
  using S = SharedPlaces<V>;
  using Products = DecodeProducts<V>;
  using Rows = DecodeRows<V>;
  using Products::kD, Products::kKeys, Products::kPanelBytes, Products::kSideBytes;
  using Products::kStageBytes, Products::kSteps, Products::lane, Products::p;
  static constexpr int kStages = V::kOwnStages, kBoxes = kKeys / 16, kRowTiles = V::kRowTiles;
  static constexpr int kPanels = Products::kPanels, kWidth = 128 / kItemBytes<V::kCache>;
  static_assert(kStageBytes == S::kOwnStageBytes, "");
  static constexpr u32 kAll = 0xffffffffu;

  const DecodeParams &d;
  const SharedParams &s;
  const TensorMap *const k_map, *const v_map;
  u32 ring;
  const u32 barrier;
  const int worker;  // of all warps for own keys
  int at, end;  // on the line
  int next;     // to ask for
  OwnRequest now;         // of `at`
  int index, next_index;  // of `now`; of the lane's tile
  int stage = 0;
  u32 parity = 0;

  // What a lane looked up: its tile of the 32 that `next` is one of.
  struct Ahead {
    int head, boxes;
    int block[kBoxes], slot[kBoxes];
  } ahead;

  __device__ __forceinline__ OwnKeys(const AttentionParams &p, const DecodeParams &d,
                                     const SharedParams &s, const TensorMap *k_map,
                                     const TensorMap *v_map, const OwnStart &start, u32 base)
      : Products(p),
        d(d),
        s(s),
        k_map(k_map),
        v_map(v_map),
        ring(base + S::kRings + threadIdx.x / 32 * kStages * kStageBytes),
        barrier(base + S::kOwnFull + threadIdx.x / 32 * kStages * 8),
        worker(blockIdx.x * kOwnWarps + threadIdx.x / 32) {
    now = start.request;
    at = next = start.span.x, end = start.span.y, index = next_index = start.span.z;
    if (!V::kWiden) asm("" : "+r"(ring));  // or `base` takes a register of its own all along
  }

  __device__ __forceinline__ u32 base() const {
    return ring - S::kRings - threadIdx.x / 32 * kStages * kStageBytes;
  }

  // `found`: the request of `next`, or one before.
  __device__ __forceinline__ void look_up(OwnRequest found) {
    const int tile = (next & ~31) + lane;
    ahead.boxes = 0;
    if (tile < next || tile >= end) return;
    while (tile >= line_end(found)) found = s.own[++next_index];
    const int segment = (tile - found.line) / found.tiles;
    ahead.head = segment / found.row_blocks;
    const int key = key_of(found, tile - found.line - segment * found.tiles);
    const i32 *const row =
        reinterpret_cast<const i32 *>(p.block_table + found.request * p.table_row_stride);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      if (key + i * 16 >= found.kv_len) break;
      const int box_key = key + i * 16;
      const int column = d.page_shift >= 0 ? box_key >> d.page_shift : box_key / p.page_size;
      ahead.block[i] = row[column];
      ahead.slot[i] = box_key - column * p.page_size;
      ahead.boxes = i + 1;
    }
  }

  // Asks for the warp's next tile.
  __device__ __forceinline__ void ask(int stage) {
    if (next >= end) return;
    const int source = next & 31;
    if (source == 0 && next != at) look_up(s.own[next_index]);
    // A tile has a key, so of one box nothing needs to be known.
    const int boxes = kBoxes == 1 ? 1 : __shfl_sync(kAll, ahead.boxes, source);
    const int head = __shfl_sync(kAll, ahead.head, source);
    const u32 to = ring + stage * kStageBytes, full = barrier + stage * 8;
    if (lane == 0) mbarrier_arrive_expect(full, boxes * 2 * kSideBytes);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const int block = __shfl_sync(kAll, ahead.block[i], source);
      const int slot = __shfl_sync(kAll, ahead.slot[i], source);
      if (lane == 0 && i < boxes) load_box(to + i * 2 * kSideBytes, full, head, block, slot);
    }
    ++next;
  }

  __device__ __forceinline__ void load_box(u32 to, u32 full, int head, int block,
                                           int slot) const {
    if (d.whole_boxes) {
      const i32 where[5] = {0, slot, 0, head, block};
      tma_load5(to, k_map, where, full, kEvictFirst);
      tma_load5(to + kSideBytes, v_map, where, full, kEvictFirst);
      return;
    }
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      const i32 where[5] = {i * kWidth, slot, 0, head, block};
      tma_load5(to + i * kPanelBytes, k_map, where, full, kEvictFirst);
      tma_load5(to + kSideBytes + i * kPanelBytes, v_map, where, full, kEvictFirst);
    }
  }

  __device__ __forceinline__ void run() {
    if (at < end) walk();
    tell(0x7fffffff);
  }

  // All that this warp has before a position of the line is stored.
  __device__ __forceinline__ void tell(int position) const {
    if (V::kParts) return;
    __syncwarp();
    if (lane == 0) {
      store_release_shared(base() + S::kProgress + threadIdx.x / 32 * 4, position);
    }
  }

  __device__ __forceinline__ void walk() {
    look_up(now);
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) ask(i);
    Rows rows;
    fetch(rows);
#pragma unroll 1
    while (true) {
      const OwnRequest of = now;
      const int segment = (at - of.line) / of.tiles, first = of.line + segment * of.tiles;
      const int stop = min(end, first + of.tiles), head = segment / of.row_blocks;
      const int block = segment - head * of.row_blocks, row = block * d.row_block;
      const int count = min(d.row_block, of.q_len * p.group - row);
      if (stop < end && stop >= line_end(of)) now = s.own[++index];
      DecodeState<V> state;
      rows.prepare(p, d, as_request(of), head, row, row + count);
#pragma unroll
      for (int j = 0; j < kRowTiles && !V::kAlibi; ++j) {
        rows.slope[j][0] = rows.slope[j][1] = 0.f;  // takes no registers
      }
      state.clear();
      const bool final = at == first && stop == first + of.tiles && of.levels() == 0;
#pragma unroll 1
      for (; at < stop; ++at) {
        const int key = key_of(of, at - first);
        mbarrier_wait(barrier + stage * 8, parity);
        const u32 tile = ring + stage * kStageBytes;
        if (rows.all_see(key, kKeys)) {
          Products::template take_tile<false>(tile, key, rows, state);
        } else {
          Products::template take_tile<true>(tile, key, rows, state);
        }
        __syncwarp();
        ask(stage);
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
      // The next queries are asked for before the results are stored.
      if (at < end) fetch(rows);
      finish(state, of, head, block, count, final);
      if (at >= end) return;
      tell(at);
    }
  }

  __device__ __forceinline__ static Request as_request(const OwnRequest &r) {
    return {r.request, r.q_begin, r.q_len, 0, r.kv_len};
  }

  __device__ __forceinline__ int line_end(const OwnRequest &r) const {
    return r.line + r.tiles * r.row_blocks * p.heads_kv;
  }
  // Of a tile of a segment.
  __device__ __forceinline__ static int key_of(const OwnRequest &r, int tile) {
    return tile < r.early_tiles ? r.early_key + tile * kKeys
                                : r.first_key + (tile - r.early_tiles) * kKeys;
  }

  // The queries of `at`, unused yet.
  __device__ __forceinline__ void fetch(Rows &rows) const {
    const int segment = (at - now.line) / now.tiles, head = segment / now.row_blocks;
    const int row = (segment - head * now.row_blocks) * d.row_block;
    rows.fetch(p, d, as_request(now), head, row, min(row + d.row_block, now.q_len * p.group));
  }

  __device__ __forceinline__ void finish(const DecodeState<V> &state, const OwnRequest &of,
                                         int head, int block, int rows, bool final) const {
    const int g = lane / 4, q = lane % 4;
    // Columns of a pair: 8 apart, or of 8-bit values neighbours.
    constexpr int kApart = V::kWiden ? 1 : 8;
    const int first = V::kWiden ? 2 * g : g;
    const float of_values = V::kWiden ? value_scale(p, of.request, head) : 1.f;
    const i64 partial = own_partial_row(p, d, s, of.place(), head, block, worker);
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float sum = state.sum[j][x];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) sum += __shfl_xor_sync(kAll, sum, mask);
        const int row = 8 * j + 2 * q + x;
        if (row >= rows) continue;
        float norm = sum == 0.f ? 0.f : __fdividef(of_values, sum);
        if (!final) {
          float *const to = s.partial_out + (partial + row) * kD;
#pragma unroll
          for (int n = 0; n < kSteps; ++n) {
            to[n * 16 + first] = state.acc[n][j][x] * norm;
            to[n * 16 + first + kApart] = state.acc[n][j][x + 2] * norm;
          }
          if (g == 0) s.partial_state[partial + row] = make_float2(state.top[j][x], sum);
          continue;
        }
        const int in_head = block * d.row_block + row, in_request = token_of(d, in_head);
        const int q_head = head * p.group + in_head - in_request * p.group;
        const i64 token = static_cast<i64>(of.q_begin) + in_request;
        float lse = lse_of(state.top[j][x], sum);
        if (p.sink) {
          const float2 both = with_sink(lse, load_sink(p, q_head));
          norm *= both.x, lse = both.y;
        }
        u16 *const to = reinterpret_cast<u16 *>(p.out + token * p.out_token_stride +
                                                q_head * p.out_head_stride);
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          const u32 pair =
              pack_result<V>(p, state.acc[n][j][x] * norm, state.acc[n][j][x + 2] * norm);
          const int column = n * 16 + first;
          if (column < p.head_dim_v) to[column] = static_cast<u16>(pair);
          if (column + kApart < p.head_dim_v) to[column + kApart] = static_cast<u16>(pair >> 16);
        }
        if (g == 0) store_lse(p, token, q_head, lse);
      }
    }
  }
};
