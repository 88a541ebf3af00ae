// Shared keys: 128 gathered rows of many requests against blocks of 64 keys, by warpgroup products.
//
// One warp asks for blocks, two warpgroups take 64 rows each; where there are no more than 64 they
// take turns with the blocks. The scores of a block are computed while the values of the block
// before are added up. All rows see all keys, so only the end of a piece is masked.
#pragma once

#include "arch/mma_sm80.cuh"
#include "arch/tma_sm90.cuh"
#include "arch/wgmma_sm90.cuh"
#include "block/shared_work.cuh"
#include "block/soft_cap.cuh"
#include "mainloop/shared_merge_sm90.cuh"

constexpr u64 kEvictNormal = 0x1000000000000000ull;

// The warp that asks.
template <class V>
struct SharedLoads {
  using S = SharedPlaces<V>;
  static constexpr int kPanels = V::kWiden ? 1 : V::kHeadDim / 64, kPanelBytes = kShareKeys * 128;
  static constexpr int kStages = S::kLoadStages, kWidth = 128 / kItemBytes<V::kCache>;

  const AttentionParams &p;
  const DecodeParams &d;
  const SharedParams &s;
  const TensorMap *const k_map, *const v_map;
  const u32 base;

  __device__ __forceinline__ void run(const SharedStarts &from) const {
    const int lane = threadIdx.x % 32;
    const int boxes = kShareKeys >> s.box_shift, box = lane / kPanels, panel = lane % kPanels;
    SharedWalk walk(p, s, from);
    int stage = 0;
    u32 phase = 0;
#pragma unroll 1
    while (!walk.done()) {
      walk.next();
      const i32 *const row =
          reinterpret_cast<const i32 *>(p.block_table + walk.request * p.table_row_stride);
      // The cache block and slot of this lane's box; past the end there is no such block, and the
      // box is filled with zeros.
      int key = walk.key + (box << s.box_shift), slot;
      const int end = walk.key + walk.keys;
      const auto find = [&](int at, int &in_block) {
        const int column = d.page_shift >= 0 ? at >> d.page_shift : at / p.page_size;
        in_block = at - column * p.page_size;
        return at < end && box < boxes ? row[column] : -1;
      };
      int block = find(key, slot);
#pragma unroll 1
      for (int left = walk.blocks; left; --left) {
        const i32 where[5] = {panel * kWidth, slot, 0, walk.head, block};
        const u32 to = base + stage * S::kLoadBytes + panel * kPanelBytes +
                       (box << s.box_shift) * 128;
        key += kShareKeys;
        block = find(key, slot);
        mbarrier_wait(base + S::kLoadedKeyEmpty + 8 * stage, phase ^ 1);
        if (lane == 0) mbarrier_arrive_expect(base + S::kLoadedKeyFull + 8 * stage, S::kLoadBytes);
        __syncwarp();
        if (box < boxes) {
          tma_load5(to + S::kLoads, k_map, where, base + S::kLoadedKeyFull + 8 * stage,
                    kEvictNormal);
        }
        if constexpr (V::kInside) {
          if (!V::kParts || V::kWiden || stage == kStages - 1) {  // of few requests, of the last
            mbarrier_wait(base + S::kRows, 0);  // the schedule is made in the memory of values
          }
        }
        mbarrier_wait(base + S::kLoadedValueEmpty + 8 * stage, phase ^ 1);
        if (lane == 0) {
          mbarrier_arrive_expect(base + S::kLoadedValueFull + 8 * stage, S::kLoadBytes);
        }
        __syncwarp();
        if (box < boxes) {
          tma_load5(to + S::kLoadedValues, v_map, where, base + S::kLoadedValueFull + 8 * stage,
                    kEvictNormal);
        }
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
    }
  }
};

// A warpgroup that multiplies.
template <class V>
struct SharedProducts {
  using S = SharedPlaces<V>;
  static constexpr int kD = V::kHeadDim, kPanelBytes = kShareKeys * 128, kStages = V::kStages;
  static constexpr float kRescaleAt = 8.f;  // a maximum is kept until a score is 2^8 above it
  static constexpr u32 kAll = 0xffffffffu;

