// Writes new keys and values to their slots of a paged cache, converting on the way.
//
// Threads x run along a row, y over heads, z over tokens; grid z is key, value. Where heads lie one
// behind the other on both sides, the host calls them one long row. Loads do not wait for the slot:
// both latencies overlap, and skipped tokens are rare.

#include "core/variant.cuh"
#include "core/numeric.cuh"
#include "core/memory.cuh"
#include "core/params.cuh"

namespace {

using V = ConvertVariant;
constexpr int kThreads = 128;
constexpr int kTokensPerThread = 2;
constexpr int kAccesses = 4;  // of a thread in a row, blockDim.x apart
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

template <int kCount>
__device__ void write_rows(const CacheWriteParams &p, int which, int head, float scale) {
  constexpr int kInStep = kCount * kItemBytes<V::kIn>, kOutStep = kCount * kItemBytes<V::kOut>;
  const CacheSide &side = p.side[which];
  const i64 first = static_cast<i64>(blockIdx.x) * (blockDim.z * kTokensPerThread) + threadIdx.z;
  const char *source = p.source[which] + head * side.source_head_stride;
  char *cache = p.cache[which] + head * side.head_stride;
  i64 slot[kTokensPerThread];
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i) {
    const i64 token = first + i * blockDim.z;
    slot[i] = token >= p.num_tokens ? -1
              : p.wide_slots        ? reinterpret_cast<const i64 *>(p.slots)[token]
                                    : reinterpret_cast<const i32 *>(p.slots)[token];
  }
  const int accesses = p.head_dim[which] / kCount;
  for (int x = threadIdx.x; x < accesses; x += kAccesses * blockDim.x) {
    Elements<V::kIn, kCount> in[kTokensPerThread][kAccesses];
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) {
      const i64 token = first + i * blockDim.z;
      const char *row = source + token * side.source_token_stride + x * kInStep;
#pragma unroll
      for (int k = 0; k < kAccesses; ++k) {
        const int at = k * blockDim.x;
        if (token < p.num_tokens && x + at < accesses) in[i][k].load(row + at * kInStep);
      }
    }
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) {
      if (slot[i] < 0 || slot[i] >= p.num_slots) continue;
      char *row = cache + slot_offset(p, side, slot[i]) + x * kOutStep;
#pragma unroll
      for (int k = 0; k < kAccesses; ++k) {
        const int at = k * blockDim.x;
        if (x + at < accesses) convert<kCount>(in[i][k], scale).store(row + at * kOutStep);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 5) KERNEL_NAME(
    const __grid_constant__ CacheWriteParams p) {
  const int which = blockIdx.z;
  const int head = blockIdx.y * blockDim.y + threadIdx.y;
  if (head >= p.heads) return;
  float scale = p.scale_value[which];
  if (p.scale[which]) {
    const char *at = p.scale[which] + head * p.side[which].scale_stride;
    scale = *reinterpret_cast<const float *>(at);
  }
  if (p.vectorised) {
    write_rows<16 / kItemBytes<V::kIn>>(p, which, head, scale);
  } else {
    write_rows<1>(p, which, head, scale);
  }
}
