// Merges the partial results of split keys, in the order of the keys, and the sink. A warp takes
// one (token, head). Rows whose keys lie in one chunk are final already.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/state.cuh"
#include "block/epilogue.cuh"
#include "block/segment.cuh"
#include "block/tile.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");

namespace {

constexpr u32 kAll = 0xffffffffu;

// Chunks of the row block that a row is in.
__device__ __forceinline__ int chunks_of(const AttentionParams &p, const Request &r, int token,
                                         int head) {
  const int rows = r.q_len * p.group, row = token * p.group + head % p.group;
  const int begin = row / p.row_block * p.row_block;
  return count_chunks(p, block_keys(p, r, begin, min(rows, begin + p.row_block)));
}

__device__ __forceinline__ void store_quad(const AttentionParams &p, char *to,
                                           const float (&value)[4]) {
  store_pair(p, to, value[0], value[1]);
  store_pair(p, to + 4, value[2], value[3]);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) KERNEL_NAME(
    const __grid_constant__ AttentionParams p) {
  const int lane = threadIdx.x % 32;
  const int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const int token = row / p.heads_q, head = row - token * p.heads_q;
  if (token >= p.cu_seqlens_q[p.batch]) return;
  const int request = find_last(p.batch, token, [&](int i) { return p.cu_seqlens_q[i]; });
  const Request r = load_request(p, request);
  const int chunks = chunks_of(p, r, token - r.q_begin, head);
  if (chunks <= 1) return;

  const i64 slot_stride = static_cast<i64>(p.total_q) * p.heads_q;
  float top = -infinity();
  for (i64 slot = lane; slot < chunks; slot += 32) {
    top = fmaxf(top, p.partial_lse[slot * slot_stride + row]);
  }
#pragma unroll
  for (int mask = 16; mask; mask /= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, mask));
  const float sink = p.sink ? load_sink(p, head) : -infinity();
  StateSum state(fmaxf(top, sink));
  for (int base = 0; base < chunks; base += 32) {
    const int slot = base + lane;
    const float lse = slot < chunks ? p.partial_lse[slot * slot_stride + row] : -infinity();
    for (int i = 0; i < min(32, chunks - base); ++i) state.add(__shfl_sync(kAll, lse, i));
  }
  if (p.sink) state.add(sink);

  for (int column = lane * 4; column < p.head_dim_v; column += 128) {
    float acc[4] = {};
#pragma unroll 4
    for (i64 slot = 0; slot < chunks; ++slot) {
      const i64 at = slot * slot_stride + row;
      const float weight = state.weight(expf(p.partial_lse[at] - state.shift));
      const float4 v =
          *reinterpret_cast<const float4 *>(p.partial_out + at * p.head_dim_v + column);
      const float value[4] = {v.x, v.y, v.z, v.w};
      add_weighted(acc, weight, value);
    }
    store_quad(p, p.out + token * p.out_token_stride + head * p.out_head_stride + column * 2, acc);
  }
  if (lane == 0) store_lse(p, token, head, state.lse());
}