  const AttentionParams &p;
  const DecodeParams &d;
  const SharedParams &s;
  const u32 base;
  const int group;  // 0, 1
  const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;

  int slot = 0;  // the next block's stage
  u32 phase = 0;
  int before;  // the stage of the values that are not added up yet: one or two behind
  float score[kShareKeys / 2], acc[kD / 2], top[2], sum[2], slope[2];
  int distance[2];
  float scale[2];  // of 8-bit keys, a row: of scores, to base 2 unless they are modified
  u32 weight[kShareKeys / 16][4];

  __device__ __forceinline__ SharedProducts(const AttentionParams &p, const DecodeParams &d,
                                            const SharedParams &s, u32 base, int group)
      : p(p),
        d(d),
        s(s),
        base(base),
        group(group) {}

  __device__ __forceinline__ void advance() {
    before = slot;
    if (++slot == kStages) slot = 0, phase ^= 1;
  }
  __device__ __forceinline__ void give_back(u32 barriers, int slot) const {
    if (lane == 0) mbarrier_arrive(base + barriers + 8 * slot);
  }
  __device__ __forceinline__ void wait_for_values() const {
    mbarrier_wait(base + S::kValueFull + 8 * before, phase ^ (before > slot ? 1u : 0u));
  }
  // A block that the other warpgroup takes.
  __device__ __forceinline__ void skip() {
    mbarrier_wait(base + S::kKeyFull + 8 * slot, phase);
    give_back(S::kKeyEmpty, slot);
    mbarrier_wait(base + S::kValueFull + 8 * slot, phase);
    give_back(S::kValueEmpty, slot);
    if (++slot == kStages) slot = 0, phase ^= 1;
  }

  __device__ __forceinline__ void multiply_keys() {
    const u64 left = matrix_descriptor(base + group * S::kQueryBytes, 16, 1024);
    const u64 right = matrix_descriptor(base + S::kKeys + slot * S::kStageBytes, 16, 1024);
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      Wgmma<kShareKeys>::template shared<V::kCompute>(
          score, left + (i / 4 * 64 * 128 + i % 4 * 32) / 16,
          right + (i / 4 * kPanelBytes + i % 4 * 32) / 16, i > 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void multiply_values() {
    const u64 right =
        matrix_descriptor(base + S::kValues + before * S::kStageBytes, kPanelBytes, 1024);
#pragma unroll
    for (int i = 0; i < kShareKeys / 16; ++i) {
      Wgmma<kD>::template registers<V::kCompute>(acc, weight[i], right + i * 2048 / 16, 1);
    }
    wgmma_commit();
  }

  // Of the rows of this thread, for ALiBi: slopes to base 2, and how far in front of the piece's
  // first key of this thread a row is.
  __device__ __forceinline__ void look_up_slopes(const SharedWalk &walk, int first_token,
                                                 int rows) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      slope[h] = 0.f, distance[h] = 0;
      const int row = thread / 32 * 16 + lane / 4 + 8 * h, token = token_of(d, row);
      if (row >= rows) continue;
      const int4 of = walk.rows[first_token + token];
      const int head = walk.head * p.group + row - token * p.group;
      slope[h] = kLog2e * load_float(p.alibi_slopes, of.z * p.alibi_batch_stride +
                                                         head * p.alibi_head_stride);
      distance[h] = walk.key + 2 * (lane & 3) - of.y;
    }
  }

  // What scores are multiplied by before they are weights: to base 2, of row h of this thread.
  __device__ __forceinline__ float later_scale(int h) const {
    if constexpr (!V::kWiden) return s.scale;
    return V::kAlibi || p.softcap > 0.f ? 1.f : scale[h];
  }

