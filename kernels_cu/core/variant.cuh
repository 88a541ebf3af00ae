// What is compiled. The only file that reads macros: the compile step defines them on top of the
// text, and the defaults here let a file be opened by itself.
#pragma once

#ifndef KERNEL_NAME
#define KERNEL_NAME kernel
#endif
#ifndef PARAMS_NBYTES
#define PARAMS_NBYTES 0
#endif

// The numbers of cupyflash/runtime/dtypes.py.
enum ScalarType : int { kFp32 = 0, kFp16 = 1, kBf16 = 2, kE4m3 = 3, kE5m2 = 4 };

// Compute capability times ten: 80, 89, 90, 120.
constexpr int kArch = __CUDA_ARCH__ / 10;

// The params struct of a kernel must have the size that the host packs.
template <class Params>
__device__ constexpr bool params_agree() {
  return PARAMS_NBYTES == 0 || sizeof(Params) == PARAMS_NBYTES;
}

#ifdef IN_TYPE
// Kernels that read one type and write another.
struct ConvertVariant {
  static constexpr ScalarType kIn = static_cast<ScalarType>(IN_TYPE);
  static constexpr ScalarType kOut = static_cast<ScalarType>(OUT_TYPE);
};
static_assert(ConvertVariant::kIn <= kBf16, "8-bit inputs carry a scale; no kernel reads them so");
#endif

#ifdef ROW_TILES
// Attention: what the products are computed in, how the cache is stored, and the tile.
struct AttentionVariant {
  static constexpr ScalarType kCompute = static_cast<ScalarType>(COMPUTE_TYPE);
  static constexpr ScalarType kCache = static_cast<ScalarType>(KV_TYPE);
  static constexpr int kHeadDim = HEAD_DIM;  // buckets: at least the real ones
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kRowTiles = ROW_TILES;  // of 16 rows a warp
  static constexpr int kKeyWarps = KEY_WARPS;  // warps that share rows and split the keys of a tile
  static constexpr int kKeys = KEY_TILE;
  static constexpr int kBlocks = KEY_WARPS > 1 && KV_TYPE <= kBf16 ? 3 : 2;  // a multiprocessor
  static constexpr bool kScoreMod = SCORE_MOD;        // soft cap or ALiBi
  static constexpr bool kWiden = kCache != kCompute;  // 8-bit cache
  static constexpr int kSharedBytes = SMEM_NBYTES;
};
static_assert(AttentionVariant::kCompute == kFp16 || AttentionVariant::kCompute == kBf16, "");
static_assert(!AttentionVariant::kWiden || AttentionVariant::kCache >= kE4m3, "");
#endif
