// Attention states (out, lse) over disjoint sets of keys, and their merge.
//
//   lse = log(sum_i exp(lse_i))      out = sum_i exp(lse_i - lse) * out_i
//
// (anything, -inf) is the neutral element: an empty state has weight 0 and its values are not
// used. A sink is the state (0, s). Sums run in the order of the states, so bits do not depend on
// timing. All natural logarithms, float32.
#pragma once

#include "numeric.cuh"

// Some producers write +inf for a row without keys.
__device__ __forceinline__ float read_lse(float lse) {
  return lse == infinity() ? -infinity() : lse;
}

// The sum over states, after their maximum is known.
struct StateSum {
  float shift;
  float sum = 0.f;

  __device__ __forceinline__ explicit StateSum(float max_lse)
      : shift(max_lse == -infinity() ? 0.f : max_lse) {}

  __device__ __forceinline__ float add(float lse) {
    const float part = expf(lse - shift);
    sum += part;
    return part;
  }

  // Weight of a state from what `add` returned for it, after all of them.
  __device__ __forceinline__ float weight(float part) const {
    return sum == 0.f ? 0.f : div_rn(part, sum);
  }

  __device__ __forceinline__ float lse() const {
    return sum == 0.f ? -infinity() : shift + logf(sum);
  }
};

// acc += weight * value; a state of weight 0 adds nothing, whatever its values hold.
template <int kCount>
__device__ __forceinline__ void add_weighted(float (&acc)[kCount], float weight,
                                             const float (&value)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    acc[i] = weight == 0.f ? acc[i] : fma_rn(weight, value[i], acc[i]);
  }
}
