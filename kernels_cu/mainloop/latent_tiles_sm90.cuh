// Shared memory of latent attention on wgmma, and the loads of its key tiles by TMA.
//
// A stage is 9 panels of 64 keys and 128 bytes: 8 of the latent, which are keys and values, and one
// of the rope part. Once a tile's scores are known its rope panel is free, and the weights take its
// place: they need no memory, nor a barrier, of their own.
#pragma once

#include "arch/tma_sm90.cuh"
#include "arch/wgmma_sm90.cuh"
#include "block/spans.cuh"
#include "mainloop/latent_rows.cuh"

constexpr int kLatentRows = 64, kLatentKeys = 64, kLatentStages = 3;
constexpr int kPanelBytes = kLatentKeys * 128, kLatentPanels = 8, kHalfPanels = kLatentPanels / 2;
constexpr int kLatentStageBytes = (kLatentPanels + 1) * kPanelBytes;
constexpr int kLatentSteps = kRowDim / 16, kHeldSteps = kLatentDim / 16 - 1;

// Named barriers, besides those of halves of the columns: 2 and 3.
constexpr int kPieceDone = 1, kPieceReady = 4, kScoresOnly = 5, kValuesOnly = 6;

// The keys that a block takes of a segment.
struct LatentPiece {
  Segment segment;       // slot: of the partial result; -1: the result itself
  u16 first_span, spans;  // that share the segment; 0 of them: there is no piece
};

// What is left of a block's span, and how the line is cut.
struct LatentCursor {
  int at, end;         // tiles of the line
  int request, start;  // the request of tile `at` or an earlier one, and its first tile
  SpanCut cut;
};

struct LatentTiles {
  struct Results {
    float norm[kLatentRows], top[kLatentRows], sum[kLatentRows];
  };
  struct Rest {
    u64 full[kLatentStages];     // all of a tile has landed
    u64 scored[kLatentStages];   // its scores are there
    u64 weights[kLatentStages];  // its weights are there
    u64 done[kLatentStages];     // its weights and values have been used
    union {
      float factor[kLatentStages][kLatentRows];  // of the sums before this tile
      Results results;                           // after the last one
      int turn;                                  // after those
    };
    LatentPiece piece[2];
    LatentCursor cursor;
  };
  // Of the queries, what registers do not hold: the rope part, and a step of the latent.
  static constexpr int kRopeAt = kLatentStages * kLatentStageBytes;
  static constexpr int kStepAt = kRopeAt + kPanelBytes;
  static constexpr int kRestAt = kStepAt + kLatentRows * 32;
  static constexpr u32 kPieceBytes = sizeof(LatentPiece), kPieceAt = 12 * 8 + 3 * 64 * 4;
  static constexpr int kBytes = kRestAt + static_cast<int>(sizeof(Rest));

  char *base;
  u32 address;

  __device__ __forceinline__ explicit LatentTiles(char *smem)
      : base(smem), address(shared_address(smem)) {}

  // One of the two pieces: 0 or kPieceBytes.
  __device__ __forceinline__ LatentPiece &piece(u32 offset) const {
    return *reinterpret_cast<LatentPiece *>(base + kRestAt + kPieceAt + offset);
  }
  __device__ __forceinline__ Rest &rest() const { return *reinterpret_cast<Rest *>(base + kRestAt); }
  __device__ __forceinline__ u32 panel(int stage, int i) const {
    return address + stage * kLatentStageBytes + i * kPanelBytes;
  }
  __device__ __forceinline__ char *stage(int i) const { return base + i * kLatentStageBytes; }

  // By one thread.
  __device__ __forceinline__ void init() const {
    Rest &r = rest();
    for (int i = 0; i < kLatentStages; ++i) {
      mbarrier_init(shared_address(&r.full[i]), 3);  // the shares of a tile
      mbarrier_init(shared_address(&r.scored[i]), 128);
      mbarrier_init(shared_address(&r.weights[i]), 128);
      mbarrier_init(shared_address(&r.done[i]), 256);
    }
    mbarrier_init_fence();
  }
};

// The place of a tile in the ring, and the parity of its barriers there.
struct LatentPlace {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kLatentStages) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ int first_tile_of(const Segment &s) { return s.kv_begin / kLatentKeys; }
__device__ __forceinline__ int end_tile_of(const Segment &s) {
  return s.kv_begin < s.kv_end ? (s.kv_end + kLatentKeys - 1) / kLatentKeys : first_tile_of(s);
}

struct LatentLoader {
  const AttentionParams &p;
  const LatentParams &l;
  const LatentTiles &tiles;
  const TensorMap *rope_map, *latent_map;

  // The block of the cache that a lane loads keys of: a box has the keys of one, lane i takes the i-th
  // of a tile. Boxes that no row of the segment sees are zero, and so is what it does not read.
  __device__ __forceinline__ int page_of(const Segment &s, int tile) const {
    if (!p.block_table) return 0;
    const int at = static_cast<int>(threadIdx.x % 32) * l.box_keys, key = tile * kLatentKeys + at;
    if (at >= kLatentKeys || key >= s.kv_end || key + l.box_keys <= s.kv_begin) {
      return l.outside_page;
    }
    const char *const row = p.block_table + s.request.index * p.table_row_stride;
    return reinterpret_cast<const i32 *>(row)[__umulhi(key, l.page_inverse)];
  }

  // By one warp: panels [first, first + count) of a tile to a stage.
  __device__ __forceinline__ void load(const Segment &s, int tile, int stage, int page, int first,
                                       int count, const TensorMap *map) const {
    const u32 full = shared_address(&tiles.rest().full[stage]);
    if (threadIdx.x % 32 == 0) {
      mbarrier_arrive_expect(full, static_cast<u32>(count * kPanelBytes));
    }
    __syncwarp();
    const int at = static_cast<int>(threadIdx.x % 32) * l.box_keys, key = tile * kLatentKeys + at;
    if (at >= kLatentKeys) return;
    const int slot = p.block_table
                         ? key - static_cast<int>(__umulhi(key, l.page_inverse)) * p.page_size
                         : s.request.kv_begin + key;
#pragma unroll 1
    for (int i = first; i < first + count; ++i) {
      tma_load4(tiles.panel(stage, i) + at * 128, map, i % kLatentPanels * 64, slot, s.kv_head, page,
                full);
    }
  }

  // Shares 0 and 1 of a tile are the halves of the latent, 2 is the rope part.
  __device__ __forceinline__ void load_share(const Segment &s, int tile, int stage, int page,
                                             int share) const {
    if (share == 2) {
      load(s, tile, stage, page, kLatentPanels, 1, rope_map);
    } else {
      load(s, tile, stage, page, share * kHalfPanels, kHalfPanels, latent_map);
    }
  }

  __device__ __forceinline__ void load_all(const Segment &s, int tile, int stage) const {
    const int page = page_of(s, tile);
#pragma unroll 1
    for (int share = 0; share < 3; ++share) load_share(s, tile, stage, page, share);
  }
};

// A number that is the same in all lanes, so that the compiler knows it.
__device__ __forceinline__ u32 uniform_lane(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

// A number hidden from the compiler, which would keep what follows from it in registers.
__device__ __forceinline__ int fresh(int number) {
  asm volatile("" : "+r"(number));
  return number;
}
