// Which work a CTA takes of a batch with shared prefixes: two lines of equal pieces of keys, each
// cut into spans. On the line of shared keys a piece is a block of keys of a group's row block and
// KV head, and a CTA takes a span. On the line of own keys it is a tile of a request and KV head,
// and a warp takes a span.
//
// A segment is what lies on a line next to each other of the same rows and head. What a span has of
// one leaves partial results at rows of their own: the first row of the segment, and so many on for
// each span.
#pragma once

#include "block/segment.cuh"
#include "core/decode_params.cuh"
#include "core/shared_params.cuh"

constexpr int kShareKeys = 64;  // of a block
constexpr int kShareRows = 128;  // of a row block: two warpgroups
constexpr int kOwnWarps = 4;
constexpr int kFewestBlocks = 2, kFewestTiles = 4;  // of a piece, if there is a choice

struct Deal {
  u32 total, count, pieces, whole, segment, share, rest;

  Deal() = default;

  // `segment`: pieces of each, 0 if they differ; `largest`: of the largest; `most_pieces` of a
  // segment, 0: any. Spans that end where segments end leave fewer partial results.
  __device__ __forceinline__ Deal(u32 total, u32 segment, u32 largest, u32 spans, u32 fewest,
                                  u32 most_pieces)
      : total(total), pieces(0), whole(0), segment(segment), share(0), rest(0) {
    count = min(spans, (total + fewest - 1) / fewest);
    if (total == 0) return;
    if (most_pieces > 1) {
      const u32 shortest = (largest + most_pieces - 2) / (most_pieces - 1);
      count = min(count, max(1u, total / max(1u, shortest)));
    }
    if (segment) {
      const u32 segments = total / segment;
      if (segments <= spans) {
        u32 most = spans / segments;
        if (most_pieces) most = min(most, most_pieces);
        const u32 each = max(1u, min(most, segment / fewest));
        if (each < spans / segments || each * segments * 8 >= spans * 7) {
          pieces = each, count = each * segments;
        }
      } else {
        const u32 each = (segments + spans - 1) / spans, needed = (segments + each - 1) / each;
        if (needed * 16 >= spans * 15) whole = each * segment, count = needed;
      }
    }
    if (!pieces && !whole) share = total / count, rest = total - share * count;
  }

  __device__ __forceinline__ KeyRange span(u32 c) const {
    if (c >= count) return {static_cast<int>(total), static_cast<int>(total)};
    if (pieces) {
      const u32 s = c / pieces, r = c - s * pieces, at = s * segment;
      return {static_cast<int>(at + r * segment / pieces),
              static_cast<int>(at + (r + 1) * segment / pieces)};
    }
    if (whole) {
      return {static_cast<int>(c * whole), static_cast<int>(min(total, (c + 1) * whole))};
    }
    const u32 at = c * share + min(c, rest);
    return {static_cast<int>(at), static_cast<int>(at + share + (c < rest))};
  }

  // Whether every segment is in the spans of one of these teams of neighbours.
  __device__ __forceinline__ bool within(u32 team) const {
    return pieces ? team % pieces == 0 : whole;
  }

  // The spans that have the segment of pieces first..last - 1: the first one, and how many.
  __device__ __forceinline__ int2 owners(u32 first, u32 last) const {
    if (pieces) return make_int2(first / segment * pieces, pieces);
    const int begin = owner(first);
    return make_int2(begin, owner(last - 1) - begin + 1);
  }

 private:
  __device__ __forceinline__ int owner(u32 at) const {
    if (whole) return at / whole;
    const u32 longer = rest * (share + 1);
    return at < longer ? at / (share + 1) : rest + (at - longer) / share;
  }
};

// Tokens of a warpgroup's 64 rows; rows hold whole tokens.
__device__ __forceinline__ int half_tokens(const AttentionParams &p) {
  return kShareRows / 2 / p.group;
}

// A row block of a group, KV head `head`.
struct RowBlock {
  int first, count;  // of `tokens`
  bool halves;       // the warpgroups have the same rows and take turns with the keys

  __device__ __forceinline__ RowBlock(const AttentionParams &p, int first_token, int tokens,
                                      int block) {
    const int half = half_tokens(p);
    first = first_token + block * 2 * half;
    count = min(2 * half, tokens - block * 2 * half);
    halves = count <= half;
  }

  // Of partial results, where span c has some of it.
  __device__ __forceinline__ int partial_row(const AttentionParams &p, int head, int c) const {
    return 2 * p.group * (p.heads_kv * first + head * count) + kShareRows * c;
  }
};

// Of partial results of own keys.
__device__ __forceinline__ int own_partial_row(const AttentionParams &p, const DecodeParams &d,
                                               const SharedParams &s, int place, int head,
                                               int block, int worker) {
  const int segment = (place * p.heads_kv + head) * s.row_blocks + block;
  return s.tile_rows + (segment + worker) * d.row_block;
}

// What the warps of a CTA start from: in memory, or in shared memory.
struct SharedStarts {
  OwnStart *own;  // [kOwnWarps]
  // [4] begin and end of its span of shared keys, group, where its `tokens` begin; the two of
  // SharedParams::groups of that group; first row whose own keys are here, last + 1, and whether all
  // rows are merged where their own keys are.
  int4 *groups;
};

// The pieces of a span of shared keys, one after the other.
struct SharedWalk {
  const AttentionParams &p;
  const SharedParams &s;
  int at, end, group;
  const int4 *of_group;
  const int4 *rows;  // of SharedParams::tokens

  // The piece.
  int request, head, key, keys, blocks;
  int first_token, tokens, partial_row;
  bool halves;

  __device__ __forceinline__ SharedWalk(const AttentionParams &p, const SharedParams &s,
                                        const SharedStarts &from)
      : p(p), s(s) {
    const int4 start = *from.groups;
    at = start.x, end = start.y, group = start.z, rows = s.tokens + start.w;
    of_group = from.groups + 1;
  }

  __device__ __forceinline__ bool done() const { return at >= end; }

  __device__ __forceinline__ void next() {
    int4 found = of_group[0], line = of_group[1];
    if (at >= line.z) {
      of_group = s.groups + 2 * ++group;
      found = of_group[0], line = of_group[1];
    }
    request = line.x;
    const int all = (found.y - found.x + kShareKeys - 1) / kShareKeys;
    const int rest = at - line.y, item = rest / all, from = rest - item * all;
    const int block = item / p.heads_kv;
    head = item - block * p.heads_kv;
    blocks = min(all - from, end - at);
    key = found.x + from * kShareKeys;
    keys = min(blocks * kShareKeys, found.y - key);
    const RowBlock taken(p, found.z, found.w, block);
    first_token = taken.first, tokens = taken.count, halves = taken.halves;
    partial_row = taken.partial_row(p, head, blockIdx.x);
    at += blocks;
  }
};
