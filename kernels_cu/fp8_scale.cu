// The largest absolute value of each piece of the rows of a group. Infinities and NaN do not count.
// Grid: pieces, groups.

#include "core/variant.cuh"
#include "block/quantize_rows.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
static_assert(params_agree<QuantizeParams>(), "QuantizeParams differs from the host's layout");

template <int kCount>
__device__ float largest_of_row(const QuantizeParams &p, const char *row) {
  float largest = 0.f;
  for (int x = threadIdx.x % 32; x < p.head_dim / kCount; x += 32) {
    Elements<ConvertVariant::kIn, kCount> in;
    in.load(row + x * kCount * kItemBytes<ConvertVariant::kIn>);
    float value[kCount];
    in.to_floats(value);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float size = fabsf(value[i]);
      largest = size < infinity() ? fmaxf(largest, size) : largest;
    }
  }
  return largest;
}

template <int kCount>
__device__ float largest_of_rotated(const QuantizeParams &p, const char *row) {
  float value[kCount], largest = 0.f;
  rotate_row<ConvertVariant::kIn>(row, p.rotation, value);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float size = fabsf(value[i]);
    largest = size < infinity() ? fmaxf(largest, size) : largest;
  }
  return largest;
}

__device__ float largest_of(const QuantizeParams &p, const char *row) {
  constexpr int kWide = 16 / kItemBytes<ConvertVariant::kIn>;
  switch (p.rotated) {
    case 2:
      return largest_of_rotated<2>(p, row);
    case 4:
      return largest_of_rotated<4>(p, row);
    case 8:
      return largest_of_rotated<8>(p, row);
  }
  return p.vectorised ? largest_of_row<kWide>(p, row) : largest_of_row<1>(p, row);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) KERNEL_NAME(
    const __grid_constant__ QuantizeParams p) {
  __shared__ float found[kWarps];
  const int group = blockIdx.y, warp = threadIdx.x / 32;
  const i64 rows = static_cast<i64>(p.tokens) * p.group_heads;
  float largest = 0.f;
  for (i64 row = blockIdx.x * kWarps + warp; row < rows; row += gridDim.x * kWarps) {
    const QuantizeRow at(p, group, static_cast<int>(row));
    largest = fmaxf(largest, largest_of(p, at.source));
  }
  largest = warp_max(largest);
  if (threadIdx.x % 32 == 0) found[warp] = largest;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kWarps; ++i) largest = fmaxf(largest, found[i]);
    p.largest[group * p.pieces + blockIdx.x] = largest;
  }
}
