"""A few calls of every tile of the Hopper prefill, for compute-sanitizer: `make sanitize-hopper`.

Each is also held to the oracle, so that a tool that changes timing shows a race twice.
"""

from __future__ import annotations

from functools import partial

import cupy
from sanitized import run
from test_emul_prefill_sm90_shift import built

import cupyflash
from cupyflash.testing import Case

CAUSAL = Case(lengths=((300, 40), (5, 70), (65, 0)), num_heads_kv=1, group_size=2, causal=True)
PAGED = Case(lengths=((200, 300), (0, 3)), group_size=4, window_size=(150, 0), page_size=16)
FULL = Case(lengths=((257, 0), (64, 90)), num_heads_kv=2)
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def main() -> None:
    """Thirty-one calls: three masks of each head size in both types, with modified scores, of
    batch-invariant tiles, split, and with tiles that run again."""
    attend = partial(cupyflash.flash_attn_varlen_func, fa_version=3)
    cases = [
        (case.replace(head_dim=size, head_dim_v=size_v, q_type=kind, kv_type=kind), {})
        for (size, size_v), kind in zip(HEAD_DIMS, ("bf16", "fp16") * 3, strict=True)
        for case in (CAUSAL, PAGED, FULL, CAUSAL.replace(softcap=8.0, alibi="head"))
    ]
    half = {"q_type": "bf16", "kv_type": "bf16"}
    cases += [(CAUSAL.replace(head_dim=64, **half), {"batch_invariant": True})]
    cases += [(FULL.replace(lengths=((512, 0),) * 2, head_dim=64, **half), {})]
    cases += [(PAGED.replace(head_dim=128, **half), {"num_splits": 3})]
    checks = [partial(case.make(cupy).check, attend, **options) for case, options in cases]
    for pattern in ("jump", "climb", "wild", "values"):
        checks.append(partial(built(pattern, "bf16", xp=cupy).check, attend, num_splits=1))
    run(checks)


if __name__ == "__main__":
    main()
