// ldmatrix, stmatrix, movmatrix, mma.sync.
#include "alu.h"
#include "half.h"
#include "matmul.h"

namespace emu {

// args: number of matrices, transposed, space, address (3), registers...
static void rows_of(Warp& w, const Insn& in, bool write, const char* what, uint32_t* addr) {
  const int n = in.arg[0];
  for (int l = 0; l < n * 8; l++) {
    const uint64_t base = in.arg[3] < 0 ? 0 : in.arg[4] ? w.d(in.arg[3])[l] : w.r(in.arg[3])[l];
    const Target t = resolve(w, Space(in.arg[2]), base + int64_t(in.arg[5]), 16, l, write, what);
    if (t.space != kShared || t.cta != w.cta) fail("%s: not shared memory of its CTA", what);
    addr[l] = uint32_t(t.addr);
    if (write) guard_mbarriers(*w.cta, addr[l], 16);
  }
  w.vm->progress += write;
  w.vm->cfg.stats[write ? kSharedWritten : kSharedRead] += uint64_t(n) * 128;
  if (w.vm->check) check_shared_rows(w, addr, n * 8, write);
  for (int q = 0; q < n; q++) count_conflicts(w, addr, 0xffu << (8 * q), 16);
}

static Step ldmatrix(Warp& w, const Insn& in, uint32_t) {
  uint32_t addr[32];
  rows_of(w, in, false, "ldmatrix", addr);
  const uint8_t* const smem = w.cta->smem.data();
  uint32_t out[4][32];
  for (int q = 0; q < in.arg[0]; q++) {
    if (!in.arg[1]) {
      for (int i = 0; i < 8; i++) memcpy(out[q] + i * 4, smem + addr[q * 8 + i], 16);
    } else {
      for (int l = 0; l < 32; l++) {
        uint16_t lo, hi;
        memcpy(&lo, smem + addr[q * 8 + l % 4 * 2] + l / 4 * 2, 2);
        memcpy(&hi, smem + addr[q * 8 + l % 4 * 2 + 1] + l / 4 * 2, 2);
        out[q][l] = lo | uint32_t(hi) << 16;
      }
    }
  }
  for (int q = 0; q < in.arg[0]; q++) memcpy(w.r(in.arg[6 + q]), out[q], 128);
  return Step::kNext;
}

static Step stmatrix(Warp& w, const Insn& in, uint32_t) {
  uint32_t addr[32];
  rows_of(w, in, true, "stmatrix", addr);
  uint8_t* const smem = w.cta->smem.data();
  for (int q = 0; q < in.arg[0]; q++) {
    const uint32_t* r = w.r(in.arg[6 + q]);
    if (!in.arg[1]) {
      for (int i = 0; i < 8; i++) memcpy(smem + addr[q * 8 + i], r + i * 4, 16);
    } else {
      for (int l = 0; l < 32; l++) {
        const uint16_t lo = uint16_t(r[l]), hi = uint16_t(r[l] >> 16);
        memcpy(smem + addr[q * 8 + l % 4 * 2] + l / 4 * 2, &lo, 2);
        memcpy(smem + addr[q * 8 + l % 4 * 2 + 1] + l / 4 * 2, &hi, 2);
      }
    }
  }
  return Step::kNext;
}

static Step movmatrix(Warp& w, const Insn& in, uint32_t) {
  uint16_t x[8][8];
  memcpy(x, w.r(in.arg[1]), sizeof x);
  uint32_t* d = w.r(in.arg[0]);
  for (int l = 0; l < 32; l++) d[l] = x[l % 4 * 2][l / 4] | uint32_t(x[l % 4 * 2 + 1][l / 4]) << 16;
  return Step::kNext;
}

// mma.m16n8kK. args: D..., A..., B..., C... ; a row of a register of A or B is four lanes: four words of k.
template <int K, class A, class B, bool HALF_ACC>
static Step mma(Warp& w, const Insn& in, uint32_t) {
  constexpr int PER = kPerWord<A>, NA = K / PER / 2, NB = K / PER / 4, ND = HALF_ACC ? 2 : 4;
  alignas(32) float a[16][K], b[K][8], c[16][8];
  const int32_t *da = in.arg + ND, *db = da + NA, *dc = db + NB;
  for (int i = 0; i < NA; i++)
    for (int row = 0; row < 8; row++) decode<A>(w.r(da[i]) + row * 4, &a[row + (i & 1) * 8][(i >> 1) * 4 * PER]);
  w8 words[4 * NB];
  for (int i = 0; i < NB; i++) transpose(reinterpret_cast<const uint32_t(*)[4]>(w.r(db[i])), words + i * 4);
  decode_columns<B, 4 * NB>(words, b, 0);
  if constexpr (HALF_ACC) {
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++)
        c[l / 4 + (i >> 1) * 8][l % 4 * 2 + (i & 1)] = half_to_float(w.r(dc[i >> 1])[l] >> (16 * (i & 1)) & 0xffff);
  } else {
    for (int row = 0; row < 16; row++)
      gather8(c[row], w.r(dc[row / 8 * 2]) + row % 8 * 4, w.r(dc[row / 8 * 2 + 1]) + row % 8 * 4);
  }
  tile_mma<K, 8>(8, c, a, b);
  if constexpr (HALF_ACC) {
    for (int l = 0; l < 32; l++)
      for (int h = 0; h < 2; h++) {
        const float* v = &c[l / 4 + h * 8][l % 4 * 2];
        w.r(in.arg[h])[l] = float_to_half(v[0]) | float_to_half(v[1]) << 16;
      }
  } else {
    for (int row = 0; row < 16; row++)
      scatter8(c[row], w.r(in.arg[row / 8 * 2]) + row % 8 * 4, w.r(in.arg[row / 8 * 2 + 1]) + row % 8 * 4);
  }
  return Step::kNext;
}

