// Groups of requests whose block tables begin alike, in levels: the tree of core/shared_params.cuh.
//
// A request's leader is the first one of its group whose next block is the same; the group of a
// leader shares what all of it have in common, and is searched again from there on. CTAs take
// requests in turn and meet after each level: the grid is no larger than what runs at the same
// time.

#include "core/variant.cuh"
#include "core/prefix_params.cuh"
#include "arch/tma_sm90.cuh"

static_assert(params_agree<PrefixParams>(), "PrefixParams differs from the host's layout");

namespace {
constexpr int kThreads = 256, kNone = 0x7fffffff;

// What another CTA wrote before a barrier of the grid.
__device__ __forceinline__ i32 load_fresh(const i32 *at) {
  i32 value;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void meet(u32 *counter) {
  __syncthreads();
  if (threadIdx.x == 0 && arrive_and_wrap(counter, gridDim.x - 1) != gridDim.x - 1) {
    // All of them run at once; if they cannot, an error is better than a wait for ever.
    for (int i = 0; load_acquire(counter) != 0; ++i) {
      if (i > 1 << 24) asm volatile("trap;");
    }
  }
  __syncthreads();
}

// The least value of all threads; `shared` is kNone before and afterwards.
__device__ __forceinline__ i32 least_of(i32 value, i32 *shared) {
  value = __reduce_min_sync(0xffffffffu, value);
  if (threadIdx.x % 32 == 0) atomicMin(shared, value);
  __syncthreads();
  const i32 found = *shared;
  __syncthreads();
  if (threadIdx.x == 0) *shared = kNone;
  __syncthreads();
  return found;
}

struct Search {
  const PrefixParams &p;

  __device__ __forceinline__ i32 *leaders(int level) const { return p.leaders + level * p.batch; }
  __device__ __forceinline__ i32 *ends(int level) const { return p.ends + level * p.batch; }
  __device__ __forceinline__ i32 *counts(int level) const { return p.counts + level * p.batch; }

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

  __device__ __forceinline__ void search(int level, int r, i32 *shared) const {
    int before = 0, begin = 0;
    bool alive = true;
    if (level) {
      before = load_fresh(leaders(level - 1) + r);
      alive = load_fresh(counts(level - 1) + before) > 1;
      begin = alive ? load_fresh(ends(level - 1) + before) : 0;
    }
    const int last = blocks(r);
    alive = alive && last > begin && real(row(r)[begin]);
    i32 leader = r;
    if (alive) {
      for (int other = threadIdx.x; other < r; other += kThreads) {
        if (level && load_fresh(leaders(level - 1) + other) != before) continue;
        if (blocks(other) > begin && row(other)[begin] == row(r)[begin]) {
          leader = min(leader, other);
          break;
        }
      }
    }
    leader = least_of(leader, shared);
    int end = last;
    if (alive && leader != r) {
      end = min(last, blocks(leader));
      for (int i = begin + threadIdx.x; i < end; i += kThreads) {
        if (row(r)[i] != row(leader)[i] || !real(row(r)[i])) {
          end = i;
          break;
        }
      }
    } else if (alive) {
      for (int i = begin + threadIdx.x; i < end; i += kThreads) {
        if (!real(row(r)[i])) {
          end = i;
          break;
        }
      }
    }
    end = least_of(end, shared);
    if (threadIdx.x == 0) {
      leaders(level)[r] = leader;
      if (alive) atomicMin(ends(level) + leader, end), atomicAdd(counts(level) + leader, 1);
    }
  }

  // Where a request stands when those of each group are neighbours, its leader the first of them.
  __device__ __forceinline__ void place(int r, i32 *sums) const {
    i32 key[kMostLevels] = {}, ahead[1 + kMostLevels] = {};
#pragma unroll
    for (int l = 0; l < kMostLevels; ++l) {
      if (l < p.levels) key[l] = load_fresh(leaders(l) + r);
    }
    for (int other = threadIdx.x; other < p.batch; other += kThreads) {
      int alike = 0;
      bool less = other < r, open = true;
#pragma unroll
      for (int l = 0; l < kMostLevels; ++l) {
        if (l >= p.levels || !open) continue;
        const i32 found = load_fresh(leaders(l) + other);
        open = found == key[l];
        if (open) alike = l + 1;
        if (!open) less = found < key[l];
      }
      if (!less) continue;
      ++ahead[0];
#pragma unroll
      for (int l = 0; l < kMostLevels; ++l) ahead[1 + l] += alike > l;
    }
#pragma unroll
    for (int n = 0; n <= kMostLevels; ++n) {
      const i32 sum = __reduce_add_sync(0xffffffffu, ahead[n]);
      if (threadIdx.x % 32 == 0) atomicAdd(sums + n, sum);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const int at = sums[0];
      p.order[at] = r;
      bool member = true;
      for (int l = 0; l < p.levels; ++l) {
        const i32 leader = load_fresh(leaders(l) + r), count = load_fresh(counts(l) + leader);
        member = member && count > 1;
        const i32 end = member ? load_fresh(ends(l) + leader) * p.page_size : 0;
        p.tree[l * p.batch + at] =
            make_int2(!member ? 0 : leader == r ? count : -sums[1 + l], end);
      }
    }
    __syncthreads();
    if (threadIdx.x <= kMostLevels) sums[threadIdx.x] = 0;
    __syncthreads();
  }
};
}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) KERNEL_NAME(
    const __grid_constant__ PrefixParams p) {
  __shared__ i32 least, sums[1 + kMostLevels];
  if (threadIdx.x == 0) least = kNone;
  if (threadIdx.x <= kMostLevels) sums[threadIdx.x] = 0;
  wait_for_earlier_launches();
  let_later_launches_start();
  const Search search{p};
  for (int r = blockIdx.x; r < p.batch; r += gridDim.x) {
    if (threadIdx.x < static_cast<unsigned>(p.levels)) {
      search.ends(threadIdx.x)[r] = kNone, search.counts(threadIdx.x)[r] = 0;
    }
  }
  meet(p.arrivals);
#pragma unroll 1
  for (int level = 0; level < p.levels; ++level) {
#pragma unroll 1
    for (int r = blockIdx.x; r < p.batch; r += gridDim.x) search.search(level, r, &least);
    meet(p.arrivals + 1 + level);
  }
#pragma unroll 1
  for (int r = blockIdx.x; r < p.batch; r += gridDim.x) search.place(r, sums);
}
