// An instruction of a loaded program, and the entry of the opcode table that it came from.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

struct Insn;
struct Warp;

enum class Step { kNext, kStay, kJump, kYield, kExit };
using Handler = Step (*)(Warp&, const Insn&, uint32_t mask);

// Kinds of instructions (bits).
enum : uint32_t {
  kPreempt = 1,     // a warp may be preempted before it
  kAligned = 2,     // needs every live lane of the warp
  kMembers = 4,     // needs the lanes of a member mask, in the register arg[0]
  kControl = 8,     // runs even when no lane is active
  kTouches = 16,    // accesses a register that some wgmma uses (set by the front end, per instruction)
  kLive = 32,       // with kAligned: lanes that have exited need not come (barriers)
};

// Modifiers that the front end takes out of a mnemonic (bits of Insn::flags).
enum : uint32_t {
  kFtz = 1, kSat = 2, kRz = 4, kRm = 8, kRp = 16, kNan = 32, kRelu = 64, kApprox = 128, kHi = 256,
  kWide = 512, kWrap = 1024, kSatfinite = 2048, kShiftamt = 4096, kXorsign = 8192,
};

struct Insn {
  Handler fn;
  const int32_t* arg;  // register slots, immediates
  int32_t nargs;
  int32_t pred;  // slot of the guard or -1
  uint32_t flags, kind;
  bool negate;
  uint32_t defs, uses;  // bit i: arg[i] is a slot that is written, read
};

struct OpDef {
  const char* name;       // PTX mnemonic without the modifiers
  const char* operands;   // R D P written, r d p read, i immediate, x y z read and written
  Handler fn;
  uint32_t modifiers;  // those allowed
  uint32_t kind;
};
struct OpTable {
  const OpDef* ops;
  size_t size;
};
OpTable integer_ops(), bit_ops(), compare_ops(), float_ops(), half_ops(), convert_ops(), memory_ops(), control_ops(),
    cluster_ops(), collective_ops(), matrix_ops(), copy_ops(), mbarrier_ops(), load_ops(), store_ops(), wgmma_ops();

}  // namespace emu
