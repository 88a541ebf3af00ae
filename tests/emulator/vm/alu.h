// Templates of lane-by-lane instructions. 8- and 16-bit values live zero-extended in a 32-bit slot.
#pragma once
#include <type_traits>

#include "vm.h"

namespace emu {

template <class T>
using Slot = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
inline const Slot<T>* source(Warp& w, int slot) {
  return reinterpret_cast<const Slot<T>*>(w.file.data() + slot);
}
template <class T>
inline Slot<T>* dest(Warp& w, int slot) {
  return reinterpret_cast<Slot<T>*>(w.file.data() + slot);
}

template <class T>
inline T unpack(Slot<T> bits) {
  if constexpr (std::is_floating_point_v<T>) {
    T v;
    memcpy(&v, &bits, sizeof v);
    return v;
  } else {
    return T(bits);
  }
}
template <class T>
inline Slot<T> pack(T v) {
  if constexpr (std::is_floating_point_v<T>) {
    Slot<T> bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
  } else {
    return Slot<T>(std::make_unsigned_t<T>(v));
  }
}

template <class D, class A, class F>
inline Step map1(Warp& w, const Insn& in, uint32_t m, F f) {
  const auto* a = source<A>(w, in.arg[1]);
  lanes(dest<D>(w, in.arg[0]), m, [=](int l) { return pack<D>(f(unpack<A>(a[l]))); });
  return Step::kNext;
}
template <class D, class A, class B, class F>
inline Step map2(Warp& w, const Insn& in, uint32_t m, F f) {
  const auto* a = source<A>(w, in.arg[1]);
  const auto* b = source<B>(w, in.arg[2]);
  lanes(dest<D>(w, in.arg[0]), m, [=](int l) { return pack<D>(f(unpack<A>(a[l]), unpack<B>(b[l]))); });
  return Step::kNext;
}
template <class D, class A, class B, class C, class F>
inline Step map3(Warp& w, const Insn& in, uint32_t m, F f) {
  const auto* a = source<A>(w, in.arg[1]);
  const auto* b = source<B>(w, in.arg[2]);
  const auto* c = source<C>(w, in.arg[3]);
  lanes(dest<D>(w, in.arg[0]), m,
        [=](int l) { return pack<D>(f(unpack<A>(a[l]), unpack<B>(b[l]), unpack<C>(c[l]))); });
  return Step::kNext;
}

// One-line definitions of table entries.
#define EMU_FN [](Warp & w, const Insn& in, uint32_t m) -> Step
#define OP1(NAME, SIG, D, A, EXPR) \
  {NAME, SIG, EMU_FN { return map1<D, A>(w, in, m, [](A a) -> D { return D(EXPR); }); }, 0, 0}
#define OP2(NAME, SIG, D, A, B, EXPR) \
  {NAME, SIG, EMU_FN { return map2<D, A, B>(w, in, m, [](A a, B b) -> D { return D(EXPR); }); }, 0, 0}
#define OP3(NAME, SIG, D, A, B, C, EXPR) \
  {NAME, SIG, EMU_FN { return map3<D, A, B, C>(w, in, m, [](A a, B b, C c) -> D { return D(EXPR); }); }, 0, 0}

#define EMU_TABLE(FUNCTION, ARRAY) \
  OpTable FUNCTION() { return {ARRAY, sizeof ARRAY / sizeof ARRAY[0]}; }

typedef int16_t s16;
typedef uint16_t u16;
typedef int32_t s32;
typedef uint32_t u32;
typedef int64_t s64;
typedef uint64_t u64;
typedef float f32;
typedef double f64;

}  // namespace emu
