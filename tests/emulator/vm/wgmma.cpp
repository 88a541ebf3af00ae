// wgmma: each of the four warps of a warpgroup computes its 16 rows, when its group is waited for.
#include "matmul.h"
#include "vm.h"

namespace emu {

// args: N, type of A, type of B, scale A, scale B, A is MN-major, B is MN-major, A in registers, fp16 accumulator,
// scale-d predicate, descriptor of B, descriptor of A or four registers, accumulators...
enum { N_, TYPE_A, TYPE_B, SCALE_A, SCALE_B, TRANS_A, TRANS_B, RS, HALF, SCALE_D, DESC_B, DESC_A };
enum { W_F16, W_BF16, W_E4M3, W_E5M2 };
constexpr int kRead = 1, kWritten = 2;

static int first_acc(const Insn& in) { return DESC_A + (in.arg[RS] ? 4 : 1); }
static int num_acc(const Insn& in) { return in.arg[N_] / (in.arg[HALF] ? 4 : 2); }
static int elem_bytes(int type) { return type >= W_E4M3 ? 1 : 2; }

struct Descriptor {
  uint32_t start, lead, stride, mode;  // mode 0 none, 1 32, 2 64, 3 128 bytes

  explicit Descriptor(uint64_t d)
      : start(uint32_t(d & 0x3fff) << 4), lead(uint32_t(d >> 16 & 0x3fff) << 4), stride(uint32_t(d >> 32 & 0x3fff) << 4),
        mode(uint32_t(4 - (d >> 62)) & 3) {
    if (d >> 49 & 7) fail("WGMMA: a matrix descriptor with a base offset is not modelled");
  }
  uint32_t swizzled(uint32_t a) const { return a ^ ((a >> 7 & ((1u << mode) - 1)) << 4); }

