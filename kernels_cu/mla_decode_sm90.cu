// Multi-head latent attention for compute capability 9.0a: 64 rows (heads of one or more tokens)
// share every row of the cache. One launch that plans, attends and merges split segments.
// Grid: spans times the blocks that take one side by side, no more than run at the same time.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/latent_params.cuh"
#include "mainloop/latent_line_sm90.cuh"
#include "mainloop/latent_end_sm90.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");
static_assert(sizeof(LatentParams) == LatentVariant::kParamsBytes,
              "LatentParams differs from the host's layout");

namespace {

constexpr int kThreads = 384;

// By one warp: one of the first tiles of a piece. Other blocks may still be at an earlier one, so
// each loads its own.
__device__ __forceinline__ void load_first(const LatentLoader &loader, const Segment &s, int tile,
                                           int stage, int page) {
  if (tile >= end_tile_of(s)) return;
  if (threadIdx.x % 32 == 0) loader.expect(stage);
  __syncwarp();
  loader.load(s, tile, stage, page, 0, 0, 1);
}

// Makes pieces, holds their queries, and makes weights of their scores. A piece is made, and asked
// for, while the values of the one before are added up and stored.
template <class V>
__device__ __forceinline__ void run_scores(const LatentLoader &loader, const LatentLine &line) {
  LatentScores<V> scores(loader);
  LatentTiles::Rest &rest = loader.tiles.rest();
  LatentPlace at;
  bool later = false;
#pragma unroll 1
  while (true) {
    const int newest = uniform_lane(rest.newest ^ 1);  // than what the values are of
    if (threadIdx.x == 0) line.next(rest.cursor, rest.piece[newest]);
    named_barrier_sync(kScoresOnly, 128);
    const LatentPiece &piece = rest.piece[newest];
    const Segment &s = piece.segment;
    const int warp = fresh(threadIdx.x) / 32;
    LatentPlace second = at, third;
    second.next();
    third = second, third.next();
    if (later) scores.conclude(third);
    // Outputs of the piece before pass through the third stage.
    const auto third_is_free = [&]() {
      if (warp == 2 && later) named_barrier_sync(kStaged, kStagedThreads);
    };
    if (piece.spans == 0) {
      third_is_free();
      if (threadIdx.x == 0) rest.newest = newest;
      break;
    }
    const int begin = first_tile_of(s), page = loader.page_of(s, begin + warp);
    // Queries, which are asked for first, pass through the second stage. A warp loads a tile.
    scores.hold_queries(s, second.stage, [&]() {
      if (warp == 0) load_first(loader, s, begin, at.stage, page);
    });
    if (warp == 1) load_first(loader, s, begin + 1, second.stage, page);
    third_is_free();
    if (warp == 2) load_first(loader, s, begin + 2, third.stage, page);
    if (threadIdx.x == 0) {
      // By a way of its own: an address in one thread's registers would be one in all, and spilled.
      char *const own = loader.tiles.base + fresh(LatentTiles::kRestAt);
      reinterpret_cast<LatentTiles::Rest *>(own)->newest = newest;
    }
    later = true;
    named_barrier_sync(kPieceReady, kThreads);
    scores.run(rest.piece[rest.newest].segment, at);
  }
  named_barrier_sync(kPieceReady, kThreads);
}

// Adds up half of the columns.
template <class V>
__device__ __forceinline__ void run_values(const LatentLoader &loader, const LatentEnd<V> &ends,
                                           int half) {
  LatentTiles::Rest &rest = loader.tiles.rest();
  LatentPlace at;
  u32 parities = 0;
#pragma unroll 1
  while (true) {
    named_barrier_sync(kPieceReady, kThreads);
    const LatentPiece &piece = rest.piece[rest.newest];
    if (piece.spans == 0) return;
    LatentValues<V> values(loader, half);
    values.run(piece.segment, at, parities);
    named_barrier_sync(kPieceDone, kThreads);
    ends.store(values, piece, at.stage);
    if (piece.segment.slot >= 0) {
      LatentMerge::merge(ends.p, ends.d, ends.l, loader.tiles.base, &piece);
    }
  }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(LatentVariant::kSide, 1, 1)
    __launch_bounds__(kThreads, 1) KERNEL_NAME(
    const __grid_constant__ AttentionParams p, const __grid_constant__ DecodeParams d,
    const __grid_constant__ LatentParams l, const __grid_constant__ TensorMap rope_map,
    const __grid_constant__ TensorMap latent_map) {
  using V = LatentVariant;
  static_assert(LatentTiles::kBytes <= V::kSharedBytes, "the host asks for less shared memory");
  extern __shared__ __align__(1024) char smem[];
  const LatentTiles tiles(smem);
  if (tiles.address % 1024) __trap();  // the swizzles count on it
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&rope_map), prefetch_tensor_map(&latent_map);
    tiles.init<V::kSide>();
    cluster_fence();
  }
  cluster_arrive();
  wait_for_earlier_launches();
  let_later_launches_start();

  // The lengths are added up where key tiles will be.
  i32 *const scratch = reinterpret_cast<i32 *>(smem), *const prefix = scratch + 64;
  const BatchTotals totals = add_up<kThreads>(p, d, 0, p.batch, BatchTotals{}, prefix, scratch);
  const Spans spans(d, p.batch, prefix, totals);
  const LatentLine line = {p, d, l};
  if (threadIdx.x == 0) {
    tiles.rest().newest = 0;
    tiles.rest().cursor = line.begin(spans);
  }
  const LatentEnd<V> ends = {p, d, l, tiles};
  if (!totals.alike || !totals.first_tiles) ends.write_empty(prefix);
  fence_async_proxy();
  __syncthreads();
  const LatentLoader loader = {p, l, tiles, &rope_map, &latent_map};
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    take_registers<184>();
    run_scores<V>(loader, line);
    cluster_wait();
  } else {
    give_registers<160>();
    cluster_wait();  // counters and barriers of other blocks are there too
    run_values<V>(loader, ends, warpgroup - 1);
  }
  cluster_sync();  // what others load to this block, and count in it, is over
}
