// Merges the partial results of split keys, and the sink. A block takes one (token, head): its
// warps add up every fourth part each. Rows whose keys lie in one chunk are final already.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/state.cuh"
#include "block/epilogue.cuh"
#include "block/segment.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");

namespace {

constexpr u32 kAll = 0xffffffffu;
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kMostParts = 128;  // the host splits no further
constexpr int kRounds = kMostParts / 32;
constexpr int kLargestDim = 512;

struct Row {
  Request request;
  int kv_head, row;  // of the request's q_len * group
};

// The row of a block; false if it is none, or of a request that is left to another launch.
__device__ __forceinline__ bool find_row(const AttentionParams &p, int block, Row &found) {
  const int token = block / p.heads_q, head = block - token * p.heads_q;
  if (token >= p.cu_seqlens_q[p.batch]) return false;
  found.request =
      load_request(p, find_last(p.batch, token, [&](int i) { return p.cu_seqlens_q[i]; }));
  found.kv_head = head / p.group;
  found.row = (token - found.request.q_begin) * p.group + head % p.group;
  return found.request.q_len * p.group > p.skipped_rows;
}

// Chunks of the row block that a row is in.
__device__ __forceinline__ int chunks_of(const AttentionParams &p, const Row &at) {
  const int begin = at.row / p.row_block * p.row_block;
  return count_chunks(p, block_keys(p, at.request, begin,
                                    min(at.request.q_len * p.group, begin + p.row_block)));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) KERNEL_NAME(
    const __grid_constant__ AttentionParams p) {
  __shared__ float4 sums[kWarps][kLargestDim / 4];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Row at;
  if (!find_row(p, blockIdx.x, at)) return;
  const int chunks = chunks_of(p, at);
  if (chunks <= 1) return;

  // Every warp has the weights of all parts: lane l those of parts l, l + 32, ...
  const i64 part_stride = partial_rows(p), row = partial_row(p, at.request, at.kv_head, at.row);
  const int in_request = at.row / p.group;
  const int head = at.kv_head * p.group + at.row - in_request * p.group;
  const i64 token = static_cast<i64>(at.request.q_begin) + in_request;
  float weight[kRounds], top = -infinity();
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int part = i * 32 + lane;
    weight[i] = part < chunks ? p.partial_lse[part * part_stride + row] : -infinity();
    top = fmaxf(top, weight[i]);
  }
#pragma unroll
  for (int mask = 16; mask; mask /= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, mask));
  const float sink = p.sink ? load_sink(p, head) : -infinity();
  StateSum state(fmaxf(top, sink));
#pragma unroll
  for (int i = 0; i < kRounds; ++i) weight[i] = state.add(weight[i]);
#pragma unroll
  for (int mask = 16; mask; mask /= 2) state.sum += __shfl_xor_sync(kAll, state.sum, mask);
  if (p.sink) state.add(sink);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) weight[i] = state.weight(weight[i]);

#pragma unroll
  for (int half = 0; half < kLargestDim / 128; ++half) {
    if (half * 128 >= p.head_dim_v) break;
    const int column = half * 128 + lane * 4;
    float acc[4] = {};
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (i * 32 >= chunks) break;
#pragma unroll
      for (int j = 0; j < 32 / kWarps; ++j) {
        const int part = i * 32 + j * kWarps + warp;
        const float w = __shfl_sync(kAll, weight[i], j * kWarps + warp);
        float4 v = {};
        if (part < chunks && column < p.head_dim_v) {
          v = *reinterpret_cast<const float4 *>(
              p.partial_out + (part * part_stride + row) * p.head_dim_v + column);
        }
        const float value[4] = {v.x, v.y, v.z, v.w};
        add_weighted(acc, w, value);
      }
    }
    sums[warp][half * 32 + lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
  }
  __syncthreads();
#pragma unroll 1
  for (int column = threadIdx.x * 2; column < p.head_dim_v; column += kThreads * 2) {
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float *pair = reinterpret_cast<const float *>(sums[w]) + column;
      a += pair[0], b += pair[1];
    }
    store_pair(p, p.out + token * p.out_token_stride + head * p.out_head_stride + column * 2, a, b);
  }
  if (threadIdx.x == 0) store_lse(p, token, head, state.lse());
}
