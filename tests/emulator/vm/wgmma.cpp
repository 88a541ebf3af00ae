// wgmma: each of the four warps of a warpgroup computes its 16 rows, when its group is waited for.
#include <cmath>

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

// What this warp reads of `rows` rows (columns of B) from `first`; remembered by the CTA.
static Operand& operand(Warp& w, uint64_t desc, bool mn, int first, int rows) {
  // Bits that a descriptor leaves free tell operands apart.
  const uint64_t key = desc | uint64_t(mn) << 14 | uint64_t(rows / 8) << 52 | uint64_t(first / 16) << 58;
  auto& [recent, there] = w.cta->found_operands[key * 0x9E3779B97F4A7C15ull >> 54];
  if (there && recent == key) return *there;
  Operand& found = w.cta->operands[key];
  recent = key;
  there = &found;
  auto& out = found.ranges;
  if (!out.empty()) return found;
  const Descriptor d(desc);
  std::vector<uint64_t> chunks(w.vm->smem_end / 1024 + 1);  // a bit for each 16 bytes
  uint32_t low = ~0u, high = 0;
  const auto add = [&](uint32_t addr) {
    shared_bounds(w, addr, 16, "wgmma operand");
    chunks[addr / 1024] |= 1ull << addr / 16 % 64;
    low = std::min(low, addr);
    high = std::max(high, addr);
  };
  if (mn) {
    for (int k = 0; k < 16; k++)
      for (int j = first / 8; j < (first + rows) / 8; j++) add(d.mn_major(j, k));
  } else {
    for (int r = first; r < first + rows; r++)
      for (int c = 0; c < 2; c++) add(d.k_major(r, c));
  }
  for (uint32_t addr = low; addr <= high; addr += 16) {
    if (!(chunks[addr / 1024] >> addr / 16 % 64 & 1)) continue;
    if (!out.empty() && addr == out.back().addr + out.back().bytes) out.back().bytes += 16;
    else out.push_back({addr, 16});
  }
  place_operand(*w.cta, found);
  return found;
}
constexpr int kMaxN = 256 + 8;  // a stride that does not fall on the same cache sets

// Rows of A: 16 of the warp; B as [k][n].
template <class E, int K>
static void load_a(Warp& w, const WgmmaOp& op, float (*a)[K]) {
  const uint8_t* const smem = w.cta->smem.data();
  const int32_t* const arg = op.insn->arg;
  const int row0 = (w.id & 3) * 16;
  if (arg[RS]) {
    for (int i = 0; i < 4; i++)
      for (int row = 0; row < 8; row++)
        decode<E>(&op.a[i * 32 + row * 4], &a[row + (i & 1) * 8][(i >> 1) * K / 2]);
  } else if (arg[TRANS_A]) {
    const Descriptor d(op.desc_a);
    float t[16];
    for (int k = 0; k < K; k++)
      for (int j = 0; j < 2; j++) {
        decode<E>(smem + d.mn_major(row0 / 8 + j, k), t);
        for (int e = 0; e < 8; e++) a[j * 8 + e][k] = t[e];
      }
  } else {
    const Descriptor d(op.desc_a);
    for (int r = 0; r < 16; r++)
      for (int h = 0; h < 2; h++) decode<E>(smem + d.k_major(row0 + r, h), &a[r][h * K / 2]);
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
      for (int j = 0; j < n / 8; j++) decode<E>(smem + d.mn_major(j, k), &b[k][j * 8]);
    return;
  }
  for (int column = 0; column < n; column += 8) {
    uint32_t rows[2][8][4];
    w8 words[8];
    for (int h = 0; h < 2; h++) {
      for (int i = 0; i < 8; i++) memcpy(rows[h][i], smem + d.k_major(column + i, h), 16);
      transpose(rows[h], words + h * 4);
    }
    decode_columns<E, 8>(words, b, column);
  }
}

