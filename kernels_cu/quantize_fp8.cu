// Values over the scale of their group of heads, in 8 bits: to nearest even, saturated; NaN stays.
// Grid: rows, groups.

#include "core/variant.cuh"
#include "block/quantize_rows.cuh"

namespace {

using V = ConvertVariant;
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr float kLargest = V::kOut == kE4m3 ? 448.f : 57344.f;
static_assert(kIsFp8<V::kOut>, "");
static_assert(params_agree<QuantizeParams>(), "QuantizeParams differs from the host's layout");

__device__ float group_scale(const QuantizeParams &p, int group) {
  if (p.scale) return *reinterpret_cast<const float *>(p.scale + group * p.scale_stride);
  if (!p.largest) return p.scale_value;
  float largest = 0.f;
  for (int i = threadIdx.x % 32; i < p.pieces; i += 32) {
    largest = fmaxf(largest, p.largest[group * p.pieces + i]);
  }
  largest = warp_max(largest);
  return largest > 0.f ? fmaxf(div_rn(largest, kLargest), 0x1p-126f) : 1.f;
}

template <int kCount>
__device__ void quantize_row(const QuantizeParams &p, const QuantizeRow &at, float scale) {
  for (int x = threadIdx.x % 32; x < p.head_dim / kCount; x += 32) {
    Elements<V::kIn, kCount> in;
    in.load(at.source + x * kCount * kItemBytes<V::kIn>);
    float value[kCount];
    in.to_floats(value);
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = div_rn(value[i], scale);
    Elements<V::kOut, kCount> out;
    out.from_floats(value);
    out.store(at.out + x * kCount);
  }
}

template <int kCount>
__device__ void quantize_rotated(const QuantizeParams &p, const QuantizeRow &at, float scale) {
  float value[kCount];
  rotate_row<V::kIn>(at.source, p.rotation, value);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    Elements<V::kOut, 1> out;
    const float one[1] = {div_rn(value[i], scale)};
    out.from_floats(one);
    out.store(at.out + threadIdx.x % 32 * kCount + i);
  }
}

__device__ void quantize(const QuantizeParams &p, const QuantizeRow &at, float scale) {
  switch (p.rotated) {
    case 2:
      return quantize_rotated<2>(p, at, scale);
    case 4:
      return quantize_rotated<4>(p, at, scale);
    case 8:
      return quantize_rotated<8>(p, at, scale);
  }
  if (p.vectorised) {
    quantize_row<16 / kItemBytes<V::kIn>>(p, at, scale);
  } else {
    quantize_row<1>(p, at, scale);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) KERNEL_NAME(
    const __grid_constant__ QuantizeParams p) {
  const int group = blockIdx.y;
  const float scale = group_scale(p, group);
  if (p.made && blockIdx.x == 0 && threadIdx.x == 0) p.made[group] = scale;
  const i64 rows = static_cast<i64>(p.tokens) * p.group_heads;
  const i64 step = static_cast<i64>(gridDim.x) * kWarps;
  for (i64 row = blockIdx.x * kWarps + threadIdx.x / 32; row < rows; row += step) {
    quantize(p, QuantizeRow(p, group, static_cast<int>(row)), scale);
  }
}
