// Clusters and CTAs as they start: registers, shared memory, special registers.
#include "vm.h"

namespace emu {

enum Special { kTidX, kTidY, kTidZ, kNtidX, kNtidY, kNtidZ, kCtaX, kCtaY, kCtaZ, kNctaX, kNctaY, kNctaZ, kLane,
               kWarpId, kNwarp, kSmid, kNsmid, kMaskEq, kMaskLt, kMaskLe, kMaskGt, kMaskGe, kDynSmem, kTotalSmem,
               kGridId, kClusterRank, kClusterSize, kClusterCtaX, kClusterCtaY, kClusterCtaZ, kClusterNctaX,
               kClusterNctaY, kClusterNctaZ, kClusterX, kClusterY, kClusterZ, kNclusterX, kNclusterY, kNclusterZ };

static uint32_t special(const Machine& vm, const Cta& cta, int warp, int l, int id) {
  const uint32_t t = uint32_t(warp * 32 + l);
  const auto& b = vm.cfg.block;
  const auto &g = vm.cfg.grid, &c = vm.cfg.cluster;
  switch (id) {
    case kTidX: return uint32_t(t % b[0]);
    case kTidY: return uint32_t(t / b[0] % b[1]);
    case kTidZ: return uint32_t(t / (b[0] * b[1]));
    case kNtidX: case kNtidY: case kNtidZ: return uint32_t(b[id - kNtidX]);
    case kCtaX: case kCtaY: case kCtaZ: return cta.block[id - kCtaX];
    case kNctaX: case kNctaY: case kNctaZ: return uint32_t(g[id - kNctaX]);
    case kLane: return l;
    case kWarpId: return warp;
    case kNwarp: return vm.warps_per_cta;
    case kSmid: return uint32_t(cta.index % vm.cfg.resident);
    case kNsmid: return uint32_t(vm.cfg.resident);
    case kMaskEq: return 1u << l;
    case kMaskLt: return (1u << l) - 1;
    case kMaskLe: return (2u << l) - 1;
    case kMaskGt: return ~((2u << l) - 1);
    case kMaskGe: return ~((1u << l) - 1);
    case kDynSmem: return uint32_t(vm.cfg.smem);
    case kTotalSmem: return vm.smem_end - kSharedBase;
    case kClusterRank: return uint32_t(cta.rank);
    case kClusterSize: return uint32_t(cta.cluster->size());
    case kClusterCtaX: case kClusterCtaY: case kClusterCtaZ: return uint32_t(cta.block[id - kClusterCtaX] % c[id - kClusterCtaX]);
    case kClusterNctaX: case kClusterNctaY: case kClusterNctaZ: return uint32_t(c[id - kClusterNctaX]);
    case kClusterX: case kClusterY: case kClusterZ: return uint32_t(cta.block[id - kClusterX] / c[id - kClusterX]);
    case kNclusterX: case kNclusterY: case kNclusterZ: return uint32_t(g[id - kNclusterX] / c[id - kNclusterX]);
    default: return 0;
  }
}

void Machine::start_cluster(int64_t index) {
  const auto &g = cfg.grid, &c = cfg.cluster;
  auto cluster = std::make_unique<Cluster>();
  cluster->vm = this;
  cluster->index = index;
  const int64_t at[3] = {index % (g[0] / c[0]), index / (g[0] / c[0]) % (g[1] / c[1]), index / (g[0] / c[0] * (g[1] / c[1]))};
  for (int64_t rank = 0; rank < c[0] * c[1] * c[2]; rank++) {
    auto cta = std::make_unique<Cta>();
    cta->rank = int(rank);
    cta->cluster = cluster.get();
    cluster->ctas.push_back(std::move(cta));
  }
  for (auto& cta : cluster->ctas) {
    const int64_t r = cta->rank;
    const int64_t block[3] = {at[0] * c[0] + r % c[0], at[1] * c[1] + r / c[0] % c[1], at[2] * c[2] + r / (c[0] * c[1])};
    start_cta(*cta, block);
  }
  clusters.push_back(std::move(cluster));
}

void Machine::start_cta(Cta& self, const int64_t* block) {
  Cta* const cta = &self;
  cta->vm = this;
  cta->index = block[0] + cfg.grid[0] * (block[1] + cfg.grid[1] * block[2]);
  for (int d = 0; d < 3; d++) cta->block[d] = uint32_t(block[d]);
  cta->smem.assign(smem_end + 16, kPoisonByte);
  if (check) cta->shadow.init(smem_end + 16, int(warps_per_cta), cta->cluster->size());
  for (uint32_t id = 0; id < warps_per_cta; id++) {
    auto w = std::make_unique<Warp>();
    w->vm = this;
    w->cta = cta;
    w->id = int(id);
    const uint32_t left = threads - id * 32;
    w->live = left >= 32 ? ~0u : (1u << left) - 1;
    w->born = w->live;
    w->paths = {{0, w->live}};
    std::fill_n(w->floor, 32, 1u);
    w->file.assign(prog.file_words, kPoisonRegister);
    w->in_flight.assign(prog.file_words / 32 + 2, 0);
    w->local.assign(size_t(prog.local_bytes) * 32, kPoisonByte);
    for (size_t i = 0; i < prog.constants.size(); i += 4) {
      const int32_t* c = &prog.constants[i];
      if (c[1] == 2) w->p(c[0]) = uint32_t(c[2]);
      else if (c[1]) std::fill_n(w->d(c[0]), 32, uint64_t(uint32_t(c[3])) << 32 | uint32_t(c[2]));
      else std::fill_n(w->r(c[0]), 32, uint32_t(c[2]));
    }
    for (size_t i = 0; i < prog.specials.size(); i += 2)
      for (int l = 0; l < 32; l++) w->r(prog.specials[i])[l] = special(*this, *cta, int(id), l, prog.specials[i + 1]);
    cta->warps.push_back(std::move(w));
  }
  cta->live = int(warps_per_cta);
}

}  // namespace emu
