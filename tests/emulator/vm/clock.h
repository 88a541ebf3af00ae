// Vector clocks. Order between threads comes only from barriers, mbarriers, fences and waits.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace emu {

constexpr int kMaxWarps = 32;
constexpr int kMaxMbarriers = 96;  // of one CTA

// Lane of an access record, beside 0..31.
constexpr int kManyLanes = 32;  // several lanes, each for itself
constexpr int kAnyLane = 33;    // the warp as one: every lane knows that it is done

// What is known of one warp: accesses up to clock `all` of every lane, and up to `some` of the
// lanes in `mask` (a release by a part of the warp).
struct Entry {
  uint32_t all = 0, some = 0, mask = 0;

  void join(const Entry& o) {
    all = std::max(all, o.all);
    if (o.some > o.all && o.mask) {
      some = std::max(some, o.some);
      mask |= o.mask;
    }
    if (some <= all) some = mask = 0;
  }

  bool covers(int lane, uint32_t clock) const {
    if (clock <= all) return true;
    if (clock > some) return false;
    return lane == kAnyLane ? mask != 0 : lane == kManyLanes ? mask == ~0u : mask >> lane & 1;
  }
};

struct Clock {
  Entry warp[kMaxWarps];
  uint32_t mbar[kMaxMbarriers] = {};  // phases of an mbarrier whose copies are known to have landed

  void join(const Clock& o, int warps, int mbars) {
    for (int i = 0; i < warps; i++) warp[i].join(o.warp[i]);
    for (int i = 0; i < mbars; i++) mbar[i] = std::max(mbar[i], o.mbar[i]);
  }
};

// What is known of a warp of another CTA, or of copies on a mbarrier there.
struct Known {
  Entry seen, proxied, done;  // its writes; what of them the async proxy sees; its reads

  void join(const Known& o) {
    seen.join(o.seen);
    proxied.join(o.proxied);
    done.join(o.done);
  }
};

// By `entity`, in order. Empty for kernels whose CTAs do not talk.
struct Foreign {
  std::vector<std::pair<uint64_t, Known>> known;

  auto lower_bound(uint64_t who) const {
    return std::lower_bound(known.begin(), known.end(), who, [](const auto& e, uint64_t key) { return e.first < key; });
  }
  const Known* find(uint64_t who) const {
    const auto it = lower_bound(who);
    return it == known.end() || it->first != who ? nullptr : &it->second;
  }
  Known& at(uint64_t who) {
    const size_t i = lower_bound(who) - known.begin();
    if (i == known.size() || known[i].first != who) known.insert(known.begin() + i, {who, Known()});
    return known[i].second;
  }

  // Whether all that `o` holds is known.
  bool holds(const Foreign& o) const {
    size_t i = 0;
    for (const auto& [who, e] : o.known) {
      while (i < known.size() && known[i].first < who) i++;
      if (i == known.size() || known[i].first != who) return false;
      Known both = known[i].second;
      both.join(e);
      if (memcmp(&both, &known[i].second, sizeof both)) return false;
    }
    return true;
  }

  void join(const Foreign& o) {
    size_t i = 0;
    for (const auto& [who, e] : o.known) {
      while (i < known.size() && known[i].first < who) i++;
      if (i == known.size() || known[i].first != who) known.insert(known.begin() + i, {who, Known()});
      known[i].second.join(e);
    }
  }
};

// Key of a warp, or of kMbarrierWriter + slot, of a CTA.
inline uint64_t entity(int64_t cta, int id) { return uint64_t(cta) * 256 + uint64_t(id); }

// A point in the causality order: what happened before it, and what the async proxy sees of that.
struct Order {
  Clock seen, proxied;
  std::shared_ptr<const Foreign> foreign;

  void join_foreign(const std::shared_ptr<const Foreign>& o) {
    if (!o || o == foreign) return;
    if (!foreign) {
      foreign = o;
      return;
    }
    if (foreign->holds(*o)) return;
    auto merged = std::make_shared<Foreign>(*foreign);
    merged->join(*o);
    foreign = merged;
  }

  void join(const Order& o, int warps, int mbars) {
    seen.join(o.seen, warps, mbars);
    proxied.join(o.proxied, warps, mbars);
    join_foreign(o.foreign);
  }
};

}  // namespace emu
