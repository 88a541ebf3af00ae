// Which tile a block of the Hopper prefill takes next.
//
// A tile is V::kTileRows rows of one request: (token, head) pairs of heads that share a KV head,
// tokens outermost. Tiles with many keys come first, and those that read the same keys
// together, as far as the L2 holds them. Where there are many short requests, only the last of them
// are walked so: before, tiles of all lengths are under way, or all blocks ask for keys at once.
#pragma once

#include "block/segment.cuh"
#include "core/prefill_params.cuh"

constexpr int kMostSorted = 128;  // requests

// Requests by falling number of keys. In shared memory.
struct RequestOrder {
  i32 total;               // tiles; -1: not sorted
  i32 start[kMostSorted];  // tiles of the requests before
  i32 request[kMostSorted];
};

// While it is sorted; in shared memory that is free at the time.
struct OrderScratch {
  i32 keys[kMostSorted];
  i32 tiles[kMostSorted];
};

struct PrefillTile {
  i32 item;  // negative: see mainloop/fwd_sm90_boxes.cuh
  i32 request;
  i32 q_begin, q_len;  // of the request
  i32 token;           // the first one, in the request
  i32 head_group, kv_head;
  i32 slot;              // of the partial result; -1: the result itself
  i32 shift;             // position of token 0 among the keys
  i32 kv_row;            // first row of packed keys
  i32 kv_begin, kv_end;  // keys of the segment
  i32 own_begin, own_end;  // keys outside of these may hold anything
  i32 n_begin, n_end;      // key tiles; they are walked downwards
  i32 mask_from;           // key tiles from here on need the mask and the running maximum,
  i32 mask_below;          // and so do those below
  i32 staged;              // every row is one of the request's, and this is their final result
  i32 failed;              // the fixed shift did not hold
};

template <class V>
__device__ __forceinline__ int tile_tokens(const PrefillParams &x) {
  return V::kTileRows >> x.pack_shift;
}

__device__ __forceinline__ bool is_skipped(const AttentionParams &p, const PrefillParams &x,
                                           int q_len) {
  return q_len * p.group <= x.most_skipped;
}

// By all threads of the block, at least kMostSorted.
template <class V>
__device__ __forceinline__ void sort_requests(const AttentionParams &p, const PrefillParams &x,
                                              RequestOrder &order, OrderScratch &scratch) {
  const int i = static_cast<int>(threadIdx.x);
  if (x.blocks || p.batch > kMostSorted) {
    if (i == 0) order.total = -1;
    __syncthreads();
    return;
  }
  if (i < p.batch) {
    const Request r = load_request(p, i);
    const bool none = r.q_len <= 0 || is_skipped(p, x, r.q_len);
    const int tokens = tile_tokens<V>(x);
    scratch.keys[i] = none ? -1 : r.kv_len;
    scratch.tiles[i] = none ? 0 : (r.q_len + tokens - 1) / tokens * x.head_groups;
  }
  __syncthreads();
  if (i < p.batch) {
    const int keys = scratch.keys[i];
    int rank = 0, start = 0;
    for (int j = 0; j < p.batch; ++j) {
      const bool before = scratch.keys[j] > keys || (scratch.keys[j] == keys && j < i);
      rank += before;
      start += before ? scratch.tiles[j] : 0;
    }
    order.start[rank] = start;
    order.request[rank] = i;
    if (rank == p.batch - 1) order.total = start + scratch.tiles[i];
  }
  __syncthreads();
}

__device__ __forceinline__ int count_items(const PrefillParams &x, const RequestOrder &order) {
  return order.total < 0 ? x.items : order.total * x.splits;
}

// Which of a tile's keys need what; tokens first..last of a request see `keys`.
template <int kKeys>
__device__ __forceinline__ void describe_keys(const AttentionParams &p, int kv_len, int shift,
                                              int first, int last, KeyRange keys, PrefillTile &t) {
  t.shift = shift;
  t.kv_begin = keys.begin;
  t.kv_end = keys.end;
  t.own_begin = p.window_left < 0 ? 0 : max(0, shift - p.window_left);
  t.own_end = kv_len;
  const int n_begin = keys.begin / kKeys;
  t.n_begin = n_begin;
  t.n_end = max((keys.end + kKeys - 1) / kKeys, n_begin + 1);
  // Every row sees the keys in [free_begin, free_end). The shift is fixed once each row has seen a
  // key: where the first row's end at a border, it has not yet.
  const int seen = p.window_right < 0 ? keys.end : first + shift + p.window_right + 1;
  const int free_end = max(0, min(keys.end, seen));
  const int free_begin = p.window_left < 0 ? 0 : max(0, last + shift - p.window_left);
  t.mask_from = free_end / kKeys - (free_end % kKeys == 0 && free_end < keys.end ? 1 : 0);
  t.mask_below = (free_begin + kKeys - 1) / kKeys;
}

