// Attention of few query rows over many keys: the rows of one KV head, its keys and values by TMA.
//
// Every warp has a ring of tiles of its own in shared memory and takes every kLanes-th tile of the
// CTA's span. It asks for another tile as soon as it has read one, also across the ends of
// segments, so that no warp waits for another inside of a segment.
//
// Products have keys on their 16 rows and query rows on their 8 columns: S^T = K Q^T and
// O^T = V^T P^T. A group of up to 8 rows wastes nothing, and P^T is made from S^T in registers.
#pragma once

#include "arch/mma_sm80.cuh"
#include "arch/tma_sm90.cuh"
#include "block/decode_rows.cuh"
#include "block/spans.cuh"

template <class V>
struct DecodeLoop {
  static constexpr int kD = V::kHeadDim, kRowTiles = V::kRowTiles, kKeys = V::kKeys;
  static constexpr bool kWiden = V::kWiden;
  static constexpr int kSteps = kD / 16, kKeyTiles = kKeys / 16;
  static constexpr int kPanels = (kD * kItemBytes<V::kCache> + 127) / 128;
  static constexpr int kPanelBytes = 16 * 128, kSideBytes = kPanels * kPanelBytes;
  static constexpr int kStageBytes = 2 * kKeyTiles * kSideBytes;
  static constexpr int kPanelSteps = kWiden ? 8 : 4;  // steps of 16 elements in 128 bytes
  static constexpr bool kSkipPanels = kD > 128;       // that the head does not have
  static constexpr float kRescaleAt = 8.f;  // a maximum is kept until a score is 2^8 above it

  using Rows = DecodeRows<V>;

  const AttentionParams &p;
  const DecodeParams &d;
  const Spans &spans;
  const TensorMap *const k_map, *const v_map;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int side_head = warp & ((1 << d.unit_shift) - 1);  // of the heads side by side, the warp's
  const int step = kDecodeWarps >> d.unit_shift;  // tiles from one of its own to the next
  const u32 ring, barrier;
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
                                        const Spans &spans, const TensorMap *k_map,
                                        const TensorMap *v_map, u32 ring, u32 barriers, int begin,
                                        int end)
      : p(p),
        d(d),
        spans(spans),
        k_map(k_map),
        v_map(v_map),
        ring(ring + threadIdx.x / 32 * d.stages * kStageBytes),
        barrier(barriers + threadIdx.x / 32 * d.stages * 8),
        span_end(end),
        next(begin + static_cast<int>(threadIdx.x / 32 >> d.unit_shift)),
        taken(next) {}

  // ---- loads

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
    ahead.request = spans.find(tile);
    const RequestWork w = request_work(p, d, ahead.request);
    const u32 rest = tile - spans.prefix[ahead.request], segment = rest / w.tiles;
    const u32 unit = w.row_blocks == 1 ? segment : segment / w.row_blocks;
    ahead.head = (unit << d.unit_shift) + side_head;
    ahead.key = (w.first_tile + (rest - segment * w.tiles)) * kKeys;
    const KeyRange seen = visible_keys(p, w.request, 0, w.request.q_len - 1);
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
    const u32 to = tile + key / 16 * 2 * kSideBytes + key % 16 * 128;
    if (d.whole_boxes) {
      const i32 at[5] = {0, slot, 0, head, block};
      tma_load5(to, k_map, at, full, kEvictFirst);
      tma_load5(to + kSideBytes, v_map, at, full, kEvictFirst);
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

  // Asks for the warp's next tile.
  __device__ __forceinline__ void ask(int stage) {
    if (next >= span_end) return;
    const int source = asked % 32;
    if (source == 0) look_up();
    constexpr u32 kAll = 0xffffffffu;
    const u32 boxes = __shfl_sync(kAll, ahead.boxes, source);
    const int head = __shfl_sync(kAll, ahead.head, source);
    const u32 to = ring + stage * kStageBytes, full = barrier + stage * 8;
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
    const int panels = d.k_panels + d.v_panels;
    if (lane == 0) mbarrier_arrive_expect(full, (__popc(boxes) << d.box_shift) * panels * 128);
#pragma unroll 1
    for (u32 left = boxes; left; left &= left - 1) {
      const int box = __ffs(left) - 1;
      int from = block[0], first = slot[0];
      if (many_boxes()) {
        from = __shfl_sync(kAll, from, box), first = __shfl_sync(kAll, first, box);
      } else if (box) {
        from = block[1], first = slot[1];
      }
      if (lane == 0) load_box(to, full, box, head, from, first);
    }
    next += step;
    ++asked;
  }

  __device__ __forceinline__ void start() {
#pragma unroll 1
    for (int i = 0; i < d.stages; ++i) ask(i);
  }

  // ---- products

  // 32 bytes further along the rows of a swizzled panel.
  __device__ __forceinline__ static u32 along(u32 base, int step) {
    return (base + step / 4 * kPanelBytes) ^ (step % 4 * 32);
  }

  __device__ __forceinline__ static u32 widen(u32 pair) {
    return fp8_to_fp16<V::kWiden ? V::kCache : kE4m3>(pair);
  }

  __device__ __forceinline__ void score(u32 tile, const Rows &rows,
                                        float (&s)[kKeyTiles][kRowTiles][4]) const {
    const int token = lane % 8 + (lane & 8);
    const u32 base = tile + token * 128 + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][j][e] = 0.f;
      }
    }
