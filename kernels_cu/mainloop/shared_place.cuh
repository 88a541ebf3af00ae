// A place in the order of a batch: the lengths that its request has, and what follows of them: which
// keys it shares and which are its own.
#pragma once

#include "arch/memory_sm80.cuh"
#include "mainloop/prefix_search.cuh"
#include "block/shared_work.cuh"

// What a schedule is made of, of a place. Read from the L2 cache, where a launch in front may write.
struct Lengths {
  i32 request = 0, q_begin = 0, q_end = 0, keys = 0;
  int2 node[kMostLevels] = {};

  __device__ __forceinline__ Lengths(const AttentionParams &p, const SharedParams &s, int place) {
    if (place >= p.batch) return;
    request = request_of(p, s, place);
    read(p, s, place);
  }

  // The same in one round of memory where requests stand in their own order.
  struct AsTheyStand {};
  __device__ __forceinline__ Lengths(const AttentionParams &p, const SharedParams &s, int place,
                                     AsTheyStand) {
    if (place >= p.batch) return;
    const int found = request_of(p, s, place);
    request = place;
    read(p, s, place);
    if (found != place) request = found, read(p, s, place);
  }

  // Of the search, before it is in memory.
  template <int kMost>
  __device__ __forceinline__ Lengths(const AttentionParams &p, const SharedParams &s, int place,
                                     const FoundPlaces<kMost> &found) {
    if (place >= p.batch) return;
    request = found.request[place];
#pragma unroll
    for (int l = 0; l < kMostLevels; ++l) {
      if (l < s.levels) node[l] = make_int2(found.node[l][place], found.end[l][place]);
    }
    q_begin = found.q_begin[request], q_end = found.q_end[request], keys = found.keys[request];
  }

  // Whether they are others by now.
  __device__ __forceinline__ bool changed(const AttentionParams &p, const SharedParams &s,
                                          int place) const {
    if (place >= p.batch) return false;
    Lengths now = *this;
    now.request = request_of(p, s, place);
    now.read(p, s, place);
    bool differ = now.request != request || now.q_begin != q_begin || now.q_end != q_end ||
                  now.keys != keys;
#pragma unroll
    for (int l = 0; l < kMostLevels; ++l) {
      differ = differ || now.node[l].x != node[l].x || now.node[l].y != node[l].y;
    }
    return differ;
  }

  // Place of the first member of its group.
  __device__ __forceinline__ int leader(int level, int place) const {
    return max(0, place + min(0, node[level].x));
  }

 private:
  // What is being written may be anything: no index may leave its array.
  __device__ __forceinline__ static int request_of(const AttentionParams &p, const SharedParams &s,
                                                   int place) {
    return s.order ? min(load_relaxed(word(s.order + place)), p.batch - 1u) : place;
  }
  __device__ __forceinline__ void read(const AttentionParams &p, const SharedParams &s, int place) {
#pragma unroll
    for (int l = 0; l < kMostLevels; ++l) {
      if (l < s.levels) node[l] = node_of(p, s, l, place);
    }
    q_begin = load_relaxed(word(p.cu_seqlens_q + request));
    q_end = load_relaxed(word(p.cu_seqlens_q + request + 1));
    keys = load_relaxed(word(p.seqused_k + request));
  }
  __device__ __forceinline__ static const u32 *word(const i32 *at) {
    return reinterpret_cast<const u32 *>(at);
  }
  __device__ __forceinline__ static int2 node_of(const AttentionParams &p, const SharedParams &s,
                                                 int level, int place) {
    if (!s.tree) return make_int2(place ? -place : p.batch, s.common_keys);
    const uint2 found = load_relaxed(reinterpret_cast<const uint2 *>(s.tree) +
                                     level * p.batch + place);
    return make_int2(found.x, found.y);
  }
};

// A place: its request, what it shares and what it has of its own; nothing past the last one.
struct Place {
  OwnRequest own = {};
  int depth = 0, first_level = 0;
  int shared_end = 0, shared_begin = 0;  // of the levels that it shares; of level 0: unless hidden
  int first_seen = 0, all_seen = 0;      // the first keys that some row of it sees, and all rows

  __device__ __forceinline__ Place(const AttentionParams &p, const DecodeParams &d,
                                   const SharedParams &s, const Lengths &of, int place) {
    if (place >= p.batch) return;
    own.request = of.request, own.q_begin = of.q_begin;
    own.q_len = of.q_end - of.q_begin, own.kv_len = of.keys + s.added_keys;
    own.row_blocks = (own.q_len * p.group + d.row_block - 1) / d.row_block;
    // Keys that all of its rows see; with ALiBi, those in front of all of them.
    const int behind = p.alibi_slopes ? 0 : p.window_right;
    const int seen = behind < 0 ? own.kv_len : min(own.kv_len, own.kv_len - own.q_len + behind + 1);
#pragma unroll
    for (int l = 0; l < kMostLevels; ++l) {
      const int end = of.node[l].y;
      if (depth == l && of.node[l].x && own.q_len > 0 && end > shared_end && end <= seen) {
        depth = l + 1, shared_end = end;
      }
    }
    if (p.window_left >= 0) look_through_window(p, d, of);
  }

  // Of the first level a part may be shared, the half of it at least; others as a whole.
  __device__ __forceinline__ void look_through_window(const AttentionParams &p,
                                                      const DecodeParams &d, const Lengths &of) {
    all_seen = max(0, own.kv_len - 1 - p.window_left);
    first_seen = max(0, own.kv_len - own.q_len - p.window_left);
    if (depth && all_seen <= of.node[0].y / 2 && shared_from(all_seen) < of.node[0].y) return;
    first_level = 1;
#pragma unroll
    for (int l = 1; l < kMostLevels; ++l) {
      const int begin = of.node[l - 1].y, inside_tile = begin & ((1 << d.tile_shift) - 1);
      if (first_level != l) continue;
      shared_begin = begin;
      if (all_seen > begin || inside_tile) first_level = l + 1;
    }
    if (first_level >= depth) first_level = depth = shared_begin = shared_end = 0;
  }

  __device__ __forceinline__ static int shared_from(int key) {
    return (key + kShareKeys - 1) & -kShareKeys;
  }

  // Its own keys, where its group shares level 0 from a key on.
  __device__ __forceinline__ void deal(const DecodeParams &d, int place, int level0_begin) {
    const int size = 1 << d.tile_shift, begin = first_level ? shared_begin : level0_begin;
    own.first_key = depth ? shared_end : first_seen & -size;
    own.place_levels = 16 * place + 4 * first_level + depth;
    if (own.q_len <= 0) return;
    if (depth && begin > first_seen) {
      own.early_tiles = (begin - first_seen + size - 1) >> d.tile_shift;
      own.early_key = begin - own.early_tiles * size;
    }
    const int left = own.kv_len - own.first_key;
    own.tiles = max(0, own.early_tiles + (left > 0 ? ((left - 1) >> d.tile_shift) + 1 : 0));
  }
};