  // Soft cap, ALiBi; then what lies past the end of the piece. `n`: blocks before this one.
  __device__ __forceinline__ void modify(int n, int valid) {
    if (V::kWiden && (V::kAlibi || p.softcap > 0.f)) {
#pragma unroll
      for (int i = 0; i < kShareKeys / 2; ++i) score[i] *= scale[i >> 1 & 1];
    }
    if (p.softcap > 0.f) SoftCap(s.modify_scale, p.softcap * kLog2e).apply(score);
    if constexpr (V::kAlibi) {
      const float scale = p.softcap > 0.f ? 1.f : s.modify_scale;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float first = slope[h] * static_cast<float>(distance[h] + n * kShareKeys);
#pragma unroll
        for (int i = 0; i < kShareKeys / 8; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float &x = score[4 * i + 2 * h + e];
            x = fmaf(x, scale, fmaf(slope[h], static_cast<float>(8 * i + e), first));
          }
        }
      }
    }
    if (valid >= kShareKeys) return;
    const int limit = valid - 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < kShareKeys / 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (8 * n >= limit) score[4 * n + 2 * h] = -infinity();
        if (8 * n + 1 >= limit) score[4 * n + 2 * h + 1] = -infinity();
      }
    }
  }

  // Every block has a whole page at least, so no row is without keys.
  template <bool kFirst>
  __device__ __forceinline__ bool fold(float (&factor)[2]) {
    float most[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      most[h] = kFirst ? score[2 * h] : fmaxf(top[h], score[2 * h]);
#pragma unroll
      for (int n = 0; n < kShareKeys / 8; ++n) {
        most[h] = fmaxf(most[h], fmaxf(score[4 * n + 2 * h], score[4 * n + 2 * h + 1]));
      }
      most[h] = quad_max(most[h]);
    }
    bool grew = true;
    if (!kFirst) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if ((most[h] - top[h]) * later_scale(h) <= kRescaleAt) most[h] = top[h];
      }
      grew = __any_sync(kAll, most[0] > top[0] || most[1] > top[1]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = later_scale(h), shift = most[h] * scale;
      float found = 0.f;
      if (!kFirst) factor[h] = exp2_approx(top[h] * scale - shift);
      top[h] = most[h];
#pragma unroll
      for (int n = 0; n < kShareKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float &x = score[4 * n + 2 * h + e];
          x = exp2_approx(fmaf(x, scale, -shift));
          found += x;
        }
      }
      sum[h] = kFirst ? found : fmaf(sum[h], factor[h], found);
    }
    return grew;
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < kShareKeys / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weight[i][j] = pack_pair<V::kCompute>(score[8 * i + 2 * j], score[8 * i + 2 * j + 1]);
      }
    }
  }

  // 64 rows of q, swizzled as a copy of boxes would. A negative scale changes their sign.
  __device__ __forceinline__ void gather(const SharedWalk &walk, int first_token, int rows) {
    if constexpr (V::kWiden) {
      gather_fp16(walk, first_token, rows);
      return;
    }
    constexpr int kChunks = kD / 8, kEach = 64 * kChunks / 128;
    const int chunk = thread % kChunks;
    uint4 v[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = i * (128 / kChunks) + thread / kChunks, token = token_of(d, row);
      v[i] = make_uint4(0u, 0u, 0u, 0u);
      if (row >= rows || chunk * 8 >= p.head_dim) continue;
      const i64 at = walk.rows[first_token + token].x;
      v[i] = *reinterpret_cast<const uint4 *>(
          p.q + at * p.q_token_stride +
          (walk.head * p.group + row - token * p.group) * p.q_head_stride + chunk * 16);
    }
    const u32 sign = p.softmax_scale < 0.f ? 0x80008000u : 0u;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = i * (128 / kChunks) + thread / kChunks;
      const u32 word[4] = {v[i].x ^ sign, v[i].y ^ sign, v[i].z ^ sign, v[i].w ^ sign};
      const u32 to = base + group * S::kQueryBytes + chunk / 8 * 64 * 128 + row * 128;
      store_shared16(to + ((chunk % 8 ^ row % 8) << 4), word);
    }
    fence_async_proxy();
    named_barrier_sync(2 + group, 128);
  }

  // The same for 8-bit keys: in fp16, bf16 rows divided by a power of two, as
  // block/decode_rows.cuh has them. Descales are those of each row's own request.
  __device__ __forceinline__ void gather_fp16(const SharedWalk &walk, int first_token, int rows) {
    constexpr int kChunks = kD / 8;
    const int chunk = thread % kChunks;
    const u32 scales = base + S::kRowScales + group * 64 * 8;
#pragma unroll 2
    for (int row = thread / kChunks; row < 64; row += 128 / kChunks) {
      u32 word[4] = {};
      float factor = 1.f, of_values = 1.f, largest = 0.f;
      if (row < rows) {
        const int token = token_of(d, row), head = walk.head * p.group + row - token * p.group;
        const int4 of = walk.rows[first_token + token];
        if (chunk * 8 < p.head_dim) {
          load_chunk(p.q + of.x * p.q_token_stride + head * p.q_head_stride, chunk, word);
        }
        factor = score_scale(p, of.z, walk.head), of_values = value_scale(p, of.z, walk.head);
      }
      int exponent = 0;
      if (p.q_type == kBf16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = unpack_bf16(word[i]);
          largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
#pragma unroll
        for (int mask = kChunks / 2; mask; mask /= 2) {
          largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, mask));
        }
        exponent = narrowing_exponent(largest);
        const float by = power_of_two(-exponent);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = unpack_bf16(word[i]);
          word[i] = pack_fp16(pair.x * by, pair.y * by);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] ^= factor < 0.f ? 0x80008000u : 0u;
      const u32 to = base + group * S::kQueryBytes + chunk / 8 * 64 * 128 + row * 128;
      store_shared16(to + ((chunk % 8 ^ row % 8) << 4), word);
      if (chunk) continue;
      factor = fmaxf(fabsf(factor), 1e-30f) * (V::kAlibi || p.softcap > 0.f ? 1.f : kLog2e);
      store_shared4(scales + row * 8, __float_as_uint(fmaxf(power_of_two(exponent) * factor, 1e-30f)));
      store_shared4(scales + row * 8 + 4, __float_as_uint(of_values));
    }
    fence_async_proxy();
    named_barrier_sync(2 + group, 128);