#pragma unroll
    for (int panel = 0; panel < kSteps; panel += kPanelSteps) {
      if (kSkipPanels && panel * 16 >= p.head_dim) break;
#pragma unroll
      for (int n = panel; n < panel + kPanelSteps && n < kSteps; n += kWiden ? 2 : 1) {
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
          u32 r[4];
          ldmatrix4(r, along(base + t * 2 * kSideBytes, kWiden ? n / 2 : n));
          if constexpr (kWiden) {
            // The order of the 16 elements of a step is permuted; that of the queries too.
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const u32 a[4] = {widen(r[2 * h] & 0xffffu), widen(r[2 * h + 1] & 0xffffu),
                                widen(r[2 * h] >> 16), widen(r[2 * h + 1] >> 16)};
#pragma unroll
              for (int j = 0; j < kRowTiles; ++j) {
                mma_16x8x16<V::kCompute>(s[t][j], a, rows.query[j][n + h][0],
                                         rows.query[j][n + h][1]);
              }
            }
          } else {
#pragma unroll
            for (int j = 0; j < kRowTiles; ++j) {
              mma_16x8x16<V::kCompute>(s[t][j], r, rows.query[j][n][0], rows.query[j][n][1]);
            }
          }
        }
      }
    }
  }

  // `keep`: which of the keys 2q, 2q + 1 and 8 after those of this lane count.
  template <bool kEdge>
  __device__ __forceinline__ void accumulate(u32 tile, const u32 (&weight)[kRowTiles][2],
                                             const u32 (&keep)[2],
                                             float (&acc)[kSteps][kRowTiles][4]) const {
    const int token = kWiden ? lane % 8 + (lane & 8) : lane % 8 + (lane >> 1 & 8);
    const int chunk = kWiden ? lane / 16 : lane >> 3 & 1;
    const u32 base = tile + kSideBytes + token * 128 + ((chunk ^ lane % 8) << 4);
#pragma unroll
    for (int panel = 0; panel < kSteps; panel += kPanelSteps) {
      if (kSkipPanels && panel * 16 >= p.head_dim_v) break;
#pragma unroll
      for (int n = panel; n < panel + kPanelSteps && n < kSteps; n += kWiden ? 2 : 1) {
        u32 r[4];
        ldmatrix4_trans(r, along(base, kWiden ? n / 2 : n));
        if constexpr (kWiden) {
          // Bytes (key, element) to pairs of keys; rows g and g + 8 are elements 2g and 2g + 1.
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const u32 low = __byte_perm(r[2 * h], 0, 0x3120);
            const u32 high = __byte_perm(r[2 * h + 1], 0, 0x3120);
            u32 a[4] = {widen(low & 0xffffu), widen(low >> 16), widen(high & 0xffffu),
                        widen(high >> 16)};
            if constexpr (kEdge) mask_values(a, keep);
#pragma unroll
            for (int j = 0; j < kRowTiles; ++j) {
              mma_16x8x16<V::kCompute>(acc[n + h][j], a, weight[j][0], weight[j][1]);
            }
          }
        } else {
          if constexpr (kEdge) mask_values(r, keep);
#pragma unroll
          for (int j = 0; j < kRowTiles; ++j) {
            mma_16x8x16<V::kCompute>(acc[n][j], r, weight[j][0], weight[j][1]);
          }
        }
      }
    }
  }

  // What lies in unused slots may be NaN, and 0 * NaN is NaN.
  __device__ __forceinline__ static void mask_values(u32 (&a)[4], const u32 (&keep)[2]) {
    a[0] &= keep[0], a[1] &= keep[0], a[2] &= keep[1], a[3] &= keep[1];
  }

  // One tile: scores, running softmax over the keys, sums of values.
  template <bool kEdge>
  __device__ __forceinline__ void take_tile(u32 tile, int key, const Rows &rows,
                                            DecodeState<V> &state) const {
    float s[kKeyTiles][kRowTiles][4];
    score(tile, rows, s);
    if constexpr (kEdge) rows.modify_and_mask(p, key, s);
    bool grew = false;
    float top[kRowTiles][2];
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float most = -infinity();
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) most = fmaxf(most, fmaxf(s[t][j][x], s[t][j][x + 2]));
        top[j][x] = most * rows.template later_scale<kEdge>(j, x);
        grew |= top[j][x] > state.top[j][x] + kRescaleAt;
      }
    }
    if (__any_sync(0xffffffffu, grew)) state.rescale(top);
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
      u32 weight[kRowTiles][2];
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        float w[4];
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const float shift =
              kEdge && state.top[j][x] == -infinity() ? 0.f : state.top[j][x];
          const float scale = rows.template later_scale<kEdge>(j, x);
          w[x] = exp2_approx(fmaf(s[t][j][x], scale, -shift));
          w[x + 2] = exp2_approx(fmaf(s[t][j][x + 2], scale, -shift));
          state.sum[j][x] += w[x] + w[x + 2];
        }
        weight[j][0] = transpose_8x8(pack_pair<V::kCompute>(w[0], w[1]));
        weight[j][1] = transpose_8x8(pack_pair<V::kCompute>(w[2], w[3]));
      }
      u32 keep[2] = {};
      if constexpr (kEdge) rows.kept_keys(key + t * 16, keep);
      accumulate<kEdge>(tile + t * 2 * kSideBytes, weight, keep, state.acc);
    }
  }

  // The warp's tiles of a segment, which begins at tile `start` of the line and key `first_key`.
  // Whether there were any.
  __device__ __forceinline__ bool run(int start, int end, int first_key, const Rows &rows,
                                      DecodeState<V> &state) {
    const bool any = taken < end;
#pragma unroll 1
    for (; taken < end; taken += step) {
      const int key = first_key + (taken - start) * kKeys;
      mbarrier_wait(barrier + stage * 8, parity);
      const u32 tile = ring + stage * kStageBytes;
      if (rows.all_see(key, kKeys)) {
        take_tile<false>(tile, key, rows, state);
      } else {
        take_tile<true>(tile, key, rows, state);
      }
      __syncwarp();
      ask(stage);
      if (++stage == d.stages) stage = 0, parity ^= 1;
    }
    return any;
  }
};
