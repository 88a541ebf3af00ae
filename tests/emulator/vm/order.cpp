// Happens-before: what a lane knows, and how barriers, fences and strong accesses pass it on.
#include "vm.h"

namespace emu {

static int nw(const Warp& w) { return w.cta->num_warps(); }
static int nm(const Warp& w) { return w.cta->num_mbar(); }
static uint64_t entity(const Cta& c, int warp) { return uint64_t(c.index) * kMaxWarps + warp; }

Order& view(Warp& w, int lane) {
  const bool part = lane < 32 && (w.partial_mask >> lane & 1);
  return part ? w.partial : w.base;
}

static Entry own_entry(const Warp& w, uint32_t mask) {
  Entry e;
  if ((mask & w.live) == w.live) {
    e.all = w.clock;
    return e;
  }
  e.all = w.low_floor - 1;
  e.some = w.clock;
  e.mask = mask;
  return e;
}

// What `mask` knows, its own accesses included; later accesses get a later clock.
Order release(Warp& w, uint32_t mask) {
  Order o = (mask & w.partial_mask) ? w.partial : w.base;
  o.seen.warp[w.id] = own_entry(w, mask);
  w.clock++;
  return o;
}

static void update_floor(Warp& w) {
  w.low_floor = ~0u;
  each_lane(w.live, [&](int l) { w.low_floor = std::min(w.low_floor, w.floor[l]); });
}

void acquire(Warp& w, const Order& o, uint32_t mask) {
  if (!w.vm->check) return;
  if ((mask & w.live) == w.live) {
    w.base.join(o, nw(w), nm(w));
    if (w.partial_mask) w.partial.join(o, nw(w), nm(w));
  } else {
    if (!w.partial_mask) w.partial = w.base;
    w.partial_mask |= mask;
    w.partial.join(o, nw(w), nm(w));
  }
  const Entry& mine = o.seen.warp[w.id];
  const uint32_t known = std::max(mine.all, mine.some) + 1;
  if (known <= 1) return;
  each_lane(mask, [&](int l) { w.floor[l] = std::max(w.floor[l], known); });
  update_floor(w);
}

// The lanes of `mask` have met: each is ordered after what the others did.
void warp_sync(Warp& w, uint32_t mask) {
  if (!w.vm->check) return;
  w.clock++;
  each_lane(mask, [&](int l) { w.floor[l] = w.clock; });
  update_floor(w);
  if (!(w.partial_mask & mask)) return;
  if ((mask & w.live) == w.live) {
    w.base.join(w.partial, nw(w), nm(w));
    w.partial_mask = 0;
  } else {
    w.partial_mask |= mask;
  }
}

bool ordered_elsewhere(Warp& w, int lane, const Record& rec, bool async_proxy) {
  const Order& o = view(w, lane);
  if (!o.foreign) return false;
  const auto it = o.foreign->known.find(uint64_t(rec.cta) * kMaxWarps + rec.warp);
  if (it == o.foreign->known.end()) return false;
  return it->second.first.covers(rec.lane, rec.clock) &&
         (!async_proxy || !rec.generic || it->second.second.covers(rec.lane, rec.clock));
}

// ---- fences and strong accesses
static std::shared_ptr<const Foreign> to_foreign(const Warp& w, const Order& o) {
  auto f = o.foreign ? std::make_shared<Foreign>(*o.foreign) : std::make_shared<Foreign>();
  for (int i = 0; i < nw(w); i++) {
    auto& e = f->known[entity(*w.cta, i)];
    e.first.join(o.seen.warp[i]);
    e.second.join(o.proxied.warp[i]);
  }
  return f;
}

void fence(Warp& w, uint32_t mask, Scope scope) {
  if (!w.vm->check) return;
  const bool gpu = scope >= kScopeCluster;
  if (w.pending_cta) acquire(w, w.seen_cta, mask);
  if (gpu && w.pending_gpu) acquire(w, w.seen_gpu, mask);
  w.pending_cta = false;
  w.seen_cta = Order();
  if (gpu) {
    w.pending_gpu = false;
    w.seen_gpu = Order();
  }
  const Order o = release(w, mask);
  w.fence_cta = o;
  w.fenced_cta = true;
  if (gpu) {
    w.fence_gpu = o;
    w.fenced_gpu = true;
  }
}

void proxy_fence(Warp& w, uint32_t mask) {
  if (!w.vm->check) return;
  Order& o = (mask & w.partial_mask) ? w.partial : w.base;
  const Order point = release(w, mask);
  o.proxied.join(point.seen, nw(w), nm(w));
  if (o.foreign) {
    auto f = std::make_shared<Foreign>(*o.foreign);
    for (auto& [who, e] : f->known) e.second.join(e.first);
    o.foreign = f;
  }
  if (w.partial_mask && &o == &w.base) w.partial.proxied.join(point.seen, nw(w), nm(w));
}

static void publish(Warp& w, const Order& o, uint64_t addr, bool gpu) {
  w.cta->sync[addr].join(o, nw(w), nm(w));
  if (!gpu || addr >= kSharedWindow) return;
  auto& at = w.vm->sync[addr];
  const auto mine = to_foreign(w, o);
  if (!at) {
    at = mine;
  } else {
    auto merged = std::make_shared<Foreign>(*at);
    merged->join(*mine);
    at = merged;
  }
}

void strong_write(Warp& w, uint32_t mask, uint64_t addr, Ordering ordering, Scope scope) {
  if (!w.vm->check) return;
  if (ordering >= kRelease) {
    publish(w, release(w, mask), addr, scope >= kScopeCluster);
  } else {
    if (w.fenced_cta) publish(w, w.fence_cta, addr, false);
    if (w.fenced_gpu) publish(w, w.fence_gpu, addr, true);
    w.clock++;
  }
}

void strong_read(Warp& w, uint32_t mask, uint64_t addr, Ordering ordering, Scope scope) {
  if (!w.vm->check) return;
  const bool now = ordering == kAcquire || ordering == kAcqRel;
  const auto local = w.cta->sync.find(addr);
  if (local != w.cta->sync.end()) {
    if (now) {
      acquire(w, local->second, mask);
    } else {
      w.seen_cta.join(local->second, nw(w), nm(w));
      w.pending_cta = true;
    }
  }
  if (addr >= kSharedWindow) return;
  const auto wide = w.vm->sync.find(addr);
  if (wide == w.vm->sync.end()) return;
  Order o;
  o.foreign = wide->second;
  if (now && scope >= kScopeCluster) {
    acquire(w, o, mask);
  } else if (!now) {
    w.seen_gpu.join_foreign(o.foreign);
    w.pending_gpu = true;
  }
}

}  // namespace emu
