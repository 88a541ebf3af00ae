// Which share of a batch a CTA takes, found from the lengths alone.
//
// A batch is a line of tiles: so many keys of one request, KV head (or unit of heads) and row
// block, requests outermost, keys innermost. Span c of the line belongs to CTA c; all spans are as
// long as each other. A segment is the part of the line that has one request, unit and row block.
#pragma once

#include "block/segment.cuh"
#include "core/decode_params.cuh"

constexpr int kMostPieces = 128;  // of equal segments

struct RequestWork {
  Request request;
  int first_tile, tiles;  // key tiles that some row sees, and what is added to them: of a segment
  int row_blocks;
  int chunks;
  int segments;  // chunks of row blocks of all units; 0: nothing to do here
};

// Where most calls have 1: a function of its own, out of their way.
__device__ __noinline__ u32 over_rare(u32 n, u32 count) { return n / count; }

// Chunks of equal length, of which a request has as many whatever the others are. Its tiles are
// filled up with some that no row sees, so that warps take turns in all of them alike.
// Returns tiles and chunks. A function of its own, as it is not on the way of other calls.
__device__ __noinline__ int2 cut_chunks(int tiles, int most) {
  constexpr int kAlike = 8, kShortest = 16;
  const int wanted = min(tiles, max(kShortest, (tiles + most - 1) / most));
  const int each = (wanted + kAlike - 1) / kAlike * kAlike;
  return {each, (tiles + each - 1) / each};
}

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
  const bool any = mine && keys.end > keys.begin;
  w.tiles = any ? ((keys.end - 1) >> d.tile_shift) - w.first_tile + 1 + d.segment_tiles : 0;
  w.row_blocks = !mine ? 0 : rows <= d.row_block ? 1 : (rows + d.row_block - 1) / d.row_block;
  w.segments = w.row_blocks * d.units;
  w.chunks = 1;
  if (d.chunks && w.tiles) {
    const int2 cut = cut_chunks(w.tiles, d.chunks);
    w.tiles = cut.x, w.chunks = cut.y, w.segments *= cut.y;
  }
  return w;
}

// Queries times keys of a request that is left to another kernel.
__device__ __forceinline__ float long_pairs(const AttentionParams &p, const DecodeParams &d,
                                            const Request &request) {
  if (request.q_len * p.group <= d.most_rows) return 0.f;
  const KeyRange first = visible_keys(p, request, 0, 0);
  const KeyRange last = visible_keys(p, request, request.q_len - 1, request.q_len - 1);
  const int keys = max(0, first.end - first.begin) + max(0, last.end - last.begin);
  return 0.5f * static_cast<float>(request.q_len) * static_cast<float>(keys);
}

struct BatchTotals {
  int tiles;
  int largest;         // tiles of a segment
  int first_tiles;     // of each segment of request 0
  int first_segments;  // of request 0
  bool alike;          // all requests are as request 0
  float pairs;         // of the requests that are left to another kernel
};

