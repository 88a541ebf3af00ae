// Parameters of plain decode calls with what is known of them when the kernel is compiled: a third
// fewer instructions, all of them on the way to the first tile and from the last one.
//
// Plain: whole heads in pages of a power of two, 16 keys or more; no window to the left, soft cap,
// ALiBi nor sink; split as planned, no table made ahead.
#pragma once

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/decode_params.cuh"

constexpr int log2_of(int power) { return power > 1 ? 1 + log2_of(power / 2) : 0; }

// The parameters as they are, or a copy of which the compiler knows those fields.
template <class V>
__device__ __forceinline__ decltype(auto) known(const AttentionParams &given) {
  if constexpr (!V::kPlain) {
    return (given);
  } else {
    AttentionParams p = given;
    p.window_left = -1;
    p.softcap = 0.f;
    p.alibi_slopes = p.sink = nullptr;
    p.cu_seqlens_k = nullptr;
    p.head_dim = p.head_dim_v = V::kHeadDim;
    if (!V::kWiden) {
      p.q_type = p.out_type = V::kCompute;
      p.q_descale = p.k_descale = p.v_descale = nullptr;
    }
    return p;
  }
}

template <class V>
__device__ __forceinline__ decltype(auto) known(const DecodeParams &given) {
  if constexpr (!V::kPlain) {
    return (given);
  } else {
    DecodeParams d = given;
    d.prefix = nullptr;
    d.tile_shift = log2_of(V::kKeys);
    d.most_pieces = d.chunks = 0;
    d.box_shift = 4;
    d.k_panels = d.v_panels = V::kHeadDim * kItemBytes<V::kCache> / 128;
    d.whole_boxes = 1;
    d.column_shift = log2_of(V::kHeadDim < 128 ? V::kHeadDim : 128);
    if (!V::kBeside) {
      d.most_rows = 0x7fffffff;
      d.pair_time = 0.f;
    }
    return d;
  }
}
