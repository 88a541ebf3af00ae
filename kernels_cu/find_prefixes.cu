// Groups of requests whose block tables begin alike, in levels: the tree of core/shared_params.cuh.
//
// Requests whose next block is the same are a group, its leader the first of them; what the group
// shares ends where a member's blocks differ from the leader's, and is searched again from there
// on. One cluster: its CTAs all know all groups, and compare different parts of the tables.

#include "core/variant.cuh"
#include "core/prefix_params.cuh"
#include "arch/cluster_sm90.cuh"
#include "arch/mma_sm80.cuh"

static_assert(params_agree<PrefixParams>(), "PrefixParams differs from the host's layout");

namespace {
constexpr int kThreads = 512, kCtas = 8, kWarps = kThreads / 32;
constexpr int kMost = 1024, kEach = kMost / kThreads;  // requests; of a thread
constexpr int kSlots = 2 * kMost, kNone = 0x7fffffff;
constexpr int kChunk = 256, kAtOnce = kChunk / 32;  // columns that a warp compares; of a lane

struct Groups {
  i32 blocks[kMost];  // that all queries of a request see
  i32 next[kMost];    // the next block; -1: it is in no group any more
  u16 leader[kMostLevels][kMost];
  i32 count[kMostLevels][kMost], end[kMostLevels][kMost];  // of a leader; ends: of the first CTA
  i32 slot[kSlots];  // a member of a group, in the end its leader
};

__device__ __forceinline__ u32 cta_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

class Search {
 public:
  __device__ __forceinline__ Search(const PrefixParams &p, Groups &x) : p(p), x(x) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int r = threadIdx.x + e * kThreads;
      begin[e] = 0, before[e] = 0, alive[e] = r < p.batch;
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
    for (int r = cta_rank() * kWarps + threadIdx.x / 32; r < p.batch; r += kCtas * kWarps) {
      place(r, level);
    }
    cluster_sync();  // the first one's memory is read by the others
  }

 private:
  const PrefixParams &p;
  Groups &x;
  int begin[kEach], before[kEach];  // where a request's next level begins; its leader there
  bool alive[kEach];
  const int lane = threadIdx.x % 32;

  // Blocks without a token of this step, which all queries see.
  __device__ __forceinline__ int blocks(int r) const {
    const int q_len = p.cu_seqlens_q ? p.cu_seqlens_q[r + 1] - p.cu_seqlens_q[r] : 1;
    const int keys = q_len > 0 ? p.seqused_k[r] - q_len : 0;
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
      const i32 next = alive[e] ? row(r)[begin[e]] : -1;
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
      for (int at = x.next[r] * 2654435761u >> 21;; at = (at + 1) % kSlots) {
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
    const int chunks = (p.columns + kChunk - 1) / kChunk;
#pragma unroll 1
    for (int n = cta_rank() * kWarps + threadIdx.x / 32; n < chunks * p.batch;
         n += kCtas * kWarps) {
      const int chunk = n / p.batch, r = n - chunk * p.batch, leader = x.leader[level][r];
      if (x.next[r] < 0 || x.count[level][leader] < 2) continue;
      const int last = min(x.blocks[r], x.blocks[leader]), first = chunk * kChunk;
      if (chunk == 0 && lane == 0) cluster_min(end_of(level, leader), last);
      if (first >= last) continue;
      const i32 *const mine = row(r), *const its = row(leader);
      i32 a[kAtOnce], b[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = min(first + i * 32 + lane, last - 1);
        a[i] = mine[at], b[i] = its[at];
      }
      int end = kNone;
#pragma unroll
      for (int i = kAtOnce - 1; i >= 0; --i) {
        if (a[i] != b[i] || !real(a[i])) end = min(first + i * 32 + lane, last - 1);
      }
      end = __reduce_min_sync(0xffffffffu, end);
      if (end != kNone && lane == 0) cluster_min(end_of(level, leader), end);
    }
  }

  __device__ __forceinline__ void go_on(int level) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int r = threadIdx.x + e * kThreads, leader = x.leader[level][r];
      alive[e] = alive[e] && x.count[level][leader] > 1;
      before[e] = leader, begin[e] = alive[e] ? cluster_load(end_of(level, leader)) : 0;
    }
  }

  // Where a request stands when those of each group are neighbours, its leader the first of them.
  __device__ __forceinline__ void place(int r, int levels) const {
    int key[kMostLevels], ahead[1 + kMostLevels] = {};
#pragma unroll
    for (int l = 0; l < kMostLevels; ++l) key[l] = l < levels ? x.leader[l][r] : r;
#pragma unroll 1
    for (int other = lane; other < p.batch; other += 32) {
      int alike = 0;
      bool less = other < r, open = true;
#pragma unroll
      for (int l = 0; l < kMostLevels; ++l) {
        if (l >= levels || !open) continue;
        const int found = x.leader[l][other];
        open = found == key[l];
        if (open) alike = l + 1;
        if (!open) less = found < key[l];
      }
#pragma unroll
      for (int l = 0; l <= kMostLevels; ++l) ahead[l] += less && alike >= l;
    }
#pragma unroll
    for (int l = 0; l <= kMostLevels; ++l) ahead[l] = __reduce_add_sync(0xffffffffu, ahead[l]);
    if (lane) return;
    p.order[ahead[0]] = r;
    bool member = true;
#pragma unroll
    for (int l = 0; l < kMostLevels; ++l) {
      if (l >= p.levels) break;
      const int count = l < levels ? x.count[l][key[l]] : 0;
      member = member && count > 1;
      const i32 end = member ? cluster_load(end_of(l, key[l])) * p.page_size : 0;
      p.tree[l * p.batch + ahead[0]] =
          make_int2(!member ? 0 : key[l] == r ? count : -ahead[1 + l], end);
    }
  }
};
}  // namespace

extern "C" __global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads) KERNEL_NAME(
    const __grid_constant__ PrefixParams p) {
  __shared__ Groups groups;
  wait_for_earlier_launches();
  let_later_launches_start();
  Search(p, groups).run();
}