// Adds requests begin..end - 1 up, as many a thread as it takes. prefix[i + 1] are the tiles of
// requests 0..i; `before` are the totals of earlier calls. Barriers inside.
// scratch [3 * warps + 2].
template <int kBlock>
__device__ __forceinline__ BatchTotals add_up(const AttentionParams &p, const DecodeParams &d,
                                              int begin, int end, BatchTotals before, i32 *prefix,
                                              i32 *scratch) {
  constexpr int kWarps = kBlock / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int each = (end - begin + kBlock - 1) / kBlock;
  const int mine = begin + static_cast<int>(threadIdx.x) * each, last = min(end, mine + each);
  int sum = 0, largest = 0, tiles = -1, segments = -1;
  bool alike = true;
  float pairs = 0.f;
#pragma unroll 1
  for (int i = mine; i < last; ++i) {
    const RequestWork w = request_work(p, d, i);
    if (d.pair_time > 0.f) pairs += long_pairs(p, d, w.request);
    sum += w.tiles * w.segments;
    largest = max(largest, w.tiles);
    alike &= i == mine || (w.tiles == tiles && w.segments == segments);
    tiles = w.tiles, segments = w.segments;
  }
  int upto = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, upto, step);
    if (lane >= step) upto += other;
  }
  largest = static_cast<int>(__reduce_max_sync(0xffffffffu, static_cast<u32>(largest)));
  float *const pair_sums = reinterpret_cast<float *>(scratch + 2 * kWarps + 2);
  if (d.pair_time > 0.f) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) pairs += __shfl_xor_sync(0xffffffffu, pairs, mask);
    if (lane == 0) pair_sums[warp] = pairs;
  }
  if (lane == 31) scratch[warp] = upto, scratch[kWarps + warp] = largest;
  if (threadIdx.x == 0) {
    scratch[2 * kWarps] = begin ? before.first_tiles : tiles;
    scratch[2 * kWarps + 1] = begin ? before.first_segments : segments;
  }
  __syncthreads();
  BatchTotals totals = before;
  int run = before.tiles + upto - sum;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) run += scratch[w];
    totals.tiles += scratch[w];
    totals.largest = max(totals.largest, scratch[kWarps + w]);
    if (d.pair_time > 0.f) totals.pairs += pair_sums[w];
  }
  totals.first_tiles = scratch[2 * kWarps], totals.first_segments = scratch[2 * kWarps + 1];
  alike &= mine >= last || (tiles == totals.first_tiles && segments == totals.first_segments);
  if (each == 1) {
    if (mine < end) prefix[mine + 1] = run + sum;
  } else {
#pragma unroll 1
    for (int i = mine; i < last; ++i) {
      const RequestWork w = request_work(p, d, i);
      run += w.tiles * w.segments;
      prefix[i + 1] = run;
    }
  }
  if (begin == 0 && threadIdx.x == 0) prefix[0] = 0;
  totals.alike = __syncthreads_and(alike) && (begin == 0 || before.alike);
  return totals;
}

// Of a line that is cut into spans: which of them have a part of it.
struct SpanCut {
  u32 pieces, segment;  // each segment of so many tiles in so many pieces; 0 pieces: it is not so
  u32 share, rest;      // tiles of a span, and the spans that have one more

  __device__ __forceinline__ int owner(u32 tile) const {
    const u32 longer = rest * (share + 1);
    return tile < longer ? tile / (share + 1) : rest + (tile - longer) / share;
  }

  // The spans that have a split segment: the first one, and how many.
  __device__ __forceinline__ void owners(int first, int last, int &span, int &count) const {
    if (pieces) {
      span = static_cast<u32>(first) / segment * pieces;
      count = pieces;
    } else {
      span = owner(first);
      count = owner(last - 1) - span + 1;
    }
  }
};

class Spans {
 public:
  __device__ __forceinline__ Spans(const DecodeParams &d, int batch, const i32 *prefix,
                                   const BatchTotals &totals)
      : prefix(prefix), batch_(batch), total_(totals.tiles), single_(d.most_pieces == 1) {
    const u32 total = totals.tiles, limit = shared_spans(d, totals);
    count_ = min(limit, (total + (1 << d.fewest_shift) - 1) >> d.fewest_shift);
    if (totals.alike && totals.first_tiles && total <= static_cast<u32>(d.align_most)) {
      cut_alike(d, totals.first_tiles, totals.first_segments * batch, limit);
    }
    if (d.most_pieces > 1 && !pieces_ && !whole_) {
      const u32 shortest = (totals.largest + d.most_pieces - 2) / (d.most_pieces - 1);
      count_ = min(count_, max(1u, total / max(1u, shortest)));
    }
    if (total == 0) count_ = 0;
    share_ = rest_ = 0;
    if (pieces_) {  // of a segment's own tiles, not of all
      const u32 own = segment_ - d.segment_tiles;
      share_ = own / pieces_;
      rest_ = own - share_ * pieces_;
    } else if (count_ && !whole_) {
      share_ = total / count_;
      rest_ = total - share_ * count_;
    }
  }

