// Element types of tensor-core operands, and the product.
#pragma once
#include "half.h"

namespace emu {

struct EF16 {
  static constexpr int kPerRegister = 2;
  static float get(uint32_t r, int e) { return half_to_float(r >> (16 * e) & 0xffff); }
};
struct EBF16 {
  static constexpr int kPerRegister = 2;
  static float get(uint32_t r, int e) { return e ? as_float(r & 0xffff0000) : as_float(r << 16); }
};
struct EE4M3 {
  static constexpr int kPerRegister = 4;
  static float get(uint32_t r, int e) { return e4m3_to_float(r >> (8 * e) & 255); }
};
struct EE5M2 {
  static constexpr int kPerRegister = 4;
  static float get(uint32_t r, int e) { return e5m2_to_float(r >> (8 * e) & 255); }
};

typedef float v8 __attribute__((vector_size(32)));

// c += a * b in fp32, k in ascending order.
template <int K, int N>
inline void tile_mma(float (&c)[16][N], const float (&a)[16][K], const float (&b)[K][N]) {
  for (int row = 0; row < 16; row++) {
    v8 acc[N / 8];
    memcpy(acc, c[row], sizeof acc);
    for (int k = 0; k < K; k++)
      for (int q = 0; q < N / 8; q++) {
        v8 bv;
        memcpy(&bv, &b[k][q * 8], sizeof bv);
        acc[q] += a[row][k] * bv;
      }
    memcpy(c[row], acc, sizeof acc);
  }
}

}  // namespace emu
