// Which keys of a batch are shared, by whom, and who takes what: the tables that a CTA of
// attention_shared_sm90.cu finds its work by. Every CTA adds the whole batch up, a thread a
// request, and writes what itself will read: CTAs need not wait for each other.
#pragma once

#include "mainloop/shared_place.cuh"

constexpr int kMostWarps = 32;

// Shared memory that making a schedule of so many requests takes.
template <int kMostRequests>
struct ScheduleScratch {
  OwnRequest place[kMostRequests];
  i32 sums[2][2 * kMostLevels + 2][kMostWarps];
  Deal deals[2];  // of own keys, and shared ones
  i32 count[2];   // of those that have some; of groups
  i32 own_line[kMostRequests + 1], group_line[kMostLevels * kMostRequests + 1];
  i32 key_end[kMostLevels][kMostRequests];
  i32 shared_begin[kMostRequests];  // of the group of level 0 that begins at a place
  u16 tokens_before[kMostLevels][kMostRequests + 1];
  u16 own_place[kMostRequests];
  u16 leader[kMostLevels][kMostRequests];  // place
  u16 members[kMostLevels][kMostRequests];  // of the group that begins at a place
  // Of the group that begins at a place: its index, and the request whose table it reads.
  u16 group_at[kMostLevels][kMostRequests], group_request[kMostLevels][kMostRequests];
  u16 group_node[kMostLevels * kMostRequests];  // level and place of a group
};

struct Extremes {
  i32 least, most;

  __device__ __forceinline__ int common() const { return least == most ? least : 0; }
};

// Sums of the first `used` of kCount numbers before each thread, and of all threads; the extremes
// of all. A barrier inside; `scratch` is not used again.
template <int kCount>
__device__ __forceinline__ Extremes add_up(const i32 (&value)[kCount], Extremes of, int used,
                                           i32 (&before)[kCount], i32 (&all)[kCount],
                                           i32 (*scratch)[kMostWarps]) {
  constexpr u32 kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    before[n] = all[n] = 0;
    if (n >= used) continue;
    i32 upto = value[n];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const i32 other = __shfl_up_sync(kAll, upto, step);
      if (lane >= step) upto += other;
    }
    if (lane == 31) scratch[n][warp] = upto;
    before[n] = upto - value[n];
  }
  of.least = __reduce_min_sync(kAll, of.least), of.most = __reduce_max_sync(kAll, of.most);
  if (lane == 0) scratch[kCount][warp] = of.least, scratch[kCount + 1][warp] = of.most;
  __syncthreads();
  const bool mine = lane < warps;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    if (n >= used) continue;
    const i32 sum = mine ? scratch[n][lane] : 0;
    before[n] += __reduce_add_sync(kAll, lane < warp ? sum : 0);
    all[n] = __reduce_add_sync(kAll, sum);
  }
  return {__reduce_min_sync(kAll, mine ? scratch[kCount][lane] : 0x7fffffff),
          __reduce_max_sync(kAll, mine ? scratch[kCount + 1][lane] : 0)};
}

// The last of `count` that begins at or before `target`.
__device__ __forceinline__ int last_before(const i32 *line, int count, int target) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    if (line[middle] <= target) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The schedule of a batch, and the parts of it that a CTA writes. All threads of the CTA call
// everything, but for rows(); there are at least as many as requests.
template <int kMostRequests>
class SharedSchedule {
 protected:
  static constexpr int kLevels = kMostLevels, kBare = 1 << 16;

 public:
  __device__ __forceinline__ SharedSchedule(const AttentionParams &p, const DecodeParams &d,
                                            const SharedParams &s,
                                            ScheduleScratch<kMostRequests> &x, int ctas)
      : p(p), d(d), s(s), x(x), ctas(ctas) {}