  // Of equal segments, each of so many tiles in so many pieces.
  __device__ __forceinline__ Spans(u32 tiles, u32 pieces)
      : prefix(nullptr), batch_(0), total_(0), single_(false), count_(0), pieces_(pieces),
        segment_(tiles), share_(0), rest_(0) {}

  // The tiles of span c; none for those past the last.
  __device__ __forceinline__ KeyRange tiles_of(const AttentionParams &p, const DecodeParams &d,
                                               u32 c) const {
    if (c >= count_) return {total_, total_};
    if (pieces_) {
      const u32 s = c / pieces_, r = c - s * pieces_;
      const int at = s * segment_ + r * share_ + min(r, rest_);
      return {at, static_cast<int>(at + share_ + (r < rest_ ? 1 : 0))};
    }
    if (whole_) {
      const u32 at = c * whole_;
      return {static_cast<int>(at), static_cast<int>(min(static_cast<u32>(total_), at + whole_))};
    }
    const int at = c * share_ + min(c, rest_), end = at + share_ + (c < rest_ ? 1 : 0);
    if (!single_) return {at, end};
    return {at ? segment_end(p, d, prefix, batch_, at - 1) : 0,
            segment_end(p, d, prefix, batch_, end - 1)};
  }

  __device__ __forceinline__ SpanCut cut() const { return {pieces_, segment_, share_, rest_}; }
  __device__ __forceinline__ void owners(int first, int last, int &span, int &count) const {
    cut().owners(first, last, span, count);
  }

  // Of every one of several equal segments, a piece a span; 0 or 1 where they are not cut so.
  __device__ __forceinline__ int pieces() const { return pieces_; }
  // Of those, the one of span c.
  __device__ __forceinline__ int part(u32 c) const { return pieces_ > 1 ? c % pieces_ : 0; }

  // The request of a tile; lanes may ask for different ones.
  __device__ __forceinline__ int find(int tile) const { return find(prefix, batch_, tile); }

  const i32 *const prefix;

 private:
  // How many multiprocessors to take of those that another kernel shares: it takes the others now
  // and these when their spans end, and both should end together. One span a multiprocessor.
  __device__ __forceinline__ static u32 shared_spans(const DecodeParams &d,
                                                     const BatchTotals &totals) {
    if (!(totals.pairs > 0.f)) return d.spans;
    const float all = static_cast<float>(d.spans), tiles = static_cast<float>(totals.tiles);
    const float others = totals.pairs * d.pair_time;
    const float share = __fdividef(others + tiles * d.tile_time, all);
    const float time = fmaxf(tiles * d.tile_floor, share);
    const int left = static_cast<int>(all - __fdividef(others, time) + 0.5f);
    return min(max(left, 1), d.spans);
  }

  __device__ __forceinline__ static int find(const i32 *prefix, int batch, int tile) {
    int low = 0, high = batch;
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

  // Spans that end where segments end leave fewer pieces to merge. They are taken if nearly as
  // many CTAs have work: some pieces a segment, or some whole segments a span.
  __device__ __forceinline__ void cut_alike(const DecodeParams &d, u32 segment, u32 segments,
                                            u32 limit) {
    segment_ = segment;
    if (segments <= limit) {
      const u32 own = segment - d.segment_tiles;
      count_ = min(count_, segments * max(1u, (own + (1 << d.fewest_shift) - 1) >> d.fewest_shift));
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

  // Where the segment of a tile ends. Rare enough to be one function.
  __device__ __noinline__ static int segment_end(const AttentionParams &p, const DecodeParams &d,
                                                 const i32 *prefix, int batch, int tile) {
    const int request = find(prefix, batch, tile), start = prefix[request];
    const int tiles = request_work(p, d, request).tiles;
    return start + ((tile - start) / tiles + 1) * tiles;
  }

  const int batch_, total_;
  const bool single_;
  u32 count_;
  u32 pieces_ = 0, whole_ = 0, segment_ = 1;
  u32 share_, rest_;
};
