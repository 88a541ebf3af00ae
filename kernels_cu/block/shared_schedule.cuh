// Which keys of a batch are shared, by whom, and who takes what: the tables that a CTA of
// attention_shared_sm90.cu finds its work by. Every CTA adds the whole batch up, a thread a
// request, and they write different parts.
#pragma once

#include "block/shared_work.cuh"

constexpr int kMostRequests = 1024, kMostWarps = kMostRequests / 32;  // a thread a request

// Shared memory that making a schedule takes.
struct ScheduleScratch {
  i32 sums[2 * kMostLevels][kMostWarps], extremes[4];
  i32 own_line[kMostRequests + 1], group_line[kMostLevels * kMostRequests + 1];
  u16 tokens_before[kMostLevels][kMostRequests + 1];
  u16 own_index[kMostRequests], own_place[kMostRequests];
  u16 group_at[kMostLevels][kMostRequests];  // index of the group that begins at a place
};

// Sums of kCount numbers before each thread, and of all threads. Barriers inside.
template <int kCount>
__device__ __forceinline__ void sums(const i32 (&value)[kCount], i32 (&before)[kCount],
                                     i32 (&all)[kCount], i32 (*scratch)[kMostWarps]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    i32 upto = value[n];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const i32 other = __shfl_up_sync(0xffffffffu, upto, step);
      if (lane >= step) upto += other;
    }
    if (lane == 31) scratch[n][warp] = upto;
    before[n] = upto - value[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    i32 sum = lane < warps ? scratch[n][lane] : 0;
    const i32 mine = __reduce_add_sync(0xffffffffu, lane < warp ? sum : 0);
    before[n] += mine;
    all[n] = __reduce_add_sync(0xffffffffu, sum);
  }
  __syncthreads();
}