// c + a * b as 8-bit tensor cores add it up: products and c are cut towards zero at 13 bits below the
// highest exponent, which of a product is the sum of its factors' exponents; then the sum is.
static int exponent(float x) { return int(as_bits(x) >> 23 & 255) - 127; }  // -127 for 0
static float cut_sum(float c, const float* a, const float* b, int count) {
  float x[33], plain = c;
  int top = exponent(c);
  for (int k = 0; k < count; k++) {
    x[k] = a[k] * b[k * kMaxN];
    const int e = exponent(a[k]) + exponent(b[k * kMaxN]);
    if (x[k] != 0.f && e > top) top = e;
    plain += x[k];
  }
  if (!std::isfinite(plain) || top == -127) return plain;
  x[count] = c;
  int sum = 0;
  for (int k = 0; k <= count; k++) sum += int(std::ldexp(x[k], 13 - top));
  if (!sum) return 0.f;
  const int spare = 31 - __builtin_clz(unsigned(std::abs(sum))) - 13;
  if (spare > 0) sum = sum / (1 << spare) * (1 << spare);
  return std::ldexp(float(sum), top - 13);
}

// The same for many columns at a time, where all numbers are finite and none is near the ends of fp32.
typedef int32_t ints __attribute__((vector_size(sizeof(wide))));
typedef int8_t bytes __attribute__((vector_size(kWideFloats)));
typedef int8_t v64 __attribute__((vector_size(64)));
static ints exponents(wide x) { return (ints(x) >> 23 & 255) - 127; }
constexpr int kOfZero = -60, kLowest = -40, kEnd = 100;  // exponents of products are -32 to 30

template <int K>
static void cut_columns(float* c, const float* a, const float (*b)[kMaxN], const int8_t* top, int column) {
  bytes of_products;
  memcpy(&of_products, top + column, sizeof of_products);
  const wide old = load<wide>(c + column);
  const ints of_old = exponents(old);
  ints e = __builtin_convertvector(of_products, ints);
  e = e > kLowest ? e : -kEnd;
  e = e > of_old ? e : of_old;
  const wide up = wide((13 + 127 - e) << 23), down = wide((e - 13 + 127) << 23);
  ints sum = __builtin_convertvector(old * up, ints);
  for (int k = 0; k < K; k++) sum += __builtin_convertvector(a[k] * load<wide>(&b[k][column]) * up, ints);
  const wide found = wide(ints(__builtin_convertvector(sum, wide)) & ~0x3ff) * down;  // 14 bits are left
  memcpy(c + column, &found, sizeof found);
}

static bool any(ints x) {
  int found = 0;
  for (int i = 0; i < kWideFloats; i++) found |= x[i];
  return found;
}

// low[k][column]: exponents of 8-bit values; endless[column]: not 0 where one is an infinity or NaN.
template <int K>
static void exponents_of_columns(int n, const float (*b)[kMaxN], int8_t (*low)[kMaxN], int32_t* endless) {
  for (int q = 0; q < n; q += kWideFloats) {
    ints no_number = {};
    for (int k = 0; k < K; k++) {
      const wide x = load<wide>(&b[k][q]);
      const ints e = exponents(x);
      no_number |= e == 128;
      const bytes small = __builtin_convertvector(x == 0.f ? ints{} + kOfZero : e, bytes);
      memcpy(&low[k][q], &small, sizeof small);
    }
    memcpy(&endless[q], &no_number, sizeof no_number);
  }
}

