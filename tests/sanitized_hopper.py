"""A few calls of every other Hopper kernel, for compute-sanitizer: `make sanitize-hopper`.

``--only latent,shared`` takes the calls of these kinds alone, as a tool may need minutes for all.
"""

from __future__ import annotations

import argparse
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


Calls = Iterator[Callable[[], object]]


def attend(case: Case, **options: object) -> Callable[[], object]:
    """Attention of a case by the Hopper kernels, checked."""
    attention = partial(cupyflash.flash_attn_varlen_func, fa_version=3)
    return partial(case.make(cupy).check, attention, **options)


def decode() -> Calls:
    """Of 16-bit and 8-bit caches, with the sums of split keys."""
    for head_dim in (64, 128, 256):
        for q_type, kv_type in TYPES:
            typed = PLAIN.replace(head_dim=head_dim, q_type=q_type, kv_type=kv_type)
            yield attend(typed)
            yield attend(typed.replace(sink=True, softcap=8.0), num_splits=3)


def eight_bit() -> Calls:
    """Prefill with 8-bit operands."""
    for head_dim in (64, 128, 256):
        eight = {"head_dim": head_dim, "q_type": "e4m3", "kv_type": "e4m3"}
        yield from (attend(case.replace(**eight)) for case in (PROMPTS, PAGES))
        yield attend(PAGES.replace(**eight), num_splits=3)


def mixed() -> Calls:
    """Decode beside prefill, and what does not depend on the batch."""
    yield from (attend(PLAIN, batch_invariant=True), attend(MIXED), attend(MIXED, num_splits=1))


def latent() -> Calls:
    """Latent attention."""
    for heads in (16, 64, 128):
        yield from (attend(LATENT.replace(group_size=heads), num_splits=n) for n in (0, 1, 3))


def shared() -> Calls:
    """Shared prefixes, the schedule made in the call and ahead."""
    for case in (SHARED, SHARED.replace(head_dim=64, lengths=((3, 150),) * 5, softcap=8.0)):
        everyone = list(range(len(case.lengths)))
        made = make_shared(case, [(everyone, 80), (everyone[:2], 96)], cupy)
        yield partial(cascade, *made)
        yield partial(cascade, *made, prefix_scheduler_metadata=schedule_of(*made))


def shared_eight_bit() -> Calls:
    """Of 8-bit caches: more blocks than stages, warpgroups together and in turns."""
    for requests, head_dim in ((20, 128), (3, 64)):
        changes = {"kv_type": "e4m3", "head_dim": head_dim, "lengths": ((1, 720),) * requests}
        made = make_shared(SHARED.replace(**changes), [(list(range(requests)), 640)], cupy)
        yield partial(cascade, *made)


KINDS = {"decode": decode, "eight_bit": eight_bit, "mixed": mixed, "latent": latent,
         "shared": shared, "shared_eight_bit": shared_eight_bit}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, comma-separated")
    run([call for kind in parser.parse_args().only.split(",") for call in KINDS[kind]()])
