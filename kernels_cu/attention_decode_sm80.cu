// Attention of few query rows a request over many keys, for compute capability 8.0 and later: one
// launch that plans, attends and merges split segments. Grid: spans, as many as run at the same time.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/decode_params.cuh"
#include "block/spans.cuh"
#include "mainloop/fwd_sm80.cuh"
#include "mainloop/span_merge.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");
static_assert(AttentionVariant::kDecodeBytes == sizeof(DecodeParams),
              "DecodeParams differs from the host's layout");

namespace {

constexpr int kThreads = AttentionVariant::kThreads, kWarps = kThreads / 32;

// Where a block is on its way through its span. In shared memory: registers are for fragments.
struct Walk {
  SpanCut cut;
  int end;            // of the span
  int request, line;  // and its first tile
  Piece piece;
  Segment segment;
  SegmentRows rows;
};

// The next request with keys from `request` on. Every lane of the warp takes part.
__device__ __forceinline__ int next_request(const AttentionParams &p, const DecodeParams &d,
                                            int request) {
#pragma unroll 1
  for (; request < p.batch; request += 32) {
    const int mine = request + static_cast<int>(threadIdx.x % 32);
    const bool any = mine < p.batch && request_work(p, d, mine).tiles > 0;
    const u32 found = __ballot_sync(0xffffffffu, any);
    if (found) return request + __ffs(found) - 1;
  }
  return p.batch;
}

// Fills what the span's next piece is, from tile `at` on. By one warp.
__device__ __forceinline__ void begin_piece(const AttentionParams &p, const DecodeParams &d, int at,
                                            Walk &walk) {
  int request = walk.request, line = walk.line;
  RequestWork w = request_work(p, d, request);
  if (at >= line + w.tiles * w.segments) {
    request = next_request(p, d, request + 1), line = at;
    w = request_work(p, d, request);
  }
  __syncwarp();  // all lanes have read where they were
  if (threadIdx.x != 0) return;
  Piece piece;
  piece.begin(p, d, w, line, at, walk.end);
  const KeyRange seen = visible_keys(p, w.request, 0, w.request.q_len - 1);
  const i64 first = piece.first_key;
  Segment s;
  s.request = w.request;
  s.kv_head = piece.unit;
  s.row_begin = piece.row_begin, s.row_end = piece.row_end;
  const i64 begin = first + (static_cast<i64>(piece.start - piece.first) << d.tile_shift);
  const i64 end = first + (static_cast<i64>(piece.end - piece.first) << d.tile_shift);
  s.kv_begin = static_cast<int>(max(begin, static_cast<i64>(seen.begin)));
  s.kv_end = static_cast<int>(min(end, static_cast<i64>(seen.end)));
  s.find_free_keys(p);
  s.slot = piece.whole() ? -1 : static_cast<int>(2 * blockIdx.x) + (piece.start == piece.first);
  set_scale<AttentionVariant::kScoreMod>(p, s);
  walk.request = request, walk.line = line;
  walk.piece = piece;
  walk.segment = s;
  walk.rows = SegmentRows::of(p, s);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, AttentionVariant::kBlocks) KERNEL_NAME(
    const __grid_constant__ AttentionParams p, const __grid_constant__ DecodeParams d) {
  extern __shared__ __align__(128) char smem[];
  using Kernel = Forward<AttentionVariant>;
  __shared__ Walk walk;
  __shared__ i32 scratch[3 * kWarps + 2];
  using Merge = SpanMerge<kWarps>;
  static_assert(Kernel::kListAt - Kernel::kKeysAt >= kWarps * (Merge::kWide * 4 + 8), "");
  float *const values = reinterpret_cast<float *>(smem + Kernel::kKeysAt);
  const Merge merge(p, d, values, reinterpret_cast<float2 *>(values + kWarps * Merge::kWide));
  // Tiles before each request: where keys and values come later.
  i32 *const own = reinterpret_cast<i32 *>(smem + Kernel::kKeysAt);
  int at;
  {
    BatchTotals totals = {};
    const i32 *prefix = d.prefix;
    if (prefix) {
      const i32 *const more = prefix + p.batch;
      totals = {more[0], more[1], more[2], more[3], more[4] != 0, __int_as_float(more[5])};
    } else {
      totals = add_up<kThreads>(p, d, 0, p.batch, totals, own, scratch);
      prefix = own;
    }
    const Spans spans(d, p.batch, prefix, totals);
    const KeyRange tiles = spans.tiles_of(p, d, blockIdx.x);
    if (!totals.alike || !totals.first_tiles) merge.write_empty(prefix, blockIdx.x);
    at = tiles.begin;
    if (at >= tiles.end) return;
    if (threadIdx.x == 0) {
      const int request = spans.find(at);
      walk.cut = spans.cut();
      walk.end = tiles.end;
      walk.request = request, walk.line = prefix[request];
    }
  }
  __syncthreads();
#pragma unroll 1
  while (true) {
    if (threadIdx.x < 32) begin_piece(p, d, at, walk);
    __syncthreads();
    Kernel(p, walk.segment, walk.rows, smem).run();
    __syncthreads();
    if (!walk.piece.whole()) merge.merge_spans(walk.cut, walk.piece, scratch);
    at = walk.piece.end;
    if (at >= walk.end) return;
    __syncthreads();
  }
}
