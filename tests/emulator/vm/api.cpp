// C interface: the table of opcodes, programs, launches.
#include "vm.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

using namespace emu;

namespace {

std::vector<OpDef> all_ops() {
  std::vector<OpDef> out;
  for (const OpTable t : {integer_ops(), bit_ops(), compare_ops(), float_ops(), half_ops(), convert_ops(), memory_ops(),
                          control_ops(), cluster_ops(), collective_ops(), matrix_ops(), copy_ops(), mbarrier_ops(), load_ops(),
                          store_ops(), wgmma_ops()})
    out.insert(out.end(), t.ops, t.ops + t.size);
  return out;
}

struct Source {  // what the front end passes
  const int32_t* code;  // per instruction: op, pred, negate, flags, nargs, first argument, defs, uses
  int64_t count;
  const int32_t* args;
  int64_t nargs;
  const int32_t* constants;
  int64_t nconstants;
  const int32_t* specials;
  int64_t nspecials;
  int64_t file_words, local_bytes, static_smem, dynamic_base;
};

}  // namespace

// One line an opcode: name, operands, modifiers, kind. Returns the length needed.
extern "C" int64_t emu_table(char* out, int64_t size) {
  std::string text;
  for (const OpDef& op : all_ops()) {
    char line[200];
    snprintf(line, sizeof line, "%s\t%s\t%u\t%u\n", op.name, op.operands, op.modifiers, op.kind);
    text += line;
  }
  if (out && size > int64_t(text.size())) memcpy(out, text.c_str(), text.size() + 1);
  return int64_t(text.size());
}

// Freed memory of a launch stays with the process: each CTA takes a megabyte, and fresh pages cost more than its start.
static void keep_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
#endif
}

extern "C" void* emu_load(const Source* s) {
  keep_memory();
  const std::vector<OpDef> ops = all_ops();
  auto* p = new Program;
  p->args.assign(s->args, s->args + s->nargs);
  p->constants.assign(s->constants, s->constants + s->nconstants);
  p->specials.assign(s->specials, s->specials + s->nspecials);
  p->file_words = s->file_words;
  p->local_bytes = s->local_bytes;
  p->static_smem = s->static_smem;
  p->dynamic_base = s->dynamic_base;
  for (int64_t i = 0; i < s->count; i++) {
    const int32_t* c = s->code + 8 * i;
    Insn in;
    in.fn = ops[c[0]].fn;
    in.kind = ops[c[0]].kind;
    in.pred = c[1];
    in.negate = c[2];
    in.flags = uint32_t(c[3]) & ~(1u << 30);
    if (uint32_t(c[3]) >> 30 & 1) in.kind |= kTouches;
    in.nargs = c[4];
    in.arg = p->args.data() + c[5];
    in.defs = uint32_t(c[6]);
    in.uses = uint32_t(c[7]);
    p->code.push_back(in);
  }
  return p;
}

extern "C" void emu_free(void* program) { delete static_cast<Program*>(program); }

// Returns 0, or 1 with a message.
extern "C" int emu_launch(const void* program, const Launch* launch, char* error, int64_t size) {
  try {
    Machine(*static_cast<const Program*>(program), *launch).run();
    return 0;
  } catch (const std::exception& e) {
    snprintf(error, size, "%s", e.what());
    return 1;
  }
}
