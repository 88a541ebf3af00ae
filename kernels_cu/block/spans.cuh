// Which share of a batch a CTA takes, found from the lengths alone.
//
// A batch is a line of tiles: so many keys of one request, KV head (or unit of heads) and row block,
// requests outermost, keys innermost. Span c of the line belongs to CTA c; all spans are as long as
// each other. A segment is the part of the line that has one request, unit and row block.
#pragma once

#include "block/segment.cuh"
#include "core/decode_params.cuh"

constexpr int kMostPieces = 128;  // of equal segments

struct RequestWork {
  Request request;
  int first_tile, tiles;  // key tiles that some row sees: of every segment of the request
  int row_blocks;
  int segments;  // row blocks of all units; 0: nothing to do here
};

__device__ __forceinline__ RequestWork request_work(const AttentionParams &p,
                                                    const DecodeParams &d, int index) {
  RequestWork w;
  if (p.cu_seqlens_q) {
    w.request = load_request(p, index);
  } else {
    w.request = {index, index, 1, 0, p.seqused_k[index]};
  }
  const int rows = w.request.q_len * p.group;
  const bool mine = rows > 0 && rows <= d.most_rows;
  const KeyRange keys = visible_keys(p, w.request, 0, w.request.q_len - 1);
  w.first_tile = keys.begin >> d.tile_shift;
  w.tiles = mine && keys.end > keys.begin ? ((keys.end - 1) >> d.tile_shift) - w.first_tile + 1 : 0;
  w.row_blocks = mine ? (rows + d.row_block - 1) / d.row_block : 0;
  w.segments = w.row_blocks * d.units;
  return w;
}

struct BatchTotals {
  int tiles;
  int alike;    // tiles of a segment, where all requests have equal segments; else 0
  int largest;  // tiles of a segment
};

// Adds kEach requests a thread up: those from `begin` on, and before request `end`. prefix[i + 1] are
// the tiles of requests 0..i; `before` are the totals of earlier calls. Barriers inside.
// scratch [2 * warps].
template <int kBlock, int kEach>
__device__ __forceinline__ BatchTotals add_up(const AttentionParams &p, const DecodeParams &d,
                                              int begin, int end, BatchTotals before, i32 *prefix,
                                              i32 *scratch) {
  constexpr int kWarps = kBlock / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int each = min(kEach, (end - begin + kBlock - 1) / kBlock);
  const int mine = begin + static_cast<int>(threadIdx.x) * each;
  const RequestWork first = request_work(p, d, 0);
  int cost[kEach], sum = 0, largest = 0;
  bool alike = true;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    cost[i] = 0;
    if (i < each && mine + i < end) {
      const RequestWork w = request_work(p, d, mine + i);
      cost[i] = w.tiles * w.segments;
      largest = max(largest, w.tiles);
      alike &= w.tiles == first.tiles && w.segments == first.segments;
    }
    sum += cost[i];
  }
  int upto = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, upto, step);
    if (lane >= step) upto += other;
  }
  largest = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<u32>(largest)));
  if (lane == 31) scratch[warp] = upto, scratch[kWarps + warp] = largest;
  alike = __syncthreads_and(alike);
  BatchTotals totals = before;
  int run = before.tiles + upto - sum;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) run += scratch[w];
    totals.tiles += scratch[w];
    totals.largest = max(totals.largest, scratch[kWarps + w]);
  }
  const bool all = alike && (begin == 0 || before.alike > 0);
  totals.alike = all ? first.tiles : 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    run += cost[i];
    if (i < each && mine + i < end) prefix[mine + i + 1] = run;
  }
  if (begin == 0 && threadIdx.x == 0) prefix[0] = 0;
  __syncthreads();
  return totals;
}

class Spans {
 public:
  // `segments`: of the whole batch, where all are alike.
  __device__ __forceinline__ Spans(const DecodeParams &d, int batch, const i32 *prefix,
                                   const BatchTotals &totals)
      : prefix(prefix), batch_(batch), total_(totals.tiles), single_(d.most_pieces == 1) {
    const u32 total = totals.tiles, limit = d.spans;
    count_ = min(limit, (total + d.fewest_tiles - 1) / d.fewest_tiles);
    if (totals.alike && total <= static_cast<u32>(d.align_most)) cut_alike(d, totals.alike, limit);
    if (d.most_pieces > 1 && !pieces_ && !whole_) {
      const u32 shortest = (totals.largest + d.most_pieces - 2) / (d.most_pieces - 1);
      count_ = min(count_, max(1u, total / max(1u, shortest)));
    }
    if (total == 0) count_ = 0;
    share_ = count_ ? total / count_ : 0;
    rest_ = total - share_ * count_;
  }

  // Where span c begins; where the line ends for those past the last.
  __device__ __forceinline__ int begin(const AttentionParams &p, const DecodeParams &d,
                                       u32 c) const {
    if (c >= count_) return total_;
    if (pieces_) {
      const u32 s = c / pieces_;
      return s * segment_ + (c - s * pieces_) * segment_ / pieces_;
    }
    if (whole_) return min(static_cast<u32>(total_), c * whole_);
    const int at = c * share_ + min(c, rest_);
    return single_ && at > 0 ? segment_end(p, d, at - 1) : at;
  }

  // The span that has a tile; asked only of segments that are split.
  __device__ __forceinline__ int owner(u32 tile) const {
    if (pieces_) {
      const u32 s = tile / segment_;
      return s * pieces_ + ((tile - s * segment_ + 1) * pieces_ - 1) / segment_;
    }
    const u32 longer = rest_ * (share_ + 1);
    return tile < longer ? tile / (share_ + 1) : rest_ + (tile - longer) / share_;
  }

  // The request of a tile; lanes may ask for different ones.
  __device__ __forceinline__ int find(int tile) const {
    int low = 0, high = batch_;
    while (high - low > 1) {
      const int middle = (low + high) >> 1;
      if (prefix[middle] <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  const i32 *const prefix;

 private:
  // Spans that end where segments end leave fewer pieces to merge. They are taken if nearly as
  // many CTAs have work: some pieces a segment, or some whole segments a span.
  __device__ __forceinline__ void cut_alike(const DecodeParams &d, u32 segment, u32 limit) {
    const u32 segments = total_ / segment;
    segment_ = segment;
    if (segments <= limit) {
      const u32 most = d.most_pieces ? min(d.most_pieces, kMostPieces) : kMostPieces;
      const u32 pieces = min(max(1u, count_ / segments), most);
      if (pieces * segments * 8 >= count_ * 7 || pieces == most) {
        pieces_ = pieces;
        count_ = pieces * segments;
      }
    } else {
      const u32 each = (segments + limit - 1) / limit, spans = (segments + each - 1) / each;
      if (spans * 16 >= limit * 15) {
        whole_ = each * segment;
        count_ = spans;
      }
    }
  }

  __device__ __forceinline__ int segment_end(const AttentionParams &p, const DecodeParams &d,
                                             int tile) const {
    const int request = find(tile), start = prefix[request];
    const int tiles = request_work(p, d, request).tiles;
    return start + ((tile - start) / tiles + 1) * tiles;
  }

  const int batch_, total_;
  const bool single_;
  u32 count_;
  u32 pieces_ = 0, whole_ = 0, segment_ = 1;
  u32 share_, rest_;
};
