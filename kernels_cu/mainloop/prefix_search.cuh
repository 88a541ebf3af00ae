// Groups of requests whose block tables begin alike, in levels: the tree of core/shared_params.cuh.
//
// Requests whose next block is the same are a group, its leader the first of them; what the group
// shares ends where a member's blocks differ from the leader's, and is searched again from there
// on. One cluster: its CTAs all know all groups, and compare different parts of the tables.
#pragma once

#include "core/prefix_params.cuh"
#include "arch/cluster_sm90.cuh"
#include "arch/mma_sm80.cuh"

constexpr int kSearchThreads = 512, kSearchCtas = 8;

// Of so many requests at most.
template <int kMost>
struct PrefixGroups {
  static constexpr int kSlots = 2 * kMost;

  i32 blocks[kMost];  // that all queries of a request see
  i32 next[kMost];    // the next block; -1: it is in no group any more
  u16 leader[kMostLevels][kMost];
  i32 count[kMostLevels][kMost], end[kMostLevels][kMost];  // of a leader; ends: of the first CTA
  i32 slot[kSlots];  // a member of a group, in the end its leader
};

// What is found, of a place, and what was read of a request, in the shared memory of each CTA.
template <int kMost>
struct FoundPlaces {
  i32 request[kMost];
  i32 end[kMostLevels][kMost];
  i32 node[kMostLevels][kMost];
  i32 q_begin[kMost], q_end[kMost], keys[kMost];
};

__device__ __forceinline__ u32 cta_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

template <int kMost>
class PrefixSearch {
  static constexpr int kThreads = kSearchThreads, kCtas = kSearchCtas, kWarps = kThreads / 32;
  static constexpr int kEach = kMost / kThreads;  // requests of a thread
  static constexpr int kSlots = PrefixGroups<kMost>::kSlots, kNone = 0x7fffffff;
  static constexpr int kChunk = 256, kAtOnce = kChunk / 32;  // columns of a warp; of a lane
  static constexpr int kPairs = 2;  // of requests that a warp compares in a turn

 public:
  __device__ __forceinline__ PrefixSearch(const PrefixParams &p, PrefixGroups<kMost> &x,
                                          FoundPlaces<kMost> *found = nullptr)
      : p(p), x(x), found(found) {}

  // `found` is complete behind it, and the tree in memory.
  __device__ __forceinline__ void run() {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int r = threadIdx.x + e * kThreads;
      begin[e] = 0, before[e] = 0, alive[e] = r < p.batch;
      upcoming[e] = alive[e] && p.columns ? row(r)[0] : -1;  // whether it is seen or not
      if (alive[e]) x.blocks[r] = blocks(r);
      for (int l = 0; l < kMostLevels; ++l) x.end[l][r] = kNone, x.count[l][r] = 0;
    }
    cluster_sync();
    int level = 0;
    while (level < p.levels && look_for_groups(level)) {
      compare(level);
      cluster_sync();
      go_on(level++);
    }
    // Leaders, the outermost first: what the requests are ordered by.
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int r = threadIdx.x + e * kThreads;
      u32 key = 0;
#pragma unroll
      for (int l = 0; l < kMostLevels; ++l) key = key << kBits | (l < level ? x.leader[l][r] : r);
      x.next[r] = key;
    }
    __syncthreads();
    for (int r = cta_rank() * kWarps + threadIdx.x / 32; r < p.batch; r += kCtas * kWarps) {
      place(r, level);
    }
    cluster_sync();  // the first one's memory is read by the others
  }

 private:
  const PrefixParams &p;
  PrefixGroups<kMost> &x;
  FoundPlaces<kMost> *const found;
  static constexpr int kBits = 10;  // of a request
  static_assert(kMost <= 1 << kBits, "");
  i32 upcoming[kEach];              // a request's next block
  int begin[kEach], before[kEach];  // where a request's next level begins; its leader there
  bool alive[kEach];
  const int lane = threadIdx.x % 32;

  // Blocks without a token of this step, which all queries see.
  __device__ __forceinline__ int blocks(int r) const {
    const int q_begin = p.cu_seqlens_q ? p.cu_seqlens_q[r] : r;
    const int q_end = p.cu_seqlens_q ? p.cu_seqlens_q[r + 1] : r + 1;
    const int all = p.seqused_k[r], keys = q_end > q_begin ? all - (q_end - q_begin) : 0;
    if (found) found->q_begin[r] = q_begin, found->q_end[r] = q_end, found->keys[r] = all;
    return min(keys / p.page_size, p.columns);
  }
  __device__ __forceinline__ const i32 *row(int r) const {
    return reinterpret_cast<const i32 *>(p.block_table + r * p.table_row_stride);
  }
  __device__ __forceinline__ bool real(i32 block) const {
    return block >= 0 && block != p.null_block;
  }
  __device__ __forceinline__ u32 end_of(int level, int leader) const {
    return cluster_address(shared_address(&x.end[level][leader]), 0);
  }

  // Leaders and sizes of the groups of a level; whether there is one of two requests.
  __device__ __forceinline__ bool look_for_groups(int level) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int r = threadIdx.x + e * kThreads;
      alive[e] = alive[e] && x.blocks[r] > begin[e];
      const i32 next = upcoming[e];
      alive[e] = alive[e] && real(next);
      x.next[r] = alive[e] ? next : -1;
    }
    for (int i = threadIdx.x; i < kSlots; i += kThreads) x.slot[i] = kNone;
    __syncthreads();
    int slot[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int r = threadIdx.x + e * kThreads;
      if (!alive[e]) continue;
#pragma unroll 1
      for (int at = (x.next[r] * 2654435761u >> 8) % kSlots;; at = (at + 1) % kSlots) {
        const i32 other = atomicCAS(&x.slot[at], kNone, r);
        if (other != kNone && (x.next[other] != x.next[r] ||
                               leader_before(level, other) != before[e])) {
          continue;
        }
        atomicMin(&x.slot[at], r);
        slot[e] = at;
        break;
      }
    }
    __syncthreads();
    bool shared = false;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int r = threadIdx.x + e * kThreads, leader = alive[e] ? x.slot[slot[e]] : r;
      x.leader[level][r] = leader;
      if (alive[e]) atomicAdd(&x.count[level][leader], 1);
      shared = shared || leader != r;
    }
    return __syncthreads_or(shared);
  }

  __device__ __forceinline__ int leader_before(int level, int r) const {
    return level ? x.leader[level ? level - 1 : 0][r] : 0;
  }

  // Where blocks of the members of groups cease to be the leader's.
  __device__ __forceinline__ void compare(int level) const {
    const int chunks = (p.columns + kChunk - 1) / kChunk, all = chunks * p.batch;
    constexpr int kStep = kCtas * kWarps;
#pragma unroll 1
    for (int n = cta_rank() * kWarps + threadIdx.x / 32; n < all; n += kPairs * kStep) {
      int request[kPairs], first[kPairs], last[kPairs];
      i32 a[kPairs][kAtOnce], b[kPairs][kAtOnce];
      // All loads of a turn are asked for together.
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        const int at = min(n + k * kStep, all - 1), chunk = at / p.batch, r = at - chunk * p.batch;
        const int leader = x.leader[level][r];
        const bool looked_at =
            n + k * kStep < all && x.next[r] >= 0 && x.count[level][leader] > 1;
        request[k] = r, first[k] = chunk * kChunk;
        last[k] = looked_at ? min(x.blocks[r], x.blocks[leader]) : 0;
        const i32 *const mine = row(r), *const its = row(leader);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int column = max(0, min(first[k] + i * 32 + lane, last[k] - 1));
          a[k][i] = mine[column], b[k][i] = its[column];
        }
      }
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        const int leader = x.leader[level][request[k]];
        if (first[k] == 0 && last[k] && lane == 0) cluster_min(end_of(level, leader), last[k]);
        if (first[k] >= last[k]) continue;
        int end = kNone;
