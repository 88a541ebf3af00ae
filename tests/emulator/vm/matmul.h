// Element types of tensor-core operands, and the product.
#pragma once
#include <array>

#include "half.h"

namespace emu {

typedef float v8 __attribute__((vector_size(32)));

inline v8 load8(const float* p) {
  v8 v;
  memcpy(&v, p, sizeof v);
  return v;
}

// A row of eight columns of an accumulator: lanes 4r..4r+3 of two registers, interleaved.
inline void gather8(float* row, const uint32_t* even, const uint32_t* odd) {
  for (int i = 0; i < 4; i++) {
    row[2 * i] = as_float(even[i]);
    row[2 * i + 1] = as_float(odd[i]);
  }
}
inline void scatter8(const float* row, uint32_t* even, uint32_t* odd) {
  for (int i = 0; i < 4; i++) {
    even[i] = as_bits(row[2 * i]);
    odd[i] = as_bits(row[2 * i + 1]);
  }
}

// The values of all 256 codes of an 8-bit format.
template <float (*GET)(uint32_t)>
inline const float* code_table() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> t;
    for (uint32_t i = 0; i < 256; i++) t[i] = GET(i);
    return t;
  }();
  return table.data();
}

// `get`: element `e` of a 32-bit register; `decode`: the elements of 16 bytes.
struct EF16 {
  static constexpr int kPerRegister = 2, kPer16 = 8;
  static float get(uint32_t r, int e) { return half_to_float(r >> (16 * e) & 0xffff); }
  static void decode(const uint8_t* p, float* out) {
    uint16_t v[8];
    memcpy(v, p, 16);
    for (int i = 0; i < 8; i++) out[i] = half_to_float(v[i]);
  }
};
struct EBF16 {
  static constexpr int kPerRegister = 2, kPer16 = 8;
  static float get(uint32_t r, int e) { return e ? as_float(r & 0xffff0000) : as_float(r << 16); }
  static void decode(const uint8_t* p, float* out) {
    uint16_t v[8];
    memcpy(v, p, 16);
    for (int i = 0; i < 8; i++) out[i] = as_float(uint32_t(v[i]) << 16);
  }
};
template <float (*GET)(uint32_t)>
struct E8 {
  static constexpr int kPerRegister = 4, kPer16 = 16;
  static float get(uint32_t r, int e) { return code_table<GET>()[r >> (8 * e) & 255]; }
  static void decode(const uint8_t* p, float* out) {
    const float* table = code_table<GET>();
    for (int i = 0; i < 16; i++) out[i] = table[p[i]];
  }
};
using EE4M3 = E8<e4m3_to_float>;
using EE5M2 = E8<e5m2_to_float>;

// c[16][N] += a * b in fp32, k in ascending order; 4 rows by 16 or 8 columns at a time.
template <int K, int STRIDE>
inline void tile_mma(int n, float (*c)[STRIDE], const float (*a)[K], const float (*b)[STRIDE]) {
  for (int row = 0; row < 16; row += 4) {
    int q = 0;
    for (; q + 16 <= n; q += 16) {
      v8 acc[4][2];
      for (int r = 0; r < 4; r++)
        for (int i = 0; i < 2; i++) acc[r][i] = load8(&c[row + r][q + 8 * i]);
      for (int k = 0; k < K; k++) {
        const v8 b0 = load8(&b[k][q]), b1 = load8(&b[k][q + 8]);
        for (int r = 0; r < 4; r++) {
          acc[r][0] += a[row + r][k] * b0;
          acc[r][1] += a[row + r][k] * b1;
        }
      }
      for (int r = 0; r < 4; r++)
        for (int i = 0; i < 2; i++) memcpy(&c[row + r][q + 8 * i], &acc[r][i], sizeof(v8));
    }
    for (; q < n; q += 8) {
      v8 acc[4];
      for (int r = 0; r < 4; r++) acc[r] = load8(&c[row + r][q]);
      for (int k = 0; k < K; k++) {
        const v8 b0 = load8(&b[k][q]);
        for (int r = 0; r < 4; r++) acc[r] += a[row + r][k] * b0;
      }
      for (int r = 0; r < 4; r++) memcpy(&c[row + r][q], &acc[r], sizeof(v8));
    }
  }
}

}  // namespace emu
