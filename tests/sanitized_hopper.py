"""A few calls of every other Hopper kernel, for compute-sanitizer: `make sanitize-hopper`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import cupy
from prefixes import SHARED, cascade, make_shared, schedule_of
from sanitized import run
from test_emul_decode_sm90 import PLAIN
from test_emul_mixed_sm90 import MIXED
from test_mla import CASE

import cupyflash
from cupyflash.testing import Case

TYPES = (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "e4m3"))
PROMPTS = Case(lengths=((300, 40), (5, 70)), group_size=2, causal=True)
PAGES = Case(lengths=((150, 200), (65, 3)), num_heads_kv=2, page_size=16, window_size=(150, 0))
LATENT = CASE.replace(lengths=((1, 300), (2, 40), (1, -1)), page_size=64)


def checks() -> Iterator[Callable[[], object]]:
    """Decode, mixed batches, 8-bit prefill, latent attention, shared prefixes."""
    attend = partial(cupyflash.flash_attn_varlen_func, fa_version=3)

    def check(case: Case, **options: object) -> Callable[[], object]:
        return partial(case.make(cupy).check, attend, **options)

    for head_dim in (64, 128, 256):
        for q_type, kv_type in TYPES:
            typed = PLAIN.replace(head_dim=head_dim, q_type=q_type, kv_type=kv_type)
            yield check(typed)
            yield check(typed.replace(sink=True, softcap=8.0), num_splits=3)
        eight = {"head_dim": head_dim, "q_type": "e4m3", "kv_type": "e4m3"}
        yield from (check(case.replace(**eight)) for case in (PROMPTS, PAGES))
        yield check(PAGES.replace(**eight), num_splits=3)
    yield from (check(PLAIN, batch_invariant=True), check(MIXED), check(MIXED, num_splits=1))
    for heads in (16, 64, 128):
        yield from (check(LATENT.replace(group_size=heads), num_splits=n) for n in (0, 1, 3))
    for case in (SHARED, SHARED.replace(head_dim=64, lengths=((3, 150),) * 5, softcap=8.0)):
        everyone = list(range(len(case.lengths)))
        shared = make_shared(case, [(everyone, 80), (everyone[:2], 96)], cupy)
        yield partial(cascade, *shared)
        yield partial(cascade, *shared, prefix_scheduler_metadata=schedule_of(*shared))


if __name__ == "__main__":
    run(list(checks()))
