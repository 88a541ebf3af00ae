// Attention of few query rows a request over many keys, for compute capability 9.0: one launch that
// plans, attends and merges split segments. Grid: spans, as many as run at the same time.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/decode_params.cuh"
#include "block/decode_plain.cuh"
#include "block/even_span.cuh"
#include "mainloop/decode_sm90.cuh"
#include "mainloop/decode_merge_sm90.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");
static_assert(DecodeVariant::kParamsBytes == sizeof(DecodeParams),
              "DecodeParams differs from the host's layout");

constexpr int kNearTable = 8 << 10;  // bytes
constexpr i32 kNoBlock = -0x7fffffff;

// Brings a small block table into L1 while the lengths are on their way: a word of each line.
__device__ __forceinline__ i32 near_line(const AttentionParams &p, const DecodeParams &d) {
  const int at = threadIdx.x * 128;
  if (at >= d.table_bytes || d.table_bytes > kNearTable) return 0;
  return *reinterpret_cast<const i32 *>(p.block_table + at);
}

// Reads a word of every line of a kernel's parameters, so that each is near when it is needed.
template <class T>
__device__ __forceinline__ u32 touch(const T &params) {
  u32 seen = 0;
#pragma unroll
  for (int i = 0; i < sizeof(T) / 4; i += 16) seen ^= reinterpret_cast<const u32 *>(&params)[i];
  return seen;
}

extern "C" __global__ void __launch_bounds__(DecodeVariant::kThreads, 8 / DecodeVariant::kWarps)
    KERNEL_NAME(
        const __grid_constant__ AttentionParams attention,
        const __grid_constant__ DecodeParams decode,
        const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  extern __shared__ __align__(1024) char smem[];
  auto &&p = known<DecodeVariant>(attention);
  auto &&d = known<DecodeVariant>(decode);
  using Loop = DecodeLoop<DecodeVariant>;
  using Merge = DecodeMerge<DecodeVariant>;
  constexpr int kWarps = DecodeVariant::kWarps, kThreads = DecodeVariant::kThreads;
  const int cta = blockIdx.x;
  const Merge merge(p, d, smem + kWarps * d.stages * Loop::kStageBytes);
  const u32 barriers = shared_address(merge.barriers());
  if (threadIdx.x == 0) prefetch_tensor_map(&k_map), prefetch_tensor_map(&v_map);
  Loop::open_rings(d, barriers);
  // The table is read after the lengths, and should be near by then.
  const int line = (cta * kThreads + threadIdx.x) * 128;
  if (line < d.table_bytes) prefetch_l2(p.block_table + line);
  if (threadIdx.x == 0) merge.keep(touch(attention) ^ touch(decode));
  wait_for_earlier_launches();
  let_later_launches_start();
  const i32 near = near_line(p, d);

  EvenSpan even;
  if (DecodeVariant::kPlain && d.even_pieces && (d.mail || d.even_pieces == 1)) {
    even.look(p, d, cta);
  }
  BatchTotals totals = {};
  totals.alike = even.there;
  const i32 *prefix = d.prefix;
  if (even.there) {
    if (DecodeVariant::kSharedRings) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  } else if (prefix) {
    const i32 *const more = prefix + p.batch;
    totals = {more[0], more[1], more[2], more[3], more[4] != 0, __int_as_float(more[5])};
    __syncthreads();
  } else {
    totals = add_up<kThreads>(p, d, 0, p.batch, totals, merge.prefix(), merge.scratch());
    prefix = merge.prefix();
  }
  const Spans spans = even.there ? Spans(even.tiles, d.even_pieces)
                                 : Spans(d, p.batch, prefix, totals);
  const KeyRange tiles =
      even.there ? KeyRange{even.begin, even.end} : spans.tiles_of(p, d, cta);
  int at = tiles.begin;
  const int end = tiles.end;
  Loop loop(p, d, spans, even, &k_map, &v_map, shared_address(smem), barriers, at, end);
  loop.start();
  if (near == kNoBlock) merge.keep(near);
  if (!even.there && (!totals.alike || !totals.first_tiles)) merge.write_empty(prefix, cta);
  if (at >= end) return;

  // The queries of a piece are asked for before the piece before it is concluded.
  int request = even.there ? 0 : spans.find(at);
  Piece piece, next;
  DecodeRows<DecodeVariant> rows;
  DecodeState<DecodeVariant> state;
  bool open = false;
#pragma unroll 1
  while (true) {
    const bool more = at < end;
    if (more) {
      if (even.there) {
        const int rows = even.request.q_len * p.group;
        next = {even.request, even.unit, 0, rows, 0, even.tiles, at, end, 0, 0, 1};
      } else {
        if (prefix[request + 1] <= at) request = spans.find(at);
        next.begin(p, d, request_work(p, d, request), prefix[request], at, end);
      }
      rows.fetch(p, d, next.request, (next.unit << d.unit_shift) + loop.side_head, next.row_begin,
                 next.row_end);
    }
    if (open) {
      const int first = even.there ? even.first : cta - spans.part(cta);
      merge.finish(spans, piece, cta, first, rows.of_values, state);
    }
    if (!more) return;
    piece = next;
    rows.prepare(p, d, piece.request, (piece.unit << d.unit_shift) + loop.side_head,
                 piece.row_begin, piece.row_end);
    state.clear();
    loop.run(piece.first, piece.end, piece.first_key, rows, state);
    at = piece.end;
    open = true;
  }
}
