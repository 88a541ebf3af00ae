"""What a step of an engine is: lengths, geometry, types, options; drawn at random."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from cupyflash.backends.kv_layout import PACKED_LAYOUTS

LAYOUTS = ("NHD", "HND", *(f"packed-{name}" for name in PACKED_LAYOUTS))


@dataclass(frozen=True)
class Case:
    """One step; ``lengths`` are (query tokens, tokens of earlier steps) of each request."""

    lengths: tuple[tuple[int, int], ...]
    prefix: int = 0  # tokens that all requests share, whole blocks
    num_kv_heads: int = 1
    group_size: int = 1
    head_size: int = 64
    block_size: int = 16
    dtype: str = "fp32"
    kv_cache_dtype: str = "auto"
    q_fp8: bool = False
    scales: str = "number"
    layout: str = "NHD"
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sink: bool = False
    pad_reqs: int = 0
    pad_tokens: int = 0
    seed: int = 0

    def replace(self, **changes):
        return replace(self, **changes)

    @property
    def num_heads(self):
        return self.num_kv_heads * self.group_size

    @property
    def q_lens(self):
        return [q for q, _ in self.lengths]

    @property
    def kv_lens(self):
        return [q + context for q, context in self.lengths]


def lengths(max_requests=4, max_q=20, max_context=70, min_context=0):
    q_len = st.one_of(st.just(1), st.integers(0, max_q))
    context = st.integers(min_context, max_context)
    return st.lists(st.tuples(q_len, context), min_size=1, max_size=max_requests).map(tuple)


def cases(**fixed):
    drawn = {
        "lengths": lengths(),
        "num_kv_heads": st.sampled_from([1, 2, 3]),
        "group_size": st.sampled_from([1, 2, 4]),
        "head_size": st.sampled_from([64, 32, 80]),
        "block_size": st.sampled_from([16, 32]),
        "scales": st.sampled_from(["number", "one", "head"]),
        "layout": st.sampled_from(LAYOUTS),
        "causal": st.booleans(),
        "window": st.sampled_from([None, None, 1, 4, 17, 300]),
        "softcap": st.sampled_from([None, 0.0, 20.0]),
        "alibi": st.booleans(),
        "sink": st.booleans(),
        "pad_reqs": st.integers(0, 2),
        "pad_tokens": st.integers(0, 3),
        "seed": st.integers(0, 2**16),
    }
    drawn.update({n: v if hasattr(v, "map") else st.just(v) for n, v in fixed.items()})
    types = [
        *(("fp32", "auto", False), ("fp16", "auto", False), ("bf16", "auto", False)),
        *(("bf16", "fp8", False), ("fp16", "fp8_e5m2", False), ("bf16", "fp8_e4m3", True)),
    ]

    def case(pair):
        (dtype, kv_cache_dtype, q_fp8), more = pair
        return Case(**{"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "q_fp8": q_fp8, **more})

    return st.tuples(st.sampled_from(types), st.fixed_dictionaries(drawn)).map(case)
