// Memory accesses: which space, in bounds, aligned; bank conflicts.
#include "vm.h"

namespace emu {

void fail(const char* format, ...) {
  char text[700];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw Fault(text);
}

int Machine::find_region(Warp& w, uint64_t addr, uint64_t bytes, bool write, const char* what) {
  int& cached = region_cache[w.pc];
  const Region* const regions = cfg.regions;
  if (!(cached >= 0 && addr >= regions[cached].begin && bytes <= regions[cached].end - addr &&
        addr < regions[cached].end)) {
    int lo = 0, hi = int(cfg.nregions);  // sorted by begin; they may overlap
    while (lo < hi) {
      const int mid = (lo + hi) / 2;
      (regions[mid].begin <= addr ? lo : hi) = regions[mid].begin <= addr ? mid + 1 : mid;
    }
    int found = -1;
    for (int i = lo - 1; i >= 0; i--)
      if (addr < regions[i].end && bytes <= regions[i].end - addr) {
        found = i;
        break;
      }
    if (found < 0) {
      const int near = lo > 0 ? lo - 1 : 0;
      if (cfg.nregions == 0) fail("OUT OF BOUNDS: %s of %llu bytes at 0x%llx: no array is registered", what,
                                  (unsigned long long)bytes, (unsigned long long)addr);
      const long long past = (long long)(addr + bytes - regions[near].end);
      fail("OUT OF BOUNDS: %s of %llu bytes at 0x%llx; nearest is array #%d, of %llu bytes: the access ends "
           "%lld bytes past its end (offset %lld)",
           what, (unsigned long long)bytes, (unsigned long long)addr, near,
           (unsigned long long)(regions[near].end - regions[near].begin), past,
           (long long)(addr - regions[near].begin));
    }
    cached = found;
  }
  if (write && !regions[cached].writable) fail("READ-ONLY: %s to array #%d, which is read-only", what, cached);
  return cached;
}

void shared_bounds(const Warp& w, uint32_t addr, uint64_t bytes, const char* what) {
  if (addr < kSharedBase || uint64_t(addr) + bytes > w.vm->smem_end)
    fail("OUT OF BOUNDS: %s of %llu bytes at shared address %u (valid: %u to %u)", what,
         (unsigned long long)bytes, addr, kSharedBase, w.vm->smem_end);
}

Target resolve(Warp& w, Space space, uint64_t addr, uint32_t bytes, int lane, bool write, const char* what) {
  Machine& vm = *w.vm;
  const bool from_generic = space == kGeneric;
  if (from_generic) {
    switch (addr & kWindowMask) {
      case kSharedWindow: space = kShared; break;
      case kLocalWindow: space = kLocal; break;
      case kParamWindow: space = kParam; break;
      default: space = kGlobal;
    }
  }
  const bool cluster = space == kSharedCluster || (space == kShared && from_generic);
  if (space == kSharedCluster) space = kShared;
  if (space >= kShared && space != kConst) addr &= ~kWindowMask;
  if (space == kShared) addr = uint32_t(addr);
  const uint32_t align = bytes >= 16 ? 16 : bytes;
  if (align > 1 && addr & (align - 1))
    fail("MISALIGNED: %s of %u bytes at %s address 0x%llx (lane %d)", what, bytes,
         space == kShared ? "shared" : space == kLocal ? "local" : "global", (unsigned long long)addr, lane);
  switch (space) {
    case kShared: {
      uint32_t at = uint32_t(addr);
      Cta& cta = cluster ? cta_of(w, at, lane, what) : *w.cta;
      shared_bounds(w, at, bytes, what);
      if (&cta != w.cta) vm.cfg.stats[kRemoteBytes] += bytes;
      return {cta.smem.data() + at, space, at, &cta};
    }
    case kLocal: {
      const uint64_t size = vm.prog.local_bytes;
      if (addr < 16 || addr + bytes > size) fail("OUT OF BOUNDS: %s of %u bytes at local address %llu", what, bytes,
                                                 (unsigned long long)addr);
      return {w.local.data() + size * lane + addr, space, addr, nullptr};
    }
    case kParam:
      if (write) fail("READ-ONLY: %s to a kernel parameter", what);
      if (addr + bytes > uint64_t(vm.cfg.param_bytes)) fail("OUT OF BOUNDS: %s at parameter offset %llu", what,
                                                            (unsigned long long)addr);
      return {const_cast<uint8_t*>(vm.cfg.params) + addr, space, addr, nullptr};
    default: {
      if (addr & kWindowMask) fail("OUT OF BOUNDS: %s at 0x%llx is not a global address", what,
                                   (unsigned long long)addr);
      const int region = vm.find_region(w, addr, bytes, write, what);
      (write ? vm.cfg.write_bytes : vm.cfg.read_bytes)[region] += bytes;
      return {reinterpret_cast<uint8_t*>(addr), kGlobal, addr, nullptr};
    }
  }
}

void guard_mbarriers(Cta& cta, uint32_t addr, uint32_t bytes) {
  if (addr >= cta.last_mbarrier + 8 || addr + bytes <= cta.first_mbarrier) return;
  if (bytes > 256) {
    for (const auto& [a, slot] : cta.mbarrier_at)
      if (a + 8 > addr && a < addr + bytes) fail("MBARRIER: a write to shared address %u overwrites a live mbarrier", a);
    return;
  }
  for (uint32_t a = addr & ~7u; a < addr + bytes; a += 8)
    if (cta.mbarrier_at.count(a)) fail("MBARRIER: a write to shared address %u overwrites a live mbarrier", addr);
}

// What releases at an address are remembered by: shared addresses name their CTA.
uint64_t sync_key(const Target& t) {
  return t.space == kShared ? kSharedWindow | uint64_t(t.cta->index) << kRankShift | t.addr : t.addr;
}

// Wavefronts of a shared-memory access; the excess over the least possible counts as conflicts.
void count_conflicts(Warp& w, const uint32_t* addr, uint32_t mask, int bytes) {
  const int words = bytes <= 4 ? 1 : bytes / 4, group = 32 / words;
  uint64_t waves = 0, least = 0;
  for (int first = 0; first < 32; first += group) {
    uint32_t lanes_in = mask >> first & (group == 32 ? ~0u : (1u << group) - 1);
    if (!lanes_in) continue;
    least++;
    uint32_t seen[32];  // one word per bank, without conflicts
    uint32_t used = 0;
    uint32_t extra[128];
    int n_extra = 0;
    each_lane(lanes_in, [&](int l) {
      for (int i = 0; i < words; i++) {
        const uint32_t word = addr[first + l] / 4 + i, bank = word & 31;
        if (!(used >> bank & 1)) {
          used |= 1u << bank;
          seen[bank] = word;
        } else if (seen[bank] != word) {
          bool known = false;
          for (int j = 0; j < n_extra; j++) known |= extra[j] == word;
          if (!known) extra[n_extra++] = word;
        }
      }
    });
    int most = 1;
    if (n_extra) {
      int count[32] = {};
      for (int j = 0; j < n_extra; j++) most = std::max(most, 1 + ++count[extra[j] & 31]);
    }
    waves += most;
  }
  w.vm->cfg.stats[kWavefronts] += waves;
  w.vm->cfg.conflicts[w.pc] += waves - least;
}

}  // namespace emu
