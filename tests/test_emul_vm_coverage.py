"""Every file of kernels_cu runs on the machine: a new one without a call here fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from emulator import device_array, emulated
from latent import hopper_latent
from prefixes import SHARED, cascade, make_shared, schedule_of

from cupyflash import find_prefix_tree
from cupyflash.attention import flash_attn_varlen_func
from cupyflash.kv_cache import reshape_and_cache_flash
from cupyflash.merge import merge_attn_states
from cupyflash.quantize import quantize_fp8
from cupyflash.scheduler_metadata import get_scheduler_metadata
from cupyflash.testing import Case

SOURCES = sorted(p.name for p in (Path(__file__).parents[1] / "kernels_cu").glob("*.cu"))
PAGED = Case(lengths=((1, 120), (1, 5), (1, 64)), num_heads_kv=2, group_size=4, page_size=16,
             head_dim=64, q_type="bf16", kv_type="bf16", causal=True)  # fmt: skip
PACKED = Case(lengths=((70, 0), (20, 40)), num_heads_kv=1, group_size=2, head_dim=64,
              q_type="bf16", kv_type="bf16", causal=True)  # fmt: skip

LATENT = Case(lengths=((1, 40), (2, 9)), group_size=16, head_dim=64, head_dim_v=512, page_size=16,
              q_v=True, q_type="bf16", kv_type="bf16", causal=True)  # fmt: skip


def attend(case: Case, **options: Any) -> None:
    case.make().check(flash_attn_varlen_func, **options)


def scheduled() -> None:
    """A step with its schedule made ahead."""
    case = PAGED.replace(lengths=((1, 40),) * 600)
    inputs = case.make()
    metadata = get_scheduler_metadata(
        600, inputs.args["max_seqlen_q"], inputs.args["max_seqlen_k"],
        case.num_heads_kv * case.group_size, case.num_heads_kv, case.head_dim,
        inputs.args["seqused_k"], "bfloat16", cu_seqlens_q=inputs.args["cu_seqlens_q"],
        page_size=16, causal=True,
    )  # fmt: skip
    inputs.check(flash_attn_varlen_func, fa_version=3, scheduler_metadata=metadata)


def latent_on_hopper() -> None:
    with hopper_latent():
        attend(LATENT.replace(group_size=64))


def shared() -> None:
    inputs, _ = make_shared(SHARED, [([0, 1, 2, 3], 64)])
    table, lengths = inputs.args["block_table"], inputs.args["seqused_k"]
    tree = find_prefix_tree(table, lengths, SHARED.page_size)
    cascade(inputs, tree)
    cascade(inputs, tree, prefix_scheduler_metadata=schedule_of(inputs, tree))
    made = schedule_of(inputs, tree, block_table=table)
    cascade(inputs, tree, prefix_scheduler_metadata=made)


def merge() -> None:
    shape = (3, 2, 64)
    out, a, b = (device_array(shape, np.float16, 1.0) for _ in range(3))
    lse = [device_array(shape[1::-1], np.float32, 0.0) for _ in range(2)]
    merge_attn_states(out, a, lse[0], b, lse[1])
    assert (out == 1).all()


def write() -> None:
    key, value = (device_array((3, 2, 64), np.float16, 1.0) for _ in range(2))
    caches = [device_array((2, 4, 2, 64), np.float16, 0.0) for _ in range(2)]
    slots = device_array(3, np.int64, [5, -1, 2])
    scale = device_array(1, np.float32, 1.0)
    reshape_and_cache_flash(key, value, *caches, slots, "auto", scale, scale)
    assert caches[0].sum() == 2 * 2 * 64


def quantize() -> None:
    bits, scale = quantize_fp8(device_array((3, 2, 64), np.float16, 2.0))
    assert (bits == 0x7E).all()  # 448, the largest
    assert scale[0] == np.float32(2 / 448)


RUNS: list[tuple[str, Callable[[], None]]] = [
    ("sm_80", lambda: attend(PAGED, num_splits=2)),
    ("sm_80", lambda: attend(PACKED)),
    ("sm_80", lambda: attend(PACKED.replace(lengths=((20, 300),)), num_splits=2)),
    ("sm_80", lambda: attend(PAGED.replace(lengths=((1, 120), (70, 0), (20, 40))))),
    ("sm_90", lambda: attend(PAGED, fa_version=3)),
    ("sm_90", lambda: attend(PACKED, fa_version=3)),
    ("sm_90", scheduled),
    ("sm_80", lambda: attend(LATENT)),
    ("sm_90", latent_on_hopper),
    ("sm_90", shared),
    ("sm_90a", lambda: attend(PACKED.replace(q_type="e4m3", kv_type="e4m3"))),
    ("sm_90a", lambda: attend(PACKED.replace(kv_type="e4m3"))),
    ("sm_90", quantize),
    ("sm_80", merge),
    ("sm_90", write),
]


def test_every_kernel_runs():
    ran: set[str] = set()
    for arch, call in RUNS:
        with emulated(arch, seed=1) as device:
            call()
            ran |= device.sources
    assert set(SOURCES) - ran == set(), "kernels that no call in RUNS launches"
