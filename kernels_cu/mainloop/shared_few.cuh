// The schedule of a batch that has a request a lane: one warp deals own keys while another deals
// shared ones, and no barrier of the CTA is in front of the one behind all of it. What others wait
// for is then what the two take, not what all warps take that execute the same instructions.
#pragma once

#include "mainloop/shared_schedule.cuh"

template <int kMostRequests>
class FewSchedule : public SharedSchedule<kMostRequests> {
  using Base = SharedSchedule<kMostRequests>;
  using Base::p, Base::d, Base::s, Base::x, Base::ctas, Base::own, Base::shared, Base::owners;
  using Base::groups, Base::kLevels;
  static constexpr u32 kAll = 0xffffffffu;

 public:
  using Base::Base;

  // Of at most 32 requests, rows of which are not merged where their own keys are; what the warps
  // of a CTA start from, and its lists. A barrier is behind everything.
  __device__ __forceinline__ void make_few(int cta, SharedStarts to) {
    const int warp = __shfl_sync(kAll, threadIdx.x / 32, 0), i = threadIdx.x % 32;
    if (warp < 2) {
      const Lengths of(p, s, i, Lengths::AsTheyStand());
      Place mine(p, d, s, of, i);
      i32 *const begins = warp ? x.shared_begin : x.sums[0][0];
      begins[i] = 0;
      const int leader = of.leader(0, i);
      if (p.window_left >= 0) {
        __syncwarp();
        if (mine.depth && !mine.first_level) {
          atomicMax(&begins[leader], Place::shared_from(mine.all_seen));
        }
        __syncwarp();
      }
      if (i < p.batch) mine.deal(d, i, p.window_left < 0 ? 0 : begins[leader]);
      if (warp == 0) {
        deal_own(mine.own, cta, to);
      } else {
        deal_shared(of, mine, cta, to);
      }
      fence_async_proxy();
    }
    __syncthreads();
  }

  // What rows() goes by. `x` stays as it is until all that call it are past that.
  __device__ __forceinline__ void look_up() {
    own = x.deals[0], shared = x.deals[1], owners = x.count[0], groups = x.count[1];
    this->all_near = false;
  }

 private:
  // Of this lane and those before it.
  __device__ __forceinline__ static int sum_upto(int value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAll, value, step);
      if (threadIdx.x % 32 >= step) value += other;
    }
    return value;
  }
  __device__ __forceinline__ static int lanes_before(u32 lanes) {
    return __popc(lanes & ((1u << threadIdx.x % 32) - 1));
  }

  __device__ __forceinline__ void deal_own(OwnRequest mine, int cta, SharedStarts to) {
    const int i = threadIdx.x % 32, line = mine.tiles * mine.row_blocks * p.heads_kv;
    const int upto = sum_upto(line), before = upto - line, total = __shfl_sync(kAll, upto, 31);
    const u32 some = __ballot_sync(kAll, mine.tiles > 0);
    const int owner = lanes_before(some);
    const Extremes segment = {__reduce_min_sync(kAll, mine.tiles ? mine.tiles : 0x7fffffff),
                              __reduce_max_sync(kAll, mine.tiles)};
    owners = __popc(some), mine.line = before;
    if (i < p.batch) x.place[i] = mine;
    if (mine.tiles) x.own_line[owner] = before, x.own_place[owner] = i;
    own = Deal(total, segment.common(), segment.most, ctas * kOwnWarps, kFewestTiles,
               d.most_pieces);
    if (i == 0) x.own_line[owners] = total, x.deals[0] = own, x.count[0] = owners;
    __syncwarp();
    const KeyRange span = own.span(cta * kOwnWarps + i % kOwnWarps);
    int from = owners;
#pragma unroll
    for (int n = 0; n < kOwnWarps; ++n) {
      const int begin = __shfl_sync(kAll, span.begin, n);
      const u32 begun = __ballot_sync(kAll, mine.tiles > 0 && before <= begin);
      if (i == n && begin < total) from = __popc(begun) - 1;
    }
    if (i < kOwnWarps) to.own[i] = this->own_start(span, from, cta);
    if (i == kOwnWarps) to.groups[3] = make_int4(0, 0, 0, 0);
    const int end = __shfl_sync(kAll, span.end, kOwnWarps - 1);
    int at = __shfl_sync(kAll, from, 0) + i;
    // None where the first warp has nothing: `at` is behind all then.
#pragma unroll 1
    for (; at < owners && x.own_line[at] < end; at += 32) {
      s.own[at + cta] = x.place[x.own_place[at]];
    }
  }

  __device__ __forceinline__ void deal_shared(const Lengths &of, const Place &mine, int cta,
                                              SharedStarts to) {
    const int i = threadIdx.x % 32;
    i32 before[kLevels];
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      if (l >= s.levels) break;
      const int value = mine.first_level <= l && l < mine.depth ? mine.own.q_len : 0;
      const int upto = sum_upto(value);
      before[l] = upto - value, x.tokens_before[l][i] = before[l];
      if (i == 31) x.tokens_before[l][32] = upto;
      x.leader[l][i] = of.leader(l, i), x.key_end[l][i] = of.node[l].y;
      x.members[l][i] = max(0, min(of.node[l].x, p.batch - i));
    }
    __syncwarp();
    Extremes segment = {0x7fffffff, 0};
    int total = 0;
    groups = 0;
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      if (l >= s.levels) break;
      const int count = this->tokens_of(l, i), blocks = count > 0 ? this->blocks_of(l, i) : 0;
      const int work =
          blocks > 0 ? ((count - 1) / this->row_tokens() + 1) * p.heads_kv * blocks : 0;
      const int upto = sum_upto(work);
      const u32 some = __ballot_sync(kAll, work > 0);
      if (work) {
        const int at = groups + lanes_before(some);
        x.group_line[at] = total + upto - work;
        x.group_at[l][i] = at, x.group_node[at] = l * kMostRequests + i;
        segment.least = min(segment.least, blocks), segment.most = max(segment.most, blocks);
      }
      if (mine.first_level <= l && l < mine.depth) {
        const int first = of.leader(l, i);
        if (x.tokens_before[l][first] == before[l]) x.group_request[l][first] = mine.own.request;
      }
      total += __shfl_sync(kAll, upto, 31), groups += __popc(some);
    }
    segment = {__reduce_min_sync(kAll, segment.least), __reduce_max_sync(kAll, segment.most)};
    const bool few = p.total_q <= half_tokens(p);
    shared = Deal(total, segment.common(), segment.most, ctas,
                  few ? 2 * kFewestBlocks : kFewestBlocks, d.most_pieces);
    if (i == 0) x.group_line[groups] = total, x.deals[1] = shared, x.count[1] = groups;
    __syncwarp();
    const KeyRange span = shared.span(cta);
    const int from = span.begin < span.end ? last_before(x.group_line, groups, span.begin) : groups;
    if (i == 0) {
      to.groups[0] = make_int4(span.begin, span.end, from + cta, cta * this->row_tokens());
      if (from < groups) this->put_group(from, to.groups + 1);
    }
#pragma unroll 1
    for (int at = from + i; at < groups && x.group_line[at] < span.end; at += 32) {
      this->put_group(at, s.groups + 2 * (at + cta));
    }
    if (i < p.batch) this->tokens(mine.own, i, span, cta * this->row_tokens());
  }
};
