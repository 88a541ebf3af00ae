"""Batches for the Hopper prefill kernels of 16 and of 8 bits, and what both are asked on a GPU."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from repeats import bits

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.testing import Case
from cupyflash.testing.strategies import cases

TILES = {
    "ragged": Case(lengths=((129, 0), (5, 200), (0, 3), (64, -3)), num_heads_kv=2),
    "causal": Case(lengths=((130, 30), (200, 0)), group_size=2, causal=True, page_size=16),
    "window": Case(lengths=((200, 300),), group_size=4, window_size=(150, 0), page_size=32),
    "both": Case(lengths=((140, 100),), group_size=3, window_size=(20, 30), sink=True),
}

LONG = {
    "causal": Case(lengths=((1100, 900),), num_heads_kv=1, group_size=2, causal=True),
    "ragged": Case(lengths=tuple((n, n // 3) for n in (900, 17, 128, 0, 500, 129, 3, 64))),
    "window": Case(lengths=((1500, 0),), window_size=(300, 0), page_size=16),
    "chunk": Case(lengths=((256, 3000), (130, 2000)), group_size=4, causal=True, page_size=16),
}


def _lengths(most_requests, tiles, fewest_rows):
    """Around the sizes of tiles; at least one request of more rows than the decode kernel takes."""
    borders = sorted({n + d for n in tiles for d in (-1, 0, 1)})
    contexts = st.one_of(st.integers(0, 20), st.sampled_from(borders), st.integers(-5, -1))
    q_len = st.one_of(st.sampled_from([1, 0, 63, 64, 65, 127, 128, 129]), st.integers(2, 70))
    some = st.lists(st.tuples(q_len, contexts), max_size=most_requests - 1)
    many = st.tuples(st.sampled_from([fewest_rows, 64, 127, 128, 129, 130]), contexts)
    return st.tuples(some, many).map(lambda drawn: (*drawn[0], drawn[1]))


def _cases(lengths, head_dim, **fixed):
    return cases(
        lengths=lengths,
        num_heads_kv=st.sampled_from([1, 2]),
        group_size=st.sampled_from([1, 2, 3, 4, 8]),
        head_dim=head_dim,
        head_dim_v=st.sampled_from([None, None, 64, 128]),
        page_size=st.sampled_from([None, 16, 24, 32, 48, 64, 256]),
        layout=st.sampled_from(["NHD", "HND"]),
        **fixed,
    )


@st.composite
def prefill_cases(draw, most_requests=3, **fixed):
    """Cases that the kernel takes: 16-bit types, pages from 16, rows at multiples of 16 bytes."""
    head_dim = draw(st.sampled_from([64, 128, 8, 80, 96, 192, 256]))
    kind = draw(st.sampled_from(["bf16", "fp16"]))
    lengths = _lengths(most_requests, (16, 64, 80, 128, 192, 256), 17)
    return draw(_cases(lengths, head_dim, **fixed)).replace(
        q_type=kind, kv_type=kind, descale=False
    )


@st.composite
def fp8_cases(draw, most_requests=3, **fixed):
    """Cases that the kernel takes: q, k and v in e4m3, pages from 16, rows at multiples of 16."""
    lengths = _lengths(most_requests, (16, 64, 128, 256), 33)
    case = draw(_cases(lengths, st.sampled_from([64, 128, 16, 80, 96, 256, 160]), **fixed))
    return case.replace(q_type="e4m3", kv_type="e4m3")


@st.composite
def widen_cases(draw, most_requests=3, **fixed):
    """Cases that the kernel takes: 16-bit queries, an 8-bit cache of pages from 16."""
    lengths = _lengths(most_requests, (16, 64, 80, 96, 128), 33)
    head_dim = st.sampled_from([64, 128, 16, 80, 96, 160, 192, 256])
    return draw(_cases(lengths, head_dim, **fixed)).replace(
        q_type=draw(st.sampled_from(["bf16", "fp16"])),
        kv_type=draw(st.sampled_from(["e4m3", "e4m3", "e5m2"])),
        descale=draw(st.booleans()),
    )


def check_nan_key(inputs, byte):
    """Key 100 of one causal request of 150 is NaN: so are the rows that see it, and no others."""
    inputs.placed["k"].view[100] = byte
    out, lse = inputs.call(flash_attn_varlen_func)
    assert np.isnan(out[100:150].astype(np.float32)).all()
    assert np.isnan(lse[:, 100:150]).all()
    assert not np.isnan(out[:100].astype(np.float32)).any()


def check_many_repeats(count, **types):
    """``count`` calls on a GPU, of pieces that are merged too, have the bits of the first."""
    import cupy

    case = Case(lengths=((700, 300), (129, 0), (17, 2000)), num_heads_kv=2, group_size=4,
                causal=True, head_dim=128, page_size=16, **types)  # fmt: skip
    inputs = case.make(cupy)
    first = bits(inputs.call(flash_attn_varlen_func, fa_version=3))
    out, lse = (inputs.placed[name].view for name in ("out", "lse"))
    right_out, right_lse = out.copy(), lse.copy()
    differs = cupy.zeros((), cupy.bool_)
    for _ in range(count):
        flash_attn_varlen_func(**inputs.args, out=out, lse=lse, fa_version=3)
        differs |= (out.view(cupy.uint16) != right_out.view(cupy.uint16)).any()
        differs |= (lse.view(cupy.uint32) != right_lse.view(cupy.uint32)).any()
    assert not bool(differs)
    assert bits(inputs.call(flash_attn_varlen_func, fa_version=3)) == first
