// Merges two attention states over disjoint sets of keys, and a sink, token by token.
//
// A block owns a tile of (token, head) rows: threads x run along a row, y over heads, z over
// tokens. Weights come first, one row a thread, tokens fastest, so that the transposed lse arrays
// are read in whole sectors; an empty side is then zeros, and not read at all. out and out_lse may
// be the very arrays of an input: each element is read by the thread that writes it, before it
// does.

#include "core/variant.cuh"
#include "core/numeric.cuh"
#include "core/memory.cuh"
#include "core/state.cuh"
#include "core/params.cuh"
#include "arch/launch_order.cuh"

namespace {

using V = ConvertVariant;
constexpr int kThreads = 128;
constexpr int kTokensPerThread = 4;
constexpr int kEarlyTokens = 2;  // of those, whose rows are asked for at once
static_assert(params_agree<MergeParams>(), "MergeParams differs from the host's layout");

struct Weights {
  float prefix, suffix;
};

__device__ float load_sink(const MergeParams &p, int head) {
  const char *at = p.sink + head * (p.sink_type == kFp32 ? 4 : 2);
  if (p.sink_type == kFp32) return *reinterpret_cast<const float *>(at);
  const u32 bits = *reinterpret_cast<const u16 *>(at);
  return p.sink_type == kFp16 ? unpack_fp16(bits).x : unpack_bf16(bits).x;
}

__device__ Weights merge_row(const MergeParams &p, i64 token, int head) {
  float prefix = -infinity(), sink = -infinity();
  if (token < p.prefix_tokens) {
    prefix = read_lse(*reinterpret_cast<const float *>(
        p.prefix_lse + head * p.prefix_lse_head_stride + token * p.prefix_lse_token_stride));
  }
  const float suffix = read_lse(*reinterpret_cast<const float *>(
      p.suffix_lse + head * p.suffix_lse_head_stride + token * p.suffix_lse_token_stride));
  if (p.sink) sink = load_sink(p, head);
  StateSum state(fmaxf(fmaxf(prefix, suffix), sink));
  const float prefix_part = state.add(prefix), suffix_part = state.add(suffix);
  if (p.sink) state.add(sink);
  if (p.out_lse) {
    *reinterpret_cast<float *>(p.out_lse + head * p.out_lse_head_stride +
                               token * p.out_lse_token_stride) = state.lse();
  }
  return {state.weight(prefix_part), state.weight(suffix_part)};
}

// The rows of a thread in one array: a first byte, and the way to the next row.
struct Rows {
  const char *first;
  i64 step;

  __device__ const char *operator[](int i) const { return first + i * step; }
};

__device__ Rows rows_of(const char *array, i64 token, int head, i64 token_stride, i64 head_stride) {
  return {array + token * token_stride + head * head_stride, token_stride * blockDim.z};
}

// Weights come first, so rows are asked for before the log-sum-exps that say how much of them
// counts.
__device__ void fetch_tile_early(const MergeParams &p, i64 token, int head) {
  const Rows prefix_rows =
      rows_of(p.prefix_out, token, head, p.prefix_token_stride, p.prefix_head_stride);
  const Rows suffix_rows =
      rows_of(p.suffix_out, token, head, p.suffix_token_stride, p.suffix_head_stride);
  for (int i = 0; i < kEarlyTokens; ++i) {
    const i64 own = token + i * blockDim.z;
    if (own >= p.tokens) break;
    for (int at = threadIdx.x * 128; at < p.head_dim * kItemBytes<V::kIn>; at += blockDim.x * 128) {
      if (own < p.prefix_tokens) fetch_early(prefix_rows[i] + at);
      fetch_early(suffix_rows[i] + at);
    }
  }
  if (threadIdx.x || threadIdx.z) return;
  fetch_early(p.prefix_lse + head * p.prefix_lse_head_stride + token * p.prefix_lse_token_stride);
  fetch_early(p.suffix_lse + head * p.suffix_lse_head_stride + token * p.suffix_lse_token_stride);
}

// kTokensPerThread tokens of one head, kCount elements at a time.
template <int kCount>
__device__ void merge_rows(const MergeParams &p, const Weights *weights, i64 token, int head,
                           float scale) {
  constexpr int kInStep = kCount * kItemBytes<V::kIn>, kOutStep = kCount * kItemBytes<V::kOut>;
  const Rows prefix_rows =
      rows_of(p.prefix_out, token, head, p.prefix_token_stride, p.prefix_head_stride);
  const Rows suffix_rows =
      rows_of(p.suffix_out, token, head, p.suffix_token_stride, p.suffix_head_stride);
  const Rows out_rows = rows_of(p.out, token, head, p.out_token_stride, p.out_head_stride);
  for (int x = threadIdx.x; x < p.head_dim / kCount; x += blockDim.x) {
    Elements<V::kIn, kCount> prefix[kTokensPerThread] = {}, suffix[kTokensPerThread] = {};
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) {
      const Weights w = weights[i * blockDim.z];
      if (w.prefix != 0.f) prefix[i].load(prefix_rows[i] + x * kInStep);
      if (w.suffix != 0.f) suffix[i].load(suffix_rows[i] + x * kInStep);
    }
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) {
      if (token + i * blockDim.z >= p.tokens) break;
      const Weights w = weights[i * blockDim.z];
      float value[kCount], acc[kCount] = {};
      prefix[i].to_floats(value);
#pragma unroll
      for (int k = 0; k < kCount; ++k) acc[k] = fma_rn(w.prefix, value[k], acc[k]);
      suffix[i].to_floats(value);
#pragma unroll
      for (int k = 0; k < kCount; ++k) acc[k] = fma_rn(w.suffix, value[k], acc[k]);
      if constexpr (V::kOut == kE4m3) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) acc[k] = div_rn(acc[k], scale);
      }
      Elements<V::kOut, kCount> merged;
      merged.from_floats(acc);
      merged.store(const_cast<char *>(out_rows[i]) + x * kOutStep);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 6) KERNEL_NAME(
    const __grid_constant__ MergeParams p) {
  __shared__ Weights weights[kThreads * kTokensPerThread];
  const int tile_tokens = blockDim.z * kTokensPerThread, tile_heads = blockDim.y;
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  const i64 first_token = static_cast<i64>(blockIdx.x) * tile_tokens;
  const int first_head = blockIdx.y * tile_heads;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int head = first_head + threadIdx.y;
  const i64 token = first_token + threadIdx.z;
  if (head < p.heads && token < p.tokens) fetch_tile_early(p, token, head);
  follow_earlier_launches();
  for (int row = thread; row < tile_tokens * tile_heads; row += threads) {
    const i64 row_token = first_token + row % tile_tokens;
    const int row_head = first_head + row / tile_tokens;
    const bool inside = row_token < p.tokens && row_head < p.heads;
    weights[row] = inside ? merge_row(p, row_token, row_head) : Weights{0.f, 0.f};
  }
  __syncthreads();
  if (head >= p.heads) return;
  const float scale = p.out_scale ? *p.out_scale : p.out_scale_value;
  const Weights *own = weights + threadIdx.y * tile_tokens + threadIdx.z;
  if (p.vectorised) {
    merge_rows<16 / kItemBytes<V::kIn>>(p, own, token, head, scale);
  } else {
    merge_rows<1>(p, own, token, head, scale);
  }
}
