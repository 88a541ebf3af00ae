// The soft cap of many scores at once.
#pragma once

#include "block/softmax.cuh"

// tanh(x), to 2 units of 2^-24 absolutely: enough where some scores come near the cap. tanh.approx is
// off by 2^-11, which a cap of 30 makes an error of 1.5 % in a weight.
__device__ __forceinline__ float tanh_any(float x) {
  return fmaf(-2.f, __fdividef(1.f, 1.f + exp2f(2.f * kLog2e * x)), 1.f);
}

// score -> cap * tanh(score * scale). Scores of a model seldom come near the cap, and up to 0.3 of
// it a polynomial does, which spares the exponential and the division of tanh; up to 0.18 a shorter
// one.
struct SoftCap {
  static constexpr float kNear = 0.18f * 0.18f, kFar = 0.3f * 0.3f;

  float scale, cap, scale_squared;
  float far[4], near[2];  // coefficients; the first one is that of both

  // Fitted to (tanh(x) / x - 1) / x^2: within 1.2e-8 of tanh up to 0.3, within 0.9e-8 up to 0.18.
  __device__ __forceinline__ SoftCap(float scale, float cap)
      : scale(scale), cap(cap), scale_squared(scale * scale) {
    constexpr float kFitted[3] = {-0.3333328664302826f, 0.13323910534381866f,
                                  -0.05113677680492401f};
    constexpr float kFittedNear[2] = {-0.33330478f, 0.13077043f};
    far[0] = cap * scale;
    float power = far[0];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      power *= scale_squared;
      far[i + 1] = power * kFitted[i];
      if (i < 2) near[i] = power * kFittedNear[i];
    }
  }

  // Capped score over score, from its square.
  __device__ __forceinline__ float of_far(float square) const {
    return fmaf(square, fmaf(square, fmaf(square, far[3], far[2]), far[1]), far[0]);
  }
  __device__ __forceinline__ float of_near(float square) const {
    return fmaf(square, fmaf(square, near[1], near[0]), far[0]);
  }

  // The square of the largest score over the cap, of this lane.
  template <int kCount>
  __device__ __forceinline__ float reach(const float (&score)[kCount]) const {
    float tops[4] = {};  // of one alone, each maximum would wait for the one before
#pragma unroll
    for (int i = 0; i < kCount; ++i) tops[i % 4] = fmaxf(tops[i % 4], fabsf(score[i]));
    const float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    return top * top * scale_squared;
  }
  // Whether a polynomial holds for every lane of the warp.
  __device__ __forceinline__ static bool holds(float reach, float limit) {
    return !__any_sync(0xffffffffu, reach > limit);
  }

  template <int kCount>
  __device__ __forceinline__ void apply(float (&score)[kCount]) const {
    if (holds(reach(score), kFar)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) score[i] *= of_far(score[i] * score[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) score[i] = cap * tanh_any(score[i] * scale);
    }
  }
};
