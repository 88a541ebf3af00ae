// Element types of tensor-core operands, and the product.
#pragma once
#include <type_traits>

#include "half.h"

namespace emu {

typedef float v8 __attribute__((vector_size(32)));
typedef uint32_t w8 __attribute__((vector_size(32)));


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

// Elements: `values` of the low bits of eight words.
struct EF16 {
  static constexpr int kBits = 16;
  static v8 values(w8 x) {
    const w8 h = x & 0x7fff;
    const w8 finite = w8(v8(h << 13) * 0x1p112f);  // subnormals too
    const w8 special = 0x7f800000 | (w8(h > 0x7c00) & 0x7fffff);
    const w8 is_special = w8(h >= 0x7c00);
    return v8((finite & ~is_special) | (special & is_special) | (x & 0x8000) << 16);
  }
};
struct EBF16 {
  static constexpr int kBits = 16;
  static v8 values(w8 x) { return v8(x << 16); }
};
struct EE4M3 {
  static constexpr int kBits = 8;
  static v8 values(w8 x) {
    const w8 h = x & 0x7f;
    return v8(w8(v8(h << 20) * 0x1p120f) | (w8(h == 0x7f) & 0x7fffffff) | (x & 0x80) << 24);
  }
};
struct EE5M2 {
  static constexpr int kBits = 8;
  static v8 values(w8 x) { return EF16::values(x << 8 & 0xffff); }
};

template <class E>
constexpr int kPerWord = 32 / E::kBits;

inline void store8(float* p, v8 v) { memcpy(p, &v, sizeof v); }

// The elements of 16 bytes, in their order.
template <class E>
inline void decode(const void* from, float* out) {
  typedef std::conditional_t<E::kBits == 16, uint16_t, uint8_t> Code;
  typedef Code Codes __attribute__((vector_size(8 * sizeof(Code))));
  for (int i = 0; i < 4 * kPerWord<E>; i += 8) {
    Codes codes;
    memcpy(&codes, static_cast<const Code*>(from) + i, sizeof codes);
    store8(out + i, E::values(__builtin_convertvector(codes, w8)));
  }
}

template <int... I>
inline w8 pick(w8 a, w8 b) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, w8{I...});
#endif
}

// Eight rows of four words as four rows of eight.
inline void transpose(const uint32_t (*in)[4], w8* out) {
  w8 t[4];
  for (int i = 0; i < 4; i++) {
    memcpy(&t[i], in[i], 16);
    memcpy(reinterpret_cast<char*>(&t[i]) + 16, in[i + 4], 16);
  }
  const w8 a = pick<0, 8, 1, 9, 4, 12, 5, 13>(t[0], t[1]), b = pick<2, 10, 3, 11, 6, 14, 7, 15>(t[0], t[1]);
  const w8 c = pick<0, 8, 1, 9, 4, 12, 5, 13>(t[2], t[3]), d = pick<2, 10, 3, 11, 6, 14, 7, 15>(t[2], t[3]);
  out[0] = pick<0, 1, 8, 9, 4, 5, 12, 13>(a, c);
  out[1] = pick<2, 3, 10, 11, 6, 7, 14, 15>(a, c);
  out[2] = pick<0, 1, 8, 9, 4, 5, 12, 13>(b, d);
  out[3] = pick<2, 3, 10, 11, 6, 7, 14, 15>(b, d);
}

// Eight columns of B, `WORDS` words of k each, as rows of k.
template <class E, int WORDS, int STRIDE>
inline void decode_columns(const w8* words, float (*b)[STRIDE], int column) {
  for (int j = 0; j < WORDS; j++)
    for (int e = 0; e < kPerWord<E>; e++) store8(&b[j * kPerWord<E> + e][column], E::values(words[j] >> (E::kBits * e)));
}

// As wide as the machine's registers.
#ifdef __AVX512F__
typedef float wide __attribute__((vector_size(64)));
#else
typedef v8 wide;
#endif
constexpr int kWideFloats = sizeof(wide) / sizeof(float);

template <class V, class T>
inline V load(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

// Four rows by COUNT vectors of columns of c += a * b, k in ascending order.
template <class V, int COUNT, int K, int STRIDE>
inline void block_mma(float (*c)[STRIDE], const float (*a)[K], const float (*b)[STRIDE], int column) {
  constexpr int W = sizeof(V) / sizeof(float);
  V acc[4][COUNT];
  for (int r = 0; r < 4; r++)
    for (int i = 0; i < COUNT; i++) acc[r][i] = load<V>(&c[r][column + W * i]);
  for (int k = 0; k < K; k++)
    for (int i = 0; i < COUNT; i++) {
      const V x = load<V>(&b[k][column + W * i]);
      for (int r = 0; r < 4; r++) acc[r][i] += a[r][k] * x;
    }
  for (int r = 0; r < 4; r++)
    for (int i = 0; i < COUNT; i++) memcpy(&c[r][column + W * i], &acc[r][i], sizeof(V));
}

// c[16][n] += a * b in fp32.
template <int K, int STRIDE>
inline void tile_mma(int n, float (*c)[STRIDE], const float (*a)[K], const float (*b)[STRIDE]) {
  for (int row = 0; row < 16; row += 4) {
    int q = 0;
    for (; q + 2 * kWideFloats <= n; q += 2 * kWideFloats) block_mma<wide, 2>(c + row, a + row, b, q);
    for (; q < n; q += 8) block_mma<v8, 1>(c + row, a + row, b, q);
  }
}

}  // namespace emu
