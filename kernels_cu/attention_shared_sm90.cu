// Attention of few query rows a request, where requests share keys, for compute capability 9.0.
// Four warps of a CTA stream own keys while two warpgroups multiply gathered rows with shared ones;
// when all CTAs are done their states are merged. Grid: as many CTAs as run at the same time.

#include "core/variant.cuh"
#include "core/attention_params.cuh"
#include "core/decode_params.cuh"
#include "core/shared_params.cuh"
#include "mainloop/shared_few.cuh"
#include "mainloop/shared_own_sm90.cuh"
#include "mainloop/shared_tile_sm90.cuh"
#include "mainloop/shared_widen_sm90.cuh"

static_assert(params_agree<AttentionParams>(), "AttentionParams differs from the host's layout");
static_assert(SharedVariant::kParamsBytes == sizeof(DecodeParams),
              "DecodeParams differs from the host's layout");
static_assert(SharedScheduleVariant::kSharedBytes == sizeof(SharedParams),
              "SharedParams differs from the host's layout");

namespace {
constexpr int kThreads = 512, kMergers = 32 * kMergeWarps;
// Threads that write rows of the schedule: of few rows those that have nothing else to do.
constexpr int kFirstOfRows = 160;
constexpr int kEndOfRows = SharedVariant::kParts && !SharedVariant::kWiden ? 256 : kThreads;

using Places = SharedPlaces<SharedVariant>;
constexpr int kRequests = SharedVariant::kParts ? 32 : kThreads;
using Scratch = ScheduleScratch<kRequests>;
// In front of the rings of own keys and behind the first block of shared ones, which are filled
// while rows of the schedule are written.
constexpr int kScratch = (Places::kRings - sizeof(Scratch)) / 16 * 16;
static_assert(kScratch >= Places::kLoads + Places::kLoadBytes, "");
static_assert(!SharedVariant::kParts || kScratch >= Places::kRings - Places::kStageBytes,
              "values of other stages are loaded meanwhile");

// What the schedule is made of should be near when it is.
__device__ __forceinline__ void fetch_lengths(const AttentionParams &p, const SharedParams &s) {
  const int at = blockIdx.x * 128, n = threadIdx.x - 32;
  if (n < 0 || n > 3) return;
  const void *const from = n == 0   ? static_cast<const void *>(s.order)
                           : n == 1 ? static_cast<const void *>(s.tree)
                           : n == 2 ? static_cast<const void *>(p.cu_seqlens_q)
                                    : static_cast<const void *>(p.seqused_k);
  if (from && at < p.batch * (n == 1 ? 8 * s.levels : 4)) {
    prefetch_l2(static_cast<const char *>(from) + at);
  }
}

// Queries, and of a schedule made ahead where this CTA begins and which rows are gathered.
__device__ __forceinline__ void fetch_starts(const AttentionParams &p, const SharedParams &s,
                                             bool inside) {
  const i64 line = (blockIdx.x * kThreads + threadIdx.x) * 128;
  if (line < (p.total_q - 1) * p.q_token_stride + 2 * p.head_dim) prefetch_l2(p.q + line);
  if (inside) return;
  const int n = threadIdx.x - 32, cta = blockIdx.x;
  if (n == 0 || n == 1) prefetch_l2(s.own_starts + cta * kOwnWarps + n * 2);
  if (n == 2) prefetch_l2(s.group_starts + 4 * cta);
  if (line < s.levels * p.total_q * 16) {
    prefetch_l2(reinterpret_cast<const char *>(s.tokens) + line);
  }
}

// What the merge will look up: it comes from far, and the merge has nothing else to do meanwhile.
__device__ __forceinline__ void fetch_rows(const AttentionParams &p, const SharedParams &s,
                                           int4 near) {
  const int rows = p.batch * s.most_tokens * p.heads_q, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = near.x + lane; row < near.y && s.near; row += 32) prefetch_l2(s.rows + row);
#pragma unroll 1
  for (int row = blockIdx.x + lane * gridDim.x; row < rows && !near.z; row += 32 * gridDim.x) {
    prefetch_l2(s.rows + rows + row);
  }
}
}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) KERNEL_NAME(
    const __grid_constant__ AttentionParams p, const __grid_constant__ DecodeParams d,
    const __grid_constant__ SharedParams s, const __grid_constant__ TensorMap own_k,
    const __grid_constant__ TensorMap own_v, const __grid_constant__ TensorMap shared_k,
    const __grid_constant__ TensorMap shared_v) {
  extern __shared__ __align__(1024) char smem[];
  using V = SharedVariant;
  using S = SharedPlaces<V>;
  const u32 base = shared_address(smem);
  const bool inside = V::kInside && !s.ahead;  // else the code of the schedule is not even there
  if (threadIdx.x == 0) {
    for (int i = 0; i < V::kStages; ++i) {
      constexpr int kFillers = V::kWiden ? kWidenWarps : 1;
      mbarrier_init(base + S::kKeyFull + 8 * i, kFillers);
      mbarrier_init(base + S::kValueFull + 8 * i, kFillers);
      mbarrier_init(base + S::kKeyEmpty + 8 * i, 8);
      mbarrier_init(base + S::kValueEmpty + 8 * i, 8);
    }
    for (int i = 0; i < 2 * V::kRawStages && V::kWiden; ++i) {
      mbarrier_init(base + S::kRawFull + 8 * i, 1);
      mbarrier_init(base + S::kRawEmpty + 8 * i, kWidenWarps);
    }
    for (int i = 0; i < kOwnWarps * V::kOwnStages; ++i) {
      mbarrier_init(base + S::kOwnFull + 8 * i, 1);
    }
    mbarrier_init(base + S::kDone, V::kParts ? kMergers : 32 * kOwnWarps);
    mbarrier_init(base + S::kOpen, 1);
    mbarrier_init(base + S::kTilesDone, 256), mbarrier_init(base + S::kTilesOpen, 1);
    mbarrier_init(base + S::kNever, 1);
    mbarrier_init(base + S::kRows, inside ? kEndOfRows - kFirstOfRows : 1);
    mbarrier_init_fence();
    if (!inside) mbarrier_arrive(base + S::kRows);
    for (int i = 0; i < kOwnWarps; ++i) store_release_shared(base + S::kProgress + 4 * i, 0);
    prefetch_tensor_map(&own_k), prefetch_tensor_map(&own_v);
    prefetch_tensor_map(&shared_k), prefetch_tensor_map(&shared_v);
  }
  // The table is read after the schedule, and should be near by then.
  const int line = (blockIdx.x * kThreads + threadIdx.x) * 128;
  if (line < d.table_bytes) prefetch_l2(p.block_table + line);
  fetch_starts(p, s, inside);
  if (inside) fetch_lengths(p, s);
  __syncthreads();
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  SharedStarts starts{s.own_starts + blockIdx.x * kOwnWarps, s.group_starts + 4 * blockIdx.x};
  if (inside) {
    starts = {reinterpret_cast<OwnStart *>(smem + S::kOwnStarts),
              reinterpret_cast<int4 *>(smem + S::kGroupStarts)};
    FewSchedule<kRequests> schedule(p, d, s, *reinterpret_cast<Scratch *>(smem + kScratch),
                                    gridDim.x);
    // Made before the launch in front is over; once more if that has written other lengths. Where
    // there are few rows, launches are over at once in all CTAs, and a look costs more than it wins.
    if constexpr (V::kParts) {
      wait_for_earlier_launches();
      let_later_launches_start();
      schedule.make_few(blockIdx.x, starts);
    } else {
#pragma unroll 1
      for (bool over = false;; over = true) {
        const Lengths found(p, s, threadIdx.x);
        schedule.make(found);
        schedule.starts(blockIdx.x, starts);
        if (over) break;
        wait_for_earlier_launches();
        let_later_launches_start();
        if (!__syncthreads_or(found.changed(p, s, threadIdx.x))) break;
      }
      __syncthreads();
      schedule.lists(blockIdx.x, starts);
      fence_async_proxy();
      __syncthreads();
    }
    if (threadIdx.x >= kFirstOfRows && threadIdx.x < kEndOfRows) {
      if (V::kParts) schedule.look_up();
      schedule.rows(blockIdx.x, starts.groups[3], threadIdx.x - kFirstOfRows,
                    kEndOfRows - kFirstOfRows);
      fence_async_proxy();
      mbarrier_arrive(base + S::kRows);
    }
  } else {
    wait_for_earlier_launches();
    let_later_launches_start();
    if (threadIdx.x / 32 == 5) fetch_rows(p, s, starts.groups[3]);
  }
  const auto again = [&] {  // a register of one role, not of all
    u32 found = base;
    asm volatile("" : "+r"(found));
    return found;
  };
  if (role == 1) {
    give_registers<V::kLoadRegisters>();
    if (threadIdx.x / 32 == 4) {
      SharedLoads<V>{p, d, s, &shared_k, &shared_v, again()}.run(starts);
    } else if constexpr (V::kWiden) {
      SharedWidening<V>{again()}.run(starts);
    }
  } else if (role == 0) {
    take_registers<V::kOwnRegisters>();
    OwnKeys<V> keys(p, d, s, &own_k, &own_v, starts.own[threadIdx.x / 32], again());
    keys.run();
    SharedMerge<V>(p, d, s).run(keys.base(), threadIdx.x / 32, starts.groups[3]);
  } else {
    take_registers<V::kTileRegisters>();
    SharedProducts<V>(p, d, s, again(), role - 2).run(starts);
  }
}
