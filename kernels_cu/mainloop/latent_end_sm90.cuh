// The ends of pieces of latent attention: results, or partial results where a segment is split (see
// latent_merge_sm90.cuh). Work of the 256 threads that hold the values.
#pragma once

#include "mainloop/latent_merge_sm90.cuh"
#include "mainloop/latent_sm90.cuh"

template <class V>
struct LatentEnd {
  static constexpr int kColumns = LatentValues<V>::kColumns, kPairs = kColumns / 8;
  static constexpr u32 kAll = 0xffffffffu;
  static constexpr int kOwnBytes = 8192;  // of a stage, a warp
  static_assert(8 * kOwnBytes <= kLatentStageBytes, "");

  const AttentionParams &p;
  const DecodeParams &d;
  const LatentParams &l;
  const LatentTiles &tiles;

  // What a thread holds of the outputs of a piece goes where it belongs, a warp's rows through its
  // own part of the stage before `next_stage`: 16 of 16 bits, or twice 8 of float32.
  __device__ __forceinline__ void store(const LatentValues<V> &values, const LatentPiece &piece,
                                        int next_stage) const {
    const float(&acc)[kColumns / 2] = values.acc;
    const Row mine = row_of(piece.segment, values.half);
    const int thread = fresh(threadIdx.x), lane = thread % 32, first = thread / 32 % 4 * 16;
    char *const stage = tiles.stage(next_stage == 0 ? kLatentStages - 1 : next_stage - 1);
    const float low = __shfl_sync(kAll, mine.scale, lane / 4);
    const float high = __shfl_sync(kAll, mine.scale, 8 + lane / 4);
    char *const own = stage + uniform_lane((values.half * 4 + first / 16) * kOwnBytes);
    const int columns = min(kColumns, p.head_dim_v - values.half * kColumns);
    if (piece.segment.slot < 0) {
      const u32 to = shared_address(own) + lane % 16 * 512 + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
      for (int n = 0; n < kPairs; n += 2) {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float scale = i % 2 ? high : low;
          word[i] = pack_pair<V::kCompute>(acc[4 * n + 2 * i] * scale,
                                           acc[4 * n + 2 * i + 1] * scale);
        }
        stmatrix4(to ^ n * 16, word);
      }
      __syncwarp();
      copy_rows<16, 512>(mine.to, 0, own, columns * 2, stores_wide(p));
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float scale = h ? high : low;
        // Shuffled, so that places are not kept in registers for both turns.
        const u32 place = lane / 4 * (1024 + 32) + lane % 4 * 8;
        const u32 to = __shfl_sync(kAll, shared_address(own) + place, lane);
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
          const u32 pair[2] = {__float_as_uint(acc[4 * n + 2 * h] * scale),
                               __float_as_uint(acc[4 * n + 2 * h + 1] * scale)};
          store_shared8(to ^ n * 32, pair);
        }
        __syncwarp();
        copy_rows<8, 1024>(mine.to, h * 8, own, columns * 4, true);
        __syncwarp();
      }
    }
    fence_async_proxy();
    named_barrier_arrive(kStaged, kStagedThreads);
  }

  // Rows of requests without keys, dealt to all blocks. All threads.
  __device__ __forceinline__ void write_empty(const i32 *prefix) const {
#pragma unroll 1
    for (int request = blockIdx.x; request < p.batch; request += gridDim.x) {
      if (prefix[request] != prefix[request + 1]) continue;
      const RequestWork w = request_work(p, d, request);
      if (!w.segments) continue;
      const int pairs = p.head_dim_v / 2;
#pragma unroll 1
      for (int i = threadIdx.x; i < w.request.q_len * p.heads_q * pairs; i += blockDim.x) {
        const int row = i / pairs, column = (i - row * pairs) * 2;
        const int in_request = row / p.heads_q, head = row - in_request * p.heads_q;
        const i64 token = static_cast<i64>(w.request.q_begin) + in_request;
        store_pair(p, p.out + token * p.out_token_stride + head * p.out_head_stride + column * 2,
                   0.f, 0.f);
        if (column == 0) store_lse(p, token, head, p.sink ? load_sink(p, head) : -infinity());
      }
    }
  }

 private:
  struct Row {
    char *to;  // null: there is none
    float scale;
  };

  // Lane i < 16 looks after the i-th row of its warp: stores what there is besides values, and
  // tells where these go and what they are multiplied by.
  __device__ __forceinline__ Row row_of(const Segment &s, int half) const {
    const int thread = fresh(threadIdx.x), lane = thread % 32;
    const int in_tile = thread / 32 % 4 * 16 + lane;
    if (lane >= 16 || in_tile >= s.row_end - s.row_begin) return {nullptr, 0.f};
    const LatentTiles::Results &r = tiles.rest().results;
    const float2 state = {r.top[in_tile], r.sum[in_tile]};
    float scale = value_scale(p, s.request.index, s.kv_head);
    scale = state.y == 0.f ? 0.f : scale / state.y;
    if (s.slot >= 0) {
      const i64 slot = static_cast<i64>(s.slot) * kLatentRows + in_tile;
      if (half == 0) d.partial_state[slot] = state;
      float *const to = d.partial_out + slot * p.head_dim_v + half * kColumns;
      return {reinterpret_cast<char *>(to), scale};
    }
    const int row = s.row_begin + in_tile, in_request = row / p.group;
    const int head = s.kv_head * p.group + row - in_request * p.group;
    const i64 token = static_cast<i64>(s.request.q_begin) + in_request;
    float lse = latent_lse(state.x, state.y);
    scale *= beside_sink(p, head, lse);
    if (half == 0) store_lse(p, token, head, lse);
    return {p.out + token * p.out_token_stride + head * p.out_head_stride + half * kColumns * 2,
            scale};
  }

  // Rows of a warp's part of a stage to where lanes first, first + 1, ... say; `wide`: in stores of
  // 16 bytes.
  template <int kCount, int kBytes>
  __device__ __forceinline__ static void copy_rows(char *to, int first, const char *from,
                                                   int bytes, bool wide) {
    constexpr int kChunks = kBytes / 16;
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int i = lane; i < kCount * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      char *const start = reinterpret_cast<char *>(
          __shfl_sync(kAll, reinterpret_cast<u64>(to), first + row));
      const int flip = kBytes == 512 ? row & 7 : row * 2;
      const int at = (row * kChunks + (chunk ^ flip)) * 16;
      const uint4 v = *reinterpret_cast<const uint4 *>(from + at);
      if (!start || chunk * 16 >= bytes) continue;
      if (wide) {
        *reinterpret_cast<uint4 *>(start + chunk * 16) = v;
      } else {
        const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          reinterpret_cast<u16 *>(start)[chunk * 8 + j] =
              static_cast<u16>(word[j / 2] >> j % 2 * 16);
        }
      }
    }
  }
};
