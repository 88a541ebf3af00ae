// Writes new keys and values to their slots of a paged cache, converting on the way.
//
// Threads x run along a row, y over heads, z over tokens; grid z is key, value. Where heads lie one
// behind the other on both sides, the host calls them one long row. Loads do not wait for the slot:
// both latencies overlap, and skipped tokens are rare.

#include "core/variant.cuh"
#include "core/numeric.cuh"
#include "core/memory.cuh"
#include "core/params.cuh"
#include "arch/launch_order.cuh"

namespace {

using V = ConvertVariant;
constexpr int kThreads = 128;
constexpr int kAccesses = 2;                       // of a thread in a row, blockDim.x apart
constexpr int kBlocks = kIsFp8<V::kOut> ? 9 : 12;  // a multiprocessor
static_assert(params_agree<CacheWriteParams>(), "CacheWriteParams differs from the host's layout");

// Byte offset of a slot in the cache. The division is a product with 2^64 / block_size rounded up,
// exact while slots * block_size < 2^64; the host sees to that.
__device__ i64 slot_offset(const CacheWriteParams &p, const CacheSide &side, i64 slot) {
  const i64 block = p.block_size == 1 ? slot : __umul64hi(slot, p.block_inverse);
  return block * side.block_stride + (slot - block * p.block_size) * side.slot_stride;
}

template <int kCount>
__device__ Elements<V::kOut, kCount> convert(const Elements<V::kIn, kCount> &in, float scale) {
  Elements<V::kOut, kCount> out;
  if constexpr (V::kIn == V::kOut) {
#pragma unroll
    for (int i = 0; i < kWords<V::kIn, kCount>; ++i) out.word[i] = in.word[i];
  } else {
    float value[kCount];
    in.to_floats(value);
    if constexpr (kIsFp8<V::kOut>) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) value[i] = div_rn(value[i], scale);
    }
    out.from_floats(value);
  }
  return out;
}

__device__ const char *source_row(const CacheWriteParams &p, int which, i64 token, int head) {
  const CacheSide &side = p.side[which];
  return p.source[which] + token * side.source_token_stride + head * side.source_head_stride;
}

// The last blocks of an earlier launch leave the memory idle.
__device__ void fetch_row_early(const CacheWriteParams &p, int which, i64 token, int head) {
  const char *row = source_row(p, which, token, head);
  const int nbytes = p.head_dim[which] * kItemBytes<V::kIn>;
  for (int at = threadIdx.x * 128; at < nbytes; at += blockDim.x * 128) fetch_early(row + at);
  if (threadIdx.x == 0) fetch_early(p.slots + token * (p.wide_slots ? 8 : 4));
}

template <int kCount>
__device__ void write_row(const CacheWriteParams &p, int which, i64 token, int head, float scale) {
  constexpr int kInStep = kCount * kItemBytes<V::kIn>, kOutStep = kCount * kItemBytes<V::kOut>;
  const CacheSide &side = p.side[which];
  const i64 slot = p.wide_slots ? reinterpret_cast<const i64 *>(p.slots)[token]
                                : reinterpret_cast<const i32 *>(p.slots)[token];
  const char *source = source_row(p, which, token, head);
  const int accesses = p.head_dim[which] / kCount;
  for (int x = threadIdx.x; x < accesses; x += kAccesses * blockDim.x) {
    Elements<V::kIn, kCount> in[kAccesses];
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      const int at = x + k * blockDim.x;
      if (at < accesses) in[k].load(source + static_cast<i64>(at) * kInStep);
    }
    if (slot < 0 || slot >= p.num_slots) return;
    char *cache = p.cache[which] + head * side.head_stride + slot_offset(p, side, slot);
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      const int at = x + k * blockDim.x;
      if (at < accesses) {
        convert<kCount>(in[k], scale).store(cache + static_cast<i64>(at) * kOutStep);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) KERNEL_NAME(
    const __grid_constant__ CacheWriteParams p) {
  const int which = blockIdx.z;
  const int head = blockIdx.y * blockDim.y + threadIdx.y;
  const i64 token = static_cast<i64>(blockIdx.x) * blockDim.z + threadIdx.z;
  if (head >= p.heads || token >= p.num_tokens) return;
  fetch_row_early(p, which, token, head);
  follow_earlier_launches();
  float scale = p.scale_value[which];
  if (p.scale[which]) {
    const char *at = p.scale[which] + head * p.side[which].scale_stride;
    scale = *reinterpret_cast<const float *>(at);
  }
  if (p.vectorised) {
    write_row<16 / kItemBytes<V::kIn>>(p, which, token, head, scale);
  } else {
    write_row<1>(p, which, token, head, scale);
  }
}
