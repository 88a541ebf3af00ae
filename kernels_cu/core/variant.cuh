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
  static constexpr int kStepKeys = KEY_STEP;  // of a warp, at a time
  static constexpr int kThreads = 32 * WARPS;
  static constexpr int kStages = STAGES;  // of keys and values; 1: one after the other
  static constexpr int kBlocks = BLOCKS;  // that share a multiprocessor
  static constexpr int kHold = HOLD;      // registers up to which queries stay in them
  static constexpr bool kScoreMod = SCORE_MOD;        // soft cap or ALiBi
  static constexpr bool kWiden = kCache != kCompute;  // 8-bit cache
  static constexpr int kSharedBytes = SMEM_NBYTES;
#ifdef DECODE_NBYTES
  static constexpr int kDecodeBytes = DECODE_NBYTES;
#endif
};
static_assert(AttentionVariant::kCompute == kFp16 || AttentionVariant::kCompute == kBf16, "");
static_assert(!AttentionVariant::kWiden || AttentionVariant::kCache >= kE4m3, "");
#endif

#ifdef DECODE_ROWS
// Decoding on 9.0: what the products are computed in, how the cache is stored, and the tile.
struct DecodeVariant {
  static constexpr ScalarType kCompute = static_cast<ScalarType>(COMPUTE_TYPE);
  static constexpr ScalarType kCache = static_cast<ScalarType>(KV_TYPE);
  static constexpr int kHeadDim = HEAD_DIM;  // a bucket: at least those of k and v
  static constexpr int kRowTiles = DECODE_ROWS / 8;
  static constexpr int kKeys = KEY_TILE;              // of a warp's tile
  static constexpr int kWarps = DECODE_WARPS, kThreads = 32 * kWarps;
  static constexpr bool kWiden = kCache != kCompute;  // 8-bit cache
  static constexpr bool kPlain = DECODE_PLAIN;        // see block/decode_plain.cuh
  static constexpr bool kSharedRings = DECODE_SHARED_RINGS;  // of the warps of heads side by side
  // Whether it runs beside a prefill: as many rows as there may be.
  static constexpr bool kBeside = kRowTiles > 1 || kHeadDim > 128;
  static constexpr int kParamsBytes = DECODE_NBYTES;
};
static_assert(DecodeVariant::kCompute == kFp16 || DecodeVariant::kCompute == kBf16, "");
static_assert(DECODE_ROWS % 8 == 0 && KEY_TILE % 16 == 0, "tiles of the products");
static_assert(DECODE_WARPS == 4 || DECODE_WARPS == 8, "a multiprocessor has 8 in all");
#endif

#ifdef PREFILL_NBYTES
// Prefill on 9.0: what the products are computed in, and the tile.
struct PrefillVariant {
  static constexpr ScalarType kCompute = static_cast<ScalarType>(COMPUTE_TYPE);
  static constexpr int kHeadDim = HEAD_DIM;  // buckets: at least the real ones
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kKeys = KEY_TILE;
  static constexpr int kTileRows = TILE_ROWS;  // 64 a computing warpgroup
  static constexpr int kQueryStages = QUERY_STAGES;
  static constexpr int kStages = KEY_STAGES;
  static constexpr int kLoadRegisters = LOAD_REGISTERS;  // of a thread that loads
  static constexpr int kComputeRegisters = COMPUTE_REGISTERS;
  static constexpr bool kTurns = TURNS;          // the warpgroups issue their products in turns
  static constexpr bool kTail = false;           // the last tiles may be cut
  static constexpr bool kScoreMod = SCORE_MOD;   // soft cap or ALiBi
  static constexpr bool kWiden = false;          // an 8-bit cache
  static constexpr ScalarType kQuery = kCompute;  // of q and out
  static constexpr bool kHold = false, kNarrow = false;
  static constexpr int kFillers = 1;       // warps that fill a buffer of keys or values
  static constexpr int kExtraThreads = 0;  // besides those that load and compute
  static constexpr int kSharedBytes = SMEM_NBYTES;
  static constexpr int kParamsBytes = PREFILL_NBYTES;
};
static_assert(PrefillVariant::kCompute == kFp16 || PrefillVariant::kCompute == kBf16, "");
static_assert(TILE_ROWS % 64 == 0 && TILE_ROWS <= 256, "two to four computing warpgroups");
#endif

#ifdef WIDEN_NBYTES
// Prefill on 9.0 with 16-bit queries over an 8-bit cache, which a warpgroup of its own widens.
struct WidenVariant {
  static constexpr ScalarType kCompute = static_cast<ScalarType>(COMPUTE_TYPE);
  static constexpr ScalarType kCache = static_cast<ScalarType>(KV_TYPE);
  static constexpr int kHeadDim = HEAD_DIM;  // buckets: at least the real ones
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kKeys = KEY_TILE;
  static constexpr int kTileRows = TILE_ROWS;  // 64 a computing warpgroup
  static constexpr int kQueryStages = QUERY_STAGES;
  static constexpr int kStages = KEY_STAGES;
  static constexpr int kRawStages = RAW_STAGES;  // of keys, and of values, as they are stored, ...
  static constexpr int kRawRows = RAW_ROWS;      // ... each a part of a tile
  static constexpr int kLoadRegisters = LOAD_REGISTERS;  // of a thread that loads
  static constexpr int kWidenRegisters = WIDEN_REGISTERS;
  static constexpr int kComputeRegisters = COMPUTE_REGISTERS;
  static constexpr bool kTurns = true, kTail = false;
  static constexpr bool kScoreMod = SCORE_MOD;  // soft cap or ALiBi
  static constexpr bool kWiden = true;
  static constexpr ScalarType kQuery = static_cast<ScalarType>(QUERY_TYPE);  // of q and out
  static constexpr bool kHold = QUERIES_HELD;                                // in registers
  static constexpr bool kNarrow = kQuery != kCompute;                        // bf16 to fp16 there
  static constexpr int kFillers = 2;
  static constexpr int kExtraThreads = 128;
  static constexpr int kSharedBytes = SMEM_NBYTES;
  static constexpr int kParamsBytes = WIDEN_NBYTES;
};
static_assert(WidenVariant::kCompute == kFp16 || WidenVariant::kCompute == kBf16, "");
static_assert(WidenVariant::kCache >= kE4m3, "");
static_assert(!WidenVariant::kNarrow || (WidenVariant::kHold && !SCORE_MOD), "");
static_assert(KEY_TILE % RAW_ROWS == 0 && RAW_ROWS % 16 == 0, "two warps widen a part");
#endif

