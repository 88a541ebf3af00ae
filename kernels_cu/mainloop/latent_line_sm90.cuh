// The pieces of a block of latent attention, one after the other; see block/spans.cuh. A segment
// has up to `side` row blocks, one for each of as many blocks, which take the same span at the same
// time and so read its keys from memory once.
#pragma once

#include "block/softmax.cuh"
#include "mainloop/latent_tiles_sm90.cuh"

struct LatentLine {
  const AttentionParams &p;
  const DecodeParams &d;
  const LatentParams &l;

  __device__ __forceinline__ LatentCursor begin(const Spans &spans) const {
    const KeyRange tiles = spans.tiles_of(p, d, blockIdx.x / l.side);
    const int request = tiles.begin < tiles.end ? spans.find(tiles.begin) : 0;
    return {tiles.begin, tiles.end, request, tiles.begin < tiles.end ? spans.prefix[request] : 0,
            spans.cut()};
  }

  // By one thread: the next piece. Blocks side by side take the same ones, also where one has no
  // rows.
  __device__ __forceinline__ void next(LatentCursor &cursor, LatentPiece &piece) const {
    piece.spans = 0;
    while (cursor.at < cursor.end && !piece.spans) {
      const RequestWork w = request_work(p, d, cursor.request);
      const int size = w.tiles * w.segments;
      if (cursor.at >= cursor.start + size) {
        cursor.start += size;
        ++cursor.request;
      } else {
        take(w, cursor, piece);
      }
    }
  }

 private:
  __device__ __forceinline__ void take(const RequestWork &w, LatentCursor &cursor,
                                       LatentPiece &piece) const {
    const int span = blockIdx.x / l.side, lane = blockIdx.x - span * l.side;
    const int segment = (cursor.at - cursor.start) / w.tiles, kv_head = segment / w.row_blocks;
    const int first = cursor.start + segment * w.tiles, next = first + w.tiles;
    const int last = next - d.segment_tiles;  // no keys behind it
    const int begin = cursor.at, end = min(last, cursor.end);
    cursor.at = min(next, cursor.end);
    if (begin >= end) return;
    piece.last = cursor.at == cursor.end;
    const int rows = w.request.q_len * p.group;
    const int row_begin = (segment - kv_head * w.row_blocks) * d.row_block;
    const int row_end = min(rows, row_begin + d.row_block);
    Segment &s = piece.segment;
    s.request = w.request;
    s.kv_head = kv_head;
    s.row_begin = row_begin + lane * kLatentRows;
    s.row_end = max(s.row_begin, min(rows, s.row_begin + kLatentRows));
    const KeyRange keys = block_keys(p, w.request, row_begin, row_end);
    s.kv_begin = max(keys.begin, (w.first_tile + begin - first) * kLatentKeys);
    s.kv_end = min(keys.end, (w.first_tile + end - first) * kLatentKeys);
    const int shift = w.request.kv_len - w.request.q_len;
    s.free_begin = p.window_left < 0 ? 0 : (row_end - 1) / p.group + shift - p.window_left;
    s.free_end = p.window_right < 0
                     ? s.kv_end
                     : min(s.kv_end, row_begin / p.group + shift + p.window_right + 1);
    const float scale = score_scale(p, w.request.index, kv_head);
    s.scale = fabsf(scale);
    s.negate = scale < 0.f;
    s.slot = begin == first && end == last ? -1
                                           : (2 * span + (begin == first ? 1 : 0)) * l.side + lane;
    int first_span, spans;
    cursor.cut.owners(first, last, first_span, spans);
    piece.first_span = static_cast<u16>(first_span);
    piece.spans = static_cast<u16>(spans);
  }
};
