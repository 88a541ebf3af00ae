"""A few calls of every portable kernel, for compute-sanitizer: `make sanitize`.

Each is also held to the oracle, so that a tool that changes timing shows a race twice.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial

import cupy

import cupyflash
from cupyflash.testing import Case

TYPES = (("fp16", "fp16"), ("bf16", "bf16"), ("bf16", "e4m3"))
HEAD_DIMS = (64, 128, 256)
DECODE = Case(
    lengths=((1, 300), (1, 0), (1, -1)), num_heads_kv=2, group_size=4, page_size=16, sink=True,
)  # fmt: skip
MIXED = Case(
    lengths=((1, 200), (70, 30), (3, 61)), num_heads_kv=1, group_size=2, page_size=16, causal=True,
)  # fmt: skip
PREFILL = Case(lengths=((140, 0), (33, 7)), causal=True, softcap=8.0, alibi="head", layout="odd")


def run(checks: Sequence[Callable[[], object]]) -> None:
    """Say how many are right as they go: a tool may take minutes."""
    for done, check in enumerate(checks, 1):
        check()
        sys.stdout.write(f"{done} of {len(checks)} calls are right\n")
        sys.stdout.flush()


def main() -> None:
    """Twenty-nine calls: nine types and sizes of three batches, and two of split keys."""
    attend = partial(cupyflash.flash_attn_varlen_func, fa_version=2)
    cases = [
        (case.replace(q_type=types[0], kv_type=types[1], head_dim=head_dim), {})
        for case, types, head_dim in itertools.product((DECODE, MIXED, PREFILL), TYPES, HEAD_DIMS)
    ]
    cases += [
        (DECODE.replace(q_type=types[0], kv_type=types[1], head_dim=128), {"num_splits": 3})
        for types in TYPES[1:]
    ]
    run([partial(case.make(cupy).check, attend, **options) for case, options in cases])


if __name__ == "__main__":
    main()
