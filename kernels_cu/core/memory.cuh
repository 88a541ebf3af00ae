// Elements in global memory, as one access where the width allows.
#pragma once

#include "numeric.cuh"

// kCount elements; `pointer` is aligned to their size, or to 16 bytes if they take more.
template <ScalarType kType, int kCount>
struct Elements {
  static constexpr int kBytes = kItemBytes<kType> * kCount;
  u32 word[kWords<kType, kCount>];

  __device__ __forceinline__ void load(const char *pointer) {
    if constexpr (kBytes == 1) {
      word[0] = *reinterpret_cast<const u8 *>(pointer);
    } else if constexpr (kBytes == 2) {
      word[0] = *reinterpret_cast<const u16 *>(pointer);
    } else if constexpr (kBytes == 4) {
      word[0] = *reinterpret_cast<const u32 *>(pointer);
    } else if constexpr (kBytes == 8) {
      const uint2 v = *reinterpret_cast<const uint2 *>(pointer);
      word[0] = v.x, word[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        const uint4 v = reinterpret_cast<const uint4 *>(pointer)[i];
        word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
      }
    }
  }

  __device__ __forceinline__ void store(char *pointer) const {
    if constexpr (kBytes == 1) {
      *reinterpret_cast<u8 *>(pointer) = static_cast<u8>(word[0]);
    } else if constexpr (kBytes == 2) {
      *reinterpret_cast<u16 *>(pointer) = static_cast<u16>(word[0]);
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<u32 *>(pointer) = word[0];
    } else if constexpr (kBytes == 8) {
      *reinterpret_cast<uint2 *>(pointer) = make_uint2(word[0], word[1]);
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) {
        reinterpret_cast<uint4 *>(pointer)[i] =
            make_uint4(word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]);
      }
    }
  }

  __device__ __forceinline__ void to_floats(float (&value)[kCount]) const {
    unpack<kType, kCount>(word, value);
  }
  __device__ __forceinline__ void from_floats(const float (&value)[kCount]) {
    pack<kType, kCount>(value, word);
  }
};
