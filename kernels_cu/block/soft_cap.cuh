// The soft cap of many scores at once.
#pragma once

#include "block/softmax.cuh"

// tanh(x) for |x| <= 0.5, to 3e-8: fitted to (tanh(x) / x - 1) / x^2.
__device__ __forceinline__ float tanh_small(float x) {
  const float square = x * x;
  const float slope = fmaf(
      square, fmaf(square, fmaf(square, 0.01799921877682209f, -0.05339105427265167f),
                   0.1333051323890686f),
      -0.3333331048488617f);
  return fmaf(x * square, slope, x);
}

// tanh(x), to 2 units of 2^-24 absolutely: enough where some scores come near the cap. tanh.approx is
// off by 2^-11, which a cap of 30 makes an error of 1.5 % in a weight.
__device__ __forceinline__ float tanh_any(float x) {
  return fmaf(-2.f, __fdividef(1.f, 1.f + exp2f(2.f * kLog2e * x)), 1.f);
}

// x becomes cap * tanh(x * scale). Scores of a model seldom come near the cap, and a polynomial
// spares the two exponentials' worth of tanh then. Every lane of the warp takes part.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&x)[kCount], float scale, float cap) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] *= scale;
    largest = fmaxf(largest, fabsf(x[i]));
  }
  if (__any_sync(0xffffffffu, largest > 0.5f)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = cap * tanh_any(x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = cap * tanh_small(x[i]);
  }
}
