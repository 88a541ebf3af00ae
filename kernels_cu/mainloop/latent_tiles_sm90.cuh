// Shared memory of latent attention on wgmma, and the loads of its key tiles by TMA.
//
// A stage is 9 panels of 64 keys and 128 bytes: 8 of the latent, which are keys and values, and one
// of the rope part. Once a tile's scores are known its rope panel is free, and the weights take its
// place: they need no memory, nor a barrier, of their own.
#pragma once

#include "arch/cluster_sm90.cuh"
#include "arch/wgmma_sm90.cuh"
#include "block/spans.cuh"
#include "mainloop/latent_rows.cuh"

constexpr int kLatentRows = 64, kLatentKeysShift = 6, kLatentKeys = 1 << kLatentKeysShift;
constexpr int kLatentStages = 3;
constexpr int kPanelBytes = kLatentKeys * 128, kLatentPanels = 8, kHalfPanels = kLatentPanels / 2;
constexpr int kLatentStageBytes = (kLatentPanels + 1) * kPanelBytes;
constexpr int kLatentSteps = kRowDim / 16, kHeldSteps = kLatentDim / 16 - 1;

// Named barriers, besides those of halves of the columns: 2 and 3.
constexpr int kPieceDone = 1, kPieceReady = 4, kScoresOnly = 5, kValuesOnly = 6;
constexpr int kStaged = 7, kStagedThreads = 256 + 32;

constexpr int kMostSpans = 160;  // that the host plans

// The keys that a block takes of a segment.
struct LatentPiece {
  Segment segment;       // slot: of the partial result; -1: the result itself
  u16 first_span, spans;  // that share the segment; 0 of them: there is no piece
  bool last;              // of the block
};

// What is left of a block's span, and how the line is cut.
struct LatentCursor {
  int at, end;         // tiles of the line
  int request, start;  // the request of tile `at` or an earlier one, and its first tile
  SpanCut cut;
};

struct LatentTiles {
  struct Results {
    float top[kLatentRows], sum[kLatentRows];
  };
  struct Rest {
    u64 full[kLatentStages];     // all of a tile has landed
    u64 scored[kLatentStages];   // its scores are there
    u64 weights[kLatentStages];  // its weights are there
    u64 done[kLatentStages];     // its weights and values have been used
    u64 released[kLatentStages];  // by all blocks that share keys, where a tile is to land in it
    union {
      float factor[2][kLatentRows];  // of the sums before a tile, by its parity
      Results results;               // after the last one
      float part_weights[kMostSpans];  // of parts that are merged
    };
    int turn;  // in merging
    LatentPiece piece[2];
    int newest;  // of them
    LatentCursor cursor;
  };
  // Of the queries, what registers do not hold: the rope part, and a step of the latent.
  static constexpr int kRopeAt = kLatentStages * kLatentStageBytes;
  static constexpr int kStepAt = kRopeAt + kPanelBytes;
  static constexpr int kRestAt = kStepAt + kLatentRows * 32;
  static constexpr int kBytes = kRestAt + static_cast<int>(sizeof(Rest));

  char *base;
  u32 address;

  __device__ __forceinline__ explicit LatentTiles(char *smem)
      : base(smem), address(shared_address(smem)) {}

  __device__ __forceinline__ Rest &rest() const {
    return *reinterpret_cast<Rest *>(base + kRestAt);
  }
  __device__ __forceinline__ u32 panel(int stage, int i) const {
    return address + stage * kLatentStageBytes + i * kPanelBytes;
  }
  __device__ __forceinline__ char *stage(int i) const { return base + i * kLatentStageBytes; }

  // By one thread.
  template <int kSide>
  __device__ __forceinline__ void init() const {
    Rest &r = rest();
    for (int i = 0; i < kLatentStages; ++i) {
      mbarrier_init(shared_address(&r.full[i]), 1);
      mbarrier_init(shared_address(&r.scored[i]), 128);
      mbarrier_init(shared_address(&r.weights[i]), 128);
      mbarrier_init(shared_address(&r.done[i]), 256);
      mbarrier_init(shared_address(&r.released[i]), 8 * kSide);
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
// The first tile that has nothing before a key, which may be negative.
__device__ __forceinline__ int tile_after(int key) {
  return (key + kLatentKeys - 1) >> kLatentKeysShift;
}
__device__ __forceinline__ int end_tile_of(const Segment &s) {
  return s.kv_begin < s.kv_end ? (s.kv_end + kLatentKeys - 1) / kLatentKeys : first_tile_of(s);
}

struct LatentLoader {
  const AttentionParams &p;
  const LatentParams &l;
  const LatentTiles &tiles;
  const TensorMap *rope_map, *latent_map;

  // The block of the cache that a lane loads keys of: a box has the keys of one, lane i takes the
  // i-th of a tile. Asked for long before it is used, so nothing may depend on it here.
  __device__ __forceinline__ int page_of(const Segment &s, int tile) const {
    int page = 0;
    if (p.block_table) {
      const int at = tile * kLatentKeys + static_cast<int>(threadIdx.x % 32) * l.box_keys;
      const int key = max(s.kv_begin, min(at, s.kv_end - 1));
      const char *const row = p.block_table + s.request.index * p.table_row_stride;
      page = reinterpret_cast<const i32 *>(row)[__umulhi(key, l.page_inverse)];
    }
    return page;
  }

  // By one thread: a tile will land in a stage.
  __device__ __forceinline__ void expect(int stage) const {
    mbarrier_arrive_expect(shared_address(&tiles.rest().full[stage]), kLatentStageBytes);
  }

  // By one warp: part `part` of `parts` of a tile's latents to a stage of each block whose bit is
  // set, and the rope part to its own. Boxes that no row of the segment sees are zero.
  __device__ __forceinline__ void load(const Segment &s, int tile, int stage, int page, u16 blocks,
                                       int part, int parts) const {
    const int at = static_cast<int>(threadIdx.x % 32) * l.box_keys, key = tile * kLatentKeys + at;
    if (at >= kLatentKeys) return;
    int slot = s.request.kv_begin + key;
    if (p.block_table) {
      slot = key - static_cast<int>(__umulhi(key, l.page_inverse)) * p.page_size;
      if (key >= s.kv_end || key + l.box_keys <= s.kv_begin) page = l.outside_page;
    }
    // Panels are a dimension of the map where a box has several.
    const bool whole = l.box_panels > 1;
    const u32 full = shared_address(&tiles.rest().full[stage]);
    put(tiles.panel(stage, kLatentPanels) + at * 128, rope_map, {0, slot, 0, s.kv_head, page}, full,
        0);
#pragma unroll 1
    for (int i = kLatentPanels / parts * part; i < kLatentPanels / parts * (part + 1);
         i += l.box_panels) {
      put(tiles.panel(stage, i) + at * 128, latent_map,
          {whole ? 0 : i * 64, slot, whole ? i : 0, s.kv_head, page}, full, blocks);
    }
  }

 private:
  __device__ __forceinline__ void put(u32 to, const TensorMap *map, const i32 (&at)[5], u32 full,
                                      u16 blocks) const {
    if (blocks) {
      tma_load5_to(to, map, at, full, blocks, kEvictFirst);
    } else {
      tma_load5(to, map, at, full, kEvictFirst);
    }
  }
};

// A number that is the same in all lanes, so that the compiler knows it.
__device__ __forceinline__ u32 uniform_lane(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

// A number hidden from the compiler, which would keep what follows from it in registers.
__device__ __forceinline__ int fresh(int number) {
  asm volatile("" : "+r"(number));
  return number;
}