#define MMA(NAME, SIG, K, A, B, HALF_ACC) {"mma.sync.aligned." NAME, SIG, mma<K, A, B, HALF_ACC>, 0, kAligned}
#define MMA_F32(K, SIG_A, SIG_B, S, A, B) \
  MMA("m16n8k" #K ".row.col.f32." S ".f32", "RRRR" SIG_A SIG_B "rrrr", K, A, B, false)

static const OpDef kOps[] = {
    {"ldmatrix", "*", ldmatrix, 0, kAligned | kPreempt},
    {"stmatrix", "*", stmatrix, 0, kAligned | kPreempt},
    {"movmatrix.sync.aligned.m8n8.trans.b16", "Rr", movmatrix, 0, kAligned},
    MMA_F32(16, "rrrr", "rr", "f16.f16", EF16, EF16), MMA_F32(16, "rrrr", "rr", "bf16.bf16", EBF16, EBF16),
    MMA_F32(8, "rr", "r", "f16.f16", EF16, EF16), MMA_F32(8, "rr", "r", "bf16.bf16", EBF16, EBF16),
    MMA_F32(32, "rrrr", "rr", "e4m3.e4m3", EE4M3, EE4M3), MMA_F32(32, "rrrr", "rr", "e4m3.e5m2", EE4M3, EE5M2),
    MMA_F32(32, "rrrr", "rr", "e5m2.e4m3", EE5M2, EE4M3), MMA_F32(32, "rrrr", "rr", "e5m2.e5m2", EE5M2, EE5M2),
    MMA_F32(16, "rr", "r", "e4m3.e4m3", EE4M3, EE4M3), MMA_F32(16, "rr", "r", "e5m2.e5m2", EE5M2, EE5M2),
    MMA("m16n8k16.row.col.f16.f16.f16.f16", "RRrrrrrrrr", 16, EF16, EF16, true),
    MMA("m16n8k8.row.col.f16.f16.f16.f16", "RRrrrrr", 8, EF16, EF16, true),
    MMA("m16n8k32.row.col.f16.e4m3.e4m3.f16", "RRrrrrrrrr", 32, EE4M3, EE4M3, true),
    MMA("m16n8k32.row.col.f16.e5m2.e5m2.f16", "RRrrrrrrrr", 32, EE5M2, EE5M2, true),
};
EMU_TABLE(matrix_ops, kOps)

}  // namespace emu