#pragma unroll
    for (int h = 0; h < 2; ++h) scale[h] = of_row(h, 0);
  }

  // Of a gathered row of this thread: what its scores (0) or values (1) are multiplied by.
  __device__ __forceinline__ float of_row(int h, int which) const {
    const int row = thread / 32 * 16 + lane / 4 + 8 * h;
    return __uint_as_float(
        load_shared4(base + S::kRowScales + (group * 64 + row) * 8 + which * 4));
  }

  // Eight elements of a query in fp16, or in bf16 as they are.
  __device__ __forceinline__ void load_chunk(const char *row, int chunk, u32 (&word)[4]) const {
    if (p.q_type <= kBf16) {
      const uint4 v = reinterpret_cast<const uint4 *>(row)[chunk];
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
      return;
    }
    const uint2 v = reinterpret_cast<const uint2 *>(row)[chunk];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 pair = (i < 2 ? v.x : v.y) >> i % 2 * 16 & 0xffffu;
      word[i] = p.q_type == kE4m3 ? fp8_to_fp16<kE4m3>(pair) : fp8_to_fp16<kE5m2>(pair);
    }
  }

  __device__ __forceinline__ void sweep(int first, int blocks, int step, int tail) {
    float factor[2];
    mbarrier_wait(base + S::kKeyFull + 8 * slot, phase);
    wgmma_fence();
    multiply_keys();
    wgmma_wait<0>();
    pin(score);
    give_back(S::kKeyEmpty, slot);
    advance();
    int n = first;
    modify(n, n == blocks - 1 ? tail : kShareKeys);
    fold<true>(factor);
    pack_weights();
#pragma unroll 1
    for (n += step; n < blocks; n += step) {
      if (step > 1) skip();
      mbarrier_wait(base + S::kKeyFull + 8 * slot, phase);
      wgmma_fence();
      multiply_keys();
      wait_for_values();
      wgmma_fence();
      multiply_values();
      wgmma_wait<1>();
      pin(score);
      give_back(S::kKeyEmpty, slot);
      modify(n, n == blocks - 1 ? tail : kShareKeys);
      const bool grew = fold<false>(factor);
      // Over at once; a boundary of blocks, which keeps the exponentials in front of the wait
      // below.
      wait_for_values();
      wgmma_wait<0>();
      pin(acc);
      give_back(S::kValueEmpty, before);
      advance();
      if (grew) {
#pragma unroll
        for (int i = 0; i < kD / 8; ++i) {
          acc[4 * i] *= factor[0], acc[4 * i + 1] *= factor[0];
          acc[4 * i + 2] *= factor[1], acc[4 * i + 3] *= factor[1];
        }
      }
      pack_weights();
    }
    wait_for_values();
    wgmma_fence();
    multiply_values();
    wgmma_wait<0>();
    pin(acc);
    give_back(S::kValueEmpty, before);
    if (step > 1 && n - step + 1 < blocks) skip();
  }

  // Straight from registers: 32 bytes of a row a quad.
  __device__ __forceinline__ void store(int first_row, int rows) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float all = quad_sum(sum[h]);
      const float of_values = V::kWiden ? of_row(h, 1) : 1.f;
      const float norm = all == 0.f ? 0.f : __fdividef(of_values, all);
      const int row = thread / 32 * 16 + lane / 4 + 8 * h;
      if (row >= rows) continue;
      float *const to = s.partial_out + static_cast<i64>(first_row + row) * kD + 2 * (lane & 3);
