// From accumulated fragments to the result, or to a partial result that is merged later.
#pragma once

#include "block/softmax.cuh"
#include "core/state.cuh"

struct RowResult {
  float lse;   // natural, of the keys alone
  float norm;  // what accumulated values are multiplied by
};

__device__ __forceinline__ float load_sink(const AttentionParams &p, int head) {
  const char *at = p.sink + head * p.sink_stride;
  if (p.sink_type == kFp32) return *reinterpret_cast<const float *>(at);
  const u32 bits = *reinterpret_cast<const u16 *>(at);
  return p.sink_type == kFp16 ? unpack_fp16(bits).x : unpack_bf16(bits).x;
}

__device__ __forceinline__ float value_scale(const AttentionParams &p, int request, int kv_head) {
  return p.v_descale ? load_float(p.v_descale, request * p.v_descale_batch_stride +
                                                   kv_head * p.v_descale_head_stride)
                     : p.v_scale;
}

// Two neighbours of an output row.
__device__ __forceinline__ void store_pair(const AttentionParams &p, char *to, float a, float b) {
  const u32 pair = p.out_type == kFp16 ? pack_fp16(a, b) : pack_bf16(a, b);
  if (p.out_vectorised) {
    *reinterpret_cast<u32 *>(to) = pair;
  } else {
    reinterpret_cast<u16 *>(to)[0] = static_cast<u16>(pair);
    reinterpret_cast<u16 *>(to)[1] = static_cast<u16>(pair >> 16);
  }
}

__device__ __forceinline__ void store_lse(const AttentionParams &p, i64 token, int head,
                                          float lse) {
  if (p.lse) {
    *reinterpret_cast<float *>(p.lse + head * p.lse_head_stride + token * p.lse_token_stride) =
        lse;
  }
}

// Rows of one partial result of all requests, and where a request's row is among them.
__device__ __forceinline__ i64 partial_rows(const AttentionParams &p) {
  return static_cast<i64>(p.total_q) * p.heads_q;
}
__device__ __forceinline__ i64 partial_row(const AttentionParams &p, const Request &r, int kv_head,
                                           int row) {
  const int token = row / p.group;
  return static_cast<i64>(r.q_begin + token) * p.heads_q + kv_head * p.group + row -
         token * p.group;
}

// The result of a row whose weights, to base 2 and over `shift`, add up to `sum`. Without the
// log-sum-exp there is no logarithm.
__device__ __forceinline__ RowResult conclude(float shift, float sum, float v_scale,
                                              bool with_lse) {
  if (sum == 0.f) return {-infinity(), 0.f};
  return {with_lse ? fmaf(shift, kLn2, logf(sum)) : 0.f, v_scale / sum};
}

// The same where a sink counts as a key without a value; what is larger is the one that is not
// rounded.
__device__ __forceinline__ RowResult conclude(float shift, float sum, float v_scale, float sink,
                                              bool with_lse) {
  const float ahead = fmaf(sink, kLog2e, -shift);
  if (sum == 0.f || ahead > 0.f) {
    const float factor = sum == 0.f ? 0.f : exp2f(-ahead), total = fmaf(sum, factor, 1.f);
    return {with_lse ? sink + logf(total) : 0.f, v_scale * factor / total};
  }
  return conclude(shift, sum + exp2f(ahead), v_scale, with_lse);
}

// Whether eight outputs side by side are one store.
__device__ __forceinline__ bool stores_wide(const AttentionParams &p) {
  const u64 low = reinterpret_cast<u64>(p.out) | p.out_token_stride | p.out_head_stride;
  return ((low | p.head_dim_v * 2) & 15) == 0;
}

// A row of a partial result; pair n are columns first_column + column_of(n) + {0, 1} of this lane.
template <int kPairs, class ColumnOf>
__device__ __forceinline__ void store_partial(const AttentionParams &p, i64 at, float norm,
                                              int first_column, const float (&value)[kPairs][2],
                                              ColumnOf column_of) {
  float *to = p.partial_out + at * p.head_dim_v;
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const int column = first_column + column_of(n);
    if (column < p.head_dim_v) {
      *reinterpret_cast<float2 *>(to + column) =
          make_float2(value[n][0] * norm, value[n][1] * norm);
    }
  }
}

// Row `row` of a segment; pair n are columns first_column + column_of(n) + {0, 1} of this lane. The
// sink counts here if kSink.
template <int kPairs, bool kSink = true, class ColumnOf>
__device__ __forceinline__ void store_row(const AttentionParams &p, const Segment &s, int kv_head,
                                          int row, RowResult result, int first_column,
                                          bool with_lse, const float (&value)[kPairs][2],
                                          ColumnOf column_of) {
  const int in_request = row / p.group, head = kv_head * p.group + row - in_request * p.group;
  const i64 token = static_cast<i64>(s.request.q_begin) + in_request;
  if (s.slot >= 0) {
    const i64 at = s.slot * partial_rows(p) + partial_row(p, s.request, kv_head, row);
    if (with_lse) p.partial_lse[at] = result.lse;
    store_partial(p, at, result.norm, first_column, value, column_of);
    return;
  }
  float lse = result.lse, weight = 1.f;
  if (kSink && p.sink) {
    const float sink = load_sink(p, head);
    StateSum state(fmaxf(lse, sink));
    const float part = state.add(lse);
    state.add(sink);
    weight = state.weight(part);
    lse = state.lse();
  }
  if (with_lse) store_lse(p, token, head, lse);
  const float norm = result.norm * weight;
  char *const to = p.out + token * p.out_token_stride + head * p.out_head_stride;
  const bool fp16 = p.out_type == kFp16;
  u32 pair[kPairs];
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const float a = value[n][0] * norm, b = value[n][1] * norm;
    pair[n] = fp16 ? pack_fp16(a, b) : pack_bf16(a, b);
  }
  if (p.out_vectorised) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int column = first_column + column_of(n);
      if (column < p.head_dim_v) *reinterpret_cast<u32 *>(to + column * 2) = pair[n];
    }
  } else {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int column = first_column + column_of(n);
      if (column < p.head_dim_v) {
        reinterpret_cast<u16 *>(to)[column] = static_cast<u16>(pair[n]);
        reinterpret_cast<u16 *>(to)[column + 1] = static_cast<u16>(pair[n] >> 16);
      }
    }
  }
}