#pragma unroll
        for (int i = kAtOnce - 1; i >= 0; --i) {
          if (a[k][i] != b[k][i] || !real(a[k][i])) {
            end = min(first[k] + i * 32 + lane, last[k] - 1);
          }
        }
        end = __reduce_min_sync(0xffffffffu, end);
        if (end != kNone && lane == 0) cluster_min(end_of(level, leader), end);
      }
    }
  }

  __device__ __forceinline__ void go_on(int level) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int r = threadIdx.x + e * kThreads, leader = x.leader[level][r];
      alive[e] = alive[e] && x.count[level][leader] > 1;
      before[e] = leader, begin[e] = alive[e] ? cluster_load(end_of(level, leader)) : 0;
      alive[e] = alive[e] && x.blocks[r] > begin[e];
      upcoming[e] = alive[e] ? row(r)[begin[e]] : -1;
    }
  }

  // Where a request stands when those of each group are neighbours, its leader the first of them.
  __device__ __forceinline__ void place(int r, int levels) const {
    const u32 key = x.next[r];
    int ahead[1 + kMostLevels] = {};  // of all; of those in the same group of each level
#pragma unroll 1
    for (int other = lane; other < p.batch; other += 32) {
      const u32 its = x.next[other], differ = its ^ key;
      if (its > key || (its == key && other >= r)) continue;
      ++ahead[0];
#pragma unroll
      for (int l = 0; l < kMostLevels; ++l) ahead[1 + l] += differ >> kBits * (2 - l) == 0;
    }
#pragma unroll
    for (int l = 0; l <= kMostLevels; ++l) ahead[l] = __reduce_add_sync(0xffffffffu, ahead[l]);
    const int at = ahead[0];
    const bool writes = blockIdx.x < kCtas && lane == 0;  // clusters do the same
    if (writes) p.order[at] = r;
    if (found && lane < kCtas) put(found->request[at], r);
    bool member = true;
#pragma unroll
    for (int l = 0; l < kMostLevels; ++l) {
      if (l >= p.levels) break;
      const int leader = l < levels ? x.leader[l][r] : r;
      const int count = l < levels ? x.count[l][leader] : 0;
      member = member && count > 1;
      const i32 end = member ? cluster_load(end_of(l, leader)) * p.page_size : 0;
      const i32 node = !member ? 0 : leader == r ? count : -ahead[1 + l];
      if (writes) p.tree[l * p.batch + at] = make_int2(node, end);
      if (found && lane < kCtas) put(found->end[l][at], end), put(found->node[l][at], node);
    }
  }

  // To the CTA of the lane.
  __device__ __forceinline__ void put(i32 &at, i32 value) const {
    cluster_store(cluster_address(shared_address(&at), lane), value);
  }
};
