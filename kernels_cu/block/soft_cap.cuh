// The soft cap of many scores at once.
#pragma once

#include "block/softmax.cuh"

// tanh(x), to 2 units of 2^-24 absolutely: enough where some scores come near the cap. tanh.approx is
// off by 2^-11, which a cap of 30 makes an error of 1.5 % in a weight.
__device__ __forceinline__ float tanh_any(float x) {
  return fmaf(-2.f, __fdividef(1.f, 1.f + exp2f(2.f * kLog2e * x)), 1.f);
}

// score -> cap * tanh(score * scale). Scores of a model seldom come near the cap, and up to 0.3 of it
// a polynomial does, which spares the exponential and the division of tanh.
struct SoftCap {
  float scale, cap;
  float largest;  // square of a score up to which the polynomial holds
  float factor[4];

  // Fitted to (tanh(x) / x - 1) / x^2 for |x| <= 0.3: within 1.2e-8 of tanh.
  __device__ __forceinline__ SoftCap(float scale, float cap) : scale(scale), cap(cap) {
    constexpr float kFitted[3] = {-0.3333328664302826f, 0.13323910534381866f,
                                  -0.05113677680492401f};
    largest = 0.09f / (scale * scale);
    factor[0] = cap * scale;
    float power = factor[0];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      power *= scale * scale;
      factor[i + 1] = power * kFitted[i];
    }
  }

  // Capped score over score, from its square.
  __device__ __forceinline__ float small(float square) const {
    float value = fmaf(square, factor[3], factor[2]);
    value = fmaf(square, value, factor[1]);
    return fmaf(square, value, factor[0]);
  }

  // Whether the polynomial holds for the scores of every lane of the warp.
  template <int kCount>
  __device__ __forceinline__ bool is_small(const float (&score)[kCount]) const {
    float tops[4] = {};  // of one alone, each maximum would wait for the one before
#pragma unroll
    for (int i = 0; i < kCount; ++i) tops[i % 4] = fmaxf(tops[i % 4], fabsf(score[i]));
    const float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    return !__any_sync(0xffffffffu, top * top > largest);
  }

  template <int kCount>
  __device__ __forceinline__ void apply(float (&score)[kCount]) const {
    if (is_small(score)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) score[i] *= small(score[i] * score[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) score[i] = cap * tanh_any(score[i] * scale);
    }
  }
};