__device__ __forceinline__ const TailParams &tail_of(const PrefillParams &x) {
  return static_cast<const TailParams &>(x);
}

// Whether an item is a piece of one of the last tiles.
template <class V>
__device__ __forceinline__ bool is_cut(const PrefillParams &x, int item) {
  if constexpr (V::kTail) return item >= tail_of(x).whole;
  return false;
}

// Of a piece: so many key tiles as the others, or one more; {0, 0} where none are left.
template <int kKeys>
__device__ __forceinline__ KeyRange cut_keys(const TailParams &x, KeyRange keys, int piece) {
  const int first = keys.begin / kKeys, tiles = max(0, (keys.end + kKeys - 1) / kKeys - first);
  const int begin = max(keys.begin, (first + x.share(tiles * piece)) * kKeys);
  const int end = min(keys.end, (first + x.share(tiles * (piece + 1))) * kKeys);
  return begin < end ? KeyRange{begin, end} : KeyRange{0, 0};
}

// Fills what an item is. False: nothing. Every lane of the warp takes part.
template <class V>
__device__ __forceinline__ bool locate_tile(const AttentionParams &p, const PrefillParams &x,
                                            const RequestOrder &order, int item, PrefillTile &t) {
  const int tokens = tile_tokens<V>(x);
  int index = item / x.splits, request = 0, block, head_group;
  if (is_cut<V>(x, item)) {
    const TailParams &tail = tail_of(x);
    index = tail.whole + tail.cut_before(item);
  }
  if (x.blocks || order.total >= 0) {
    int blocks = x.blocks, together = x.together;
    if (!x.blocks) {
      const int rank = find_last(p.batch, index, [&](int i) { return order.start[i]; });
      request = order.request[rank];
      index -= order.start[rank];
      const Request r = load_request(p, request);
      blocks = (r.q_len + tokens - 1) / tokens;
      together = max(1, x.l2_keys / max(1, r.kv_len)) * (p.group >> x.pack_shift);
    }
    int first = index / blocks, width = 1;
    if (first >= x.lead) {
      first = x.lead + (index - x.lead * blocks) / (blocks * together) * together;
      width = min(together, x.pairs - first);
    }
    index -= first * blocks;
    const int above = index / width, pair = first + index - above * width;
    block = blocks - 1 - above;
    const int other = pair / x.head_groups;
    request += other;
    head_group = pair - other * x.head_groups;
  } else {
    const int last = x.items / x.splits - 1 - index, at = last / x.head_groups;
    head_group = last - at * x.head_groups;
    const auto start = [&](int i) { return static_cast<i64>(p.cu_seqlens_q[i]) / tokens + i; };
    request = find_last(p.batch, at, start);
    block = at - static_cast<int>(start(request));
  }
  // No address is kept from the search: with 32 registers a thread there is none left for it.
  if constexpr (V::kWiden) request = __shfl_sync(0xffffffffu, request, 0);
  const Request r = load_request(p, request);
  const int first = block * tokens, last = min(first + tokens, r.q_len) - 1;
  if (first > last || is_skipped(p, x, r.q_len)) return false;
  KeyRange keys = visible_keys(p, r, first, last);
  const int chunks = count_chunks(p, keys);
  const int split = item % x.splits;
  if (split >= max(1, chunks)) return false;
  if (is_cut<V>(x, item)) {
    const TailParams &tail = tail_of(x);
    const int piece = item - tail.whole - tail.cut_before(item) * tail.cut;
    keys = cut_keys<V::kKeys>(tail, keys, piece);
  } else if (chunks == 0) {
    keys = {0, 0};
  } else {
    const int begin = (keys.begin / p.chunk + split) * p.chunk;
    keys.end = begin + min(p.chunk, keys.end - begin);
    keys.begin = max(begin, keys.begin);
  }
  if ((threadIdx.x & 31) == 0) {
    t.item = item;
    t.request = request;
    t.q_begin = r.q_begin;
    t.q_len = r.q_len;
    t.token = first;
    t.head_group = head_group;
    t.kv_head = head_group / (p.group >> x.pack_shift);
    t.slot = chunks > 1 ? split : -1;
    t.staged = chunks <= 1 && first + tokens <= r.q_len;
    t.kv_row = r.kv_begin;
    t.failed = 0;
    describe_keys<V::kKeys>(p, r.kv_len, r.kv_len - r.q_len, first, last, keys, t);
  }
  __syncwarp();
  return true;
}
