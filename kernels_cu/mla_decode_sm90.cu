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

// Makes pieces, holds their queries, and makes weights of their scores.
template <class V>
__device__ __forceinline__ void run_scores(const LatentLoader &loader, const LatentLine &line) {
  LatentScores<V> scores(loader);
  LatentTiles::Rest &rest = loader.tiles.rest();
  const bool first_warp = threadIdx.x < 32;
  LatentPlace at;
#pragma unroll 1
  for (u32 turn = 0;; turn ^= LatentTiles::kPieceBytes) {
    LatentPiece &piece = loader.tiles.piece(turn);
    if (threadIdx.x == 0) line.next(rest.cursor, piece);
    named_barrier_sync(kScoresOnly, 128);
    if (piece.spans == 0) break;
    const Segment &s = piece.segment;
    const int begin = first_tile_of(s), end = end_tile_of(s);
    // Queries pass through the third stage.
    LatentPlace place = at;
#pragma unroll 1
    for (int i = 0; i < kLatentStages - 1; ++i, place.next()) {
      if (first_warp && begin + i < end) loader.load_all(s, begin + i, place.stage);
    }
    scores.hold_queries(s, place.stage);
    if (first_warp && begin + kLatentStages - 1 < end) {
      loader.load_all(s, begin + kLatentStages - 1, place.stage);
    }
    named_barrier_sync(kPieceReady, kThreads);
    scores.run(s, at);
    scores.conclude(s);
  }
  named_barrier_sync(kPieceReady, kThreads);
}

// Adds up half of the columns.
template <class V>
__device__ __forceinline__ void run_values(const LatentLoader &loader, const LatentEnd<V> &ends,
                                           int half) {
  LatentTiles::Rest &rest = loader.tiles.rest();
  LatentPlace at;
#pragma unroll 1
  for (u32 turn = 0;; turn ^= LatentTiles::kPieceBytes) {
    named_barrier_sync(kPieceReady, kThreads);
    const LatentPiece &piece = loader.tiles.piece(turn);
    if (piece.spans == 0) return;
    LatentValues<V> values(loader, half);
    values.run(piece.segment, at);
    named_barrier_sync(kPieceDone, kThreads);
    float norm[2];
    float2 state[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = values.warp * 16 + h * 8 + values.lane / 4;
      norm[h] = rest.results.norm[row];
      state[h] = {rest.results.top[row], rest.results.sum[row]};
    }
    ends.store(values, piece, norm, state);
    if (piece.segment.slot >= 0) LatentEnd<V>::merge(ends.p, ends.d, ends.l, loader.tiles.base, turn);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) KERNEL_NAME(
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
    tiles.init();
  }
  wait_for_earlier_launches();
  let_later_launches_start();

  // The lengths are added up where key tiles will be.
  i32 *const scratch = reinterpret_cast<i32 *>(smem), *const prefix = scratch + 64;
  const BatchTotals totals = add_up<kThreads>(p, d, 0, p.batch, BatchTotals{}, prefix, scratch);
  const Spans spans(d, p.batch, prefix, totals);
  const LatentLine line = {p, d, l};
  if (threadIdx.x == 0) tiles.rest().cursor = line.begin(spans);
  const LatentEnd<V> ends = {p, d, l, tiles};
  if (!totals.alike || !totals.first_tiles) ends.write_empty(prefix);
  fence_async_proxy();
  __syncthreads();
  const LatentLoader loader = {p, l, tiles, &rope_map, &latent_map};
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    take_registers<184>();
    run_scores<V>(loader, line);
  } else {
    give_registers<160>();
    run_values<V>(loader, ends, warpgroup - 1);
  }
}