  // 16 bytes: row `r` and chunk `c` (0 or 1) of k, K-major.
  uint32_t k_major(int r, int c) const {
    if (!mode) return start + r % 8 * 16 + r / 8 * stride + c * lead;
    return swizzled(start + r % 8 * (16u << mode) + r / 8 * stride + c * 16);
  }
  // 16 bytes: eight columns from 8 * `j` at row `k` of k, MN-major.
  uint32_t mn_major(int j, int k) const {
    if (!mode) return start + j * stride + k % 8 * 16 + k / 8 * lead;
    const int span = 1 << mode;
    return swizzled(start + j % span * 16 + j / span * lead + k % 8 * (16u << mode) + k / 8 * stride);
  }
};

static float element(const uint8_t* p, int type, int e) {
  if (type >= W_E4M3) return type == W_E4M3 ? e4m3_to_float(p[e]) : e5m2_to_float(p[e]);
  uint16_t v;
  memcpy(&v, p + 2 * e, 2);
  return type == W_F16 ? half_to_float(v) : bf16_to_float(v);
}

// Calls f(shared address) for all chunks that this warp reads of an operand of `rows` rows (columns of B).
template <class F>
static void chunks(uint64_t desc, bool mn, int first_row, int rows, F f) {
  const Descriptor d(desc);
  if (mn) {
    for (int k = 0; k < 16; k++)
      for (int j = first_row / 8; j < (first_row + rows) / 8; j++) f(d.mn_major(j, k));
  } else {
    for (int r = first_row; r < first_row + rows; r++)
      for (int c = 0; c < 2; c++) f(d.k_major(r, c));
  }
}

template <int K, int N>
static void compute(Warp& w, const WgmmaOp& op) {
  const Insn& in = *op.insn;
  const int32_t* const arg = in.arg;
  const uint8_t* const smem = w.cta->smem.data();
  alignas(32) float a[16][K], b[K][N], c[16][N];
  const int ta = arg[TYPE_A], tb = arg[TYPE_B], row0 = (w.id & 3) * 16;
  if (arg[RS]) {
    const int per = ta >= W_E4M3 ? 4 : 2, group = 4 * per;
    for (int i = 0; i < 4; i++)
      for (int l = 0; l < 32; l++) {
        const uint32_t r = op.a[i * 32 + l];
        for (int e = 0; e < per; e++)
          a[l / 4 + (i & 1) * 8][l % 4 * per + (i >> 1) * group + e] =
              element(reinterpret_cast<const uint8_t*>(&r), ta, e);
      }
  } else {
    const Descriptor d(op.desc_a);
    const int per = 16 / elem_bytes(ta);
    if (arg[TRANS_A]) {
      for (int k = 0; k < K; k++)
        for (int j = 0; j < 2; j++)
          for (int e = 0; e < 8; e++) a[j * 8 + e][k] = element(smem + d.mn_major(row0 / 8 + j, k), ta, e);
    } else {
      for (int r = 0; r < 16; r++)
        for (int h = 0; h < 2; h++)
          for (int e = 0; e < per; e++) a[r][h * per + e] = element(smem + d.k_major(row0 + r, h), ta, e);
    }
  }
  const Descriptor d(op.desc_b);
  const int per = 16 / elem_bytes(tb);
  if (arg[TRANS_B]) {
    for (int k = 0; k < K; k++)
      for (int j = 0; j < N / 8; j++) {
        const uint8_t* p = smem + d.mn_major(j, k);
        for (int e = 0; e < 8; e++) b[k][j * 8 + e] = element(p, tb, e);
      }
  } else {
    for (int n = 0; n < N; n++)
      for (int h = 0; h < 2; h++) {
        const uint8_t* p = smem + d.k_major(n, h);
        for (int e = 0; e < per; e++) b[h * per + e][n] = element(p, tb, e);
      }
  }
  const float sign = float(arg[SCALE_A] * arg[SCALE_B]);
  if (sign < 0)
    for (auto& row : a)
      for (float& v : row) v = -v;
  const int32_t* acc = arg + first_acc(in);
  const bool half = arg[HALF];
  for (int i = 0; i < N / 2; i++) {
    const uint32_t* r = w.r(acc[half ? i / 2 : i]);
    for (int l = 0; l < 32; l++) {
      float v = 0;
      if (op.scale) v = half ? half_to_float(r[l] >> (16 * (i & 1)) & 0xffff) : as_float(r[l]);
      c[l / 4 + (i >> 1 & 1) * 8][(i >> 2) * 8 + l % 4 * 2 + (i & 1)] = v;
    }
  }
  tile_mma<K, N>(c, a, b);
  for (int i = 0; i < N / 2; i++) {
    uint32_t* r = w.r(acc[half ? i / 2 : i]);
    for (int l = 0; l < 32; l++) {
      const float v = c[l / 4 + (i >> 1 & 1) * 8][(i >> 2) * 8 + l % 4 * 2 + (i & 1)];
      if (!half) r[l] = as_bits(v);
      else if (i & 1) r[l] = (r[l] & 0xffff) | float_to_half(v) << 16;
      else r[l] = (r[l] & 0xffff0000) | float_to_half(v);
    }
  }
}

template <int K>
static void compute_n(Warp& w, const WgmmaOp& op) {
#define CASE(N) case N: return compute<K, N>(w, op);
  switch (op.insn->arg[N_]) {
    CASE(8) CASE(16) CASE(24) CASE(32) CASE(40) CASE(48) CASE(56) CASE(64) CASE(72) CASE(80) CASE(88) CASE(96) CASE(104)
    CASE(112) CASE(120) CASE(128) CASE(136) CASE(144) CASE(152) CASE(160) CASE(168) CASE(176) CASE(184) CASE(192)
    CASE(200) CASE(208) CASE(216) CASE(224) CASE(232) CASE(240) CASE(248) CASE(256)
  }
#undef CASE
  fail("WGMMA: N = %d", op.insn->arg[N_]);
}

static Step issue(Warp& w, const Insn& in, uint32_t) {
  if (w.vm->warps_per_cta % 4) fail("WGMMA: the CTA is not made of whole warpgroups");
  // Compilers move plain register code across the fence, so what is asked for is a fence since the last wait.
  if (!w.wgmma_fenced) fail("WGMMA: no wgmma.fence since the last wgmma.wait_group (or the start)");
  const int32_t* const arg = in.arg;
  const int first = first_acc(in), count = num_acc(in);
  WgmmaOp op = {};
  op.insn = &in;
  op.pc = w.pc;
  op.scale = w.p(arg[SCALE_D]) & 1;
  if (w.p(arg[SCALE_D]) + 1 > 1) fail("WGMMA: scale-d differs between lanes");
  op.desc_b = w.d(arg[DESC_B])[0];
  for (int l = 1; l < 32; l++)
    if (w.d(arg[DESC_B])[l] != op.desc_b || (!arg[RS] && w.d(arg[DESC_A])[l] != w.d(arg[DESC_A])[0]))
      fail("WGMMA: a matrix descriptor differs between lanes");
  if (arg[RS]) {
    for (int i = 0; i < 4; i++) {
      const int slot = arg[DESC_A + i];
      if (w.in_flight[slot / 32] & kWritten) fail("WGMMA: A registers are an accumulator in flight");
      op.a.insert(op.a.end(), w.r(slot), w.r(slot) + 32);
    }
  } else {
    op.desc_a = w.d(arg[DESC_A])[0];
  }
  bool in_chain = false;
  for (int i = 0; i < count; i++) {
    const uint8_t state = w.in_flight[arg[first + i] / 32];
    if (state & kRead) fail("WGMMA: the accumulator is an A operand in flight");
    if (i == 0) in_chain = state & kWritten;
    else if (in_chain != ((state & kWritten) != 0)) fail("WGMMA: accumulators in flight overlap in part");
  }
  const auto add = [&](uint32_t addr) {
    shared_bounds(w, addr, 16, "wgmma operand");
    if (!w.vm->check) return;
    op.reads.push_back({addr, 16});
    pend_shared_read(w, addr, 16, kAnyLane);
  };
  if (!arg[RS]) chunks(op.desc_a, arg[TRANS_A], (w.id & 3) * 16, 16, add);
  chunks(op.desc_b, arg[TRANS_B], 0, arg[N_], add);
  op.first = !in_chain;
  if (op.first)
    for (int i = 0; i < count; i++) {
      uint32_t* r = w.r(arg[first + i]);
      op.acc.insert(op.acc.end(), r, r + 32);
      std::fill_n(r, 32, kPoisonRegister);
    }
  for (int i = 0; i < count; i++) w.in_flight[arg[first + i] / 32] |= kWritten;
  if (arg[RS])
    for (int i = 0; i < 4; i++) w.in_flight[arg[DESC_A + i] / 32] |= kRead;
  w.any_in_flight = true;
  w.wgmma_count++;
  w.open_wgmmas.push_back(std::move(op));
  return Step::kNext;
}

static bool same_accumulator(const WgmmaOp& a, const WgmmaOp& b) {
  return a.insn->arg[first_acc(*a.insn)] == b.insn->arg[first_acc(*b.insn)];
}

static void finish(Warp& w, WgmmaOp& op, std::vector<WgmmaOp*>& later) {
  const Insn& in = *op.insn;
  const int first = first_acc(in), count = num_acc(in);
  if (op.first)
    for (int i = 0; i < count; i++) std::copy_n(&op.acc[i * 32], 32, w.r(in.arg[first + i]));
  const int pc = w.pc;
  w.pc = op.pc;
  for (const auto& [addr, bytes] : op.reads) land_shared_read(w, addr, bytes, kAnyLane);
  w.pc = pc;
  if (in.arg[TYPE_A] >= W_E4M3) compute_n<32>(w, op);
  else compute_n<16>(w, op);
  for (WgmmaOp* next : later) {
    if (next->first || !same_accumulator(op, *next)) continue;
    next->first = true;  // it is still in flight: its accumulator goes back to poison
    for (int i = 0; i < count; i++) {
      uint32_t* r = w.r(in.arg[first + i]);
      next->acc.insert(next->acc.end(), r, r + 32);
      std::fill_n(r, 32, kPoisonRegister);
    }
    return;
  }
}

void retire_wgmmas(Warp& w, size_t allowed) {
  std::vector<WgmmaOp*> order;
  for (auto& g : w.wgmma_groups)
    for (WgmmaOp& op : g) order.push_back(&op);
  for (WgmmaOp& op : w.open_wgmmas) order.push_back(&op);
  size_t at = 0;
  std::vector<int> retired;
  while (w.wgmma_groups.size() > allowed) {
    for (WgmmaOp& op : w.wgmma_groups.front()) {
      std::vector<WgmmaOp*> later(order.begin() + ++at, order.end());
      finish(w, op, later);
      const Insn& in = *op.insn;
      for (int i = DESC_A; i < in.nargs; i++)
        if (in.arg[RS] || i > DESC_A) retired.push_back(in.arg[i]);
    }
    w.wgmma_groups.pop_front();
  }
  if (retired.empty()) return;
  for (int slot : retired) w.in_flight[slot / 32] = 0;
  w.wgmma_fenced = false;
  w.any_in_flight = false;
  const auto mark = [&](WgmmaOp& op) {
    const Insn& in = *op.insn;
    w.any_in_flight = true;
    for (int i = first_acc(in); i < in.nargs; i++) w.in_flight[in.arg[i] / 32] = kWritten;
    if (in.arg[RS])
      for (int i = 0; i < 4; i++) w.in_flight[in.arg[DESC_A + i] / 32] |= kRead;
  };
  for (auto& g : w.wgmma_groups)
    for (WgmmaOp& op : g) mark(op);
  for (WgmmaOp& op : w.open_wgmmas) mark(op);
}

static Step fence_registers(Warp& w, const Insn&, uint32_t) {
  w.wgmma_fenced = true;
  return Step::kNext;
}
static Step commit(Warp& w, const Insn&, uint32_t) {
  w.wgmma_groups.push_back(std::exchange(w.open_wgmmas, {}));
  return Step::kNext;
}
static Step wait(Warp& w, const Insn& in, uint32_t m) {
  retire_wgmmas(w, size_t(in.arg[0]));
  (void)m;
  return Step::kNext;
}

static const OpDef kOps[] = {
    {"wgmma.mma_async", "*", issue, 0, kAligned | kPreempt},
    {"wgmma.fence.sync.aligned", "", fence_registers, 0, kAligned | kPreempt},
    {"wgmma.commit_group.sync.aligned", "", commit, 0, kAligned | kPreempt},
    {"wgmma.wait_group.sync.aligned", "i", wait, 0, kAligned | kPreempt},
};
OpTable wgmma_ops() { return {kOps, sizeof kOps / sizeof kOps[0]}; }

}  // namespace emu