  // Barriers inside, the last one behind everything that is in `x`.
  __device__ __forceinline__ void make(const Lengths &of) {
    const int i = threadIdx.x, batch = p.batch, heads = p.heads_kv;
    Place mine(p, d, s, of, i);
    const int depth = mine.depth, first_level = mine.first_level, q_len = mine.own.q_len;
    const int2 (&node)[kLevels] = of.node;
    if (i < batch) x.shared_begin[i] = 0;
    const int leader = of.leader(0, i);
    if (p.window_left >= 0) {
      __syncthreads();
      if (depth && !first_level) {
        atomicMax(&x.shared_begin[leader], Place::shared_from(mine.all_seen));
      }
      __syncthreads();
    }
    if (i < batch) mine.deal(d, i, p.window_left < 0 ? 0 : x.shared_begin[leader]);
    const int tiles = mine.own.tiles, line = tiles * mine.own.row_blocks * heads;
    const bool bare = mine.own.q_len > 0 && !tiles;  // without own keys
    i32 value[2 + kLevels] = {line, (tiles > 0) + kBare * bare}, before[2 + kLevels], all[2 + kLevels];
#pragma unroll
    for (int l = 0; l < kLevels; ++l) value[2 + l] = first_level <= l && l < depth ? q_len : 0;
    const Extremes own_segment = add_up(value, {tiles ? tiles : 0x7fffffff, tiles},
                                        2 + s.levels, before, all, x.sums[0]);
    owners = all[1] % kBare;
    mine.own.line = before[0];
    if (i < batch) x.place[i] = mine.own;
    const int owner = before[1] % kBare;
    if (tiles) x.own_line[owner] = before[0], x.own_place[owner] = i;
    if (i == 0) x.own_line[owners] = all[0];
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      if (l >= s.levels) break;
      x.tokens_before[l][i] = before[2 + l];
      if (i == 0) x.tokens_before[l][blockDim.x] = all[2 + l];
      if (i < batch) {
        x.leader[l][i] = of.leader(l, i), x.key_end[l][i] = node[l].y;
        x.members[l][i] = max(0, min(node[l].x, batch - i));
      }
    }
    __syncthreads();

