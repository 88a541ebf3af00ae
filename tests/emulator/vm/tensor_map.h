// Tensor maps, the boxes they describe, and the operands of bulk and tensor copies.
#pragma once
#include "vm.h"

namespace emu {

// The front end's own map (tensor_map.py), as large as the driver's opaque one.
struct TensorMap {
  uint64_t magic, base;
  uint32_t rank, elem, swizzle, fill;
  uint64_t dim[5], stride[4];
  uint16_t box[5];
  uint8_t step[5], type;
  uint8_t pad[8];
};
static_assert(sizeof(TensorMap) == 128, "size of CUtensorMap");
constexpr uint64_t kMagic = 0x7E4507AB;

inline uint64_t address(Warp& w, const int32_t* a, int l) {
  return (a[0] < 0 ? 0 : a[1] ? w.d(a[0])[l] : w.r(a[0])[l]) + int64_t(a[2]);
}
// An address in shared memory; with `cta` of any CTA of the cluster, which it gets.
inline uint32_t shared_address(Warp& w, const int32_t* a, int l, Cta** cta = nullptr) {
  const uint64_t v = address(w, a, l);
  if ((v & kWindowMask) && (v & kWindowMask) != kSharedWindow) fail("BULK COPY: not a shared address");
  uint32_t addr = uint32_t(v);
  if (cta) *cta = &cta_of(w, addr, l, "a bulk copy");
  return addr;
}

inline const TensorMap& tensor_map(Warp& w, uint64_t addr, int l, int rank) {
  if (addr & 63) fail("TENSOR MAP: at 0x%llx, which is not a multiple of 64", (unsigned long long)addr);
  const Target t = resolve(w, kGeneric, addr, 16, l, false, "tensor map");
  resolve(w, kGeneric, addr + 112, 16, l, false, "tensor map");
  if (t.space != kParam && t.space != kGlobal) fail("TENSOR MAP: in shared or local memory");
  const auto* map = reinterpret_cast<const TensorMap*>(t.host);
  if (map->magic != kMagic) fail("TENSOR MAP: at 0x%llx is none that was encoded", (unsigned long long)addr);
  if (int(map->rank) != rank) fail("TENSOR MAP: a map of rank %u in an instruction of rank %d", map->rank, rank);
  return *map;
}

inline uint32_t box_count(const TensorMap& m, int d) { return d ? (m.box[d] + m.step[d] - 1) / m.step[d] : m.box[0]; }
inline uint32_t box_bytes(const TensorMap& m) {
  uint32_t n = m.elem;
  for (int d = 0; d < 5; d++) n *= d < int(m.rank) ? box_count(m, d) : 1;
  return n;
}
inline uint32_t swizzled(uint32_t addr, uint32_t mode) { return addr ^ ((addr >> 7 & ((1u << mode) - 1)) << 4); }

// Calls f(offset in the box, global address, bytes) for the runs of elements inside the tensor.
template <class F>
inline void segments(const TensorMap& m, const int* coord, F f) {
  const int64_t first = std::max<int64_t>(0, -int64_t(coord[0]));
  const int64_t last = std::min<int64_t>(m.box[0], int64_t(m.dim[0]) - coord[0]);
  if (first >= last) return;
  uint32_t count[5] = {1, 1, 1, 1, 1};
  for (int d = 1; d < int(m.rank); d++) count[d] = box_count(m, d);
  uint32_t row = 0;
  for (uint32_t i4 = 0; i4 < count[4]; i4++)
    for (uint32_t i3 = 0; i3 < count[3]; i3++)
      for (uint32_t i2 = 0; i2 < count[2]; i2++)
        for (uint32_t i1 = 0; i1 < count[1]; i1++, row++) {
          const uint32_t at[5] = {0, i1, i2, i3, i4};
          uint64_t addr = m.base + uint64_t(coord[0] + first) * m.elem;
          bool inside = true;
          for (int d = 1; d < int(m.rank); d++) {
            const int64_t x = int64_t(coord[d]) + int64_t(at[d]) * m.step[d];
            inside &= x >= 0 && x < int64_t(m.dim[d]);
            addr += uint64_t(x) * m.stride[d - 1];
          }
          if (inside) f(uint32_t((row * m.box[0] + first) * m.elem), addr, uint32_t((last - first) * m.elem));
        }
}

inline uint32_t fill_pattern(const TensorMap& m) { return m.fill ? 0x7ff77ff7 : 0; }

// What a GPU answers with an illegal instruction.
inline void check_coordinates(const TensorMap& m, const int* coord, bool store) {
  if (int64_t(coord[0]) * m.elem % 16)
    fail("TENSOR COPY: coordinate %d of elements of %u bytes is not at a multiple of 16 bytes", coord[0], m.elem);
  for (int d = 0; store && d < int(m.rank); d++)
    if (coord[d] < 0) fail("TENSOR COPY: a store to coordinate %d, which is negative", coord[d]);
}

}  // namespace emu
