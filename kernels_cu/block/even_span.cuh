// The span of a CTA where all requests are alike and have few segments: a piece of one segment.
//
// It is what Spans finds, but which piece of which segment is known before the lengths are, by what
// the host says of such batches. Every warp looks at the lengths for itself.
#pragma once

#include "block/spans.cuh"

struct EvenSpan {
  bool there = false;
  Request request;
  int unit;
  int first;       // span of the segment
  int tiles;       // of the segment, which begins at key 0
  int begin, end;  // of those, the CTA's
  KeyRange keys;   // that some row sees

  // All lanes. d.even_pieces is not 0, and there is no window to the left.
  __device__ __forceinline__ void look(const AttentionParams &p, const DecodeParams &d, int cta) {
    constexpr u32 kAll = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    const int segment = d.even_inverse ? __umulhi(cta, d.even_inverse) : cta;
    const int index = d.unit_inverse ? __umulhi(segment, d.unit_inverse) : segment;
    const int own = min(index, p.batch - 1);  // spans past the last have nothing
    unit = segment - index * d.units;
    first = segment * d.even_pieces;
    Request mine;
    bool alike = true;
#pragma unroll 1
    for (int at = 0; at < p.batch; at += 32) {
      const RequestWork w = request_work(p, d, min(at + lane, p.batch - 1));
      if (at == 0) tiles = __shfl_sync(kAll, w.tiles, 0);
      alike &= w.tiles == tiles && w.segments == d.units;
      if (at == (own & ~31)) mine = w.request;
    }
    there = __all_sync(kAll, alike) && tiles >= d.even_least && tiles <= d.even_most;
    request = {own, __shfl_sync(kAll, mine.q_begin, own), __shfl_sync(kAll, mine.q_len, own), 0,
               __shfl_sync(kAll, mine.kv_len, own)};
    keys = visible_keys(p, request, 0, request.q_len - 1);
    const u32 share = d.even_inverse ? __umulhi(tiles, d.even_inverse) : tiles;
    const u32 rest = tiles - share * d.even_pieces;
    const u32 part = cta - first;
    begin = part * share + min(part, rest);
    end = begin + share + (part < rest ? 1 : 0);
    if (index >= p.batch) begin = end = tiles;
  }
};