#pragma unroll
      for (int n = 0; n < kD / 8; ++n) {
        *reinterpret_cast<float2 *>(to + 8 * n) =
            make_float2(acc[4 * n + 2 * h] * norm, acc[4 * n + 2 * h + 1] * norm);
      }
      if ((lane & 3) == 0) s.partial_state[first_row + row] = make_float2(top[h] * later_scale(h), all);
    }
  }

  // Everything, the merge included: an instruction behind the loop would cost its registers.
  __device__ __forceinline__ void run(const SharedStarts &from) {
    SharedWalk walk(p, s, from);
#pragma unroll 1
    for (bool again = false;; again = true) {
      if (!walk.done()) {
        walk.next();
        const int half = half_tokens(p), skipped = walk.halves ? 0 : group * half;
        const int rows = max(0, min(half, walk.tokens - skipped)) * p.group;
        if (again) named_barrier_sync(2 + group, 128);
        gather(walk, walk.first_token + skipped, rows);
        if constexpr (V::kAlibi) look_up_slopes(walk, walk.first_token + skipped, rows);
#pragma unroll
        for (int i = 0; i < kD / 2; ++i) acc[i] = 0.f;
#pragma unroll
        for (int i = 0; i < kShareKeys / 2; ++i) score[i] = 0.f;
        top[0] = top[1] = -infinity();
        sum[0] = sum[1] = 0.f;
        const int tail = walk.keys - (walk.blocks - 1) * kShareKeys;
        if (walk.halves && group) skip();
        const int first = walk.halves ? group : 0;
        if (first < walk.blocks) sweep(first, walk.blocks, walk.halves ? 2 : 1, tail);
        const int behind = walk.halves ? group * walk.tokens : skipped;
        store(walk.partial_row + behind * p.group, rows);
      }
      if (walk.done()) {
        SharedMerge<V>(p, d, s).run(base, kOwnWarps + threadIdx.x / 32 - 8, from.groups[3]);
        return;
      }
    }
  }
};