template <int K>
static void cut_mma(int n, float (*c)[kMaxN], const float (*a)[K], const float (*b)[kMaxN]) {
  int8_t low[K][kMaxN], top[kMaxN];
  int32_t endless[kMaxN], alone[kMaxN];
  exponents_of_columns<K>(n, b, low, endless);
  for (int row = 0; row < 16; row++) {
    int8_t high[K];
    int32_t all = 0;
    for (int k = 0; k < K; k++) {
      const int e = exponent(a[row][k]);
      high[k] = int8_t(a[row][k] == 0.f ? kOfZero : e);
      all |= -(e == 128);
    }
    for (int q = 0; q < n; q += 64) {
      v64 most = v64{} + int8_t(2 * kOfZero);
      for (int k = 0; k < K; k++) {
        const v64 e = load<v64>(&low[k][q]) + high[k];
        most = e > most ? e : most;
      }
      memcpy(&top[q], &most, sizeof most);
    }
    float one_by_one[kMaxN];
    ints some = {};
    for (int q = 0; q < n; q += kWideFloats) {
      const wide old = load<wide>(&c[row][q]);
      bytes of_products;
      memcpy(&of_products, top + q, sizeof of_products);
      const ints e = exponents(old), nothing = __builtin_convertvector(of_products, ints) <= kLowest;
      const ints found = (nothing & (e < -kEnd) & (ints(old) != 0)) | (e >= kEnd) | load<ints>(&endless[q]) | all;
      memcpy(&alone[q], &found, sizeof found);
      some |= found;
    }
    const bool slow = any(some);
    for (int q = 0; slow && q < n; q++)
      if (alone[q]) one_by_one[q] = cut_sum(c[row][q], a[row], &b[0][q], K);
    for (int q = 0; q < n; q += kWideFloats) cut_columns<K>(c[row], a[row], b, top, q);
    for (int q = 0; slow && q < n; q++)
      if (alone[q]) c[row][q] = one_by_one[q];
  }
}

// Registers of two fp16 values: row and first column of each.
template <class F>
static void each_half(Warp& w, const int32_t* acc, int n, F f) {
  for (int i = 0; i < n / 4; i++)
    for (int l = 0; l < 32; l++) f(w.r(acc[i])[l], l / 4 + (i & 1) * 8, (i >> 1) * 8 + l % 4 * 2);
}

