// The pipeline of a computing warpgroup of both Hopper prefills: its barriers, the operands of its
// products, and the product of queries and keys.
//
// Rows is TileRows or has it as a base, S the shared memory.
#pragma once

#include "arch/wgmma_fp8_sm90.cuh"
#include "mainloop/fwd_sm90_boxes.cuh"

template <class Rows, class S>
struct PrefillPipeline : Rows {
  static constexpr int kKeys = S::kKeys;
  using Rows::s, Rows::lane, Rows::warpgroup;

  const PrefillParams &x;
  const S &shared;
  Ring<S::kKeyStages> k;
  Ring<S::kOperandStages> v;
  int number = 0;  // of the tile
  u32 held[S::kRowSteps][4];  // queries, where they are kept in registers

  __device__ __forceinline__ PrefillPipeline(const AttentionParams &p, const PrefillParams &x,
                                             const S &shared, int warpgroup)
      : Rows(p, x.pack_shift, warpgroup), x(x), shared(shared) {}

  // ---- barriers

  __device__ __forceinline__ void release(const u64 &barrier) const {
    if (lane == 0) mbarrier_arrive(shared_address(&barrier));
  }
  __device__ __forceinline__ void wait_keys() const {
    mbarrier_wait(shared_address(&shared.rest().key_full[k.slot]), k.parity);
  }
  __device__ __forceinline__ int query_slot() const { return number % S::kQueryStages; }
  __device__ __forceinline__ const PrefillTile &wait_tile() const {
    mbarrier_wait(shared_address(&shared.rest().query_full[query_slot()]),
                  number / S::kQueryStages & 1);
    return tile();
  }
  __device__ __forceinline__ PrefillTile &tile() const {
    return shared.rest().tile[number % S::kTiles];
  }
  // After the wait for the products that read them.
  __device__ __forceinline__ void have_scores() {
    pin(s);
    release(shared.rest().key_empty[k.slot]);
    k.next();
  }

  // ---- products

  // What the compiler does not know to be the same in all lanes costs a move an instruction.
  __device__ __forceinline__ static u32 uniform(u32 address) {
    return __shfl_sync(0xffffffffu, address, 0);
  }

  // The operands of the next products. Made before their barriers are waited for.
  struct Operands {
    u32 queries, keys, values;
  };
  __device__ __forceinline__ Operands operands() const {
    return {uniform(shared.queries(query_slot()) + warpgroup * Rows::kWarpgroupRows * 128),
            uniform(shared.keys(k.slot)), uniform(shared.operand(v.slot))};
  }

  // Once a tile: its products read as much less of shared memory.
  __device__ __forceinline__ void hold_queries() {
    if constexpr (S::kHold) {
      // As new: its address would take registers from one tile to the next.
      const u32 thread = read_thread_anew() - 128, row = thread / 32 * 16 + thread % 16;
      const u32 chunk = thread / 16 % 2;
      const u32 at = shared.queries(query_slot()) + row * 128 + ((chunk ^ row % 8) << 4);
#pragma unroll
      for (int i = 0; i < S::kRowSteps; ++i) {
        ldmatrix4(held[i], (at ^ i % 4 * 32) + i / 4 * S::kTileRows * 128);
      }
      if constexpr (S::kNarrow) Rows::narrow(held);
    }
  }

  // Steps of 32 bytes of a row, four a panel.
  __device__ __forceinline__ void issue_scores(const Operands &from) {
    const u64 keys = matrix_descriptor(from.keys, 16, 1024);
    issue_scores(matrix_descriptor(from.queries, 16, 1024), keys);
  }
  __device__ __forceinline__ void issue_scores(u64 rows, u64 keys) {
#pragma unroll
    for (int i = 0; i < S::kRowSteps; ++i) {
      const u64 left = rows + (i / 4 * S::kTileRows * 128 + i % 4 * 32) / 16;
      const u64 right = keys + (i / 4 * kKeys * 128 + i % 4 * 32) / 16;
      if constexpr (S::kHold) {
        Wgmma<kKeys>::template registers_rows<S::kType>(s, held[i], right, i > 0);
      } else if constexpr (S::kType == kE4m3) {
        WgmmaFp8<kKeys>::shared(s, left, right, i > 0);
      } else {
        Wgmma<kKeys>::template shared<S::kType>(s, left, right, i > 0);
      }
    }
    wgmma_commit();
  }

  // ---- tiles that run again

  // Any lane's `failed` puts the tile on the list.
  __device__ __forceinline__ void note_failure(PrefillTile &t, bool failed) const {
    if (__any_sync(0xffffffffu, failed) && lane == 0 && atomicExch(&t.failed, 1) == 0) {
      x.links[t.item] = atomicExch(&shared.rest().again, t.item);
    }
  }
};