#ifdef FP8_PREFILL_NBYTES
// Prefill on 9.0 with q, k and v in e4m3.
struct Fp8Variant {
  static constexpr int kHeadDim = HEAD_DIM;  // a bucket: at least those of q, k and v
  static constexpr int kKeys = KEY_TILE;
  static constexpr int kTileRows = TILE_ROWS;  // 64 a computing warpgroup
  static constexpr int kQueryStages = QUERY_STAGES;
  static constexpr int kKeyStages = KEY_STAGES;
  static constexpr int kValueStages = VALUE_STAGES;    // as they are stored
  static constexpr int kTurnedStages = TURNED_STAGES;  // transposed
  static constexpr int kColumns = COLUMNS;  // of O at a time; 0: all, beside the next scores
  static constexpr bool kScoreMod = SCORE_MOD;  // soft cap or ALiBi
  static constexpr bool kSumColumn = SUM_COLUMN;  // V has a column of ones: O has the sums
  static constexpr bool kWiden = false, kHold = false, kNarrow = false;
  // The last tiles may be cut. Causal tiles of head size 64 are 2 % slower for it.
  static constexpr bool kTail = kColumns == 0 && kHeadDim * kTileRows > 64 * 128;
  static constexpr int kLoadRegisters = LOAD_REGISTERS, kComputeRegisters = COMPUTE_REGISTERS;
  static constexpr int kSharedBytes = SMEM_NBYTES;
  static constexpr int kParamsBytes = FP8_PREFILL_NBYTES;
};
static_assert(Fp8Variant::kKeys % 64 == 0, "panels of transposed values");
#endif

#ifdef LATENT_NBYTES
// Multi-head latent attention on mma.sync: what the products are computed in, and the tile.
struct LatentVariant {
  static constexpr ScalarType kCompute = static_cast<ScalarType>(COMPUTE_TYPE);
  static constexpr ScalarType kCache = static_cast<ScalarType>(KV_TYPE);
  static constexpr bool kWiden = kCache != kCompute;  // 8-bit cache
  static constexpr int kRowTiles = LATENT_ROWS / 16;
  static constexpr int kKeys = KEY_TILE;
  static constexpr int kStages = KEY_STAGES;
  static constexpr int kSharedBytes = SMEM_NBYTES;
  static constexpr int kParamsBytes = LATENT_NBYTES;
#ifdef LATENT_SIDE
  static constexpr int kSide = LATENT_SIDE;  // blocks that share keys: a cluster
#endif
};
static_assert(LatentVariant::kCompute == kFp16 || LatentVariant::kCompute == kBf16, "");
static_assert(!LatentVariant::kWiden || LatentVariant::kCache >= kE4m3, "");
#endif

#ifdef SHARED_NBYTES
// The schedule of shared prefixes.
struct SharedScheduleVariant {
  static constexpr int kSharedBytes = SHARED_NBYTES;
#ifdef SEARCH_NBYTES
  static constexpr int kSearchBytes = SEARCH_NBYTES;
#endif
#ifdef SCRATCH_NBYTES
  static constexpr int kScratchBytes = SCRATCH_NBYTES;
#endif
};
#ifdef SHARED_ROWS
// Decoding with shared prefixes on 9.0: own keys a warp by itself, shared ones in tiles.
struct SharedVariant {
  static constexpr ScalarType kCompute = static_cast<ScalarType>(COMPUTE_TYPE);
  static constexpr ScalarType kCache = static_cast<ScalarType>(KV_TYPE);
  static constexpr int kHeadDim = HEAD_DIM;  // a bucket: at least those of k and v
  static constexpr int kRowTiles = SHARED_ROWS / 8;
  static constexpr int kKeys = KEY_TILE;  // of a tile of own keys
  static constexpr bool kWiden = kCache != kCompute;  // 8-bit cache
  static constexpr int kStages = KEY_STAGES;     // of shared keys and values that are multiplied
  static constexpr int kRawStages = RAW_STAGES;  // of 8-bit ones, as they are stored
  static constexpr int kOwnStages = OWN_STAGES;  // of own ones, a warp
  static constexpr int kTileRegisters = TILE_REGISTERS;
  static constexpr int kOwnRegisters = OWN_REGISTERS;
  static constexpr int kLoadRegisters = LOAD_REGISTERS;
  static constexpr bool kAlibi = SHARED_ALIBI;
  static constexpr bool kInside = SHARED_INSIDE;     // it can make its schedule by itself
  static constexpr bool kParts = SHARED_MERGE_PARTS;  // few rows: a warp merges a part of one
  static constexpr int kParamsBytes = DECODE_NBYTES;
};
#endif
#endif
