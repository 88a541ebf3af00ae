// Exchanges inside a warp: shfl, vote, match, redux, elect.
#include "alu.h"

namespace emu {

enum { UP, DOWN, BFLY, IDX };

// args: member mask, mode, D, predicate (junk slot if none), a, b, c
static Step shfl(Warp& w, const Insn& in, uint32_t m) {
  const uint32_t *a = w.r(in.arg[4]), *b = w.r(in.arg[5]), *c = w.r(in.arg[6]);
  uint32_t copy[32], valid = 0, out[32];
  memcpy(copy, a, sizeof copy);
  each_lane(m, [&](int l) {
    const uint32_t lane = l, bval = b[l] & 31, cval = c[l] & 31, segment = c[l] >> 8 & 31;
    const uint32_t max_lane = (lane & segment) | (cval & ~segment), min_lane = lane & segment;
    uint32_t j = 0;
    bool ok = false;
    switch (in.arg[1]) {
      case UP: j = lane - bval; ok = int32_t(j) >= int32_t(max_lane); break;
      case DOWN: j = lane + bval; ok = j <= max_lane; break;
      case BFLY: j = lane ^ bval; ok = j <= max_lane; break;
      default: j = min_lane | (bval & ~segment); ok = j <= max_lane;
    }
    if (!ok) j = lane;
    if (!(w.live >> j & 1)) fail("SHFL: lane %u reads lane %u, which has exited", lane, j);
    if (!(m >> j & 1)) fail("SHFL: lane %u reads lane %u, which does not take part", lane, j);
    out[l] = copy[j];
    valid |= uint32_t(ok) << l;
  });
  lanes(w.r(in.arg[2]), m, [&](int l) { return out[l]; });
  w.set_p(in.arg[3], m, valid);
  return Step::kNext;
}

// args: member mask, D, predicate, negated
static uint32_t voters(Warp& w, const Insn& in) { return in.arg[3] ? ~w.p(in.arg[2]) : w.p(in.arg[2]); }
static Step vote_any(Warp& w, const Insn& in, uint32_t m) { w.set_p(in.arg[1], m, voters(w, in) & m ? ~0u : 0); return Step::kNext; }
static Step vote_all(Warp& w, const Insn& in, uint32_t m) { w.set_p(in.arg[1], m, (voters(w, in) & m) == m ? ~0u : 0); return Step::kNext; }
static Step vote_uni(Warp& w, const Insn& in, uint32_t m) {
  const uint32_t v = voters(w, in) & m;
  w.set_p(in.arg[1], m, v == 0 || v == m ? ~0u : 0);
  return Step::kNext;
}
static Step ballot(Warp& w, const Insn& in, uint32_t m) {
  const uint32_t v = voters(w, in) & m;
  lanes(w.r(in.arg[1]), m, [=](int) { return v; });
  return Step::kNext;
}

// args: member mask, D, predicate, a
template <class T>
static Step match(Warp& w, const Insn& in, uint32_t m, bool all) {
  const auto* a = source<T>(w, in.arg[3]);
  uint32_t out[32] = {}, same = 0;
  each_lane(m, [&](int l) { each_lane(m, [&](int k) { out[l] |= uint32_t(a[k] == a[l]) << k; }); });
  const bool uniform = out[first_lane(m)] == m;
  if (uniform) same = ~0u;
  lanes(w.r(in.arg[1]), m, [&](int l) { return all ? (uniform ? m : 0) : out[l]; });
  if (all) w.set_p(in.arg[2], m, same);
  return Step::kNext;
}

// args: member mask, D, a
template <class F>
static Step redux(Warp& w, const Insn& in, uint32_t m, F f) {
  const uint32_t* a = w.r(in.arg[2]);
  uint32_t r = a[first_lane(m)];
  each_lane(m & (m - 1), [&](int l) { r = f(r, a[l]); });
  lanes(w.r(in.arg[1]), m, [=](int) { return r; });
  return Step::kNext;
}
#define REDUX(NAME, EXPR) {"redux.sync." NAME, "mRr", EMU_FN { return redux(w, in, m, [](u32 a, u32 b) -> u32 { return EXPR; }); }, 0, kPreempt | kMembers}

static Step active_mask(Warp& w, const Insn& in, uint32_t m) {
  lanes(w.r(in.arg[0]), m, [=](int) { return m; });
  return Step::kNext;
}

// args: member mask, D, predicate. The highest lane leads: a kernel must not rely on lane 0.
static Step elect(Warp& w, const Insn& in, uint32_t m) {
  const int leader = 31 - __builtin_clz(m);
  lanes(w.r(in.arg[1]), m, [=](int) { return uint32_t(leader); });
  w.set_p(in.arg[2], m, 1u << leader);
  return Step::kNext;
}

static const OpDef kOps[] = {
    {"shfl.sync", "miRPrrr", shfl, 0, kPreempt | kMembers},
    {"vote.sync.any", "mPpi", vote_any, 0, kPreempt | kMembers}, {"vote.sync.all", "mPpi", vote_all, 0, kPreempt | kMembers},
    {"vote.sync.uni", "mPpi", vote_uni, 0, kPreempt | kMembers}, {"vote.sync.ballot", "mRpi", ballot, 0, kPreempt | kMembers},
    {"match.any.sync.b32", "mRPr", EMU_FN { return match<u32>(w, in, m, false); }, 0, kPreempt | kMembers},
    {"match.all.sync.b32", "mRPr", EMU_FN { return match<u32>(w, in, m, true); }, 0, kPreempt | kMembers},
    {"match.any.sync.b64", "mRPd", EMU_FN { return match<u64>(w, in, m, false); }, 0, kPreempt | kMembers},
    {"match.all.sync.b64", "mRPd", EMU_FN { return match<u64>(w, in, m, true); }, 0, kPreempt | kMembers},
    REDUX("add.u32", a + b), REDUX("add.s32", a + b), REDUX("and.b32", a & b), REDUX("or.b32", a | b), REDUX("xor.b32", a ^ b),
    REDUX("min.u32", std::min(a, b)), REDUX("max.u32", std::max(a, b)),
    REDUX("min.s32", u32(std::min(s32(a), s32(b)))), REDUX("max.s32", u32(std::max(s32(a), s32(b)))),
    {"activemask.b32", "R", active_mask, 0, 0},
    {"elect.sync", "mRP", elect, 0, kPreempt | kMembers},
};
EMU_TABLE(collective_ops, kOps)

}  // namespace emu
