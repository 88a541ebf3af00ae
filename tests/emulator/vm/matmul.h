// Element types of tensor-core operands, and the product.
#pragma once
#include <type_traits>

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

// An element: `value` of the low bits of a word, without branches so that loops over it become vectors.
struct EF16 {
  static constexpr int kBits = 16;
  static float value(uint32_t x) {
    const uint32_t h = x & 0x7fff;
    const uint32_t bits = as_bits(as_float(h << 13) * 0x1p112f);  // subnormals too
    return as_float((h < 0x7c00 ? bits : h == 0x7c00 ? 0x7f800000 : 0x7fffffff) | (x & 0x8000) << 16);
  }
};
struct EBF16 {
  static constexpr int kBits = 16;
  static float value(uint32_t x) { return as_float(x << 16); }
};
struct EE4M3 {
  static constexpr int kBits = 8;
  static float value(uint32_t x) {
    const uint32_t h = x & 0x7f;
    const uint32_t bits = as_bits(as_float(h << 20) * 0x1p120f);
    return as_float((h == 0x7f ? 0x7fffffff : bits) | (x & 0x80) << 24);
  }
};
struct EE5M2 {
  static constexpr int kBits = 8;
  static float value(uint32_t x) { return EF16::value(x << 8); }
};

template <class E>
constexpr int kPerWord = 32 / E::kBits;

// The elements of `COUNT` words, in their order.
template <class E, int COUNT>
inline void decode(const void* from, float* out) {
  using Code = std::conditional_t<E::kBits == 16, uint16_t, uint8_t>;
  Code codes[COUNT * kPerWord<E>];
  memcpy(codes, from, sizeof codes);
  for (int i = 0; i < COUNT * kPerWord<E>; i++) out[i] = E::value(codes[i]);
}

// Eight columns of B, `WORDS` words of k each, as rows of k.
template <class E, int WORDS, int STRIDE>
inline void decode_columns(const uint32_t (*words)[8], float (*b)[STRIDE], int column) {
  for (int j = 0; j < WORDS; j++)
    for (int e = 0; e < kPerWord<E>; e++)
      for (int i = 0; i < 8; i++) b[j * kPerWord<E> + e][column + i] = E::value(words[j][i] >> (E::kBits * e));
}

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
