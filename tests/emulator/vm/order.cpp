// Happens-before: what a lane knows, and how barriers, fences and strong accesses pass it on.
#include "vm.h"

namespace emu {

static int nw(const Warp& w) { return w.cta->num_warps(); }
static int nm(const Warp& w) { return w.cta->num_mbar(); }

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

// Knowledge of the own CTA that came back from others belongs to the own clocks.
static void fold(const Warp& w, Order& mine, const Foreign& o) {
  const auto end = o.lower_bound(entity(w.cta->index + 1, 0));
  for (auto it = o.lower_bound(entity(w.cta->index, 0)); it != end; ++it) {
    const int id = int(it->first - entity(w.cta->index, 0));
    if (id < kMaxWarps) {
      mine.seen.warp[id].join(it->second.seen);
      mine.proxied.warp[id].join(it->second.proxied);
    } else {
      uint32_t& phase = mine.seen.mbar[id - kMbarrierWriter];
      phase = std::max(phase, it->second.seen.all);
    }
  }
}

static void learn(const Warp& w, Order& mine, const Order& o) {
  const bool news = o.foreign && o.foreign != mine.foreign;
  mine.join(o, nw(w), nm(w));
  if (news) fold(w, mine, *o.foreign);
}

void acquire(Warp& w, const Order& o, uint32_t mask) {
  if (!w.vm->check) return;
  if ((mask & w.live) == w.live) {
    learn(w, w.base, o);
    if (w.partial_mask) learn(w, w.partial, o);
  } else {
    if (!w.partial_mask) w.partial = w.base;
    w.partial_mask |= mask;
    learn(w, w.partial, o);
    if ((w.partial_mask & w.live) == w.live) {  // all lanes have waited, one after the other
      w.base = w.partial;
      w.partial_mask = 0;
    }
  }
  Entry mine = o.seen.warp[w.id];
  if (o.foreign) {
    if (const Known* const k = o.foreign->find(entity(w.cta->index, w.id))) mine.join(k->seen);
  }
  const uint32_t known = std::max(mine.all, mine.some) + 1;
  if (known <= 1) return;
  each_lane(mask, [&](int l) { w.floor[l] = std::max(w.floor[l], known); });
  update_floor(w);
}

void acquire(Warp& w, const std::shared_ptr<const Foreign>& from, uint32_t mask) {
  if (!w.vm->check || !from) return;
  Order o;
  o.foreign = from;
  acquire(w, o, mask);
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

// ---- between CTAs
bool known_elsewhere(const Order& o, const Record& rec, bool async_proxy) {
  if (!o.foreign) return false;
  const Known* const k = o.foreign->find(entity(rec.cta, rec.warp));
  if (!k) return false;
  const int lane = rec.converged ? kAnyLane : rec.lane;
  if (!(rec.read ? k->done : k->seen).covers(lane, rec.clock)) return false;
  return !async_proxy || !rec.generic || k->proxied.covers(lane, rec.clock);
}

bool knows_of(const Warp& w, int lane, const Cta& cta) {
  const Order& o = lane < 32 && (w.partial_mask >> lane & 1) ? w.partial : w.base;
  if (!o.foreign) return false;
  const auto it = o.foreign->lower_bound(entity(cta.index, 0));
  return it != o.foreign->known.end() && it->first < entity(cta.index + 1, 0);
}

std::shared_ptr<const Foreign> reads_only(const Foreign& f) {
  auto out = std::make_shared<Foreign>();
  for (const auto& [who, e] : f.known) {
    out->known.push_back({who, Known()});
    out->known.back().second.done = e.done;
  }
  return out;
}

std::shared_ptr<const Foreign> abroad(const Warp& w, const Order& o, bool writes) {
  auto f = o.foreign ? std::make_shared<Foreign>(*o.foreign) : std::make_shared<Foreign>();
  for (int i = 0; i < nw(w); i++) {
    Known& e = f->at(entity(w.cta->index, i));
    e.seen.join(o.seen.warp[i]);
    e.proxied.join(o.proxied.warp[i]);
    e.done.join(o.seen.warp[i]);
  }
  if (w.cta->cluster->size() > 1)  // others may read what copies brought here
    for (int i = 0; i < nm(w); i++)
      if (const uint32_t phase = o.seen.mbar[i]) {
        Known& e = f->at(entity(w.cta->index, kMbarrierWriter + i));
        e.seen.all = e.done.all = std::max(e.seen.all, phase);
      }
  return writes ? f : reads_only(*f);
}

void join(std::shared_ptr<const Foreign>& into, const std::shared_ptr<const Foreign>& f) {
  if (!f || into == f) return;
  if (!into) {
    into = f;
    return;
  }
  if (into->holds(*f)) return;
  auto merged = std::make_shared<Foreign>(*into);
  merged->join(*f);
  into = merged;
}

// ---- fences and strong accesses
Level level(const Warp& w, Scope scope) {
  if (scope >= kScopeGpu) return kDevice;
  return scope == kScopeCluster && w.cta->cluster->size() > 1 ? kOwnCluster : kOwnCta;
}

void fence(Warp& w, uint32_t mask, Scope scope) {
  if (!w.vm->check) return;
  const Level top = level(w, scope);
  for (int i = 0; i <= top; i++)
    if (w.pending[i]) {
      acquire(w, w.seen_at[i], mask);
      w.pending[i] = false;
      w.seen_at[i] = Order();
    }
  const Order o = release(w, mask);
  for (int i = 0; i <= top; i++) {
    if (i == kOwnCluster && w.cta->cluster->size() == 1) continue;
    w.fence_at[i] = o;
    w.fenced[i] = true;
  }
}

void proxy_fence(Warp& w, uint32_t mask) {
  if (!w.vm->check) return;
  Order& o = (mask & w.partial_mask) ? w.partial : w.base;
  const Order point = release(w, mask);
  o.proxied.join(point.seen, nw(w), nm(w));
  if (o.foreign) {
    auto f = std::make_shared<Foreign>(*o.foreign);
    for (auto& [who, e] : f->known) e.proxied.join(e.seen);
    o.foreign = f;
  }
  if (w.partial_mask && &o == &w.base) w.partial.proxied.join(point.seen, nw(w), nm(w));
}

static void publish(Warp& w, const Order& o, uint64_t addr, Level top) {
  w.cta->sync[addr].join(o, nw(w), nm(w));
  if (top == kOwnCta) return;
  Cluster& cluster = *w.cta->cluster;
  const bool shared = addr >= kSharedWindow;
  if (shared && cluster.size() == 1) return;
  const auto f = abroad(w, o);
  if (cluster.size() > 1) join(cluster.sync[addr], f);
  if (top == kDevice && !shared) join(w.vm->sync[addr], f);
}

void strong_write(Warp& w, uint32_t mask, uint64_t addr, Ordering ordering, Scope scope) {
  if (!w.vm->check) return;
  const Level top = level(w, scope);
  if (ordering >= kRelease) {
    publish(w, release(w, mask), addr, top);
  } else {
    for (int i = 0; i < kLevels; i++)
      if (w.fenced[i]) publish(w, w.fence_at[i], addr, std::min(Level(i), top));
    w.clock++;
  }
}

void strong_read(Warp& w, uint32_t mask, uint64_t addr, Ordering ordering, Scope scope) {
  if (!w.vm->check) return;
  const bool now = ordering == kAcquire || ordering == kAcqRel;
  const Level top = level(w, scope);
  const auto local = w.cta->sync.find(addr);
  if (local != w.cta->sync.end()) {
    if (now) {
      acquire(w, local->second, mask);
    } else {
      w.seen_at[kOwnCta].join(local->second, nw(w), nm(w));
      w.pending[kOwnCta] = true;
    }
  }
  const auto take = [&](const auto& from, Level at) {
    const auto found = from.find(addr);
    if (found == from.end()) return;
    if (now) {
      acquire(w, found->second, mask);
    } else {
      w.seen_at[at].join_foreign(found->second);
      w.pending[at] = true;
    }
  };
  if (top >= kOwnCluster && w.cta->cluster->size() > 1) take(w.cta->cluster->sync, kOwnCluster);
  if (top == kDevice && addr < kSharedWindow) take(w.vm->sync, kDevice);
}

}  // namespace emu
