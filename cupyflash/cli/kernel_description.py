"""What a host without Python needs to launch a compiled kernel.

Rules are C expressions on integers (``/`` cuts off), with ``min``, ``max`` and ``ceil_div`` as
functions; names are fields of the params struct or those of ``where``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cupyflash.runtime.attention_plan import ATTENTION_PARAMS
from cupyflash.runtime.merge_plan import MERGE, MERGE_PARAMS
from cupyflash.runtime.params import ParamsLayout
from cupyflash.runtime.row_kernel import RowKernel
from cupyflash.runtime.splits import NEVER_SPLIT
from cupyflash.runtime.variant import Variant
from cupyflash.runtime.write_plan import WRITE, WRITE_PARAMS

__all__ = [
    "C_FUNCTIONS",
    "DESCRIPTIONS",
    "KernelDescription",
    "described",
    "launch_of",
    "struct_of",
]

_STRIDES = "strides are in bytes"
_ITEM_BYTES = {0: 4, 1: 2, 2: 2, 3: 1, 4: 1}  # by ScalarType code


@dataclass(frozen=True, slots=True)
class KernelDescription:
    """How the kernels of one source are launched.

    Attributes
    ----------
    struct : str
        Name of the params struct, passed by value as the only parameter.
    layout : ParamsLayout
    where : dict of str to str
        Names that rules use, in order; each may use fields and those before it.
    block, grid : tuple of str
        Rules for x, y, z.
    smem_bytes : str
        Dynamic shared memory. Above 48 KiB a function must be allowed it first
        (``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``).
    fixed : dict of str to int
        Fields that these rules rely on.
    notes : tuple of str
    """

    struct: str
    layout: ParamsLayout
    where: dict[str, str]
    block: tuple[str, str, str]
    grid: tuple[str, str, str]
    smem_bytes: str = "0"
    fixed: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = (_STRIDES,)


def _rows(kernel: RowKernel, variant: Variant, tokens: str, dim: str) -> dict[str, Any]:
    """Rules of a kernel that moves rows: ``threads`` of them along a row, one head a block."""
    itemsize = _ITEM_BYTES[dict(variant.defines)["IN_TYPE"]]
    accesses = f"max(1, {dim} / (1 + {16 // itemsize - 1} * vectorised))"
    each = kernel.thread_tokens
    return {
        "where": {
            "steps": f"ceil_div({accesses}, {kernel.thread_accesses})",
            "threads": f"min(steps, {kernel.threads})",
            "rows": f"min(min({kernel.threads} / threads, 64), ceil_div({tokens}, {each}))",
        },
        "block": ("threads", "1", "rows"),
        "grid": (f"ceil_div({tokens}, {each} * rows)", "heads", str(kernel.sides)),
    }


def _merge(variant: Variant) -> KernelDescription:
    return KernelDescription(
        "MergeParams",
        MERGE_PARAMS,
        **_rows(MERGE, variant, "tokens", "head_dim"),
        notes=(
            _STRIDES,
            "vectorised = 1 where every row of prefix_out, suffix_out starts at a multiple of 16 "
            "bytes, every row of out at one of 16 elements' bytes at most 16, else 0",
            "null pointers: out_lse, sink, out_scale; prefix_tokens = tokens as a rule",
            "nothing is launched where tokens, heads or head_dim is 0",
        ),
    )


def _write(variant: Variant) -> KernelDescription:
    return KernelDescription(
        "CacheWriteParams",
        WRITE_PARAMS,
        **_rows(WRITE, variant, "num_tokens", "max(key_head_dim, value_head_dim)"),
        notes=(
            _STRIDES,
            "block_inverse = ceil(2^64 / block_size) modulo 2^64; num_slots = blocks * block_size",
            "wide_slots = 1 for int64 slots, 0 for int32; negative slots are skipped",
            "vectorised = 1 where every row of a source starts at a multiple of 16 bytes and every "
            "row of a cache at one of what 16 bytes of source become, else 0",
            "nothing is launched where num_tokens, heads or head_dim is 0",
        ),
    )


def _attention(variant: Variant) -> KernelDescription:
    defines = dict(variant.defines)
    rows = 16 * defines["ROW_TILES"] * defines["WARPS"]
    fixed = {"row_block": rows, "chunk": NEVER_SPLIT, "skipped_rows": 0}
    shape = f"blocks_a_request = ceil_div(max_seqlen_q * group, {rows}); group = heads_q / heads_kv"
    return KernelDescription(
        "AttentionParams",
        ATTENTION_PARAMS,
        {"blocks": "batch * blocks_a_request"},
        (str(32 * defines["WARPS"]), "1", "1"),
        ("heads_kv * blocks", "1", "1"),
        str(defines["SMEM_NBYTES"]),
        fixed,
        (_STRIDES, shape, *_ATTENTION_NOTES, _sizes(defines)),
    )


_ATTENTION_NOTES = (
    "keys are not split: partial_out and partial_lse are null",
    "packed keys: block_table and seqused_k null, page_size 1, k_block_stride 0; paged keys: "
    "cu_seqlens_k null, k_token_stride within a block",
    "window_left, window_right: -1 = open; causal is (-1, 0)",
    "q_vectorised = 1 where every row of q starts at a multiple of 8 elements' bytes, k_vectorised "
    "and v_vectorised at one of 16 bytes, out_vectorised of 4 bytes, else 0",
    "q_type, out_type, sink_type: 0 fp32, 1 fp16, 2 bf16, 3 e4m3, 4 e5m2",
    "softmax_scale includes the descales of q and k that are numbers, v_scale is that of v",
    "_mod in the name: with softcap or alibi_slopes; others ignore both",
)


def _sizes(defines: dict[str, int]) -> str:
    return f"head_dim at most {defines['HEAD_DIM']}, head_dim_v at most {defines['HEAD_DIM_V']}"


DESCRIPTIONS: dict[str, Callable[[Variant], KernelDescription]] = {
    "merge_attn_states.cu": _merge,
    "reshape_and_cache.cu": _write,
    "attention_fwd_sm80.cu": _attention,
}
"""By source. Launches of a kernel that is missing are planned by ``cupyflash export``."""

_C_TYPES = {
    "ptr": "uint64_t", "i64": "int64_t", "u64": "uint64_t",
    "i32": "int32_t", "u32": "uint32_t", "f32": "float",
}  # fmt: skip


def described(variant: Variant, file: str) -> dict[str, Any]:
    """The description of one kernel as plain values."""
    names = {
        "symbol": variant.symbol,
        "file": file,
        "arch": variant.arch,
        "source": variant.source,
        "defines": dict(variant.defines),
    }
    if variant.source not in DESCRIPTIONS:
        return {**names, "notes": [_EXPORTED]}
    found = DESCRIPTIONS[variant.source](variant)
    return {
        **names,
        "params": {**_struct(found.struct, found.layout), "fixed": found.fixed},
        "where": found.where,
        "block": list(found.block),
        "grid": list(found.grid),
        "dynamic_smem_bytes": found.smem_bytes,
        "notes": list(found.notes),
    }


_EXPORTED = "`cupyflash export` writes the launches of a call with all of their parameters"


def _struct(name: str, layout: ParamsLayout) -> dict[str, Any]:
    fields = [
        {"name": field, "type": _C_TYPES[kind], "offset": offset, "pointer": kind == "ptr"}
        for field, kind, offset in layout.fields
    ]
    return {"struct": name, "nbytes": layout.nbytes, "fields": fields}


def struct_of(description: KernelDescription) -> str:
    """The params struct in C; pointers are device addresses."""
    name, layout = description.struct, description.layout
    text = "\n".join(f"  {_C_TYPES[kind]} {field};" for field, kind, _ in layout.fields)
    return (
        f"typedef struct {{\n{text}\n}} {name};\n"
        f'_Static_assert(sizeof({name}) == {layout.nbytes}, "{name} has padding");\n'
    )


C_FUNCTIONS = """static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
"""


def launch_of(symbol: str, description: KernelDescription) -> str:
    """A C function with the rules of one kernel: grid, block and shared memory from its params."""
    rules = (*description.where.values(), *description.grid, *description.block)
    used = {name for text in rules for name in re.findall(r"[a-z_]+", text)}
    lines = [f"const int64_t {n} = p->{n};" for n in description.layout.names if n in used]
    lines += [f"const int64_t {name} = {text};" for name, text in description.where.items()]
    for target, texts in (("grid", description.grid), ("block", description.block)):
        lines += [f"{target}[{i}] = (unsigned)({text});" for i, text in enumerate(texts)]
    body = "\n".join(f"  {line}" for line in (*lines, f"return {description.smem_bytes};"))
    return (
        f"static inline unsigned {symbol}_launch(const {description.struct} *p, unsigned grid[3],\n"
        f"                                       unsigned block[3]) {{\n{body}\n}}\n"
    )