// The value that all threads have which have one (x; 0 if they differ), and the largest (y).
__device__ __forceinline__ int2 common_value(i32 least, i32 most, i32 *scratch) {
  if (threadIdx.x == 0) scratch[0] = 0x7fffffff, scratch[1] = 0;
  __syncthreads();
  least = __reduce_min_sync(0xffffffffu, least), most = __reduce_max_sync(0xffffffffu, most);
  if (threadIdx.x % 32 == 0) atomicMin(&scratch[0], least), atomicMax(&scratch[1], most);
  __syncthreads();
  return make_int2(scratch[0] == scratch[1] ? scratch[0] : 0, scratch[1]);
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

__device__ __forceinline__ int2 node_of(const SharedParams &s, int batch, int level, int place) {
  return s.tree ? s.tree[level * batch + place]
                : make_int2(place ? -place : batch, s.common_keys);
}

// A place: its request, what it shares and what it has of its own; nothing past the last one.
struct Place {
  OwnRequest own = {};
  int2 node[kMostLevels] = {};
  int depth = 0;

  __device__ __forceinline__ Place(const AttentionParams &p, const DecodeParams &d,
                                   const SharedParams &s, int place) {
    if (place >= p.batch) return;
    const int request = s.order ? s.order[place] : place;
#pragma unroll
    for (int l = 0; l < kMostLevels; ++l) {
      if (l < s.levels) node[l] = node_of(s, p.batch, l, place);
    }
    const int q_begin = p.cu_seqlens_q[request], q_len = p.cu_seqlens_q[request + 1] - q_begin;
    const int kv_len = p.seqused_k[request] + s.added_keys;
    // Keys that all of its rows see.
    const int seen =
        p.window_right < 0 ? kv_len : min(kv_len, kv_len - q_len + p.window_right + 1);
    int first = 0;
#pragma unroll
    for (int l = 0; l < kMostLevels; ++l) {
      if (depth == l && node[l].x && q_len > 0 && node[l].y > first && node[l].y <= seen) {
        depth = l + 1, first = node[l].y;
      }
    }
    const int tiles =
        q_len > 0 && kv_len > first ? ((kv_len - first - 1) >> d.tile_shift) + 1 : 0;
    own = {q_begin, q_len, kv_len, first, request, 4 * place + depth, 0, tiles};
  }
};

// CTA `cta` of `ctas` writes its part; all of them have at least as many threads as there are
// requests. Barriers inside.
__device__ __forceinline__ void make_schedule(const AttentionParams &p, const DecodeParams &d,
                                              const SharedParams &s, ScheduleScratch &x, int cta,
                                              int ctas) {
  constexpr int kLevels = kMostLevels;
  const int i = threadIdx.x, batch = p.batch, heads = p.heads_kv;
  Place mine(p, d, s, i);
  const int depth = mine.depth, tiles = mine.own.tiles, q_len = mine.own.q_len;
  const int2 (&node)[kLevels] = mine.node;
  i32 value[2 + kLevels] = {tiles * heads, tiles > 0}, before[2 + kLevels], all[2 + kLevels];
#pragma unroll
  for (int l = 0; l < kLevels; ++l) value[2 + l] = l < depth ? q_len : 0;
  sums(value, before, all, x.sums);
  const int2 own_segment = common_value(tiles ? tiles : 0x7fffffff, tiles, x.extremes);
#pragma unroll
  for (int l = 0; l < kLevels; ++l) {
    x.tokens_before[l][i] = before[2 + l];
    if (i == 0) x.tokens_before[l][blockDim.x] = all[2 + l];
  }
  const int owners = all[1];
  mine.own.line = before[0];
  if (i < batch) x.own_index[i] = before[1];
  if (tiles) x.own_line[before[1]] = before[0], x.own_place[before[1]] = i;
  if (i == 0) x.own_line[owners] = all[0];
  __syncthreads();

  i32 work[2 * kLevels], work_before[2 * kLevels], work_all[2 * kLevels];
  i32 least = 0x7fffffff, most = 0;
  int4 group[kLevels];
#pragma unroll
  for (int l = 0; l < kLevels; ++l) {
    const int members = node[l].x, first = x.tokens_before[l][i];
    const int count = members > 0 ? x.tokens_before[l][min(i + members, batch)] - first : 0;
    const int begin = l ? node[l ? l - 1 : 0].y : 0;
    const int row_tokens = 2 * half_tokens(p);
    const int blocks = (node[l].y - begin + kShareKeys - 1) / kShareKeys;
    work[l] = count > 0 ? (count + row_tokens - 1) / row_tokens * heads * blocks : 0;
    work[kLevels + l] = work[l] > 0;
    group[l] = make_int4(begin, node[l].y, l * p.total_q + first, count);
    if (work[l]) least = min(least, blocks), most = max(most, blocks);
  }
  sums(work, work_before, work_all, x.sums);
  const int2 segment = common_value(least, most, x.extremes + 2);
  i32 line = 0, index = 0;
#pragma unroll
  for (int l = 0; l < kLevels; ++l) {
    if (work[l]) {
      const int at = index + work_before[kLevels + l];
      x.group_line[at] = line + work_before[l], x.group_at[l][i] = at;
    }
    line += work_all[l], index += work_all[kLevels + l];
  }
  if (i == 0) x.group_line[index] = line;
  __syncthreads();

  if (cta == 0) {
    if (tiles) s.own[before[1]] = mine.own;
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      if (work[l]) {
        const int at = x.group_at[l][i];
        s.group_line[at] = x.group_line[at], s.groups[2 * at] = group[l];
      }
      if (l >= depth) continue;
      // Of the members that are left the first one's row of the block table is used.
      const int first = i + min(0, node[l].x);
      if (x.tokens_before[l][first] == before[2 + l]) {
        s.groups[2 * x.group_at[l][first] + 1] = make_int4(mine.own.request, 0, 0, 0);
      }
      i32 *const tokens = s.tokens + l * p.total_q + before[2 + l];
      for (int n = 0; n < q_len; ++n) tokens[n] = mine.own.q_begin + n;
    }
    if (i == 0) {
      s.group_line[index] = line;
      *s.arrivals = 0;
    }
  }

  const Deal own(all[0], own_segment.x, own_segment.y, s.ctas * kOwnWarps, kFewestTiles,
                 d.most_pieces);
  const Deal shared(line, segment.x, segment.y, s.ctas, kFewestBlocks, d.most_pieces);
  const int thread = cta * blockDim.x + i, threads = ctas * blockDim.x;
  for (int c = thread; c < s.ctas * kOwnWarps; c += threads) {
    const KeyRange span = own.span(c);
    OwnStart start = {};
    start.span = make_int4(span.begin, span.end, 0, 0);
    if (span.begin < span.end) {
      const int from = last_before(x.own_line, owners, span.begin);
      start.span.z = from;
      start.request = Place(p, d, s, x.own_place[from]).own;
      start.request.line = x.own_line[from];
    }
    s.own_starts[c] = start;
  }
  for (int c = thread; c < s.ctas; c += threads) {
    const KeyRange span = shared.span(c);
    const int from = span.begin < span.end ? last_before(x.group_line, index, span.begin) : 0;
    s.group_starts[c] = make_int4(span.begin, span.end, from, 0);
  }
#pragma unroll 1
  for (int n = thread; n < batch * s.most_tokens * heads; n += threads) {
    const int row = n / heads, head = n - row * heads;
    const int place = row / s.most_tokens, in_request = row - place * s.most_tokens;
    const Place of(p, d, s, place);
    MergeUnit unit = {};
    unit.total = -1;
    if (in_request < of.own.q_len) {
      unit.token = of.own.q_begin + in_request, unit.total = 0;
      if (of.own.tiles) {
        const int first = x.own_line[x.own_index[place]] + head * of.own.tiles;
        const int2 found = own.owners(first, first + of.own.tiles);
        unit.first[kLevels] =
            own_partial_row(p, d, s, place, head, found.x) + in_request * p.group;
        unit.total = unit.count[kLevels] = found.y;
      }
#pragma unroll
      for (int l = 0; l < kLevels; ++l) {
        if (l >= of.depth) break;
        const int leader = place + min(0, of.node[l].x);
        const int which = x.group_at[l][leader];
        const int2 keys = node_of(s, batch, l, leader);
        const int begin = l ? of.node[l ? l - 1 : 0].y : 0;
        const int blocks = (keys.y - begin + kShareKeys - 1) / kShareKeys;
        const int ahead = x.tokens_before[l][leader];
        const int count = x.tokens_before[l][min(leader + keys.x, batch)] - ahead;
        const int token = l * p.total_q + x.tokens_before[l][place] + in_request;
        const int block = (token - l * p.total_q - ahead) / (2 * half_tokens(p));
        const RowBlock taken(p, l * p.total_q + ahead, count, block);
        const int first = x.group_line[which] + (block * heads + head) * blocks;
        const int2 found = shared.owners(first, first + blocks);
        unit.first[l] =
            taken.partial_row(p, head, found.x) + (token - taken.first) * p.group;
        unit.half[l] = taken.halves ? taken.count * p.group : 0;
        unit.count[l] = found.y << (taken.halves ? 1 : 0);
        unit.total += unit.count[l];
      }
      // Its only part is the result, and is there already.
      if (of.depth == 0 && unit.total == 1) unit.total = -1;
    }
    s.units[n] = unit;
  }
}