// Products one after the other into one accumulator.
template <class EA, class EB>
static void compute(Warp& w, const WgmmaOp* const* ops, size_t count) {
  constexpr int K = 8 * kPerWord<EA>;
  const Insn& in = *ops[0]->insn;
  const int n = in.arg[N_];
  alignas(64) float a[16][K], b[K][kMaxN], c[16][kMaxN];
  const int32_t* acc = in.arg + first_acc(in);
  const bool half = in.arg[HALF];
  if (half) {
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
  for (size_t i = 0; i < count; i++) {
    if (!ops[i]->scale)
      for (auto& row : c) std::fill_n(row, n, 0.f);
    load_a<EA, K>(w, *ops[i], a);
    load_b<EB, K>(w, *ops[i], b);
    if (EA::kBits == 8 && !half) {
      cut_mma<K>(n, c, a, b);
    } else {
      tile_mma<K, kMaxN>(n, c, a, b);
    }
  }
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

static void compute_any(Warp& w, const WgmmaOp* const* ops, size_t count) {
  const int a = ops[0]->insn->arg[TYPE_A], b = ops[0]->insn->arg[TYPE_B];
  if (a == W_F16) compute<EF16, EF16>(w, ops, count);
  else if (a == W_BF16) compute<EBF16, EBF16>(w, ops, count);
  else if (a == W_E4M3 && b == W_E4M3) compute<EE4M3, EE4M3>(w, ops, count);
  else if (a == W_E4M3) compute<EE4M3, EE5M2>(w, ops, count);
  else if (b == W_E4M3) compute<EE5M2, EE4M3>(w, ops, count);
  else compute<EE5M2, EE5M2>(w, ops, count);
}

// An accumulator in flight: its value is set aside, the registers are poison.
static void set_aside(Warp& w, WgmmaOp& op) {
  const Insn& in = *op.insn;
  const int first = first_acc(in), count = num_acc(in);
  if (!w.spare.empty()) {
    op.acc = std::move(w.spare.back());
    w.spare.pop_back();
  }
  op.acc.resize(size_t(count) * 32);
  for (int i = 0; i < count; i++) {
    uint32_t* r = w.r(in.arg[first + i]);
    memcpy(&op.acc[i * 32], r, 128);
    std::fill_n(r, 32, kPoisonRegister);
  }
  op.first = true;
}
static void bring_back(Warp& w, WgmmaOp& op) {
  const Insn& in = *op.insn;
  const int first = first_acc(in), count = num_acc(in);
  for (int i = 0; i < count; i++) memcpy(w.r(in.arg[first + i]), &op.acc[i * 32], 128);
  w.spare.push_back(std::move(op.acc));
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
  const uint64_t *const a = w.d(arg[DESC_A]), *const b = w.d(arg[DESC_B]);
  uint64_t differ = 0;
  for (int l = 1; l < 32; l++) differ |= b[l] ^ b[0];
  if (!arg[RS])
    for (int l = 1; l < 32; l++) differ |= a[l] ^ a[0];
  if (differ) fail("WGMMA: a matrix descriptor differs between lanes");
  op.desc_b = b[0];
  if (arg[RS]) {
    for (int i = 0; i < 4; i++) {
      const int slot = arg[DESC_A + i];
      if (w.in_flight[slot / 32] & kWritten) fail("WGMMA: A registers are an accumulator in flight");
      memcpy(&op.a[i * 32], w.r(slot), 128);
    }
  } else {
    op.desc_a = a[0];
  }
  bool in_chain = false;
  for (int i = 0; i < count; i++) {
    const uint8_t state = w.in_flight[arg[first + i] / 32];
    if (state & kRead) fail("WGMMA: the accumulator is an A operand in flight");
    if (i == 0) in_chain = state & kWritten;
    else if (in_chain != ((state & kWritten) != 0)) fail("WGMMA: accumulators in flight overlap in part");
  }
  if (!arg[RS]) op.reads[0] = &operand(w, op.desc_a, arg[TRANS_A], (w.id & 3) * 16, 16);
  op.reads[1] = &operand(w, op.desc_b, arg[TRANS_B], 0, arg[N_]);
  for (Operand* const r : op.reads)
    if (r) pend_operand(w, *r);
  if (!in_chain) set_aside(w, op);
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
// Whether `b`, which follows `a`, may be summed with it before anything is rounded to registers.
static bool fuse(const WgmmaOp& a, const WgmmaOp& b) {
  const int32_t *x = a.insn->arg, *y = b.insn->arg;
  return !b.first && same_accumulator(a, b) && !x[HALF] && x[N_] == y[N_] && x[TYPE_A] == y[TYPE_A] && x[TYPE_B] == y[TYPE_B];
}

void retire_wgmmas(Warp& w, size_t allowed) {
  std::vector<const WgmmaOp*> done;
  std::vector<std::vector<WgmmaOp>> groups;
  while (w.wgmma_groups.size() > allowed) {
    groups.push_back(std::move(w.wgmma_groups.front()));
    w.wgmma_groups.pop_front();
  }
  for (auto& group : groups)
    for (WgmmaOp& op : group) {
      if (op.first) bring_back(w, op);
      done.push_back(&op);
    }
  if (done.empty()) return;
  const int pc = w.pc;
  for (size_t i = 0, end; i < done.size(); i = end) {
    for (end = i + 1; end < done.size() && fuse(*done[i], *done[end]);) end++;
    compute_any(w, &done[i], end - i);
    for (size_t k = i; k < end; k++) {
      w.pc = done[k]->pc;
      for (Operand* const r : done[k]->reads)
        if (r) land_operand(w, *r);
      const Insn& in = *done[k]->insn;
      for (int j = in.arg[RS] ? DESC_A : DESC_A + 1; j < in.nargs; j++) w.in_flight[in.arg[j] / 32] = 0;
    }
  }
  w.pc = pc;
  w.wgmma_fenced = false;
  w.any_in_flight = false;
  const auto still = [&](WgmmaOp& op) {
    const Insn& in = *op.insn;
    w.any_in_flight = true;
    // What goes on from a finished accumulator takes over its value.
    if (!op.first && !(w.in_flight[in.arg[first_acc(in)] / 32] & kWritten)) set_aside(w, op);
    for (int i = first_acc(in); i < in.nargs; i++) w.in_flight[in.arg[i] / 32] = kWritten;
    if (in.arg[RS])
      for (int i = 0; i < 4; i++) w.in_flight[in.arg[DESC_A + i] / 32] |= kRead;
  };
  for (auto& g : w.wgmma_groups)
    for (WgmmaOp& op : g) still(op);
  for (WgmmaOp& op : w.open_wgmmas) still(op);
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