    i32 work[2 * kLevels] = {}, work_before[2 * kLevels], work_all[2 * kLevels];
    Extremes segment = {0x7fffffff, 0};
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      if (l >= s.levels) break;
      const int count = i < batch ? tokens_of(l, i) : 0;
      if (count <= 0) continue;
      const int blocks = blocks_of(l, i);
      if (blocks <= 0) continue;
      work[2 * l] = ((count - 1) / row_tokens() + 1) * heads * blocks, work[2 * l + 1] = 1;
      segment.least = min(segment.least, blocks), segment.most = max(segment.most, blocks);
    }
    segment = add_up(work, segment, 2 * s.levels, work_before, work_all, x.sums[1]);
    int total = 0;
    groups = 0;
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      if (l >= s.levels) break;
      if (work[2 * l + 1]) {
        const int at = groups + work_before[2 * l + 1];
        x.group_line[at] = total + work_before[2 * l];
        x.group_at[l][i] = at, x.group_node[at] = l * kMostRequests + i;
      }
      // Of the members that are left the first one's row of the block table is used.
      if (first_level <= l && l < depth) {
        const int first = of.leader(l, i);
        if (x.tokens_before[l][first] == before[2 + l]) {
          x.group_request[l][first] = mine.own.request;
        }
      }
      total += work_all[2 * l], groups += work_all[2 * l + 1];
    }
    if (i == 0) x.group_line[groups] = total;
    // Divisions take long: one half of the threads deals own keys, the other shared ones.
    const bool deals_own = i < blockDim.x / 2;
    const bool few = p.total_q <= half_tokens(p);
    const Deal dealt(deals_own ? all[0] : total,
                     deals_own ? own_segment.common() : segment.common(),
                     deals_own ? own_segment.most : segment.most,
                     deals_own ? ctas * kOwnWarps : ctas,
                     deals_own ? kFewestTiles : few ? 2 * kFewestBlocks : kFewestBlocks,
                     d.most_pieces);
    if (i % (blockDim.x / 2) == 0) x.deals[!deals_own] = dealt;
    __syncthreads();
    own = x.deals[0], shared = x.deals[1];
    all_near = s.near && all[1] < kBare && own.within(kOwnWarps);
  }

  // What the warps of a CTA start from; what they go on with is in tables of its own, with its
  // index ahead: neighbours have one entry in common at most.
  __device__ __forceinline__ void starts(int cta, SharedStarts to) const {
    const int i = threadIdx.x;
    if (i < 32) {
      const KeyRange warp = own.span(cta * kOwnWarps + i % kOwnWarps);
      const int begin = __shfl_sync(0xffffffffu, warp.begin, 0);
      const int end = __shfl_sync(0xffffffffu, warp.end, kOwnWarps - 1);
      const int target = i < kOwnWarps ? warp.begin : i == kOwnWarps + 1 ? end : begin;
      const int from = owner_at(target);
      // In step: divisions take long.
      const int row = s.near ? row_at(from, target) : 0;
      if (i == kOwnWarps) to.groups[3].x = row, to.groups[3].z = all_near;
      if (i == kOwnWarps + 1) to.groups[3].y = row;
      if (i < kOwnWarps) to.own[i] = own_start(warp, from, cta);
    } else if (i == blockDim.x / 2) {
      group_start(cta, to.groups, cta);
    }
  }

  // The requests, groups and tokens that they meet. A barrier is behind starts().
  __device__ __forceinline__ void lists(int cta, SharedStarts from) const {
    const int half = blockDim.x / 2, i = threadIdx.x;
    const int4 start = *from.groups;
    const KeyRange span = {start.x, start.y};
    if (i < half) {
      const int begin = from.own->span.x, end = from.own[kOwnWarps - 1].span.y;
      const int lowest = begin < end ? from.own->span.z - cta : owners;
#pragma unroll 1
      for (int at = lowest + i; at < owners && x.own_line[at] < end; at += half) {
        s.own[at + cta] = x.place[x.own_place[at]];
      }
    } else {
#pragma unroll 1
      for (int at = span.begin < span.end ? start.z - cta + i - half : groups;
           at < groups && x.group_line[at] < span.end; at += half) {
        put_group(at, s.groups + 2 * (at + cta));
      }
    }
    if (i < p.batch) tokens(x.place[i], i, span, cta * row_tokens());
  }

  // How the results of a row come together, of every row that CTA `cta` merges; by `threads`.
  // `near`: of SharedStarts.
  __device__ __forceinline__ void rows(int cta, int4 near, int thread, int threads) const {
    const int close = s.near ? near.y - near.x : 0, all = row_count();
    const int far = all_near ? 0 : (all - cta + ctas - 1) / ctas;
#pragma unroll 1
    for (int i = thread; i < close + far; i += threads) {
      const bool here = i < close;
      const int n = here ? near.x + i : cta + (i - close) * ctas;
      MergeRow row = row_of(n);
      if (here != (row.warps != 0)) row.total = -1;
      put(s.rows[here ? n : all + n], row);
    }
  }

  // All of it, for all CTAs, by so many threads.
  __device__ __forceinline__ void write(int thread, int threads) const {
#pragma unroll 1
    for (int n = threads - 1 - thread; n < ctas * (kOwnWarps + 2); n += threads) {
      const int cta = n % ctas, part = n / ctas;
      int4 *const to = s.group_starts + 4 * cta;
      if (part < kOwnWarps) {
        const int warp = cta * kOwnWarps + part;
        const KeyRange span = own.span(warp);
        s.own_starts[warp] = own_start(span, owner_at(span.begin), 0);
      } else if (part == kOwnWarps) {
        group_start(cta, to, 0);
      } else {
        const int begin = own.span(cta * kOwnWarps).begin;
        const int end = own.span(cta * kOwnWarps + kOwnWarps - 1).end;
        to[3] = make_int4(s.near ? row_at(owner_at(begin), begin) : 0,
                          s.near ? row_at(owner_at(end), end) : 0, all_near, 0);
      }
    }
    const int last = threads - 1 - thread, rows = row_count();
    const KeyRange all = {0, 0x7fffffff};
#pragma unroll 1
    for (int i = last; i < p.batch; i += threads) tokens(x.place[i], i, all, 0);
#pragma unroll 1
    for (int i = last; i < owners; i += threads) s.own[i] = x.place[x.own_place[i]];
#pragma unroll 1
    for (int i = last; i < groups; i += threads) put_group(i, s.groups + 2 * i);
#pragma unroll 1
    for (int n = thread; n < rows; n += threads) {
      const MergeRow row = row_of(n);
      const int near = row.warps ? n : rows + n, other = row.warps ? rows + n : n;
      put(s.rows[near], row);
      s.rows[other].total = -1;
    }
    if (thread < 2) s.arrivals[thread] = 0;
  }

 protected:
  const AttentionParams &p;
  const DecodeParams &d;
  const SharedParams &s;
  ScheduleScratch<kMostRequests> &x;
  const int ctas;
  Deal own, shared;
  int owners, groups;
  bool all_near;

  __device__ __forceinline__ int row_count() const {
    return p.batch * s.most_tokens * p.heads_q;
  }
  // The first row of the segment at a position of the line of own keys, that of the from-th owner.
  __device__ __forceinline__ int row_at(int from, int at) const {
    if (at >= static_cast<int>(own.total)) return row_count();
    const int place = x.own_place[from];
    const OwnRequest &of = x.place[place];
    const int segment = (at - of.line) / of.tiles, head = segment / of.row_blocks;
    return (place * p.heads_kv + head) * s.most_tokens * p.group +
           (segment - head * of.row_blocks) * d.row_block;
  }
  __device__ __forceinline__ void put_group(int at, int4 *to) const {
    const int node = x.group_node[at], l = node / kMostRequests, place = node % kMostRequests;
    to[0] = make_int4(key_begin(l, place), x.key_end[l][place],
                      l * p.total_q + x.tokens_before[l][place], tokens_of(l, place));
    to[1] = make_int4(x.group_request[l][place], x.group_line[at], x.group_line[at + 1], 0);
  }
  __device__ __forceinline__ int row_tokens() const { return 2 * half_tokens(p); }
  // Of the group of a level that begins at a place.
  __device__ __forceinline__ int key_begin(int level, int place) const {
    return level ? x.key_end[level ? level - 1 : 0][place] : x.shared_begin[place];
  }
  __device__ __forceinline__ int blocks_of(int level, int place) const {
    return (x.key_end[level][place] - key_begin(level, place) + kShareKeys - 1) / kShareKeys;
  }
  __device__ __forceinline__ int tokens_of(int level, int place) const {
    return x.tokens_before[level][place + x.members[level][place]] - x.tokens_before[level][place];
  }

  __device__ __forceinline__ int owner_at(int position) const {
    return position < static_cast<int>(own.total) ? last_before(x.own_line, owners, position) : 0;
  }
  __device__ __forceinline__ OwnStart own_start(KeyRange span, int from, int ahead) const {
    OwnStart start = {};
    start.span = make_int4(span.begin, span.end, from + ahead, 0);
    if (span.begin < span.end) start.request = x.place[x.own_place[from]];
    return start;
  }
  __device__ __forceinline__ void group_start(int cta, int4 *to, int ahead) const {
    const KeyRange span = shared.span(cta);
    const bool some = span.begin < span.end;
    const int from = some ? last_before(x.group_line, groups, span.begin) : 0;
    to[0] = make_int4(span.begin, span.end, from + ahead, ahead * row_tokens());
    if (some) put_group(from, to + 1);
  }

  // Of a place, what is in a span.
  __device__ __forceinline__ void tokens(const OwnRequest of, int place, KeyRange span,
                                         int ahead) const {
#pragma unroll 1
    for (int l = of.first_level(); l < of.levels(); ++l) {
      const int leader = x.leader[l][place], at = x.group_at[l][leader];
      const int line = x.group_line[at], first = x.tokens_before[l][place];
      if (line >= span.end || x.group_line[at + 1] <= span.begin) continue;
      const int each = blocks_of(l, leader) * p.heads_kv;  // of a row block
#pragma unroll 1
      for (int n = 0; n < of.q_len; ++n) {
        const int block = (first + n - x.tokens_before[l][leader]) / row_tokens();
        const int begin = line + block * each;
        if (begin < span.end && begin + each > span.begin) {
          s.tokens[l * p.total_q + first + n + ahead] =
              make_int4(of.q_begin + n, of.kv_len - of.q_len + n, of.request, 0);
        }
      }
    }
  }

  __device__ __forceinline__ MergeRow row_of(int n) const {
    const int rows = s.most_tokens * p.group, line = n / rows, in_head = n - line * rows;
    const int place = line / p.heads_kv, head = line - place * p.heads_kv;
    const OwnRequest &of = x.place[place];
    const int in_request = in_head / p.group, in_group = in_head - in_request * p.group;
    MergeRow row;
    row.token = of.q_begin + in_request, row.head = head * p.group + in_group;
    row.warps = row.line_end = 0;
    int total = in_request < of.q_len ? 0 : -1, first_row = 0, count = 0;
    if (total == 0 && of.tiles) {
      const int block = in_head / d.row_block;
      const int first = of.line + (head * of.row_blocks + block) * of.tiles;
      const int2 found = own.owners(first, first + of.tiles);
      first_row = own_partial_row(p, d, s, place, head, block, found.x) + in_head -
                  block * d.row_block;
      total = count = found.y, row.line_end = first + of.tiles;
      const int from = found.x % kOwnWarps;
      if (s.near && from + count <= kOwnWarps) row.warps = ((1 << count) - 1) << from;
    }
    row.first[kLevels] = first_row, row.count[kLevels] = count;
#pragma unroll
    for (int l = 0; l < kLevels; ++l) row.first[l] = row.count[l] = row.half[l] = 0;
#pragma unroll 1
    for (int l = of.first_level(); total >= 0 && l < of.levels(); ++l) {
      const int leader = x.leader[l][place], ahead = x.tokens_before[l][leader];
      const int token = x.tokens_before[l][place] + in_request;
      const int block = (token - ahead) / row_tokens(), blocks = blocks_of(l, leader);
      const RowBlock taken(p, l * p.total_q + ahead, tokens_of(l, leader), block);
      const int first = x.group_line[x.group_at[l][leader]] + (block * p.heads_kv + head) * blocks;
      const int2 found = shared.owners(first, first + blocks);
      first_row = taken.partial_row(p, head, found.x) +
                  (l * p.total_q + token - taken.first) * p.group + in_group;
      count = found.y << (taken.halves ? 1 : 0), total += count;
      // An index that is known, so that the row stays in registers.
#pragma unroll
      for (int k = 0; k < kLevels; ++k) {
        if (k != l) continue;
        row.first[k] = first_row, row.count[k] = count;
        row.half[k] = taken.halves ? taken.count * p.group : 0;
      }
    }
    // Its only part is the result, and is there already.
    row.total = of.levels() == 0 && total == 1 ? -1 : total;
    return row;
  }

  __device__ __forceinline__ static void put(MergeRow &to, const MergeRow &row) {
    constexpr int kWords = sizeof(MergeRow) / 16;
    const uint4 *const from = reinterpret_cast<const uint4 *>(&row);
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint4 *>(&to)[i] = from[i];
  }
};
