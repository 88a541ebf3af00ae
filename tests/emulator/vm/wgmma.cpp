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

constexpr int kMaxN = 256 + 8;  // a stride that does not fall on the same cache sets

// Rows of A: 16 of the warp; B as [k][n].
template <class E, int K>
static void load_a(Warp& w, const WgmmaOp& op, float (*a)[K]) {
  const uint8_t* const smem = w.cta->smem.data();
  const int32_t* const arg = op.insn->arg;
  const int row0 = (w.id & 3) * 16, per = E::kPerRegister;
  if (arg[RS]) {
    for (int i = 0; i < 4; i++)
      for (int l = 0; l < 32; l++)
        for (int e = 0; e < per; e++)
          a[l / 4 + (i & 1) * 8][l % 4 * per + (i >> 1) * 4 * per + e] = E::get(op.a[i * 32 + l], e);
  } else if (arg[TRANS_A]) {
    const Descriptor d(op.desc_a);
    float t[E::kPer16];
    for (int k = 0; k < K; k++)
      for (int j = 0; j < 2; j++) {
        E::decode(smem + d.mn_major(row0 / 8 + j, k), t);
        for (int e = 0; e < 8; e++) a[j * 8 + e][k] = t[e];
      }
  } else {
    const Descriptor d(op.desc_a);
    for (int r = 0; r < 16; r++)
      for (int h = 0; h < 2; h++) E::decode(smem + d.k_major(row0 + r, h), &a[r][h * E::kPer16]);
  }
  if (arg[SCALE_A] * arg[SCALE_B] < 0)
    for (int r = 0; r < 16; r++)
      for (int k = 0; k < K; k++) a[r][k] = -a[r][k];
}
template <class E, int K>
static void load_b(Warp& w, const WgmmaOp& op, float (*b)[kMaxN]) {
  const uint8_t* const smem = w.cta->smem.data();
  const Descriptor d(op.desc_b);
  const int n = op.insn->arg[N_];
  if (op.insn->arg[TRANS_B]) {
    for (int k = 0; k < K; k++)
      for (int j = 0; j < n / 8; j++) E::decode(smem + d.mn_major(j, k), &b[k][j * 8]);
    return;
  }
  for (int i = 0; i < n; i++)
    for (int h = 0; h < 2; h++) {
      float t[E::kPer16];
      E::decode(smem + d.k_major(i, h), t);
      for (int e = 0; e < E::kPer16; e++) b[h * E::kPer16 + e][i] = t[e];
    }
}

// Registers of two fp16 values: row and first column of each.
template <class F>
static void each_half(Warp& w, const int32_t* acc, int n, F f) {
  for (int i = 0; i < n / 4; i++)
    for (int l = 0; l < 32; l++) f(w.r(acc[i])[l], l / 4 + (i & 1) * 8, (i >> 1) * 8 + l % 4 * 2);
}

template <class EA, class EB>
static void compute(Warp& w, const WgmmaOp& op) {
  constexpr int K = 2 * EA::kPer16;
  const Insn& in = *op.insn;
  const int n = in.arg[N_];
  alignas(64) float a[16][K], b[K][kMaxN], c[16][kMaxN];
  load_a<EA, K>(w, op, a);
  load_b<EB, K>(w, op, b);
  const int32_t* acc = in.arg + first_acc(in);
  const bool half = in.arg[HALF];
  if (!op.scale) {
    for (auto& row : c) std::fill_n(row, n, 0.f);
  } else if (half) {
    each_half(w, acc, n, [&](uint32_t& r, int row, int col) {
      c[row][col] = half_to_float(r & 0xffff);
      c[row][col + 1] = half_to_float(r >> 16);
    });
  } else {
    for (int q = 0; q < n / 8; q++)
      for (int row = 0; row < 16; row++) {
        const int32_t* slot = acc + q * 4 + row / 8 * 2;
        gather8(&c[row][q * 8], w.r(slot[0]) + row % 8 * 4, w.r(slot[1]) + row % 8 * 4);
      }
  }
  tile_mma<K, kMaxN>(n, c, a, b);
  if (half) {
    each_half(w, acc, n, [&](uint32_t& r, int row, int col) {
      r = float_to_half(c[row][col]) | float_to_half(c[row][col + 1]) << 16;
    });
  } else {
    for (int q = 0; q < n / 8; q++)
      for (int row = 0; row < 16; row++) {
        const int32_t* slot = acc + q * 4 + row / 8 * 2;
        scatter8(&c[row][q * 8], w.r(slot[0]) + row % 8 * 4, w.r(slot[1]) + row % 8 * 4);
      }
  }
}

static void compute_any(Warp& w, const WgmmaOp& op) {
  const int a = op.insn->arg[TYPE_A], b = op.insn->arg[TYPE_B];
  if (a == W_F16) compute<EF16, EF16>(w, op);
  else if (a == W_BF16) compute<EBF16, EBF16>(w, op);
  else if (a == W_E4M3 && b == W_E4M3) compute<EE4M3, EE4M3>(w, op);
  else if (a == W_E4M3) compute<EE4M3, EE5M2>(w, op);
  else if (b == W_E4M3) compute<EE5M2, EE4M3>(w, op);
  else compute<EE5M2, EE5M2>(w, op);
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
    pend_shared_read(w, *w.cta, addr, 16, kAnyLane);
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
  for (const auto& [addr, bytes] : op.reads) land_shared_read(w, *w.cta, addr, bytes, kAnyLane);
  w.pc = pc;
  compute_any(w, op);
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
